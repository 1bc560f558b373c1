#include "ffi/cuda/grouped_matmul/gemm.cuh"

namespace jax_ep {

GroupedGemmFunctions rows_gradient_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kRowsGradient, 1, 2>(dtype);
}

}  // namespace jax_ep
