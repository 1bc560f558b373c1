// The two kernels of a balance that read all pairs (token, k). Each has many blocks, and needs no other rank.
// count_pairs_kernel counts the pairs before the plan is made. number_pairs_kernel then gives each pair its expert
// slot.
#pragma once

#include "ffi/cuda/balance.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/warp.cuh"

namespace jax_ep {

// Arrays in args.work, through which a kernel of a balance passes data to the next. E is the number of home experts.
struct BalanceWork {
  int32_t* block_counts;                          // [blocks, E]: the pairs of each block; then of all blocks before it
  int32_t* offset;                                // [E]: ExpertPlacements::offset
  int32_t* place;                                 // [E]: ExpertPlacements::place
  int32_t *begin, *end, *first_copy, *receivers;  // [R] each: as in RankPlacements
  int32_t* is_valid;                              // 0 if the balance has failed

  __device__ BalanceWork(const BalanceArgs& args, int32_t num_experts, int32_t num_ranks)
      : block_counts(args.work),
        offset(block_counts + kMaxBalanceBlocks * num_experts),
        place(offset + num_experts),
        begin(place + num_experts),
        end(begin + num_ranks),
        first_copy(end + num_ranks),
        receivers(first_copy + num_ranks),
        is_valid(receivers + num_ranks) {}
};

// The part of the pairs that a block counts.
struct PairsOfBlock {
  int32_t begin, end;

  __device__ PairsOfBlock(const BalanceArgs& args, int32_t block, int32_t num_blocks) {
    const int32_t num_pairs = args.num_tokens * args.top_k;
    const int32_t share = (num_pairs + num_blocks - 1) / num_blocks;
    begin = min(block * share, num_pairs);
    end = min(begin + share, num_pairs);
  }
};

struct PairCounts {
  const BalanceArgs& args;
  const PairsOfBlock pairs;
  const int32_t num_experts, num_counting_warps;
  int32_t* const counters;  // [num_counting_warps, E], in shared memory

  // Calls f(pair, id) for each pair of this warp, in order, with a lane per pair. `id` is the pair's expert. A lane
  // behind the last pair gets -1 for both.
  template <typename F>
  __device__ void for_each_pair(F f) const {
    if (warp_id() >= num_counting_warps) return;
    const int32_t share = (pairs.end - pairs.begin + num_counting_warps * 32 - 1) / (num_counting_warps * 32) * 32;
    const int32_t begin = pairs.begin + warp_id() * share, end = min(begin + share, pairs.end);
    for (int32_t first = begin; first < end; first += 32) {
      const int32_t pair = first + lane_id();
      f(pair < end ? pair : -1, pair < end ? __ldg(args.topk_idx + pair) : -1);
    }
  }

  // Counts the pairs of each warp, per expert. Writes to topk_slot how many earlier pairs of the warp name the same
  // expert.
  __device__ void count() const {
    for (int32_t i = threadIdx.x; i < num_counting_warps * num_experts; i += blockDim.x) counters[i] = 0;
    __syncthreads();
    for_each_pair([&](int32_t pair, int32_t id) {
      const bool is_row = is_expert(id, num_experts);
      const uint32_t same = __match_any_sync(kAllLanes, is_row ? id : -1);
      const uint32_t earlier = same & ((1u << lane_id()) - 1);
      int32_t* const counter = counters + warp_id() * num_experts + (is_row ? id : 0);
      const int32_t before = *counter;
      __syncwarp();
      if (is_row && earlier == 0) *counter = before + __popc(same);
      __syncwarp();
      if (is_row) args.topk_slot[pair] = before + __popc(earlier);
    });
    __syncthreads();
  }

  // Writes the block's counts to `counts` [E]. After it, a warp's counters are the pairs of the warps before it.
  __device__ void sum(int32_t* counts) const {
    for (int32_t expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
      int32_t count = 0;
      for (int32_t warp = 0; warp < num_counting_warps; ++warp) {
        int32_t& counter = counters[warp * num_experts + expert];
        const int32_t earlier = count;
        count += counter;
        counter = earlier;
      }
      counts[expert] = count;
    }
    __syncthreads();
  }

  // Adds the pairs of earlier warps to topk_slot.
  __device__ void add_earlier_warps() const {
    for_each_pair([&](int32_t pair, int32_t id) {
      if (is_expert(id, num_experts)) args.topk_slot[pair] += counters[warp_id() * num_experts + id];
    });
  }
};

__global__ void __launch_bounds__(kPairThreads)
    count_pairs_kernel(const __grid_constant__ BalanceArgs args, int32_t num_experts, int32_t num_ranks,
                       int32_t num_counting_warps) {
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  wait_for_dependencies();
  const PairCounts counts = {args, PairsOfBlock(args, blockIdx.x, gridDim.x), num_experts, num_counting_warps,
                             reinterpret_cast<int32_t*>(scratch)};
  counts.count();
  counts.sum(BalanceWork(args, num_experts, num_ranks).block_counts + blockIdx.x * num_experts);
  counts.add_earlier_warps();
}

// The expert slots to which the rows of a plan go.
struct Slots {
  const BalanceWork work;
  const Divisor by_home_experts;
  const int32_t experts_per_rank, num_slots;

  // Returns the expert slot that computes the row at `at` in the queue of the expert's home rank: rank * (home experts
  // + replica slots) + the slot's number on the rank, where replica slots come after home experts.
  __device__ int32_t slot_of(int32_t expert, int32_t at) const {
    const int32_t home = by_home_experts.quotient(expert), slots_per_rank = experts_per_rank + num_slots;
    for (uint32_t left = static_cast<uint32_t>(work.receivers[home]); left != 0; left &= left - 1) {
      const int32_t to = __ffs(static_cast<int>(left)) - 1;
      if (at < work.begin[to] || at >= work.end[to]) continue;
      return to * slots_per_rank + experts_per_rank + work.place[expert] - work.first_copy[to];
    }
    return home * slots_per_rank + expert - home * experts_per_rank;
  }
};

// Writes the slot of each pair. The rows of an expert have the order of source ranks, tokens, k. A block handles the
// pairs that one block of count_pairs_kernel has counted.
__global__ void __launch_bounds__(kPairThreads)
    number_pairs_kernel(const __grid_constant__ BalanceArgs args, int32_t experts_per_rank, int32_t num_ranks,
                        int32_t num_slots) {
  wait_for_dependencies();
  const int32_t num_experts = experts_per_rank * num_ranks;
  const PairsOfBlock pairs(args, blockIdx.x, gridDim.x);
  const Slots slots = {BalanceWork(args, num_experts, num_ranks), args.by_home_experts, experts_per_rank, num_slots};
  const int32_t* const before = slots.work.block_counts + blockIdx.x * num_experts;
  const bool is_valid = *slots.work.is_valid != 0;
  for (int32_t pair = pairs.begin + threadIdx.x; pair < pairs.end; pair += kPairThreads) {
    const int32_t id = __ldg(args.topk_idx + pair);
    const bool is_row = is_valid && is_expert(id, num_experts);
    const int32_t at = is_row ? slots.work.offset[id] + before[id] + args.topk_slot[pair] : 0;
    args.topk_slot[pair] = is_row ? slots.slot_of(id, at) : -1;
  }
}

}  // namespace jax_ep
