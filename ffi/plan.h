// The shape of a launch, from the shape of the call. The one place to tune it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

inline constexpr int32_t kBlockThreads = 512;
inline constexpr int32_t kBlockWarps = kBlockThreads / 32;
inline constexpr int32_t kDefaultBlocks = 128;

// A thread block sends, or receives. Senders come first, as blocks are started in their order, and wait for no peer's
// rows: what a receiver waits for is always on its way. Only a launch of one block does both, one after the other.
//
// If there are others, the first sender sends no rows: it tells the peers which call this is, and how many rows come.
// And the first receiver takes none: it writes the small results, and pads.
struct LaunchPlan {
  int32_t num_senders;
  int32_t first_receiver;
  int32_t num_blocks;
  int32_t log_row_warps;  // of the warps that share a row that is received, or summed

  constexpr int32_t row_warps() const { return 1 << log_row_warps; }
  constexpr int32_t num_receivers() const { return num_blocks - first_receiver; }
  // Such warps work as teams.
  constexpr int32_t row_teams() const { return kBlockWarps >> log_row_warps; }
  constexpr int32_t team(int32_t warp) const { return warp >> log_row_warps; }
  constexpr int32_t warp_of_team(int32_t warp) const { return warp & (row_warps() - 1); }
  // Blocks that move rows, and this block's number among them; negative if it does other things.
  constexpr int32_t row_senders() const { return std::max(num_senders - 1, 1); }
  constexpr int32_t row_sender(int32_t block) const { return num_senders > 1 ? block - 1 : block; }
  constexpr int32_t row_receivers() const { return std::max(num_receivers() - 1, 1); }
  constexpr int32_t row_receiver(int32_t block) const { return block - first_receiver - (num_receivers() > 1); }
};

// `sends`, `receives`: blocks for all rows that there may be.
constexpr LaunchPlan plan_launch(int64_t sends, int64_t receives, int32_t log_row_warps, int32_t num_sms) {
  const int32_t blocks = num_sms > 0 ? std::min(num_sms, kTicketWords - 1) : kDefaultBlocks;
  if (blocks == 1) return {1, 0, 1, log_row_warps};
  const auto receivers = static_cast<int32_t>(std::min<int64_t>(receives + 1, blocks / 2));
  const auto senders = static_cast<int32_t>(std::min<int64_t>(sends + 1, blocks - receivers));
  return {senders, senders, senders + receivers, log_row_warps};
}

// Few tokens: many warps on a row, for its latency. Many: more rows under way.
constexpr int32_t log_row_warps_for(int64_t num_tokens) { return num_tokens <= 16 ? 4 : num_tokens <= 64 ? 3 : 2; }

constexpr int64_t blocks_for(int64_t rows, int32_t log_row_warps) {
  const int64_t per_block = kBlockWarps >> log_row_warps;
  return (rows + per_block - 1) / per_block;
}

// Tokens go out, each read once by one block; rows of all ranks come in.
constexpr LaunchPlan plan_scatter(int64_t num_tokens, int32_t num_ranks, int32_t num_sms) {
  const int32_t log_row_warps = log_row_warps_for(num_tokens);
  return plan_launch(num_tokens, blocks_for(num_tokens * num_ranks, log_row_warps), log_row_warps, num_sms);
}

// The rows of all ranks' tokens are summed and go back; tokens come in.
constexpr LaunchPlan plan_gather(int64_t num_tokens, int32_t num_ranks, int32_t num_sms) {
  const int32_t log_row_warps = log_row_warps_for(num_tokens);
  return plan_launch(blocks_for(num_tokens * num_ranks, log_row_warps), blocks_for(num_tokens, log_row_warps),
                     log_row_warps, num_sms);
}

}  // namespace jax_ep
