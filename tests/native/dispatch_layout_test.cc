#include "ffi/cpu/dispatch_layout.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"

using namespace jax_ep;

using Counts = std::vector<int32_t>;

// What dispatch_layout says about tokens of three experts each, over 8 experts, 4 ranks and 2 nodes.
struct Routed {
  Counts per_rank, per_node, per_expert, in_rank;
};

Routed route(const std::vector<std::array<int32_t, 3>>& tokens) {
  const size_t num_flags = tokens.size() * 4;
  const auto in_rank = std::make_unique<bool[]>(num_flags);
  // The former values of the results must not matter.
  std::fill_n(in_rank.get(), num_flags, true);
  Routed routed{Counts(4, -1), Counts(2, -1), Counts(8, -1), {}};
  dispatch_layout_on_host({static_cast<int64_t>(tokens.size()), 3, 8, 4, 2, tokens.empty() ? nullptr : tokens[0].data(),
                           routed.per_rank.data(), routed.per_node.data(), routed.per_expert.data(), in_rank.get()});
  routed.in_rank.assign(in_rank.get(), in_rank.get() + num_flags);
  return routed;
}

void test_token_counts_once_per_rank_and_node() {
  const Routed routed = route({{0, 1, 2}, {7, 0, 7}});
  EXPECT_EQ(routed.per_rank, (Counts{2, 1, 0, 1}));
  EXPECT_EQ(routed.per_node, (Counts{2, 1}));
  EXPECT_EQ(routed.per_expert, (Counts{2, 1, 1, 0, 0, 0, 0, 2}));
  EXPECT_EQ(routed.in_rank, (Counts{1, 1, 0, 0, 1, 0, 0, 1}));
}

void test_ids_that_are_no_expert() {
  const Routed routed = route({{-1, 8, 5}, {INT32_MIN, INT32_MAX, -1}});
  EXPECT_EQ(routed.per_rank, (Counts{0, 0, 1, 0}));
  EXPECT_EQ(routed.per_node, (Counts{0, 1}));
  EXPECT_EQ(routed.per_expert, (Counts{0, 0, 0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(routed.in_rank, (Counts{0, 0, 1, 0, 0, 0, 0, 0}));
}

void test_no_tokens() {
  const Routed routed = route({});
  EXPECT_EQ(routed.per_rank, Counts(4, 0));
  EXPECT_EQ(routed.per_node, Counts(2, 0));
  EXPECT_EQ(routed.per_expert, Counts(8, 0));
}

int main() {
  test_token_counts_once_per_rank_and_node();
  test_ids_that_are_no_expert();
  test_no_tokens();
  return check::exit_status();
}
