// Derives the shapes of the launches of balance and replicate from the shapes of the calls.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/plan.h"

namespace jax_ep {

// The three launches of a balance. The first counts the pairs (token, k). In the second, one block makes the plan. The
// third numbers the pairs (ffi/cuda/pairs.cuh). Few pairs get few blocks, and few experts get few threads in the block
// that plans.
inline constexpr int32_t kPairThreads = 512;
struct BalancePlan {
  int32_t num_worker_threads;  // threads of the block that plans, without the control warp
  int32_t num_blocks;          // of each of the two kernels that count and number the pairs
  int32_t num_counting_warps;  // of a block that counts; each has a counter per expert in shared memory

  constexpr int32_t block_threads() const { return num_worker_threads + 32; }
  constexpr int32_t counters_bytes(int32_t num_experts) const {
    return static_cast<int32_t>(align_up(4 * num_experts * num_counting_warps, 16));
  }
};

// The dynamic shared memory of the block that plans: six words per expert.
inline constexpr int32_t kWordsPerExpert = 6, kMaxBalanceScratch = 96 * 1024;
constexpr int32_t balance_scratch_bytes(int32_t num_experts) {
  return static_cast<int32_t>(align_up(4 * num_experts * kWordsPerExpert, 16));
}
inline constexpr int32_t kMaxBalancedExperts = kMaxBalanceScratch / (4 * kWordsPerExpert);
// The size of the array `work` of a balance (BalanceWork).
constexpr int64_t balance_work_words(int64_t num_experts, int64_t num_ranks) {
  return (kMaxBalanceBlocks + 2) * num_experts + 4 * num_ranks + 1;
}

constexpr BalancePlan plan_balance(int64_t num_pairs, int32_t num_experts, int32_t num_sms, int32_t device_sms) {
  constexpr int64_t kPairsPerBlock = 4 * kPairThreads;
  const int64_t num_warps = std::clamp<int64_t>(divide_up(num_experts, 32), 8, 31);
  const int64_t most = std::min(kMaxBalanceBlocks, usable_sms(num_sms, device_sms));
  const int64_t num_blocks = std::clamp<int64_t>(divide_up(num_pairs, kPairsPerBlock), 1, most);
  const int32_t room = kMaxBalanceScratch / (4 * num_experts);
  return {static_cast<int32_t>(num_warps * 32), static_cast<int32_t>(num_blocks), std::min(kPairThreads / 32, room)};
}

// The launch of a replicate: warps claim tracks of rows (ffi/cuda/row_ring.cuh). All ranks have equally many tracks. If
// the kernel also clears replica slots, it uses all SMs that it may use: a warp that finds no track left clears parts
// of replica slots.
inline constexpr int32_t kCopyWarps = 16;  // of a block
struct CopyPlan {
  int32_t num_blocks, num_tracks;
};
// A track has at least four rows in flight, if the arena has room for so many.
constexpr CopyPlan plan_replicate(int32_t max_tokens, bool clears_slots, int32_t num_sms, int32_t device_sms) {
  const int32_t num_tracks = std::clamp(max_tokens / 4, 1, kMaxCopyTracks), sms = usable_sms(num_sms, device_sms);
  return {clears_slots ? sms : std::min(sms, (num_tracks + kCopyWarps - 1) / kCopyWarps), num_tracks};
}

}  // namespace jax_ep
