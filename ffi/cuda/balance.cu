#include "ffi/cuda/balance.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/pairs.cuh"
#include "ffi/cuda/placement.cuh"

namespace jax_ep {
namespace {

struct BalanceShared {
  State state;
  RankPlacements ranks;
};

// The steps of balance_kernel, whose one block makes the plan. count_pairs_kernel has counted this rank's pairs.
struct Balance {
  const Peers& peers;
  const BalanceArgs& args;
  const Operation op;
  const Placing placing;
  const BalanceWork work;
  int32_t* const counts;  // [E], in shared memory: the pairs of this rank

  // Sums the counts of all blocks. After it, a block's counts in `work` are the pairs of the blocks before it.
  __device__ void sum_blocks(int32_t num_blocks) const {
    constexpr int kAtOnce = 8;  // loads in flight
    const int32_t num_experts = placing.num_experts();
    for (int32_t expert = threadIdx.x; expert < num_experts; expert += op.num_worker_threads) {
      int32_t sum = 0;
      for (int32_t first = 0; first < num_blocks; first += kAtOnce) {
        int32_t found[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          found[i] = work.block_counts[min(first + i, num_blocks - 1) * num_experts + expert];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= num_blocks) break;
          work.block_counts[(first + i) * num_experts + expert] = sum;
          sum += found[i];
        }
      }
      counts[expert] = sum;
      placing.experts.needs[expert] = placing.experts.offset[expert] = 0;
    }
  }

  // Sends the counts of this rank to all ranks, and sums the counts of all ranks.
  __device__ void exchange_counts() const {
    const int32_t num_words = peers.num_ranks * placing.num_experts();
    for (int32_t i = threadIdx.x; i < num_words && !op.state.failed; i += op.num_worker_threads) {
      const int32_t peer = i / placing.num_experts(), expert = i - peer * placing.num_experts();
      op.send_number(peer, op.counts_at(peer, peers.rank) + expert, counts[expert]);
    }
    if (threadIdx.x < peers.num_ranks && !op.state.failed) op.notify(threadIdx.x);
    op.tell_former_finished();
    for (int32_t i = threadIdx.x; i < num_words; i += op.num_worker_threads) {
      const int32_t source = i / placing.num_experts(), expert = i - source * placing.num_experts();
      const int32_t count = op.wait_number(source, op.counts_at(peers.rank, source) + expert);
      atomicAdd(placing.experts.needs + expert, count);
      if (source < peers.rank) atomicAdd(placing.experts.offset + expert, count);
    }
    op.sync_workers();
  }

  // Writes the results that the plan has for ranks, and adds this rank's numbers to its counters.
  __device__ void write_slots() const {
    const RankPlacements& ranks = placing.ranks;
    PlacementCounters& counted = op.own_control().counters.placement;
    for (int32_t i = threadIdx.x; i < peers.num_ranks * placing.num_slots; i += op.num_worker_threads) {
      const int32_t rank = i / placing.num_slots, slot = i % placing.num_slots;
      const int32_t expert = placing.expert_in_slot(rank, slot);
      args.slots[i] = expert;
      if (rank != peers.rank) continue;
      args.slot_expert[slot] = expert;
      if (expert >= 0 && !op.state.failed) red_add_relaxed_gpu(&counted.copies, 1);
    }
    if (threadIdx.x != 0) return;
    *args.num_rows = ranks.num_rows[peers.rank];
    *args.home_rows = ranks.load[peers.rank];
    if (op.state.failed) return;
    red_add_relaxed_gpu(&counted.planned_rows, ranks.num_rows[peers.rank]);
    red_add_relaxed_gpu(&counted.home_rows, ranks.load[peers.rank]);
  }

