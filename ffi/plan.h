// Derives the shape of a launch from the shape of the call. All tuning of launches is in this file.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

inline constexpr int32_t kMaxBlockWarps = 16;  // a streaming multiprocessor (SM) runs one block of this size
// The most shared memory, static and dynamic, that a block of any kernel needs. dispatch.cu and combine.cu assert it.
inline constexpr int64_t kMaxBlockSharedBytes = 204 * 1024;
inline constexpr int32_t kDefaultSmsBesideOthers = 32;  // of a done: concurrent kernels use the other SMs
inline constexpr int32_t kMostSmsBesideOthers = 64;

// The SMs that a launch may take. `num_sms` is the user's choice, or 0 for all SMs of the device.
constexpr int32_t usable_sms(int32_t num_sms, int32_t device_sms) {
  return num_sms > 0 ? std::min(num_sms, device_sms) : device_sms;
}

// The SMs that a done may take: at most half of the device's. Two ranks may run a done and a whole operation in
// different orders. If the done took all SMs here, the whole operation could not start here, and each of the two would
// wait for a peer that is in the other one.
constexpr int32_t usable_sms_beside_others(int32_t num_sms, int32_t device_sms) {
  const int32_t most = std::min(kMostSmsBesideOthers, std::max(device_sms / 2, 1));
  return std::min(num_sms > 0 ? num_sms : kDefaultSmsBesideOthers, most);
}

// The variants of a kernel.
//
// kLowLatency, for few rows: small blocks on many SMs, and little code, because latency depends on instruction fetch.
// An extra warp, the control warp, moves no rows: it enters the operation (ffi/cuda/epoch.cuh).
//
// kBalanced: large blocks, one per SM.
//
// kThroughput, for many rows: large blocks, one per SM. In a dispatch, sender blocks that have sent their tokens steal
// rows. A combine prefetches y (ffi/cuda/ring.cuh).
enum class Variant : int32_t { kLowLatency, kBalanced, kThroughput };
inline constexpr Variant kVariants[] = {Variant::kLowLatency, Variant::kBalanced, Variant::kThroughput};
constexpr bool is_low_latency(Variant variant) { return variant == Variant::kLowLatency; }
inline constexpr int32_t kLowLatencyBlockWarps = 8;
constexpr bool has_control_warp(Variant variant) { return is_low_latency(variant); }
constexpr int32_t most_threads(Variant variant) {
  return 32 * (is_low_latency(variant) ? kLowLatencyBlockWarps + 1 : kMaxBlockWarps);
}
constexpr int32_t least_blocks_per_sm(Variant variant) { return is_low_latency(variant) ? 2 : 1; }

// A thread block is a sender or a receiver. With work stealing, a sender also receives, after it has sent. Blocks get
// their roles in the order in which they enter: senders come first, and wait for no peer's rows. So the rows that a
// receiver waits for are always sent. In a launch of one block, the block sends and then receives, in any variant.
//
// If there are several senders, the first sends no rows: it notifies the peers of the call and of the number of rows.
// If there are several receivers, the first starts without a row: it writes the small results, and pads.
struct LaunchPlan {
  int32_t num_senders;
  int32_t first_receiver;
  int32_t num_blocks;
  Variant variant;
  int32_t log_block_warps;
  int32_t log_send_warps,
      log_receive_warps;  // log2 of the warps in a warp group, which share a row; they may be in several blocks
  bool sums_own = false;  // combine: receivers sum the rows of this rank's own tokens; senders do not send them

  constexpr int32_t block_warps() const { return 1 << log_block_warps; }
  constexpr int32_t block_threads() const { return 32 * (block_warps() + has_control_warp(variant)); }

