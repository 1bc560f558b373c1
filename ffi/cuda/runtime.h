// Host functions for CUDA: errors as exceptions, functions of the driver, the current device, and ranges for profilers.
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

// Loads a word of host memory that a kernel writes with store_release (ptx.cuh).
inline uint32_t load_acquire_on_host(const uint32_t* word) {
#ifdef JAX_EP_EMULATOR
  emulator::acquire_on_host(word);
#endif
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

// Stores a word of host memory that other host threads read with load_acquire_on_host.
inline void store_release_on_host(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// Looks up a function of the CUDA driver. The driver is not linked, so that the module also loads on machines without
// it.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(function);
}

// Makes a device current, and restores the former context at the end, because the thread belongs to other code. It
// restores the context and not the device: a thread without a context reports device 0, which another process may use.
class OnDevice {
 public:
  explicit OnDevice(int32_t ordinal) {
    static const auto get_current = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
    if (get_current(&former_) != CUDA_SUCCESS) former_ = nullptr;  // the driver is not initialized yet
    check(cudaSetDevice(ordinal), "cudaSetDevice(" + std::to_string(ordinal) + ")");
  }
  ~OnDevice() {
    static const auto set_current = driver_function<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
    set_current(former_);
  }

 private:
  CUcontext former_ = nullptr;
};

// A range of host time, which Nsight Systems shows. Without a profiler, it costs a load and a branch.
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
