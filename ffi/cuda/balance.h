// Balance plans which rank computes which rows, so that no rank computes more than its share (jax_ep/_placement.py).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "ffi/cuda/call.h"
#include "ffi/layout.h"

namespace jax_ep {

struct BalanceArgs : Call {
  const int32_t* topk_idx;  // [T, K]
  int32_t tolerance_units;  // how much more than the mean a rank may compute, in units of 1 / kToleranceUnit
  Divisor by_home_experts;  // of a rank
  // The results, which jax_ep.Plan describes:
  int32_t *slot_expert, *num_rows, *home_rows, *slots, *topk_slot;
};

// The threads of the launch, which has one block. Few pairs and experts have few threads.
struct BalancePlan {
  int32_t num_workers;   // threads, without the control warp
  int32_t num_counters;  // warps that count and number pairs: each has a counter per expert in shared memory

  constexpr int32_t block_threads() const { return num_workers + 32; }
};

// The dynamic shared memory of the block: five words per expert, and the counters.
inline constexpr int32_t kWordsPerExpert = 5, kMaxBalanceScratch = 96 * 1024;
constexpr int32_t balance_scratch_bytes(int32_t num_experts, int32_t num_counters) {
  return static_cast<int32_t>(align_up(4 * num_experts * (kWordsPerExpert + num_counters), 16));
}
inline constexpr int32_t kMaxBalancedExperts = kMaxBalanceScratch / (4 * (kWordsPerExpert + 1));

constexpr BalancePlan plan_balance(int64_t num_pairs, int32_t num_experts) {
  constexpr int64_t kPairsPerThread = 8;
  const int64_t useful = std::max<int64_t>(num_experts, num_pairs / kPairsPerThread);
  const int32_t num_warps = static_cast<int32_t>(std::clamp<int64_t>((useful + 31) / 32, 1, 31));
  const int32_t room = kMaxBalanceScratch / (4 * num_experts) - kWordsPerExpert;
  return {num_warps * 32, std::min(num_warps, room)};
}

// Enqueues one kernel. The group has replicas, and at most kMaxBalancedExperts experts.
cudaError_t launch_balance(const Peers& peers, const BalanceArgs& args, cudaStream_t stream);

// Loads the kernel on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_balance();

}  // namespace jax_ep
