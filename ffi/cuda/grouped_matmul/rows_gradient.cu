#include "ffi/cuda/grouped_matmul/gemm.cuh"
#include "ffi/cuda/grouped_matmul/gemms.h"

namespace jax_ep {

GroupedGemmFunction rows_gradient_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kRowsGradient, 1, 2>(dtype);
}

}  // namespace jax_ep
