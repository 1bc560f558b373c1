#include "ffi/cuda/grouped_matmul/gemm.cuh"

namespace jax_ep {

GroupedGemmFunctions rows_gradient_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kRowsGradient, LargeTile>(dtype);
}

}  // namespace jax_ep
