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
  int32_t log_send_warps, log_receive_warps;  // of the warps that share a row, a team, which need not be of one block

  constexpr int32_t num_receivers() const { return num_blocks - first_receiver; }
  // Blocks that move rows, and a block's number among them; negative if it does other things.
  constexpr int32_t row_senders() const { return std::max(num_senders - 1, 1); }
  constexpr int32_t row_sender(int32_t block) const { return num_senders > 1 ? block - 1 : block; }
  constexpr int32_t row_receivers() const { return std::max(num_receivers() - 1, 1); }
  constexpr int32_t row_receiver(int32_t block) const { return block - first_receiver - (num_receivers() > 1); }
};

// A warp's place among those of a role.
struct Team {
  int32_t index, num_teams;
  int32_t warp, num_warps;  // in the team

  constexpr Team(int32_t block, int32_t num_blocks, int32_t warp_of_block, int32_t log_warps)
      : index((block * kBlockWarps + warp_of_block) >> log_warps),
        num_teams(std::max(num_blocks * kBlockWarps >> log_warps, 1)),
        warp((block * kBlockWarps + warp_of_block) & ((1 << log_warps) - 1)),
        num_warps(1 << log_warps) {}
};

// `sends`, `receives`: blocks for all rows that there may be, of which at most `receive_eighths` / 8 receive.
constexpr LaunchPlan plan_launch(int64_t sends, int64_t receives, int32_t receive_eighths, int32_t log_send_warps,
                                 int32_t log_receive_warps, int32_t num_sms) {
  const int32_t blocks = num_sms > 0 ? std::min(num_sms, kTicketWords - 1) : kDefaultBlocks;
  if (blocks == 1) return {1, 0, 1, std::min(log_send_warps, 4), std::min(log_receive_warps, 4)};
  const int32_t most_receive = std::max(blocks * receive_eighths / 8, 1);
  const auto receivers = static_cast<int32_t>(std::min<int64_t>(receives + 1, most_receive));
  const auto senders = static_cast<int32_t>(std::min<int64_t>(sends + 1, blocks - receivers));
  // A team must not be larger than all that there are.
  const auto fitting = [](int32_t log_warps, int32_t row_blocks) {
    return row_blocks > 1 ? log_warps : std::min(log_warps, 4);
  };
  return {senders, senders, senders + receivers, fitting(log_send_warps, senders - 1),
          fitting(log_receive_warps, receivers - 1)};
}

constexpr int64_t blocks_for(int64_t rows, int32_t log_warps) {
  return ((rows << log_warps) + kBlockWarps - 1) / kBlockWarps;
}

// Tokens go out, each read once by one block; rows of all ranks come in, and are written once per expert. Few tokens:
// many warps on a row, for its latency. Many: more rows under way.
constexpr LaunchPlan plan_scatter(int64_t num_tokens, int32_t num_ranks, int32_t num_sms) {
  const int32_t log_receive = num_tokens <= 16 ? 4 : num_tokens <= 64 ? 3 : 2;
  return plan_launch(num_tokens, blocks_for(num_tokens * num_ranks, log_receive), 5, 4, log_receive, num_sms);
}

// The rows of all ranks' tokens are summed and go back; tokens come in.
constexpr LaunchPlan plan_gather(int64_t num_tokens, int32_t num_ranks, int32_t num_sms) {
  const int32_t log_send = num_tokens <= 128 ? 4 : 2;
  const int32_t log_receive = num_tokens <= 64 ? 5 : num_tokens <= 128 ? 4 : 2;
  return plan_launch(blocks_for(num_tokens * num_ranks, log_send), blocks_for(num_tokens, log_receive), 3, log_send,
                     log_receive, num_sms);
}

}  // namespace jax_ep