  constexpr int32_t num_receivers() const { return num_blocks - first_receiver; }
  // By node, the blocks between the senders and the receivers forward the rows of other nodes. In a launch of one
  // block, that block forwards them.
  constexpr int32_t num_forwarders() const { return std::max(first_receiver - num_senders, 1); }
  constexpr bool forwards(int32_t block) const {
    return first_receiver == 0 || (block >= num_senders && block < first_receiver);
  }
  // row_senders, row_receivers: the number of blocks that move rows. row_sender, row_receiver: a block's index among
  // them, negative for a block that moves no rows.
  constexpr int32_t row_senders() const { return std::max(num_senders - 1, 1); }
  constexpr int32_t row_sender(int32_t block) const { return num_senders > 1 ? block - 1 : block; }
  constexpr bool sends_rows(int32_t block) const { return block < num_senders && row_sender(block) >= 0; }
  constexpr int32_t row_receivers() const { return std::max(num_receivers() - 1, 1); }
  constexpr int32_t row_receiver(int32_t block) const { return block - first_receiver - (num_receivers() > 1); }
};

// The warp group of a warp within its role, and the warp's index in the warp group. Warp group `index` processes every
// num_groups-th item, from item `index` on. An item is a row that may exist; of each rank's possible rows, only the
// first ones exist.
struct WarpGroup {
  int32_t index, num_groups;
  int32_t warp, num_warps;  // in the warp group

