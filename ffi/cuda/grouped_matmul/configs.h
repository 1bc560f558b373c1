// The instantiations of the GEMM. Each product has a source file of its own, since each takes long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ffi/cuda/grouped_matmul/groups.h"

namespace jax_ep {

// nullptr, or why the kernel was not launched.
using RunGroupedGemm = const char* (*)(const GroupArrays& arrays, int32_t num_groups, int32_t device, int32_t num_sms,
                                       cudaStream_t stream);

struct GroupedConfig {
  const char* name;
  RunGroupedGemm bfloat16;
  RunGroupedGemm float16 = nullptr;
};

const std::vector<GroupedConfig>& forward_configs();
const std::vector<GroupedConfig>& rows_gradient_configs();
const std::vector<GroupedConfig>& weights_gradient_configs();

}  // namespace jax_ep
