// A pair (token, k) is a row of recv.x in the layout "token" and its k-th expert id. It has no row in expand's result
// if that expert is on another rank, or if the row was dropped. PairRows maps each pair to its row, and each row to its
// pair.
#pragma once

#include <cstdint>

namespace jax_ep {

struct PairRows {
  int32_t num_tokens, top_k;   // num_tokens: the rows of recv.x, also those that hold no token. top_k: at most 32
  int32_t capacity;            // the number of rows of expand's result
  int64_t row_bytes;           // a multiple of kUnitBytes
  const int32_t* row_of_pair;  // [num_tokens, top_k]; `capacity` for a pair without a row
  // [capacity]: token * top_k + k; num_tokens * top_k for a row without a pair. expand writes it, the gradient of
  // reduce reads it, and it is null in reduce.
  int32_t* pair_of_row;
};

}  // namespace jax_ep
