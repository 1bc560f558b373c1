// What the kernels' host functions share: launching a kernel, loading a kernel, and the choice of an element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ffi/cuda/call.h"

namespace jax_ep {

// Calls f with a value of the element type.
template <typename F>
auto with_element_type(ElementType type, F f) {
  switch (type) {
    case ElementType::kFloat32:
      return f(float{});
    case ElementType::kFloat16:
      return f(__half{});
    default:
      return f(__nv_bfloat16{});
  }
}

struct Grid {
  int32_t num_blocks, block_threads;
  int64_t shared_bytes;  // dynamic shared memory of a block
};

// Enqueues a kernel.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.num_blocks);
  config.blockDim = dim3(grid.block_threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Loads a kernel on the current device, before the first launch: loading it while a peer waits can deadlock. `scratch`:
// the most bytes of dynamic shared memory that a launch may need.
template <typename Kernel>
cudaError_t load_kernel(Kernel kernel, int32_t scratch) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              scratch);
}

}  // namespace jax_ep
