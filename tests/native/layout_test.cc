#include "ffi/layout.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "check.h"
#include "ffi/arena.h"

using namespace jax_ep;

constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

void test_experts() {
  EXPECT_EQ(is_expert(0, 8), true);
  EXPECT_EQ(is_expert(7, 8), true);
  EXPECT_EQ(is_expert(8, 8), false);
  EXPECT_EQ(is_expert(-1, 8), false);
  EXPECT_EQ(is_expert(std::numeric_limits<int32_t>::min(), 8), false);
  EXPECT_EQ(rank_of_expert(11, 4), 2);
}

void test_sizes() {
  EXPECT_EQ(align_up(0, 16), 0);
  EXPECT_EQ(align_up(1, 16), 16);
  EXPECT_EQ(align_up(16, 16), 16);
  EXPECT_EQ(align_up(kMaxInt32, 128), int64_t{1} << 31);
}

void test_default_capacity() {
  EXPECT_EQ(default_capacity(Layout::kExpert, 8, 128, 8, 32, 16), 1024);
  EXPECT_EQ(default_capacity(Layout::kRagged, 8, 128, 8, 32, 1), 8192);
  EXPECT_EQ(default_capacity(Layout::kRagged, 8, 128, 8, 32, 16), 8192 + 480);
  EXPECT_EQ(default_capacity(Layout::kRagged, 8, 128, 8, 2, 1), 2048);  // at most two experts of a rank
  EXPECT_EQ(default_capacity(Layout::kRagged, 8, 1, 1, 1, 128), 256);   // 8 + 127, rounded up
  EXPECT_EQ(default_capacity(Layout::kToken, 8, 128, 8, 32, 16), 1024);
  EXPECT_EQ(default_capacity(Layout::kRagged, 1024, 1 << 20, 32, 32, 1), int64_t{1} << 35);
}

// Places groups one after the other.
void expect_ragged(const std::vector<int32_t>& need, int64_t capacity, int64_t alignment) {
  int64_t rows_before = 0;
  for (size_t expert = 0; expert < need.size(); ++expert) {
    const ExpertGroup group = place_group(Layout::kRagged, expert, rows_before, need[expert], capacity, alignment);
    EXPECT_EQ(group.first_row, rows_before);
    rows_before += align_up(need[expert], alignment);
    EXPECT_EQ(group.fits, rows_before <= capacity);
    if (group.fits) EXPECT_EQ(group.first_row + group.group_size, rows_before);
  }
}

void test_ragged_places() {
  for (int64_t alignment : {1, 8, 128}) {
    for (int64_t blocks = 0; blocks <= 40; ++blocks) {
      expect_ragged({3, 0, 8, 130, 0, 0, 1, 129}, blocks * alignment, alignment);
    }
  }
  expect_ragged({kMaxInt32, kMaxInt32, kMaxInt32}, 1024, 128);
}

void test_expert_places() {
  const ExpertGroup group = place_group(Layout::kExpert, 3, 0, 20, 16, 8);
  EXPECT_EQ(group.first_row, 48);
  EXPECT_EQ(group.group_size, 20);
  EXPECT_EQ(group.fits, false);
  EXPECT_EQ(place_group(Layout::kExpert, 3, 0, 16, 16, 8).fits, true);
  EXPECT_EQ(place_group(Layout::kExpert, 3, 0, 5, 16, 8).group_size, 5);
  EXPECT_EQ(place_group(Layout::kExpert, 64, 0, 0, int64_t{1} << 31, 1).first_row, int64_t{1} << 37);
}

// Shares rows among sources: in each round, each source that needs more gets one row. The rows of the last, incomplete
// round go to the sources from `start` on. (share_rows() computes the same with a level.)
std::vector<int32_t> share_round_robin(const std::vector<int32_t>& need, int32_t room, int32_t start) {
  const auto num = static_cast<int32_t>(need.size());
  std::vector<int32_t> kept(num);
  for (int32_t served = 1; room > 0 && served > 0;) {
    served = 0;
    for (int32_t i = start; i < start + num && room > 0; ++i) {
      if (kept[i % num] == need[i % num]) continue;
      ++kept[i % num], --room, ++served;
    }
  }
  return kept;
}

