// The GEMM of each product. Each has a source file of its own, since each takes long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/cuda/grouped_matmul/groups.h"

namespace jax_ep {

// Enqueues the GEMM. Returns nullptr, or why it could not.
using GroupedGemmFunction = const char* (*)(const GroupArrays& arrays, int32_t num_groups, int32_t device,
                                            int32_t num_sms, cudaStream_t stream);

GroupedGemmFunction forward_gemm(GroupedDtype dtype);
GroupedGemmFunction rows_gradient_gemm(GroupedDtype dtype);
GroupedGemmFunction weights_gradient_gemm(GroupedDtype dtype);

}  // namespace jax_ep
