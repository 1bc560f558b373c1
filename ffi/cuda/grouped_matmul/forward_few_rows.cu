#include "ffi/cuda/grouped_matmul/gemm.cuh"

namespace jax_ep {

GroupedGemmFunctions forward_few_rows_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kForward, SmallTile>(dtype);
}

}  // namespace jax_ep
