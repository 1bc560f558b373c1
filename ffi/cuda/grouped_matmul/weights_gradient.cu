#include "ffi/cuda/grouped_matmul/gemm.cuh"

namespace jax_ep {

GroupedGemmFunctions weights_gradient_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kWeightsGradient, 2, 1>(dtype);
}

}  // namespace jax_ep
