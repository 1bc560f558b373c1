// The shape of a launch, from the shape of the call. The one place to tune it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

inline constexpr int32_t kMaxBlockWarps = 16;  // one such block on a streaming multiprocessor (SM)
// The most shared memory, static and dynamic, that a block of any kernel needs. dispatch.cu and combine.cu assert it.
inline constexpr int64_t kMaxBlockSharedBytes = 204 * 1024;
inline constexpr int32_t kDefaultSmsBesideOthers = 32;  // of a done: the other SMs are for what runs beside it
inline constexpr int32_t kMostSmsBesideOthers = 64;

// The SMs that a launch may take. `num_sms` is the user's choice, or 0 for all SMs of the device.
constexpr int32_t usable_sms(int32_t num_sms, int32_t device_sms) {
  return num_sms > 0 ? std::min(num_sms, device_sms) : device_sms;
}

// The SMs that a done may take: at most half of the device's. A whole operation that took turns with the done on
// another rank needs a free SM here; without one, each of the two would wait for the other's peer.
constexpr int32_t usable_sms_beside_others(int32_t num_sms, int32_t device_sms) {
  const int32_t most = std::min(kMostSmsBesideOthers, std::max(device_sms / 2, 1));
  return std::min(num_sms > 0 ? num_sms : kDefaultSmsBesideOthers, most);
}

// The variants of a kernel. For few rows: small blocks, on many SMs, and little code, since what counts is how soon the
// next instruction is there; and a warp that moves no rows, but enters the operation (ffi/cuda/epoch.cuh). Usual:
// large blocks, one on an SM. For many rows: likewise, and dispatch's blocks that have sent take rows, too, while
// combine has y come ahead (ffi/cuda/ring.cuh).
enum class Variant : int32_t { kLowLatency, kBalanced, kThroughput };
inline constexpr Variant kVariants[] = {Variant::kLowLatency, Variant::kBalanced, Variant::kThroughput};
constexpr bool is_low_latency(Variant variant) { return variant == Variant::kLowLatency; }
inline constexpr int32_t kLowLatencyBlockWarps = 8;
constexpr bool has_control_warp(Variant variant) { return is_low_latency(variant); }
constexpr int32_t most_threads(Variant variant) {
  return 32 * (is_low_latency(variant) ? kLowLatencyBlockWarps + 1 : kMaxBlockWarps);
}
constexpr int32_t least_blocks_per_sm(Variant variant) { return is_low_latency(variant) ? 2 : 1; }

// A thread block sends, or receives; or, where rows are shared, sends and then receives. Senders come first, as blocks
// are started in their order, and wait for no peer's rows: what a receiver waits for is always on its way. In a launch
// of one block it does both, one after the other, in any variant.
//
// If there are others, the first sender sends no rows: it tells the peers which call this is, and how many rows come.
// And the first receiver begins with none: it writes the small results, and pads.
struct LaunchPlan {
  int32_t num_senders;
  int32_t first_receiver;
  int32_t num_blocks;
  Variant variant;
  int32_t log_block_warps;
  int32_t log_send_warps,
      log_receive_warps;  // of the warps that share a row, a warp group, which need not be of one block
  bool sums_own = false;  // combine: who receives sums the rows of this rank's own tokens, and they are not sent

  constexpr int32_t block_warps() const { return 1 << log_block_warps; }
  constexpr int32_t block_threads() const { return 32 * (block_warps() + has_control_warp(variant)); }

  constexpr int32_t num_receivers() const { return num_blocks - first_receiver; }
  // By node, the blocks between senders and receivers forward what other nodes send; one that is alone does it, too.
  constexpr int32_t num_forwarders() const { return std::max(first_receiver - num_senders, 1); }
  constexpr bool forwards(int32_t block) const {
    return first_receiver == 0 || (block >= num_senders && block < first_receiver);
  }
  // Blocks that move rows, and a block's number among them; negative if it does other things.
  constexpr int32_t row_senders() const { return std::max(num_senders - 1, 1); }
  constexpr int32_t row_sender(int32_t block) const { return num_senders > 1 ? block - 1 : block; }
  constexpr bool sends_rows(int32_t block) const { return block < num_senders && row_sender(block) >= 0; }
  constexpr int32_t row_receivers() const { return std::max(num_receivers() - 1, 1); }
  constexpr int32_t row_receiver(int32_t block) const { return block - first_receiver - (num_receivers() > 1); }
};

