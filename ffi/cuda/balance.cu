#include "ffi/cuda/balance.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/placement.cuh"

namespace jax_ep {
namespace {

struct BalanceShared {
  State state;
  RankPlacements ranks;
};

// The steps of a balance. A pair is a (token, k) that names an expert.
struct Balance {
  const Peers& peers;
  const BalanceArgs& args;
  const Operation op;
  const Placing placing;
  int32_t* const counters;  // [num_counters, E], in shared memory
  const int32_t num_counters;

  __device__ int32_t num_pairs() const { return args.num_tokens * args.top_k; }
  __device__ bool names_expert(int32_t id) const { return is_expert(id, placing.num_experts()); }

  // Calls f with the expert id of each pair of this warp, in order: a lane per pair. Its index is -1 behind the end.
  template <typename F>
  __device__ void for_each_pair(F f) const {
    constexpr int kIdsAtOnce = 4;  // loads that are under way
    if (warp_id() >= num_counters) return;
    const int32_t share = (num_pairs() + num_counters * 32 - 1) / (num_counters * 32) * 32;
    const int32_t begin = warp_id() * share, end = min(begin + share, num_pairs());
    for (int32_t first = begin; first < end; first += 32 * kIdsAtOnce) {
      int32_t ids[kIdsAtOnce];
#pragma unroll
      for (int i = 0; i < kIdsAtOnce; ++i) {
        const int32_t pair = first + i * 32 + lane_id();
        ids[i] = pair < end ? __ldg(args.topk_idx + pair) : -1;
      }
#pragma unroll
      for (int i = 0; i < kIdsAtOnce; ++i) {
        const int32_t pair = first + i * 32 + lane_id();
        f(pair < end ? pair : -1, ids[i]);
      }
    }
  }

  // Counts the pairs of each warp, per expert.
  __device__ void count_pairs() const {
    const int32_t num_experts = placing.num_experts();
    for (int32_t i = threadIdx.x; i < num_counters * num_experts; i += op.num_workers) counters[i] = 0;
    op.sync_workers();
    for_each_pair([&](int32_t, int32_t id) {
      if (names_expert(id)) atomicAdd(counters + warp_id() * num_experts + id, 1);
    });
    op.sync_workers();
  }

  // Sends the counts of this rank to all ranks, and sums up theirs. A warp's counters then are the pairs of the warps
  // before it.
  __device__ void exchange_counts() const {
    const int32_t num_experts = placing.num_experts();
    for (int32_t expert = threadIdx.x; expert < num_experts; expert += op.num_workers) {
      int32_t count = 0;
      for (int32_t warp = 0; warp < num_counters; ++warp) {
        int32_t& counter = counters[warp * num_experts + expert];
        const int32_t earlier = count;
        count += counter;
        counter = earlier;
      }
      if (op.state.failed) continue;
      for (int32_t peer = 0; peer < peers.num_ranks; ++peer) {
        op.send_number(peer, op.counts_at(peer, peers.rank) + expert, count);
      }
    }
    if (threadIdx.x < peers.num_ranks && !op.state.failed) op.notify(threadIdx.x);
    op.tell_former_finished();
    for (int32_t expert = threadIdx.x; expert < num_experts; expert += op.num_workers) {
      int32_t need = 0, before = 0;
      for (int32_t source = 0; source < peers.num_ranks; ++source) {
        const int32_t count = op.wait_number(source, op.counts_at(peers.rank, source) + expert);
        need += count;
        before += source < peers.rank ? count : 0;
      }
      placing.experts.needs[expert] = need;
      placing.experts.offset[expert] = before;
    }
    op.sync_workers();
  }

  // Writes what the plan says of ranks, and counts what it says of this rank.
  __device__ void write_slots() const {
    const RankPlacements& ranks = placing.ranks;
    PlacementCounters& counted = op.own().counters.placement;
    for (int32_t i = threadIdx.x; i < peers.num_ranks * placing.num_slots; i += op.num_workers) {
      const int32_t rank = i / placing.num_slots, slot = i % placing.num_slots;
      const int32_t expert = placing.expert_in_slot(rank, slot);
      args.slots[i] = expert;
      if (rank != peers.rank) continue;
      args.slot_expert[slot] = expert;
      if (expert >= 0) red_add_relaxed_gpu(&counted.copies, 1);
    }
    if (threadIdx.x != 0) return;
    *args.num_rows = ranks.num_rows[peers.rank];
    *args.home_rows = ranks.load[peers.rank];
    red_add_relaxed_gpu(&counted.planned_rows, ranks.num_rows[peers.rank]);
    red_add_relaxed_gpu(&counted.home_rows, ranks.load[peers.rank]);
  }

