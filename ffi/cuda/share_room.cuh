// The choice of the rows that a rank keeps if there is too little room for all rows that arrive. ffi/layout.h has the
// rule for sharing room among experts and among sources. In addition, experts in one buffer share whole tiles of
// `alignment` rows.
#pragma once

#include "ffi/cuda/dispatch_operands.cuh"

namespace jax_ep {

// The inclusive prefix sum over a warp's lanes.
__device__ __forceinline__ int64_t sum_through(int64_t value) {
#pragma unroll
  for (int32_t offset = 1; offset < 32; offset *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, value, offset);
    if (lane_id() >= offset) value += before;
  }
  return value;
}

// Shares `room` among the needs of all experts. One warp calls it; all lanes get the same answer.
__device__ inline Fill fill_experts(const int32_t* needs, int32_t num_experts, int32_t room) {
  Fill share = {0, 0};
  int32_t met = 0, num_wanting = 0;
  do {
    met = num_wanting = 0;
#pragma unroll 1
    for (int32_t expert = lane_id(); expert < num_experts; expert += 32) {
      const int32_t need = needs[expert];
      met += need <= share.level ? need : 0;
      num_wanting += need > share.level;
    }
    met = __reduce_add_sync(kAllLanes, met);
    num_wanting = __reduce_add_sync(kAllLanes, num_wanting);
  } while (raise_level(share, met, num_wanting, room));
  return share;
}

// Limits the destinations of a new route to the capacity: the experts share the room of the rank, and the sources share
// the room of each expert. Before the call, `memory` has the destinations without a limit. Returns the number of
// dropped rows. One warp calls it, and only if rows do not fit. It takes the state and not an operation: see
// operation_of().
__device__ __noinline__ static int32_t share_room(State& state, void* memory) {
  const Peers& peers = *state.peers;
  const auto& args = static_cast<const DispatchArgs&>(*state.call);
  const int32_t num_experts = peers.experts_per_rank;
  const Destinations destinations(memory, peers.num_ranks, num_experts);
  const bool shares_buffer = !has_buffer_per_expert(args.layout);
  // Alignment and capacity fit in 32 bits (jax_ep/_dispatch_options.py). A GPU is slow in 64-bit divisions.
  const auto alignment = static_cast<uint32_t>(args.alignment);
  __syncwarp();  // the other lanes have written their destinations
  // Only if the experts share a buffer: the tiles of `alignment` rows that each expert needs. The sizes of the groups
  // overwrite them below.
  int32_t* const tiles = destinations.group_sizes;
  Fill share = {};
  if (shares_buffer) {
#pragma unroll 1
    for (int32_t expert = lane_id(); expert < num_experts; expert += 32) {
      tiles[expert] = static_cast<int32_t>((destinations.counts[expert] + alignment - 1) / alignment);
    }
    share = fill_experts(tiles, num_experts, static_cast<int32_t>(static_cast<uint32_t>(args.capacity) / alignment));
  }
  int64_t rows_before = 0;
  // An expert is wanting if it needs more than share.level. The first wanting experts get the tiles that are left over.
  int32_t dropped = 0, wanting_before_batch = 0;
#pragma unroll 1
  for (int32_t base = 0; base < num_experts; base += 32) {
    const int32_t expert = base + lane_id();
    const bool present = expert < num_experts;
    int64_t room = args.capacity;
    if (shares_buffer) {
      const int32_t tiles_needed = present ? tiles[expert] : 0;
      const uint32_t wanting = __ballot_sync(kAllLanes, tiles_needed > share.level);
      const int32_t wanting_before = wanting_before_batch + __popc(wanting & ((1u << lane_id()) - 1));
      wanting_before_batch += __popc(wanting);
      const int32_t kept =
          tiles_needed <= share.level ? tiles_needed : share.level + (wanting_before < share.left_over);
      room = kept * args.alignment;
      const int64_t through = rows_before + sum_through(room);
      if (present) destinations.first_row[expert] = static_cast<int32_t>(through - room);
      rows_before = __shfl_sync(kAllLanes, through, 31);
    }
    if (!present) continue;
    const int32_t need = destinations.counts[expert], count = static_cast<int32_t>(room < need ? room : need);
    share_rows(destinations.first_position + expert, num_experts, peers.num_ranks, count,
               args.has_token_rows() ? 0 : (peers.rank * num_experts + expert) % peers.num_ranks);
    destinations.group_sizes[expert] = shares_buffer ? static_cast<int32_t>(room) : count;
    dropped += need - count;
  }
  return __reduce_add_sync(kAllLanes, dropped);
}

}  // namespace jax_ep
