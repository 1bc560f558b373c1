// What the kernels' host functions share: one kernel per element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"

namespace jax_ep {

// Calls f with an element of the type.
template <typename F>
void with_element_type(ElementType type, F f) {
  switch (type) {
    case ElementType::kFloat32:
      return f(float{});
    case ElementType::kFloat16:
      return f(__half{});
    case ElementType::kBFloat16:
      return f(__nv_bfloat16{});
  }
}

// Loads a kernel on the current device: one that is loaded while a peer waits can deadlock. `scratch`: the most dynamic
// shared memory that a launch may ask for.
template <typename Kernel>
cudaError_t load_kernel(Kernel kernel, int32_t scratch) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              scratch);
}

}  // namespace jax_ep
