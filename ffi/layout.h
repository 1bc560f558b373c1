// Layout arithmetic for kernels, handlers and host functions: the owners of experts, the capacities of layouts, and the
// positions of received rows.
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

constexpr int32_t local_expert(int32_t expert, int32_t experts_per_rank) { return expert % experts_per_rank; }

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
  int32_t own = 0, number = 0;  // this rank's node, and the rank's number in the node

  constexpr Nodes() = default;
  constexpr Nodes(int32_t size, int32_t num_ranks, int32_t rank)
      : size(size), count(num_ranks / size), own(rank / size), number(rank % size) {}

  constexpr int32_t num_others() const { return count - 1; }
  // The i-th of the other nodes, beginning with the node after this one.
  constexpr int32_t other(int32_t i) const { return (own + 1 + i) % count; }
  constexpr bool is_own(int32_t rank) const { return rank / size == own; }
  // The rank of `node` that has the same number as `rank`.
  constexpr int32_t rail_peer(int32_t rank, int32_t node) const { return node * size + rank % size; }
  constexpr int32_t rail_peer_in(int32_t node) const { return rail_peer(number, node); }
  constexpr bool is_rail_peer(int32_t rank) const { return !is_own(rank) && rank % size == number; }
  // True if `rank` is a rail peer, and if `ranks` (a bit per rank) has a rank of its node.
  constexpr bool forwards(int32_t rank, uint32_t ranks) const {
    return is_rail_peer(rank) && (ranks >> (rank - rank % size) & 0xffffffffu >> (32 - size)) != 0;
  }
  // The source under which a rank keeps the rows that another node sends by node. It follows the ranks.
  constexpr int32_t source_of(int32_t node) const { return size * count + node; }
};

// The smallest capacity that never drops a row, if no token names an expert twice.
constexpr int64_t default_capacity(Layout layout, int64_t num_ranks, int64_t num_tokens, int64_t top_k,
                                   int64_t experts_per_rank, int64_t alignment) {
  if (layout == Layout::kExpert) return num_ranks * num_tokens;
  const int64_t most_rows = num_ranks * num_tokens * std::min(top_k, experts_per_rank);
  return align_up(most_rows + experts_per_rank * (alignment - 1), alignment);
}

// The rows of one local expert in a rank's flattened buffer.
struct Placement {
  int64_t first_row;
  int32_t count;       // rows kept
  int32_t group_size;  // count, rounded up to the alignment in the ragged layout
};

// Places `need` rows of local expert `expert`. If there is too little room, the expert keeps its first rows.
// `rows_before` is the sum of align_up(need, alignment) over the experts before it; only the ragged layout uses it.
//
// The result does not depend on the number of rows that earlier groups dropped. The capacity is a multiple of the
// alignment, so a group that overflows fills the buffer to its end, and it is enough to clip `rows_before` to the
// capacity. So a parallel prefix sum over `need` places all groups.
constexpr Placement place_group(Layout layout, int32_t expert, int64_t rows_before, int32_t need, int64_t capacity,
                                int64_t alignment) {
  if (layout == Layout::kExpert) {
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(need, capacity));
    return {expert * capacity, count, count};
  }
  const int64_t first_row = std::min(rows_before, capacity);
  const int32_t count = static_cast<int32_t>(std::min<int64_t>(need, capacity - first_row));
  return {first_row, count, static_cast<int32_t>(align_up(count, alignment))};
}

}  // namespace jax_ep
