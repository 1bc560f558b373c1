// The shape of a launch, from the shape of the call. The one place to tune it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

inline constexpr int32_t kMaxBlockWarps = 16;  // one such block on a streaming multiprocessor (SM)
inline constexpr int32_t kDefaultSms = 128;

// Of a kernel's two forms, that for few rows has small blocks, on many SMs, and little code, since what counts is how
// soon the next instruction is there. It has a warp that does nothing but enter the operation (ffi/cuda/protocol.cuh).
inline constexpr int32_t kFewBlockWarps = 8;
constexpr int32_t most_threads(bool few) { return 32 * (few ? kFewBlockWarps + 1 : kMaxBlockWarps); }

// A thread block sends, or receives. Senders come first, as blocks are started in their order, and wait for no peer's
// rows: what a receiver waits for is always on its way. Only a launch of one block does both, one after the other.
//
// If there are others, the first sender sends no rows: it tells the peers which call this is, and how many rows come.
// And the first receiver takes none: it writes the small results, and pads.
struct LaunchPlan {
  int32_t num_senders;
  int32_t first_receiver;
  int32_t num_blocks;
  bool few;
  int32_t log_block_warps;
  int32_t log_send_warps, log_receive_warps;  // of the warps that share a row, a team, which need not be of one block

  constexpr int32_t block_warps() const { return 1 << log_block_warps; }
  constexpr int32_t block_threads() const { return 32 * (block_warps() + few); }

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

  constexpr Team(const LaunchPlan& plan, int32_t block, int32_t num_blocks, int32_t warp_of_block, int32_t log_warps)
      : index(((block << plan.log_block_warps) + warp_of_block) >> log_warps),
        num_teams(std::max((num_blocks << plan.log_block_warps) >> log_warps, 1)),
        warp(((block << plan.log_block_warps) + warp_of_block) & ((1 << log_warps) - 1)),
        num_warps(1 << log_warps) {}
  static constexpr Team of_senders(const LaunchPlan& plan, int32_t block, int32_t warp_of_block) {
    return {plan, plan.row_sender(block), plan.row_senders(), warp_of_block, plan.log_send_warps};
  }
  static constexpr Team of_receivers(const LaunchPlan& plan, int32_t block, int32_t warp_of_block) {
    return {plan, plan.row_receiver(block), plan.row_receivers(), warp_of_block, plan.log_receive_warps};
  }
};

// What a launch would like to be.
struct Shape {
  bool few;
  int32_t log_block_warps, log_send_warps, log_receive_warps;
  int32_t receive_eighths;  // of the blocks, at most, receive
};

// Blocks for `sends` and `receives` rows.
constexpr LaunchPlan plan_launch(int64_t sends, int64_t receives, Shape shape, int32_t num_sms) {
  const int32_t log_block = shape.log_block_warps;
  const auto blocks_for = [=](int64_t rows, int32_t log_warps) {
    return ((rows << log_warps) + (1 << log_block) - 1) >> log_block;
  };
  const int32_t blocks = (num_sms > 0 ? num_sms : kDefaultSms) * kMaxBlockWarps >> log_block;
  if (blocks == 1) {
    return {1,
            0,
            1,
            shape.few,
            log_block,
            std::min(shape.log_send_warps, log_block),
            std::min(shape.log_receive_warps, log_block)};
  }
  const int64_t most_receive = std::max(blocks * shape.receive_eighths / 8, 1);
  const auto receivers =
      static_cast<int32_t>(std::min(blocks_for(receives, shape.log_receive_warps) + 1, most_receive));
  const auto senders = static_cast<int32_t>(
      std::min({blocks_for(sends, shape.log_send_warps) + 1, int64_t{blocks - receivers}, int64_t{kMaxSenders}}));
  // A team must not be larger than all that there are.
  const auto fitting = [=](int32_t log_warps, int32_t row_blocks) {
    while (log_warps > log_block && row_blocks << log_block >> log_warps == 0) --log_warps;
    return log_warps;
  };
  return {senders,
          senders,
          senders + receivers,
          shape.few,
          log_block,
          fitting(shape.log_send_warps, std::max(senders - 1, 1)),
          fitting(shape.log_receive_warps, std::max(receivers - 1, 1))};
}

// Few tokens: many warps on a row, for its latency. Many: more rows under way.
constexpr bool is_few(int64_t num_tokens, int32_t num_sms) { return num_tokens <= 32 && num_sms == 0; }

constexpr int32_t log2_ceil(int32_t n) {
  int32_t log = 0;
  while (1 << log < n) ++log;
  return log;
}

// Tokens go out, each read once by one team; rows of all ranks come in, and are written once per expert. The warps of a
// team that sends are whole blocks, which are small where rows are, if they need not keep to some SMs; of one that
// receives, with `team_in_block`, they are of one block. `num_chunks` is of a row under way.
constexpr LaunchPlan plan_scatter(int64_t num_tokens, int32_t num_ranks, int32_t num_chunks, int32_t num_sms,
                                  bool team_in_block) {
  const int32_t log_chunks = log2_ceil(num_chunks);
  Shape shape = {};
  if (is_few(num_tokens, num_sms)) {
    const int32_t log_receive = num_tokens <= 2 ? 5 : num_tokens <= 16 ? 4 : 3;
    shape = {true, 3, num_tokens <= 16 ? std::clamp(log_chunks, 3, 4) : 3, std::min(log_chunks, log_receive), 5};
  } else {
    const int32_t log_block = num_sms > 0 ? 4 : std::clamp(log_chunks, 2, 4);
    shape = {false, log_block, log_block, std::clamp(log_chunks - 2, 0, 2), num_tokens <= 256 ? 5 : 4};
  }
  if (team_in_block) shape.log_receive_warps = std::min(shape.log_receive_warps, shape.log_block_warps);
  return plan_launch(num_tokens, num_tokens * num_ranks, shape, num_sms);
}

// The rows of all ranks' tokens are summed and go back; tokens come in.
constexpr LaunchPlan plan_gather(int64_t num_tokens, int32_t num_ranks, int32_t num_chunks, int32_t num_sms) {
  Shape shape = is_few(num_tokens, num_sms) ? Shape{true, num_tokens <= 2 ? 2 : 3, num_tokens <= 16 ? 4 : 3, 5, 5}
                : num_tokens <= 256         ? Shape{false, 4, 4, 4, 4}
                                            : Shape{false, 4, 4, 2, 3};
  const int32_t log_chunks = log2_ceil(num_chunks);
  shape.log_send_warps = std::clamp(log_chunks - 1, 0, shape.log_send_warps);  // a warp sums two chunks at once
  shape.log_receive_warps = std::min(shape.log_receive_warps, log_chunks);
  return plan_launch(num_tokens * num_ranks, num_tokens, shape, num_sms);
}

}  // namespace jax_ep