// A warp's place among those of a role. Items are dealt to warp groups by their numbers, and of each rank's possible
// rows the first ones are there.
struct WarpGroup {
  int32_t index, num_groups;
  int32_t warp, num_warps;  // in the warp group

  // Neighbours are of one block, if `by_block` says so, if there are few rows, or if a block has no more than one. Else
  // they are of different blocks, which then have equally many of the rows that are there; and a block's have even and
  // odd numbers by turns, as such items may differ.
  constexpr WarpGroup(const LaunchPlan& plan, int32_t block, int32_t num_blocks, int32_t warp_of_block,
                      int32_t log_warps, bool by_block = false)
      : index(((block << plan.log_block_warps) + warp_of_block) >> log_warps),
        num_groups(std::max((num_blocks << plan.log_block_warps) >> log_warps, 1)),
        warp(((block << plan.log_block_warps) + warp_of_block) & ((1 << log_warps) - 1)),
        num_warps(1 << log_warps) {
    if (by_block || is_low_latency(plan.variant) || log_warps > plan.log_block_warps) return;
    const int32_t warp_group = warp_of_block >> log_warps;
    index = warp_group * num_blocks + (num_blocks % 2 ? block : block ^ (warp_group & 1));
  }
  static constexpr WarpGroup of_senders(const LaunchPlan& plan, int32_t block, int32_t warp_of_block,
                                        bool by_block = false) {
    return {plan, plan.row_sender(block), plan.row_senders(), warp_of_block, plan.log_send_warps, by_block};
  }
  static constexpr WarpGroup of_forwarders(const LaunchPlan& plan, int32_t block, int32_t warp_of_block) {
    return {plan, std::max(block - plan.num_senders, 0), plan.num_forwarders(), warp_of_block, plan.log_receive_warps};
  }
  static constexpr WarpGroup of_receivers(const LaunchPlan& plan, int32_t block, int32_t warp_of_block) {
    return {plan, plan.row_receiver(block), plan.row_receivers(), warp_of_block, plan.log_receive_warps};
  }
};

// What a launch would like to be.
struct Shape {
  Variant variant;
  int32_t log_block_warps, log_send_warps, log_receive_warps;
  int32_t receive_16ths;  // of the blocks receive at most; or more, if they are not needed to send
  // Whether as few blocks send as have no more turns for it, and all others receive. If not, it is the other way round.
  bool rest_receives = false;
};

constexpr int64_t divide_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

// Blocks for `sends` and `receives` rows, on at most `num_sms` SMs. No more receive than it takes for as few turns: all
// wait for a warp group that has one row more than the others, and the rest may send. Or no more send than that takes,
// and the rest receives.
constexpr LaunchPlan plan_launch(int64_t sends, int64_t receives, Shape shape, int32_t num_sms) {
  const int32_t log_block = shape.log_block_warps;
  const auto blocks_for = [=](int64_t rows, int32_t log_warps) {  // one of which has no rows
    return divide_up(rows << log_warps, 1 << log_block) + 1;
  };
  const auto even = [=](int64_t rows, int64_t most, int32_t log_warps) {
    const int64_t teams = std::max((most - 1) << log_block >> log_warps, int64_t{1});
    const int64_t turns = std::max<int64_t>(divide_up(rows, teams), 1);
    return std::min(most, blocks_for(divide_up(rows, turns), log_warps));
  };
  const int32_t blocks = num_sms * kMaxBlockWarps >> log_block;
  if (blocks == 1) {
    return {1,
            0,
            1,
            shape.variant,
            log_block,
            std::min(shape.log_send_warps, log_block),
            std::min(shape.log_receive_warps, log_block)};
  }
  const int64_t could_receive = blocks_for(receives, shape.log_receive_warps);
  const int64_t share = std::min(could_receive, std::max<int64_t>(blocks * shape.receive_16ths / 16, 1));
  const auto senders =
      static_cast<int32_t>(shape.rest_receives ? even(sends, blocks - share, shape.log_send_warps)
                                               : std::min(blocks_for(sends, shape.log_send_warps),
                                                          blocks - even(receives, share, shape.log_receive_warps)));
  const auto receivers = static_cast<int32_t>(std::min(could_receive, int64_t{blocks - senders}));
  // A warp group must not be larger than all that there are.
  const auto fitting = [=](int32_t log_warps, int32_t row_blocks) {
    while (log_warps > log_block && row_blocks << log_block >> log_warps == 0) --log_warps;
    return log_warps;
  };
  return {senders,
          senders,
          senders + receivers,
          shape.variant,
          log_block,
          fitting(shape.log_send_warps, std::max(senders - 1, 1)),
          fitting(shape.log_receive_warps, std::max(receivers - 1, 1))};
}

