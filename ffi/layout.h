// Layout arithmetic for kernels, handlers and host functions: the owners of experts, the nodes of a group, the
// capacities of layouts, and the positions of received rows. Also division by a number that is known before a launch.
//
// All functions are constexpr. nvcc's --expt-relaxed-constexpr makes them callable on the device, so that host and
// device cannot disagree. Counts of rows are int32, as in XLA. Sums of counts, row numbers and byte sizes are int64,
// because they can be larger.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/constants.h"

namespace jax_ep {

// Any id outside [0, num_experts) means "no expert".
constexpr bool is_expert(int32_t id, int32_t num_experts) { return id >= 0 && id < num_experts; }

constexpr int32_t rank_of_expert(int32_t expert, int32_t experts_per_rank) { return expert / experts_per_rank; }

constexpr int64_t divide_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

// The alignment is usually 1. The comparison avoids a 64-bit division, which is slow on a GPU.
constexpr int64_t align_up(int64_t n, int64_t alignment) {
  return alignment == 1 ? n : (n + alignment - 1) / alignment * alignment;
}

// Division by a number that is known before a launch. On a GPU, it takes a tenth of the time of an integer division.
// Exact for n with n * divisor < 2^32.
class Divisor {
 public:
  constexpr Divisor() = default;
  constexpr explicit Divisor(uint32_t divisor)
      : divisor_(divisor),
        factor_(divisor == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor)) {}
  constexpr int32_t quotient(uint32_t n) const {
    return static_cast<int32_t>(factor_ == 0 ? n : uint64_t{n} * factor_ >> 32);
  }
  constexpr int32_t remainder(uint32_t n) const { return static_cast<int32_t>(n - quotient(n) * divisor_); }

 private:
  uint32_t divisor_ = 1, factor_ = 0;
};

// The nodes of a group over a network. A node is `size` consecutive ranks, which map each other's memory. A rank's rail
// peers are the ranks with its number in the other nodes. Rows and sums for a node go to the rail peer in that node.
struct Nodes {
  int32_t size = 1, count = 1;
  int32_t own_node = 0, number = 0;  // this rank's node, and the rank's number in the node

  constexpr Nodes() = default;
  constexpr Nodes(int32_t size, int32_t num_ranks, int32_t rank)
      : size(size), count(num_ranks / size), own_node(rank / size), number(rank % size) {}

  constexpr int32_t num_others() const { return count - 1; }
  // The i-th of the other nodes, beginning with the node after this one.
  constexpr int32_t other(int32_t i) const { return (own_node + 1 + i) % count; }
  constexpr bool is_in_own_node(int32_t rank) const { return rank / size == own_node; }
  // The rank of `node` that has the same number as `rank`.
  constexpr int32_t rail_peer(int32_t rank, int32_t node) const { return node * size + rank % size; }
  constexpr int32_t rail_peer_in(int32_t node) const { return rail_peer(number, node); }
  constexpr bool is_rail_peer(int32_t rank) const { return !is_in_own_node(rank) && rank % size == number; }
  // The source under which a rank keeps the rows that its rail peer in another node sends. It follows the ranks.
  constexpr int32_t source_of(int32_t node) const { return size * count + node; }
};

// The next two functions say how the buffers of the layouts differ. Their switches have no default, so that the
// compiler warns of a switch that lacks a new layout. (ffi/README.md says how to find the code that only the layout
// "token" has.)

// True if each expert has a buffer of `capacity` rows. False if the groups of a rank's experts follow one another in
// one buffer of `capacity` rows. (In the token layout, all rows are in one group.)
constexpr bool has_buffer_per_expert(Layout layout) {
  switch (layout) {
    case Layout::kExpert:
      return true;
    case Layout::kRagged:
    case Layout::kToken:
      break;
  }
  return false;
}

// True if a token has at most one row in a buffer of `capacity` rows. (This assumes that no token names an expert
// twice.) The buffer then belongs to one expert, or has one row per token.
constexpr bool holds_token_once(Layout layout) {
  switch (layout) {
    case Layout::kRagged:
      return false;
    case Layout::kExpert:
    case Layout::kToken:
      break;
  }
  return true;
}