  // Writes the parts of the plan that number_pairs_kernel needs.
  __device__ void write_work() const {
    for (int32_t expert = threadIdx.x; expert < placing.num_experts(); expert += op.num_worker_threads) {
      work.offset[expert] = placing.experts.offset[expert];
      work.place[expert] = placing.experts.place[expert];
    }
    for (int32_t rank = threadIdx.x; rank < peers.num_ranks; rank += op.num_worker_threads) {
      work.begin[rank] = placing.ranks.begin[rank];
      work.end[rank] = placing.ranks.end[rank];
      work.first_copy[rank] = placing.ranks.first_copy[rank];
      work.receivers[rank] = static_cast<int32_t>(placing.ranks.receivers[rank]);
    }
    if (threadIdx.x == 0) *work.is_valid = 1;
  }

  // Writes the results of a failed balance: no row has an expert slot.
  __device__ void poison() const {
    for (int32_t i = threadIdx.x; i < peers.num_ranks * placing.num_slots; i += blockDim.x) args.slots[i] = -1;
    for (int32_t i = threadIdx.x; i < placing.num_slots; i += blockDim.x) args.slot_expert[i] = -1;
    if (threadIdx.x == 0) *args.num_rows = *args.home_rows = *work.is_valid = 0;
  }
};

__global__ void __launch_bounds__(1024, 1)
    balance_kernel(const __grid_constant__ Peers peers, const __grid_constant__ BalanceArgs args,
                   const __grid_constant__ BalancePlan plan) {
  if (!Operation::is_control_warp()) fetch_arguments(peers, args, plan);
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  JAX_EP_SHARED(BalanceShared, shared);
  const Operation op = {peers, args, args.slots, shared.state, plan.num_worker_threads};
  auto* const words = reinterpret_cast<int32_t*>(scratch);
  const int32_t num_slots = peers.replicas, experts_per_rank = peers.num_home_experts();
  const int32_t num_experts = peers.num_ranks * experts_per_rank;
  const ExpertPlacements experts = {words, words + num_experts, words + 2 * num_experts, words + 3 * num_experts,
                                    words + 4 * num_experts};
  const Placing placing = {
      op,        shared.ranks,        experts, args.by_home_experts, peers.num_ranks, experts_per_rank,
      num_slots, args.tolerance_units};
  const BalanceWork work(args, num_experts, peers.num_ranks);
  const Balance balance = {peers, args, op, placing, work, words + (kWordsPerExpert - 1) * num_experts};
  wait_for_dependencies();
  op.stamp(Stamp::kBegun);
  if (op.is_control_warp()) {
    op.enter([](int32_t) { return true; });
  } else {
    balance.sum_blocks(plan.num_blocks);
  }
  __syncthreads();  // the block has entered
  if (op.is_worker()) {
    balance.exchange_counts();
    op.stamp(Stamp::kRouted);
    placing.place();
    balance.write_slots();
    balance.write_work();
  } else {
    Operation::wait_peers(shared.state);
  }
  op.end([&] { balance.poison(); });
}

}  // namespace

cudaError_t launch_balance(const Peers& peers, const BalanceArgs& args, const BalancePlan& plan, cudaStream_t stream) {
  if (peers.num_ranks > kMaxLocalRanks) return cudaErrorInvalidConfiguration;  // a lane per rank
  const int32_t experts_per_rank = peers.num_home_experts(), num_experts = peers.num_ranks * experts_per_rank;
  const Grid pairs = {plan.num_blocks, kPairThreads, 0};
  cudaError_t status = launch(count_pairs_kernel, {plan.num_blocks, kPairThreads, plan.counters_bytes(num_experts)},
                              stream, args, num_experts, peers.num_ranks, plan.num_counting_warps);
  if (status == cudaSuccess) {
    status = launch(balance_kernel, {1, plan.block_threads(), balance_scratch_bytes(num_experts)}, stream, peers, args,
                    plan);
  }
  if (status != cudaSuccess) return status;
  return launch(number_pairs_kernel, pairs, stream, args, experts_per_rank, peers.num_ranks, peers.replicas);
}

cudaError_t load_balance() {
  cudaError_t status = load_kernel(count_pairs_kernel, kMaxBalanceScratch);
  if (status == cudaSuccess) status = load_kernel(balance_kernel, kMaxBalanceScratch);
  return status == cudaSuccess ? load_kernel(number_pairs_kernel, 0) : status;
}

}  // namespace jax_ep
