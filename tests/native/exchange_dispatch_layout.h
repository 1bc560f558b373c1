// dispatch_layout's kernel, compared with a plain count.
#pragma once

#include "exchange.h"
#include "ffi/cuda/dispatch_layout.h"

namespace {

struct RoutingCounts {
  std::vector<int32_t> per_rank, per_node, per_expert;
  std::vector<uint8_t> is_in_rank;
};

RoutingCounts count_routing(const std::vector<int32_t>& ids, int32_t top_k, int32_t experts, int32_t ranks,
                            int32_t nodes) {
  const size_t tokens = ids.size() / top_k;
  RoutingCounts counts = {std::vector<int32_t>(ranks), std::vector<int32_t>(nodes), std::vector<int32_t>(experts),
                          std::vector<uint8_t>(tokens * ranks)};
  for (size_t token = 0; token < tokens; ++token) {
    std::vector<bool> is_in_node(nodes);
    for (int32_t k = 0; k < top_k; ++k) {
      const int32_t id = ids[token * top_k + k];
      if (id < 0 || id >= experts) continue;
      ++counts.per_expert[id];
      counts.is_in_rank[token * ranks + id / (experts / ranks)] = 1;
      is_in_node[id / (experts / nodes)] = true;
    }
    for (int32_t rank = 0; rank < ranks; ++rank) counts.per_rank[rank] += counts.is_in_rank[token * ranks + rank];
    for (int32_t node = 0; node < nodes; ++node) counts.per_node[node] += is_in_node[node];
  }
  return counts;
}

void run_dispatch_layout(int32_t tokens, int32_t top_k, int32_t experts, int32_t ranks, int32_t nodes,
                         std::mt19937& random) {
  must(cudaSetDevice(0));
  Array<int32_t> ids(size_t(tokens) * top_k), per_rank(ranks), per_node(nodes), per_expert(experts);
  Array<uint8_t> is_in_rank(size_t(tokens) * ranks);
  // Some ids name no expert, and some tokens name an expert twice.
  for (int32_t& id : ids.host) id = std::uniform_int_distribution<int32_t>(-2, experts + 1)(random);
  ids.upload();
  const auto fill = [](auto& array) {  // What the results held before does not matter.
    must(cudaMemset(array.device, 0x5a, array.host.size() * sizeof(array.host[0])));
  };
  fill(per_rank), fill(per_node), fill(per_expert), fill(is_in_rank);
  must(cudaDeviceSynchronize());
  must(dispatch_layout_on_device({tokens, top_k, experts, ranks, nodes, ids.device, per_rank.device, per_node.device,
                                  per_expert.device, reinterpret_cast<bool*>(is_in_rank.device)},
                                 nullptr));
  must(cudaDeviceSynchronize());
  const RoutingCounts expected = count_routing(ids.host, top_k, experts, ranks, nodes);
  EXPECT_EQ(per_rank.download(), expected.per_rank);
  EXPECT_EQ(per_node.download(), expected.per_node);
  EXPECT_EQ(per_expert.download(), expected.per_expert);
  EXPECT_EQ(is_in_rank.download() == expected.is_in_rank, true);
}

void run_dispatch_layouts(bool is_quick) {
  std::mt19937 random(0);
  for (int32_t tokens : is_quick ? std::vector{1, 300} : std::vector{1, 12, 300, 9000}) {
    run_dispatch_layout(tokens, 1, 1, 1, 1, random);
    run_dispatch_layout(tokens, 4, 6, 2, 1, random);
    run_dispatch_layout(tokens, 8, 256, 8, 2, random);
    run_dispatch_layout(tokens, 8, 2048, 2, 2, random);  // A block's threads have less than one expert each.
  }
}

}  // namespace