  // Warp groups with consecutive indices are in one block if `by_block` is true, in the low-latency variant, and if a
  // block has at most one warp group. Otherwise they are in different blocks, so that all blocks get equally many of
  // the rows that exist. The indices of a block's warp groups are then even and odd alternately, because even and odd
  // items may differ.
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

// The preferred shape of a launch, before plan_launch fits it to the SMs.
struct Shape {
  Variant variant;
  int32_t log_block_warps, log_send_warps, log_receive_warps;
  int32_t receive_16ths;  // sixteenths of the blocks that receive at most; more if senders leave blocks unused
  // True: the number of sending blocks is the smallest that keeps the rounds at a minimum, and all other blocks
  // receive. False: the same with sending and receiving exchanged.
  bool rest_receives = false;
};

constexpr int64_t divide_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

// Plans blocks for `sends` and `receives` rows on at most `num_sms` SMs. A warp group processes one row per round, and
// the launch lasts until the warp groups with the most rounds are done. So the number of receiving blocks is the
// smallest that keeps the rounds at a minimum, and the other blocks may send. With rest_receives, the two roles are
// exchanged.
constexpr LaunchPlan plan_launch(int64_t sends, int64_t receives, Shape shape, int32_t num_sms) {
  const int32_t log_block = shape.log_block_warps;
  const auto blocks_for = [=](int64_t rows, int32_t log_warps) {  // + 1: the first block moves no rows
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
  // A warp group must not have more warps than all blocks of its role together.
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

// Adapts a plan to a network. The warps of a sending warp group wait for one another, so they must be in one block. By
// node, some blocks forward rows, also with warp groups within one block. They are half of the blocks that would
// receive or, if only one receives, one block that would send. A plan of two blocks becomes a plan of one block, which
// has all roles.
constexpr LaunchPlan over_network(LaunchPlan plan, bool by_node) {
  plan.log_send_warps = std::min(plan.log_send_warps, plan.log_block_warps);
  if (!by_node) return plan;
  plan.log_receive_warps = std::min(plan.log_receive_warps, plan.log_block_warps);
  if (plan.num_blocks == 2) plan.num_senders = plan.num_blocks = 1, plan.first_receiver = 0;  // it has all roles
  if (plan.first_receiver == 0) return plan;
  if (plan.num_receivers() == 1) {
    --plan.num_senders;
  } else {
    plan.first_receiver += plan.num_receivers() / 2;
  }
  return plan;
}

// True if a call has few tokens. Over a network, the rows of few tokens go directly to their ranks, in all operations
// of a route. The rows of more tokens go by node.
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

// Returns log2 of the warps per row: the largest power of two, but at most 2^most, with which `rows` rows occupy at
// most `warps` warps. Few rows get many warps each, for latency. Many rows get few warps each, so that more rows are in
// flight.
constexpr int32_t log_warp_group(int64_t rows, int32_t warps, int32_t most) {
  int32_t log = 0;
  while (log < most && rows << (log + 1) <= warps) ++log;
  return log;
}

// Plans a dispatch. A sending warp group reads a token once, and sends its row to several ranks. A receiving warp group
// writes a row once per expert. A block computes the destinations of its warp groups' next tokens together, at the cost
// of one. `group_in_block`: the warps of a receiving warp group are in one block. `num_chunks`: the chunks of a row in
// transit.
constexpr LaunchPlan plan_dispatch(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks,
                                   int32_t num_sms, int32_t device_sms, bool group_in_block) {
  const int32_t log_chunks = log2_ceil(num_chunks);
  const int32_t sms = usable_sms(num_sms, device_sms), warps = sms * kMaxBlockWarps / 2;
  const int64_t num_rows = num_tokens * num_ranks;
  Variant variant = variant_for(num_tokens, num_sms);
  if (group_in_block && variant == Variant::kBalanced)
    variant = Variant::kThroughput;  // backward pass of combine: blocks share the padding
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
      // With two ranks, a sender has little to do: it sends each row to one other rank. The longer the row is, the more
      // a receiver has to write.
      const bool is_long = num_chunks > 16,
                 is_many = variant == Variant::kThroughput && !group_in_block && num_ranks == 2;
      const int32_t log_parts =
          variant == Variant::kThroughput ? std::max(log_chunks - 1, 0) : log_chunks;  // the parts of a row
      shape = {variant, 4, std::min(log_parts, log_send), log_receive, !is_many ? 8 : is_long ? 11 : 10};
      if (is_many && is_long && num_tokens >= 2048) shape.log_receive_warps = 1;  // measured: faster than four warps
      // Many long rows, for which receivers need several rounds, should not all arrive at the end. So few blocks send
      // the tokens one after another; they keep the link equally busy.
      const int64_t most_rows = num_tokens * std::min(top_k, num_ranks);
      if (variant == Variant::kBalanced && num_ranks > 2 && num_chunks > 8 && most_rows >= 512) {
        shape.log_send_warps = 4;
        shape.receive_16ths = 10;
        shape.rest_receives = true;
      }
      break;
    }
  }
  if (group_in_block || !is_low_latency(variant)) {  // the warps of a warp group share data in the block's memory
    shape.log_receive_warps = std::min(shape.log_receive_warps, shape.log_block_warps);
  }
  return plan_launch(num_tokens, num_rows, shape, sms);
}

// Plans a combine. Senders sum the experts' rows for each token of another rank, and send the sum. If routing is
// uniform, a sum has top_k / num_ranks rows. Receivers sum the rows of this rank's own tokens, and add the sums that
// arrive. If all of this is little work, own rows go through the arena like a peer's, so that all rows are summed at
// once. If a token has one or two rows, few warps process it, so that one round is enough for all tokens. top_k == 0
// means all_to_all_back: rows are not summed, and own rows go back like a peer's.
constexpr LaunchPlan plan_combine(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks,
                                  int32_t num_sms, int32_t device_sms) {
  const int32_t sms = usable_sms(num_sms, device_sms);
  const int32_t log_chunks = log2_ceil(num_chunks), most = std::max(log_chunks - 1, 0);
  Variant variant = variant_for(num_tokens, num_sms);
  const bool is_thin = top_k > 0 && top_k <= 2, is_much = num_tokens * top_k * num_chunks >= 24 * 1024;
  if (num_sms == 0 && !are_few(num_tokens)) {
    // With much to read, y is prefetched (kThroughput). With one rank, or more than two, this pays only for more tokens
    // (measured when the ring took more instructions).
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
      // If senders read most of the data, because there are many tokens or many rows per token, half of the blocks
      // send.
      const bool reads_most = num_ranks > 2 && (num_tokens > 256 || top_k > 2 * num_ranks);
      shape = {variant, 4, std::min(4, most), 5, !sums_own || reads_most ? 8 : 12};
      break;
    }
    case Variant::kThroughput: {
      // A warp sums a part, which is four chunks, at once. By default, a row gets one warp, which sums all parts of the
      // row in each round. If it is clearly faster, a row gets one warp per part: there are more rounds, of one part
      // each.
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
