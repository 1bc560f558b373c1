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

  // Calls use(pair, load(pair)) for each pair of this warp, in order: a lane per pair. Behind the end, a lane has pair
  // -1 and the value that load() gives for the last pair.
  template <typename Load, typename Use>
  __device__ void for_each_pair(Load load, Use use) const {
    constexpr int kAtOnce = 8;  // loads that are under way
    if (warp_id() >= num_counters) return;
    const int32_t share = (num_pairs() + num_counters * 32 - 1) / (num_counters * 32) * 32;
    const int32_t begin = warp_id() * share, end = min(begin + share, num_pairs());
    for (int32_t first = begin; first < end; first += 32 * kAtOnce) {
      decltype(load(0)) values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) values[i] = load(min(first + i * 32 + lane_id(), end - 1));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * 32 >= end) break;
        const int32_t pair = first + i * 32 + lane_id();
        use(pair < end ? pair : -1, values[i]);
      }
    }
  }

  // Counts the pairs of each warp, per expert. Writes to topk_slot how many earlier pairs of the warp name the same
  // expert.
  __device__ void count_pairs() const {
    const int32_t num_experts = placing.num_experts();
    for (int32_t i = threadIdx.x; i < num_counters * num_experts; i += op.num_workers) counters[i] = 0;
    for (int32_t expert = threadIdx.x; expert < num_experts; expert += op.num_workers) {
      placing.experts.needs[expert] = placing.experts.offset[expert] = 0;
    }
    op.sync_workers();
    const int32_t num_bits = 32 - __clz(num_experts);
    const auto load = [&](int32_t pair) { return __ldg(args.topk_idx + pair); };
    for_each_pair(load, [&](int32_t pair, int32_t id) {
      const bool is_row = pair >= 0 && names_expert(id);
      const uint32_t same = lanes_with_same(is_row ? id : num_experts, num_bits);
      const uint32_t earlier = same & ((1u << lane_id()) - 1);
      int32_t* const counter = counters + warp_id() * num_experts + (is_row ? id : 0);
      const int32_t before = *counter;
      __syncwarp();
      if (is_row && earlier == 0) *counter = before + __popc(same);
      __syncwarp();
      if (is_row) args.topk_slot[pair] = before + __popc(earlier);
    });
    op.sync_workers();
  }

  // Turns the counters of an expert into the pairs of the warps before. Returns the pairs of all warps.
  __device__ int32_t sum_counters(int32_t expert) const {
    constexpr int kAtOnce = 8;  // loads that are under way
    int32_t count = 0;
    for (int32_t first = 0; first < num_counters; first += kAtOnce) {
      int32_t counts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t warp = min(first + i, num_counters - 1);
        counts[i] = counters[warp * placing.num_experts() + expert];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= num_counters) break;
        counters[(first + i) * placing.num_experts() + expert] = count;
        count += counts[i];
      }
    }
    return count;
  }

  // Sends the counts of this rank to all ranks, and sums up theirs.
  __device__ void exchange_counts() const {
    const int32_t num_experts = placing.num_experts();
    for (int32_t expert = threadIdx.x; expert < num_experts; expert += op.num_workers) {
      const int32_t count = sum_counters(expert);
      if (op.state.failed) continue;
      for (int32_t peer = 0; peer < peers.num_ranks; ++peer) {
        op.send_number(peer, op.counts_at(peer, peers.rank) + expert, count);
      }
    }
    if (threadIdx.x < peers.num_ranks && !op.state.failed) op.notify(threadIdx.x);
    op.tell_former_finished();
    for (int32_t i = threadIdx.x; i < peers.num_ranks * num_experts; i += op.num_workers) {
      const int32_t source = i / num_experts, expert = i - source * num_experts;
      const int32_t count = op.wait_number(source, op.counts_at(peers.rank, source) + expert);
      atomicAdd(placing.experts.needs + expert, count);
      if (source < peers.rank) atomicAdd(placing.experts.offset + expert, count);
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
    struct Counted {
      int32_t id, earlier;
    };
    const auto load = [&](int32_t pair) { return Counted{__ldg(args.topk_idx + pair), args.topk_slot[pair]}; };
    for_each_pair(load, [&](int32_t pair, const Counted& counted) {
      const auto [id, earlier] = counted;
      const bool is_row = names_expert(id);
      const int32_t before = is_row ? counters[warp_id() * placing.num_experts() + id] + earlier : 0;
      if (pair < 0) return;
      args.topk_slot[pair] = is_row ? placing.slot_of(id, placing.experts.offset[id] + before) : -1;
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
