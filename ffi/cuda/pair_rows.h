// Maps the pairs (token, k) of one rank's rows of the layout "token" to rows of expand's result, and back.
#pragma once

#include <cstdint>

namespace jax_ep {

struct PairRows {
  int32_t num_tokens, top_k;   // top_k is at most 32: a lane for each k
  int32_t capacity;            // the number of rows of expand's result
  int64_t row_bytes;           // a multiple of kUnitBytes
  const int32_t* row_of_pair;  // [num_tokens, top_k]; `capacity` for a pair without a row
  // [capacity]: token * top_k + k; num_tokens * top_k for a row without a pair. expand writes it, the gradient of
  // reduce reads it, and it is null in reduce.
  int32_t* pair_of_row;
};

}  // namespace jax_ep
