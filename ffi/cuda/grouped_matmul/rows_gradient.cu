#include "ffi/cuda/grouped_matmul/configs.h"
#include "ffi/cuda/grouped_matmul/gemm.cuh"

namespace jax_ep {

namespace {

template <typename Schedule, int... parameters>
GroupedConfig config(const char* name) {
  return {name, &GroupedGemm<GroupedProduct::kRowsGradient, cutlass::bfloat16_t, Schedule, parameters...>::run};
}

}  // namespace

const std::vector<GroupedConfig>& rows_gradient_configs() {
  static const std::vector<GroupedConfig> configs = {
      config<Cooperative, 128, 256, 64, 1, 2>("coop128x256_c1x2"),
      config<Cooperative, 128, 256, 64, 2, 1>("coop128x256_c2x1"),
      config<Pingpong, 64, 256, 64, 1, 2>("pingpong64x256_c1x2"),
      config<Pingpong, 64, 128, 128, 1, 1>("pingpong64x128x128"),
  };
  return configs;
}

}  // namespace jax_ep
