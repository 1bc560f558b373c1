// What host code needs of CUDA: errors as exceptions, functions of the driver, the current device, and spans of time
// for profilers.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#if __has_include(<nvtx3/nvToolsExt.h>)  // small installations of CUDA lack it
#include <nvtx3/nvToolsExt.h>
#endif

#include <cstdint>
#include <stdexcept>
#include <string>

namespace jax_ep {

inline void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error would stay and be reported to whoever asks next
  throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// A word that a kernel writes with store_release (ptx.cuh), in memory of the host.
inline uint32_t load_acquire_on_host(const uint32_t* word) {
#ifdef JAX_EP_EMULATOR
  emulator::acquire_on_host(word);
#endif
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

// A word in memory of the host, which other threads of the host read with load_acquire_on_host.
inline void store_release_on_host(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// A function of the driver, which is not linked: the module loads where there is none.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(function);
}

// Makes a device current, and afterwards what was before: the thread belongs to somebody else. That may be no context
// at all, which asking for the former device would not tell: it is 0 then, and may be in use by another process.
class OnDevice {
 public:
  explicit OnDevice(int32_t ordinal) {
    static const auto get_current = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
    if (get_current(&former_) != CUDA_SUCCESS) former_ = nullptr;  // nobody has used the driver yet
    check(cudaSetDevice(ordinal), "cudaSetDevice(" + std::to_string(ordinal) + ")");
  }
  ~OnDevice() {
    static const auto set_current = driver_function<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
    set_current(former_);
  }

 private:
  CUcontext former_ = nullptr;
};

// What the host does while it lives, as Nsight Systems shows it. Without such a tool it is a load and a branch.
class Span {
 public:
#ifdef NVTX_VERSION
  explicit Span(const char* name) { nvtxRangePushA(name); }
  ~Span() { nvtxRangePop(); }
#else
  explicit Span(const char*) {}
#endif
  Span(const Span&) = delete;
};

}  // namespace jax_ep