// The same over a network, where the warps of a warp group that sends wait for one another, and so are of one block. By
// node, some blocks pass rows on, with such warp groups, too: half of those that would receive, or, if but one does,
// one that would send. Of two blocks, one does it all.
constexpr LaunchPlan over_network(LaunchPlan plan, bool by_node) {
  plan.log_send_warps = std::min(plan.log_send_warps, plan.log_block_warps);
  if (!by_node) return plan;
  plan.log_receive_warps = std::min(plan.log_receive_warps, plan.log_block_warps);
  if (plan.num_blocks == 2) plan.num_senders = plan.num_blocks = 1, plan.first_receiver = 0;  // which does it all
  if (plan.first_receiver == 0) return plan;
  if (plan.num_receivers() == 1) {
    --plan.num_senders;
  } else {
    plan.first_receiver += plan.num_receivers() / 2;
  }
  return plan;
}

// Over a network, their rows go straight, in all operations of a route; those of more tokens go by node.
constexpr bool are_few(int64_t num_tokens) { return num_tokens <= 32; }

constexpr Variant variant_for(int64_t num_tokens, int32_t num_sms) {
  if (num_sms > 0) return Variant::kThroughput;
  return are_few(num_tokens) ? Variant::kLowLatency : num_tokens <= 256 ? Variant::kBalanced : Variant::kThroughput;
}

constexpr int32_t log2_ceil(int32_t n) {
  int32_t log = 0;
  while (1 << log < n) ++log;
  return log;
}

// Few rows: many warps on one, for its latency. Many: more of them under way. The warps on a row with which `warps` are
// busy with `rows`, but no more than 2^most with one; as a power of two.
constexpr int32_t log_warp_group(int64_t rows, int32_t warps, int32_t most) {
  int32_t log = 0;
  while (log < most && rows << (log + 1) <= warps) ++log;
  return log;
}

// Tokens go out, each read once by one warp group; rows of all ranks come in, and are written once per expert. What a
// block spends on finding out where its warp groups' next tokens go, it spends once for all of them. The warps of a
// warp group that receives, with `group_in_block`, are of one block. `num_chunks` is of a row under way.
constexpr LaunchPlan plan_dispatch(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks,
                                   int32_t num_sms, int32_t device_sms, bool group_in_block) {
  const int32_t log_chunks = log2_ceil(num_chunks);
  const int32_t sms = usable_sms(num_sms, device_sms), warps = sms * kMaxBlockWarps / 2;
  const int64_t num_rows = num_tokens * num_ranks;
  Variant variant = variant_for(num_tokens, num_sms);
  if (group_in_block && variant == Variant::kBalanced)
    variant = Variant::kThroughput;  // combine's cotangents: there is padding to share
  Shape shape = {};
  switch (variant) {
    case Variant::kLowLatency: {
      const int32_t log_receive = num_tokens <= 2 || num_rows <= 16 ? 5 : num_tokens <= 16 ? 4 : 3;
      const int32_t log_send = num_tokens <= 16 ? std::clamp(log_chunks, 3, 4) : 3;
      shape = {variant, 3, log_send, std::min(log_chunks, log_receive), 10};
      break;
    }
    case Variant::kBalanced:
    case Variant::kThroughput: {
      if (num_sms > 0) {
        const int32_t most = std::max(log_chunks - 1, 0);
        shape = {variant, 4, log_warp_group(num_tokens, warps, most), log_warp_group(num_rows, warps, most), 8};
        break;
      }
      const int32_t log_send = std::max(log_warp_group(num_tokens, warps, 4), 2);
      const int32_t log_receive =
          std::max(log_warp_group(num_rows, warps, log_chunks), std::clamp(log_chunks - 2, 0, 2));
      // Of two ranks, who sends has little to do: a row to one other, and the longer it is, the more there is to write.
      const bool is_long = num_chunks > 16,
                 is_many = variant == Variant::kThroughput && !group_in_block && num_ranks == 2;
      const int32_t log_parts =
          variant == Variant::kThroughput ? std::max(log_chunks - 1, 0) : log_chunks;  // sent at once
      shape = {variant, 4, std::min(log_parts, log_send), log_receive, !is_many ? 8 : is_long ? 11 : 10};
      if (is_many && is_long && num_tokens >= 2048) shape.log_receive_warps = 1;  // measured: quicker than 4 on a row
      // Many long rows, for which receivers take several turns, should not all come at the end: tokens are sent one
      // after the other, by few blocks, which keep the link as busy.
      const int64_t most_rows = num_tokens * std::min(top_k, num_ranks);
      if (variant == Variant::kBalanced && num_ranks > 2 && num_chunks > 8 && most_rows >= 512) {
        shape.log_send_warps = 4;
        shape.receive_16ths = 10;
        shape.rest_receives = true;
      }
      break;
    }
  }
  if (group_in_block || !is_low_latency(variant)) {  // where rows are claimed, a warp group's warps tell one another
    shape.log_receive_warps = std::min(shape.log_receive_warps, shape.log_block_warps);
  }
  return plan_launch(num_tokens, num_rows, shape, sms);
}

