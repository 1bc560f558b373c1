// expand copies each row of the layout "token" to the rows of its pairs, and writes the pair of each row. It runs on
// one rank and moves nothing between ranks.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/pair_rows.h"

namespace jax_ep {

struct ExpandArgs {
  PairRows pairs;
  int32_t num_groups;
  bool zero_pad;               // whether the rows after the last group become zero; if not, they are not written
  const uint8_t* x;            // [num_tokens] rows
  const int32_t* counts;       // [num_groups]: the first counts[i] rows of group i have pairs; its others become zero
  const int32_t* group_sizes;  // [num_groups]
  uint8_t* out;                // [capacity] rows
};

cudaError_t launch_expand(const ExpandArgs& args, cudaStream_t stream);

// Loads the kernel on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_expand();

}  // namespace jax_ep
