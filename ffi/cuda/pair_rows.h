// Where expand places the pairs (token, k) of this rank's rows of the layout "token".
#pragma once

#include <cstdint>

namespace jax_ep {

struct PairRows {
  int32_t num_tokens, top_k;   // top_k is at most 32: a lane for each k
  int32_t capacity;            // the number of rows of pairs
  int64_t row_bytes;           // a multiple of kUnitBytes
  const int32_t* row_of_pair;  // [num_tokens, top_k]; `capacity` for a pair without a row
  int32_t* pair_of_row;        // [capacity]: token * top_k + k; num_tokens * top_k for a row without a pair
};

}  // namespace jax_ep
