#include "ffi/cuda/grouped_matmul/gemm.cuh"

namespace jax_ep {

GroupedGemmFunctions weights_gradient_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kWeightsGradient, LargeTile>(dtype);
}

}  // namespace jax_ep