// The rows of the other ranks' tokens are summed and go back, top_k / num_ranks rows of the experts for one, if routing
// is uniform; tokens come in, and their own rows are summed. Where all of that is little, own rows go back, too: all
// are summed at once. Where a token has a row or two, few warps on each, so that all come in one turn. A top_k of 0:
// rows are not summed, and own ones go back like a peer's (all_to_all_back).
constexpr LaunchPlan plan_combine(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks,
                                  int32_t num_sms, int32_t device_sms) {
  const int32_t sms = usable_sms(num_sms, device_sms);
  const int32_t log_chunks = log2_ceil(num_chunks), most = std::max(log_chunks - 1, 0);
  Variant variant = variant_for(num_tokens, num_sms);
  const bool is_thin = top_k > 0 && top_k <= 2, is_much = num_tokens * top_k * num_chunks >= 24 * 1024;
  if (num_sms == 0 && !are_few(num_tokens)) {
    // With much to read, y comes ahead; but of one rank, and of more than two, of more tokens only (measured when rings
    // took more instructions).
    const int32_t most_usual = num_ranks == 1 || !is_much ? 256 : num_ranks == 2 ? 0 : 1024;
    variant = num_tokens <= most_usual ? Variant::kBalanced : Variant::kThroughput;
  }
  const bool sums_own = variant == Variant::kBalanced ? is_thin || is_much : top_k > 0 && !is_low_latency(variant);
  const int64_t num_rows = num_tokens * std::max(num_ranks - sums_own, 1);
  Shape shape = {};
  switch (variant) {
    case Variant::kLowLatency:
      shape = {variant, num_tokens <= 2 ? 2 : 3, std::min(4, most), 5, 10};
      break;
    case Variant::kBalanced: {
      if (is_thin) {
        shape = {variant, 4, std::min(2, most), log_warp_group(num_tokens, sms * kMaxBlockWarps / 2, 5), 8};
        break;
      }
      // Where senders read most, of many tokens or for each row, half of the blocks send.
      const bool reads_most = num_ranks > 2 && (num_tokens > 256 || top_k > 2 * num_ranks);
      shape = {variant, 4, std::min(4, most), 5, !sums_own || reads_most ? 8 : 12};
      break;
    }
    case Variant::kThroughput: {
      // A warp sums four chunks at once, a part. Each row has a warp, or one for each of its parts, where that takes
      // clearly less: fewer turns of all parts, or more of one.
      const int32_t warps = std::max(sms / 2 - 1, 1) * kMaxBlockWarps;
      const int64_t parts = divide_up(num_chunks, 4), most_rows = std::max(num_rows, num_tokens);
      const int32_t log_parts = log2_ceil(static_cast<int32_t>(parts));
      const auto turns = [=](int32_t log) { return divide_up(most_rows, std::max(warps >> log, 1)); };
      const int32_t log_warps = 8 * turns(log_parts) <= 7 * parts * turns(0) ? log_parts : 0;
      shape = {variant, 4, log_warps, log_warps, num_ranks > 2 ? 8 : num_sms > 0 ? 10 : 11};
      break;
    }
  }
  shape.log_receive_warps = std::min(shape.log_receive_warps, log_chunks);
  LaunchPlan plan = plan_launch(num_rows, num_tokens, shape, sms);
  plan.sums_own = sums_own;
  return plan;
}

}  // namespace jax_ep
