// The GEMMs. Each has a source file of its own, since each takes long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/cuda/grouped_matmul/groups.h"

namespace jax_ep {

inline constexpr int64_t kSmallTileColumns = 256;  // of the GEMM for few rows

struct GroupedGemmFunctions {
  // Enqueues the GEMM. Returns nullptr, or why it could not.
  const char* (*run)(const GroupArrays& arrays, int32_t num_groups, int32_t device, int32_t num_sms,
                     cudaStream_t stream);
  // Loads the kernel on the current device.
  cudaError_t (*load)();
};

GroupedGemmFunctions forward_gemm(GroupedDtype dtype);
GroupedGemmFunctions forward_few_rows_gemm(GroupedDtype dtype);
GroupedGemmFunctions rows_gradient_gemm(GroupedDtype dtype);
GroupedGemmFunctions weights_gradient_gemm(GroupedDtype dtype);

}  // namespace jax_ep