  // Writes the slot of each pair. The rows of an expert have the order of source ranks, tokens, k.
  __device__ void number_pairs() const {
    const int32_t num_experts = placing.num_experts();
    for_each_pair([&](int32_t pair, int32_t id) {
      const bool is_row = names_expert(id);
      const uint32_t same = __match_any_sync(kAllLanes, is_row ? id : -1);
      const uint32_t earlier = same & ((1u << lane_id()) - 1);
      int32_t* const counter = counters + warp_id() * num_experts + (is_row ? id : 0);
      const int32_t at = is_row ? placing.experts.offset[id] + *counter + __popc(earlier) : 0;
      __syncwarp();
      if (is_row && earlier == 0) *counter += __popc(same);
      __syncwarp();
      if (pair >= 0) args.topk_slot[pair] = is_row ? placing.slot_of(id, at) : -1;
    });
  }

  // The results of a failed balance: no row goes anywhere.
  __device__ void poison() const {
    for (int32_t i = threadIdx.x; i < num_pairs(); i += blockDim.x) args.topk_slot[i] = -1;
    for (int32_t i = threadIdx.x; i < peers.num_ranks * placing.num_slots; i += blockDim.x) args.slots[i] = -1;
    for (int32_t i = threadIdx.x; i < placing.num_slots; i += blockDim.x) args.slot_expert[i] = -1;
    if (threadIdx.x == 0) *args.num_rows = *args.home_rows = 0;
  }
};

__global__ void __launch_bounds__(1024, 1)
    balance_kernel(const __grid_constant__ Peers peers, const __grid_constant__ BalanceArgs args,
                   const __grid_constant__ BalancePlan plan) {
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  JAX_EP_SHARED(BalanceShared, shared);
  const Operation op = {peers, args, args.slots, shared.state, plan.num_workers};
  auto* const words = reinterpret_cast<int32_t*>(scratch);
  const int32_t num_slots = peers.replicas, experts_per_rank = peers.num_home_experts();
  const int32_t num_experts = peers.num_ranks * experts_per_rank;
  const ExpertPlacements experts = {words, words + num_experts, words + 2 * num_experts, words + 3 * num_experts,
                                    words + 4 * num_experts};
  const Placing placing = {
      op,        shared.ranks,        experts, args.by_home_experts, peers.num_ranks, experts_per_rank,
      num_slots, args.tolerance_units};
  const Balance balance = {peers, args, op, placing, words + kWordsPerExpert * num_experts, plan.num_counters};
  if (!op.is_control_warp()) {
    fetch_arguments(peers);
    fetch_arguments(args);
  }
  wait_for_dependencies();
  op.stamp(Stamp::kBegun);
  if (op.is_control_warp()) {
    op.enter([](int32_t) { return true; });
  } else {
    balance.count_pairs();
  }
  __syncthreads();  // the block has entered
  if (op.is_worker()) {
    balance.exchange_counts();
    op.stamp(Stamp::kRouted);
    placing.place();
    balance.write_slots();
    balance.number_pairs();
  } else {
    Operation::wait_peers(shared.state);
  }
  op.end([&] { balance.poison(); });
}

}  // namespace

cudaError_t launch_balance(const Peers& peers, const BalanceArgs& args, cudaStream_t stream) {
  const int32_t num_experts = peers.num_ranks * peers.num_home_experts();
  const BalancePlan plan = plan_balance(int64_t{args.num_tokens} * args.top_k, num_experts);
  const int32_t scratch = balance_scratch_bytes(num_experts, plan.num_counters);
  return launch(balance_kernel, {1, plan.block_threads(), scratch}, stream, peers, args, plan);
}

cudaError_t load_balance() { return load_kernel(balance_kernel, kMaxBalanceScratch); }

}  // namespace jax_ep
