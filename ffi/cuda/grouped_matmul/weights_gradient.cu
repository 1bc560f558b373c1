#include "ffi/cuda/grouped_matmul/gemm.cuh"
#include "ffi/cuda/grouped_matmul/gemms.h"

namespace jax_ep {

GroupedGemmFunction weights_gradient_gemm(GroupedDtype dtype) {
  return grouped_gemm<GroupedProduct::kWeightsGradient, 2, 1>(dtype);
}

}  // namespace jax_ep
