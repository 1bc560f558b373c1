#include "ffi/cpu/dispatch_layout.h"

#include <algorithm>

#include "ffi/layout.h"

namespace jax_ep {

void dispatch_layout_on_host(const DispatchLayoutArgs& args) {
  const int32_t experts_per_rank = args.num_experts / args.num_ranks;
  const int32_t ranks_per_node = args.num_ranks / args.num_nodes;
  std::fill_n(args.num_tokens_per_rank, args.num_ranks, 0);
  std::fill_n(args.num_tokens_per_node, args.num_nodes, 0);
  std::fill_n(args.num_tokens_per_expert, args.num_experts, 0);

  const int32_t* expert = args.topk_idx;
  bool* in_rank = args.is_token_in_rank;
  for (int64_t token = 0; token < args.num_tokens; ++token, in_rank += args.num_ranks) {
    std::fill_n(in_rank, args.num_ranks, false);
    for (int32_t k = 0; k < args.top_k; ++k, ++expert) {
      if (!is_expert(*expert, args.num_experts)) continue;
      ++args.num_tokens_per_expert[*expert];
      in_rank[rank_of_expert(*expert, experts_per_rank)] = true;
    }
    for (int32_t rank = 0; rank < args.num_ranks; ++rank) {
      args.num_tokens_per_rank[rank] += in_rank[rank];
    }
    for (int32_t node = 0; node < args.num_nodes; ++node) {
      const bool* ranks = in_rank + node * ranks_per_node;
      args.num_tokens_per_node[node] += std::find(ranks, ranks + ranks_per_node, true) != ranks + ranks_per_node;
    }
  }
}

}  // namespace jax_ep