// The smallest capacity with which no row is ever dropped, if no token names an expert twice.
constexpr int64_t default_capacity(Layout layout, int64_t num_ranks, int64_t num_tokens, int64_t top_k,
                                   int64_t experts_per_rank, int64_t alignment) {
  if (holds_token_once(layout)) return num_ranks * num_tokens;
  const int64_t most_rows = num_ranks * num_tokens * std::min(top_k, experts_per_rank);
  return align_up(most_rows + experts_per_rank * (alignment - 1), alignment);
}

// The rows of one local expert in the result. The rows have consecutive numbers, over the buffers of all experts.
struct ExpertGroup {
  int64_t first_row;
  int32_t group_size;  // the need, rounded up to the alignment, except in the expert layout
  bool fits;
};

// Places `need` rows of local expert `expert`. `rows_before` is the sum of align_up(need, alignment) over the experts
// before it, and does not matter in the expert layout. If any expert of the rank does not fit, share_room()
// (cuda/share_room.cuh) decides which rows all experts keep.
constexpr ExpertGroup place_group(Layout layout, int32_t expert, int64_t rows_before, int32_t need, int64_t capacity,
                                  int64_t alignment) {
  if (has_buffer_per_expert(layout)) return {expert * capacity, need, need <= capacity};
  const int64_t size = align_up(need, alignment);
  return {rows_before, static_cast<int32_t>(size), rows_before + size <= capacity};
}

// Keeps nvcc from unrolling a loop of code that runs seldom.
#ifdef __CUDA_ARCH__
#define JAX_EP_DO_NOT_UNROLL _Pragma("unroll 1")
#else
#define JAX_EP_DO_NOT_UNROLL
#endif

// Too little room is shared fairly: each need gets min(need, level), for the highest level that fits. `left_over` is
// the room that is left, too little to raise the level. It goes, one each, to needs that are larger than the level.
struct Fill {
  int32_t level, left_over;
};

// One step towards the level, from level 0. The needs that are at most `share.level` sum up to `met`; `num_wanting`
// needs are larger. Returns false if share.level is the highest level that fits. Each step but the last two meets at
// least one more need.
constexpr bool raise_level(Fill& share, int32_t met, int32_t num_wanting, int32_t room) {
  if (num_wanting == 0) return false;
  const int32_t level = (room - met) / num_wanting;
  if (level > share.level) {
    share.level = level;
    return true;
  }
  share.left_over = room - met - num_wanting * share.level;
  return false;
}

// Shares `room` among `num` needs. `ends` has their running sums: need i is ends[(i + 1) * stride] - ends[i * stride].
constexpr Fill fill(const int32_t* ends, int32_t stride, int32_t num, int32_t room) {
  Fill share = {0, 0};
  int32_t met = 0, num_wanting = 0;
  do {
    met = num_wanting = 0;
    JAX_EP_DO_NOT_UNROLL
    for (int32_t i = 0; i < num; ++i) {
      const int32_t need = ends[(i + 1) * stride] - ends[i * stride];
      met += need <= share.level ? need : 0;
      num_wanting += need > share.level;
    }
  } while (raise_level(share, met, num_wanting, room));
  return share;
}

// Shares `room` rows of one expert among the source ranks. first[source * stride] is the position of the source's first
// row in the expert's group, and first[num_ranks * stride] is the number of all rows: before the call without a limit,
// after it with the rows that are kept. The rows that are left over go to source `start` first.
constexpr void share_rows(int32_t* first, int32_t stride, int32_t num_ranks, int32_t room, int32_t start) {
  if (first[num_ranks * stride] <= room) return;
  const Fill share = fill(first, stride, num_ranks, room);
  // The sources that want more than the level get the left-over rows in this order: `start` to the last, then 0 to
  // `start` - 1. `wanting_before` is the number of such sources that come earlier in this order. The first loop counts
  // those that come before source 0.
  int32_t wanting_before = 0;
  JAX_EP_DO_NOT_UNROLL
  for (int32_t source = start; source < num_ranks; ++source) {
    wanting_before += first[(source + 1) * stride] - first[source * stride] > share.level;
  }
  int32_t begin = 0, kept = 0;
  JAX_EP_DO_NOT_UNROLL
  for (int32_t source = 0; source < num_ranks; ++source) {
    const int32_t end = first[(source + 1) * stride], need = end - begin;
    if (source == start) wanting_before = 0;
    first[source * stride] = kept;
    kept += need <= share.level ? need : share.level + (wanting_before < share.left_over);
    wanting_before += need > share.level;
    begin = end;
  }
  first[num_ranks * stride] = kept;
}

}  // namespace jax_ep
