// What host code needs of the CUDA runtime: errors as exceptions, and the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace jax_ep {

inline void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error would stay and be reported to whoever asks next
  throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// Makes a device current, and the former one again afterwards: the thread belongs to somebody else.
class OnDevice {
 public:
  explicit OnDevice(int32_t ordinal) {
    check(cudaGetDevice(&former_), "cudaGetDevice");
    check(cudaSetDevice(ordinal), "cudaSetDevice(" + std::to_string(ordinal) + ")");
  }
  ~OnDevice() { cudaSetDevice(former_); }

 private:
  int former_ = 0;
};

}  // namespace jax_ep
