// How many tokens each rank, node and expert gets under a routing: the operation's arguments, for every platform.
#pragma once

#include <cstdint>

namespace jax_ep {

// num_ranks divides num_experts and num_nodes divides num_ranks. Rank r owns num_experts / num_ranks consecutive
// experts, node n holds num_ranks / num_nodes consecutive ranks.
//
// A token counts once for a rank or a node however many of its experts are there; every (token, k) counts for its
// expert. Ids outside [0, num_experts) count nowhere.
struct DispatchLayoutArgs {
  int64_t num_tokens;
  int32_t top_k, num_experts, num_ranks, num_nodes;
  const int32_t* topk_idx;         // [num_tokens, top_k]
  int32_t* num_tokens_per_rank;    // [num_ranks]
  int32_t* num_tokens_per_node;    // [num_nodes]
  int32_t* num_tokens_per_expert;  // [num_experts]
  bool* is_token_in_rank;          // [num_tokens, num_ranks]
};

}  // namespace jax_ep
