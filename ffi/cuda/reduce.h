// reduce sums the rows of each token's pairs, times their weights, to one row. Without weights, it is the transpose of
// expand. It runs on one rank and moves nothing between ranks.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"
#include "ffi/cuda/pair_rows.h"

namespace jax_ep {

struct ReduceArgs {
  PairRows pairs;
  const uint8_t* y;      // [capacity] rows
  const float* weights;  // [capacity]; null: all are 1
  uint8_t* out;          // [num_tokens] rows
};

// The backward pass: computes the cotangents of y and of weights, which are zero in rows without a pair.
struct ReduceBackArgs {
  PairRows pairs;
  const uint8_t* g;          // [num_tokens] rows, the cotangents of reduce's result
  const uint8_t* y;          // [capacity] rows; null if there is no weights_cotangent
  const float* weights;      // [capacity]
  uint8_t* y_cotangent;      // [capacity] rows
  float* weights_cotangent;  // [capacity], or null
};

cudaError_t launch_reduce(ElementType type, const ReduceArgs& args, cudaStream_t stream);
cudaError_t launch_reduce_back(ElementType type, const ReduceBackArgs& args, cudaStream_t stream);

// Loads the kernels on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_reduce();

}  // namespace jax_ep