void test_shared_rows() {
  const std::vector<std::vector<int32_t>> needs = {{5}, {0, 0}, {3, 0, 9, 1}, {4, 4, 4}, {7, 1, 0, 2, 7, 30, 6, 6}};
  for (const auto& need : needs) {
    const auto num = static_cast<int32_t>(need.size());
    for (int32_t stride : {1, 3}) {
      for (int32_t room = 0; room <= 62; ++room) {
        for (int32_t start = 0; start < num; ++start) {
          std::vector<int32_t> first((num + 1) * stride, -7);
          first[0] = 0;
          for (int32_t i = 0; i < num; ++i) first[(i + 1) * stride] = first[i * stride] + need[i];
          share_rows(first.data(), stride, num, room, start);
          const auto kept = share_round_robin(need, room, start);
          EXPECT_EQ(first[0], 0);
          for (int32_t i = 0; i < num; ++i) EXPECT_EQ(first[(i + 1) * stride] - first[i * stride], kept[i]);
          if (stride > 1) EXPECT_EQ(first[1], -7);
        }
      }
    }
  }
  std::vector<int32_t> first = {0, kMaxInt32 / 2, kMaxInt32 - 1};
  share_rows(first.data(), 1, 2, kMaxInt32 - 4, 1);
  EXPECT_EQ(first[1], kMaxInt32 / 2 - 2);
  EXPECT_EQ(first[2], kMaxInt32 - 4);
}

// For each node, a rank of another node has one rail peer in it, and only this rail peer forwards its rows.
void test_nodes() {
  for (int32_t num_ranks : {1, 2, 4, 6, 32}) {
    for (int32_t size = 1; size <= num_ranks; ++size) {
      if (num_ranks % size != 0) continue;
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        const Nodes nodes(size, num_ranks, rank);
        EXPECT_EQ(nodes.is_in_own_node(rank), true);
        EXPECT_EQ(nodes.rail_peer_in(nodes.own_node), rank);
        std::set<int32_t> others;
        for (int32_t i = 0; i < nodes.num_others(); ++i) {
          const int32_t node = nodes.other(i), rail_peer = nodes.rail_peer_in(node);
          others.insert(node);
          EXPECT_EQ(nodes.is_rail_peer(rail_peer), true);
          EXPECT_EQ(Nodes(size, num_ranks, rail_peer).rail_peer_in(nodes.own_node), rank);
          EXPECT_EQ(nodes.source_of(node) >= num_ranks && nodes.source_of(node) < num_ranks + nodes.count, true);
        }
        EXPECT_EQ(others.size(), static_cast<size_t>(num_ranks / size - 1));
        EXPECT_EQ(others.count(nodes.own_node), size_t{0});
        for (int32_t to = 0; to < num_ranks; ++to) {
          int32_t passing = 0;  // ranks to which a row for `to` is sent
          for (int32_t other = 0; other < num_ranks; ++other) {
            if (!nodes.is_rail_peer(other) || other / size != to / size) continue;
            EXPECT_EQ(other, nodes.rail_peer_in(to / size));
            ++passing;
          }
          EXPECT_EQ(passing, nodes.is_in_own_node(to) ? 0 : 1);
        }
      }
    }
  }
  EXPECT_EQ(Nodes(2, 8, 5).rail_peer(3, 2), 5);
  EXPECT_EQ(Nodes(2, 8, 5).source_of(1), 9);
}

// Atomic additions need aligned counters. No word that a peer writes may be between the counters.
void test_counters() {
  constexpr size_t begin = offsetof(Control, counters), end = begin + sizeof(Counters);
  EXPECT_EQ(begin % 8, size_t{0});
  EXPECT_EQ(begin >= offsetof(Control, num_rows) + sizeof(Control::num_rows), true);
  EXPECT_EQ(sizeof(Counters), 8 * (kNumOpKinds + 4 + 5 * size_t{kMaxRanks}));
  EXPECT_EQ(static_cast<size_t>(counts_offset(0, 0, 8, 32)) >= end, true);
  for (int32_t experts_per_rank : {1, 2, 7, 32}) {  // two counts are loaded as a unit
    EXPECT_EQ(counts_offset(1, 3, 8, experts_per_rank) % kUnitBytes, 0);
    EXPECT_EQ(
        counts_offset(1, 4, 8, experts_per_rank) >= counts_offset(1, 3, 8, experts_per_rank) + 8 * experts_per_rank,
        true);
  }
  EXPECT_EQ(counts_per_source(8, 32, 0), 32);
  EXPECT_EQ(counts_per_source(8, 32 + 2, 2), 8 * 32);
  EXPECT_EQ(counts_per_source(1, 4 + 4, 4), 8);
  EXPECT_EQ(control_bytes(8, 32, true) - control_bytes(8, 32, false), 8 * 8 * kMaxCopyTracks);
  EXPECT_EQ(credits_offset(0, 0, 8, 32), control_bytes(8, 32, false));
  EXPECT_EQ(static_cast<int>(OpKind::kReplicateBack), kNumOpKinds - 1);
}

int main() {
  test_experts();
  test_sizes();
  test_default_capacity();
  test_ragged_places();
  test_expert_places();
  test_shared_rows();
  test_nodes();
  test_counters();
  return check::exit_status();
}
