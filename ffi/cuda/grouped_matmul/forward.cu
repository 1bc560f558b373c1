#include "ffi/cuda/grouped_matmul/gemm.cuh"

namespace jax_ep {

GroupedGemmFunctions forward_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kForward, LargeTile>(dtype);
}

}  // namespace jax_ep
