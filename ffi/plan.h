// Derives the shape of a launch of dispatch or combine from the shape of the call. plan_balance.h has the launches of
// balance and replicate. All tuning of launches is in these two files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

inline constexpr int32_t kMaxBlockWarps = 16;  // a streaming multiprocessor (SM) runs one block of this size
// The most shared memory, static and dynamic, that a block of a dispatch or a combine needs. dispatch_operands.cuh and
// combine_operands.cuh assert it.
inline constexpr int64_t kMaxBlockSharedBytes = 204 * 1024;
inline constexpr int32_t kDefaultSmsBesideOthers = 32;  // for a done: concurrent kernels use the other SMs
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
// kLowLatency, for few rows: small blocks and little code, because latency depends on instruction fetch. The control
// warp, which enters the operation (ffi/cuda/epoch.cuh), is an extra warp and moves no rows, so that the other warps
// load rows while it enters. In the other variants, the control warp is the last of the warps that move rows.
//
// kBalanced: large blocks, one per SM.
//
// kThroughput, for many rows: large blocks, one per SM. In a dispatch, sender blocks that have sent their tokens steal
// rows. A combine prefetches y (ffi/cuda/ring.cuh), in parts of kChunksOfPart chunks of a row. It also uses this
// variant for 33 tokens and more if it casts, or if it has much to read with at most two ranks.
enum class Variant : int32_t { kLowLatency, kBalanced, kThroughput };
inline constexpr Variant kVariants[] = {Variant::kLowLatency, Variant::kBalanced, Variant::kThroughput};
constexpr bool is_low_latency(Variant variant) { return variant == Variant::kLowLatency; }
inline constexpr int32_t kLowLatencyBlockWarps = 8;
inline constexpr int32_t kChunksOfPart = 4;
inline constexpr int32_t kFewestTokensForThroughput = 257;  // with fewer tokens, other variants are faster
// True if the kernels of the variant can run a round of an operation (ffi/cuda/call.h). The variant must give roles by
// ticket: in a round of a combine, senders wait for words from role 0 of each peer, as in all_to_all_back.
constexpr bool has_rounds(Variant variant) { return variant == Variant::kThroughput; }
// The tokens for which a round is planned, so that its variant has rounds. A round may have fewer tokens.
constexpr int32_t planned_tokens(int32_t num_tokens, int32_t round_tokens) {
  return num_tokens <= round_tokens ? num_tokens : std::max(round_tokens, kFewestTokensForThroughput);
}
constexpr bool has_extra_control_warp(Variant variant) { return is_low_latency(variant); }
constexpr int32_t most_block_warps(Variant variant) {
  return is_low_latency(variant) ? kLowLatencyBlockWarps : kMaxBlockWarps;
}
// The most threads of a block.
constexpr int32_t most_block_threads(Variant variant) {
  return 32 * (most_block_warps(variant) + has_extra_control_warp(variant));
}
// How many of the largest blocks of a dispatch must fit on an SM. This limits the registers of a thread
// (__launch_bounds__). Of a combine, one block must fit.
constexpr int32_t dispatch_blocks_per_sm(Variant variant) { return is_low_latency(variant) ? 2 : 1; }

// Each thread block has a role, which is a number:
//   less than num_senders              the block sends
//   num_senders to first_receiver - 1  the block forwards; only over a network (num_forwarders)
//   first_receiver or more             the block receives
//
// A sender waits for no peer's rows until it has sent its own. A receiver waits for rows only when all senders of its
// launch have entered (epoch.cuh and roles.cuh). So the rows that a receiver waits for are always sent.
//
// A block that sends or forwards may also receive, after it has sent all its rows, in three cases:
//   - Its role is both: first_receiver <= role < num_senders. This is so in a launch of one block, and in a low-latency
//     combine that needs more blocks than there are SMs. A low-latency dispatch has no such block: while the workers of
//     a receiver wait, its control warp writes the destinations of rows to the memory in which a sender counts rows.
//   - Work stealing, in a dispatch of the throughput variant: every sender and forwarder that has sent its rows, if all
//     blocks have entered by then (sync_and_decide_to_steal in dispatch_receive.cuh).
//   - Roles given away, in the low-latency variant: the sender that enters last takes them (roles.cuh).
//
// Role 0 notifies the peers of the call and of the number of rows. If there are several senders, role 0 sends no rows.
// If there are several receivers, the first receiver starts without a row: one of its warps waits for the notifications
// of all ranks, and adds to the counters (wait_peers). In a combine, the first receiver receives no rows at all. In a
// dispatch, it writes the small results, and pads (padding.cuh). With work stealing, it then claims rows and padding.
struct LaunchPlan {
  int32_t num_senders;
  int32_t first_receiver;  // less than num_senders if some blocks send and then receive
  int32_t num_blocks;
  Variant variant;
  int32_t log_block_warps;
  int32_t log_send_warps,
      log_receive_warps;  // log2 of the warps in a warp group, which share a row; they may be in several blocks
  bool sums_own = false;  // combine: receivers sum the rows of this rank's own tokens; senders do not send them
  bool senders_enter_first = false;  // the other blocks wait a short time for the senders (Epoch::await_entries)
  // Dispatch: receivers write the own rows of the first tokens_with_own_items tokens of a round. (A token's *own* row
  // is the row that its rank sends to itself.) Senders write all other own rows, while they send the token's row to the
  // peers. So they read and cast the row once. A sender must then know the places of rows in the result, which depend
  // on the peers' counts. It sends the rows of the first tokens, those of at least one step, before it waits for the
  // counts.
  int32_t tokens_with_own_items = kAllTokens;
  static constexpr int32_t kAllTokens = INT32_MAX;
  constexpr bool senders_write_own() const { return tokens_with_own_items != kAllTokens; }

  constexpr int32_t block_warps() const { return 1 << log_block_warps; }
  constexpr int32_t block_threads() const { return 32 * (block_warps() + has_extra_control_warp(variant)); }

  // Returns false for a low-latency launch that has too many blocks, and for a low-latency launch of a done: only
  // launches that take an epoch reset Control::role_counts, and a done takes none.
  constexpr bool is_possible(Phase phase) const {
    return !is_low_latency(variant) || (num_blocks <= kMaxLowLatencyBlocks && phase != Phase::kDone);
  }
  // The same for a dispatch. Also returns false if a block of a low-latency launch would send and then receive. If
  // senders write own rows, the launch must be of the throughput variant, have one warp per sent row, and leave the own
  // rows of the first step to receivers. (In a warp group of several warps, only the first would know where they go.)
  constexpr bool is_possible_dispatch(Phase phase) const {
    const bool may_write_own = variant == Variant::kThroughput && log_send_warps == 0 && tokens_with_own_items > 0;
    return is_possible(phase) && (!is_low_latency(variant) || first_receiver >= num_senders) &&
           (!senders_write_own() || may_write_own);
  }

  constexpr bool is_sender(int32_t block) const { return block >= 0 && block < num_senders; }
  constexpr int32_t num_receivers() const { return num_blocks - first_receiver; }
  // Over a network, a row may travel once per node: to a rank of the node, the rail peer, which forwards it. Then the
  // blocks between the senders and the receivers forward rows. In a launch of one block, that block forwards them. (In
  // a call of few tokens, rows are not forwarded: has_few_tokens.)
  constexpr int32_t num_forwarders() const { return std::max(first_receiver - num_senders, 1); }
  constexpr bool forwards(int32_t block) const {
    return first_receiver == 0 || (block >= num_senders && block < first_receiver);
  }
  // row_senders, row_receivers: the number of blocks that move rows. row_sender, row_receiver: a block's index among
  // them, negative for a block that moves no rows.
  constexpr int32_t row_senders() const { return std::max(num_senders - 1, 1); }
  constexpr int32_t row_sender(int32_t block) const { return num_senders > 1 ? block - 1 : block; }
  constexpr bool sends_rows(int32_t block) const { return is_sender(block) && row_sender(block) >= 0; }
  constexpr int32_t row_receivers() const { return std::max(num_receivers() - 1, 1); }
  constexpr int32_t row_receiver(int32_t block) const { return block - first_receiver - (num_receivers() > 1); }
};

// A warp group is a set of consecutive warps that process one item together: each warp processes a part of the item's
// row. All blocks of a role are divided into warp groups of the same size, a power of two. A warp group may have warps
// of several blocks. This struct is the view of one warp.
//
// An item is a token (senders of a dispatch, receivers of a combine) or a possible row (all others). A possible row is
// a pair (rank, index). It exists if the index is less than the number of rows from or to the rank. Warp group `index`
// processes the items index, index + num_groups, index + 2 * num_groups, ... (With work stealing, a receiving warp
// group processes item `index`, and then claims items.)
struct WarpGroup {
  int32_t index, num_groups;  // the index of the warp's group among the warp groups of the role
  int32_t warp, num_warps;    // the index of the warp in its group

  // `block`: the block's index among the blocks of the role that move rows; negative for a block that moves no rows.
  //
  // There are two orders of warp groups. In the first, a block's warp groups have consecutive indices. It applies in
  // three cases: `by_block` is true; the variant is low-latency; or a block has at most one warp group. In the second
  // order, warp groups with consecutive indices are in different blocks, so that all blocks get equally many of the
  // rows that exist. The warp groups of a block then have alternately even and odd indices. This matters with two
  // ranks: even items are rows of one rank, and odd items are rows of the other.
  constexpr WarpGroup(const LaunchPlan& plan, int32_t block, int32_t num_blocks, int32_t warp_of_block,
                      int32_t log_warps, bool by_block = false)
      : index((block * plan.block_warps() + warp_of_block) >> log_warps),
        num_groups(std::max((num_blocks * plan.block_warps()) >> log_warps, 1)),
        warp((block * plan.block_warps() + warp_of_block) & ((1 << log_warps) - 1)),
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

// How many warps share a row in one role. Numbers of warps and of chunks are rounded up to powers of two, so a few
// warps may have fewer chunks.
class WarpsPerRow {
 public:
  static constexpr int32_t kAnyNumber = 1 << 30;

  static constexpr WarpsPerRow of(int32_t warps) { return WarpsPerRow().but_at_least(warps); }
  // `warps` warps; fewer if a warp would have less than `chunks_per_warp` chunks of the row.
  static constexpr WarpsPerRow at_most(int32_t warps, int32_t chunks_per_warp) {
    WarpsPerRow result;
    result.log_wanted_ = log2_ceil(warps);
    result.log_chunks_of_wanted_ = log2_ceil(chunks_per_warp);
    return result;
  }
  // At least `warps` warps, even if a row has fewer chunks.
  constexpr WarpsPerRow but_at_least(int32_t warps) const {
    WarpsPerRow result = *this;
    result.log_least_ = log2_ceil(warps);
    return result;
  }
  // More warps, at most `warps`, if the warps of half of the SMs suffice for all rows at once. Again, a warp has at
  // least `chunks_per_warp` chunks.
  constexpr WarpsPerRow more_for_few_rows(int32_t warps, int32_t chunks_per_warp) const {
    WarpsPerRow result = *this;
    result.log_most_ = log2_ceil(warps);
    result.log_chunks_of_most_ = log2_ceil(chunks_per_warp);
    return result;
  }

  // log2 of the warps for each of `num_rows` rows of `num_chunks` chunks.
  constexpr int32_t log_for(int64_t num_rows, int32_t num_chunks, int32_t num_sms) const {
    const int32_t log_chunks = log2_ceil(num_chunks);
    const int32_t wanted = std::min(log_wanted_, std::max(log_chunks - log_chunks_of_wanted_, 0));
    const int32_t most = std::min(log_most_, std::max(log_chunks - log_chunks_of_most_, 0));
    return std::max({log_least_, wanted, log_warp_group(num_rows, num_sms * kMaxBlockWarps / 2, most)});
  }

 private:
  int32_t log_least_ = 0;
  int32_t log_wanted_ = 0, log_chunks_of_wanted_ = 0;
  int32_t log_most_ = 0, log_chunks_of_most_ = 0;
};

// The fields of a launch shape. Each has a type of its own, so that the tables below show its name.
struct BlockWarps {
  int32_t number;  // a power of two
};
struct Send {
  WarpsPerRow warps;
};
struct Receive {
  WarpsPerRow warps;
};
// The receivers' share of the blocks, in sixteenths. Fewest::kReceivers: an upper limit, but receivers also get the
// blocks that senders leave unused. Fewest::kSenders: a lower limit, but they get no more blocks than their rows need.
struct ReceiverSixteenths {
  double number;
};
inline constexpr ReceiverSixteenths kAsNeeded = {0};  // for a low-latency combine, whose plan needs no share
// The role that has only as many blocks as it needs for its minimum of rounds. All other blocks have the other role.
enum class Fewest { kReceivers, kSenders };

// The preferred shape of a launch, before plan_launch fits it to the SMs and to the number of rows.
struct Shape {
  Variant variant;
  BlockWarps block_warps;
  Send send;
  Receive receive;
  ReceiverSixteenths receivers;
  Fewest fewest = Fewest::kReceivers;
};

// The warps that share a row, as log2.
struct LogWarps {
  int32_t send, receive;
};

// The number of blocks of 1 << log_block warps for `rows` rows with 1 << log_warps warps each.
constexpr int64_t blocks_for(int64_t rows, int32_t log_warps, int32_t log_block) {
  return divide_up(rows << log_warps, 1 << log_block) + 1;  // + 1: the first block moves no rows
}
// Returns log_warps, or less if a warp group of 1 << log_warps warps does not fit in `blocks` blocks, which are the
// blocks of its role that move rows.
constexpr int32_t fit_warp_group(int32_t log_warps, int32_t log_block, int32_t blocks) {
  while (log_warps > log_block && blocks << log_block >> log_warps == 0) --log_warps;
  return log_warps;
}

// Plans blocks for `sends` and `receives` rows on at most `num_sms` SMs. A warp group processes one row per round, and
// the launch lasts until the warp groups with the most rounds are done. Shape::fewest names the role that gets only as
// many blocks as its smallest number of rounds needs. The other role gets all other blocks.
constexpr LaunchPlan plan_launch(int64_t sends, int64_t receives, const Shape& shape, LogWarps log_warps,
                                 int32_t num_sms) {
  const int32_t log_block = log2_ceil(shape.block_warps.number);
  const auto fewest_blocks = [=](int64_t rows, int64_t most, int32_t log_warps) {
    const int64_t warp_groups = std::max((most - 1) << log_block >> log_warps, int64_t{1});
    const int64_t rounds = std::max<int64_t>(divide_up(rows, warp_groups), 1);
    return std::min(most, blocks_for(divide_up(rows, rounds), log_warps, log_block));
  };
  const int32_t most_blocks = is_low_latency(shape.variant) ? kMaxLowLatencyBlocks : INT32_MAX;
  const int32_t blocks = std::min(num_sms * kMaxBlockWarps >> log_block, most_blocks);
  if (blocks == 1) {
    return {
        1, 0, 1, shape.variant, log_block, std::min(log_warps.send, log_block), std::min(log_warps.receive, log_block)};
  }
  const int64_t could_receive = blocks_for(receives, log_warps.receive, log_block);
  const int64_t share =
      std::min(could_receive, std::max<int64_t>(static_cast<int64_t>(blocks * shape.receivers.number / 16), 1));
  const auto senders = static_cast<int32_t>(shape.fewest == Fewest::kSenders
                                                ? fewest_blocks(sends, blocks - share, log_warps.send)
                                                : std::min(blocks_for(sends, log_warps.send, log_block),
                                                           blocks - fewest_blocks(receives, share, log_warps.receive)));
  const auto receivers = static_cast<int32_t>(std::min(could_receive, int64_t{blocks - senders}));
  return {senders,
          senders,
          senders + receivers,
          shape.variant,
          log_block,
          fit_warp_group(log_warps.send, log_block, std::max(senders - 1, 1)),
          fit_warp_group(log_warps.receive, log_block, std::max(receivers - 1, 1))};
}

// Plans a low-latency combine, with at most one block per SM. If senders and receivers need more blocks, the last
// senders also receive.
constexpr LaunchPlan plan_low_latency_combine(int64_t sends, int64_t receives, const Shape& shape, LogWarps log_warps,
                                              int32_t num_sms) {
  const int32_t log_block = log2_ceil(shape.block_warps.number);
  const int32_t most_blocks = std::min(num_sms, kMaxLowLatencyBlocks);
  const auto most = [=](int64_t blocks) { return static_cast<int32_t>(std::min<int64_t>(blocks, most_blocks)); };
  const int32_t senders = most(blocks_for(sends, log_warps.send, log_block));
  const int32_t receivers = most(blocks_for(receives, log_warps.receive, log_block));
  const int32_t blocks = most(senders + receivers);
  return {senders,
          blocks - receivers,
          blocks,
          shape.variant,
          log_block,
          fit_warp_group(log_warps.send, log_block, std::max(senders - 1, 1)),
          fit_warp_group(log_warps.receive, log_block, std::max(receivers - 1, 1))};
}

// Adapts a plan to a network. The warps of a sending warp group wait for one another, so they must be in one block.
//
// by_node: a row travels once per node, so some blocks must forward rows. Half of the receivers become forwarders. If
// there is only one receiver, one sender becomes the forwarder. A plan of two blocks becomes a plan of one block, which
// has all roles. The warps of a forwarding or receiving warp group must be in one block, too.
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

// True if a call has few tokens per rank. Over a network, the rows of such a call go directly to their ranks, in all
// operations of a route. In a call with more tokens, rows go through rail peers.
constexpr bool has_few_tokens(int64_t num_tokens) { return num_tokens <= 32; }

// Returns LaunchPlan::senders_enter_first. With at most two ranks or at most 256 tokens, it was not faster to let the
// senders enter first (docs/experiments.md, "Which SMs send"). It has not been measured with a limit on SMs.
constexpr bool let_senders_enter_first(int64_t num_tokens, int32_t num_ranks, int32_t num_sms) {
  return num_sms == 0 && num_ranks > 2 && num_tokens > 256;
}

constexpr Variant variant_for(int64_t num_tokens, int32_t num_sms) {
  if (num_sms > 0) return Variant::kThroughput;
  return has_few_tokens(num_tokens)                ? Variant::kLowLatency
         : num_tokens < kFewestTokensForThroughput ? Variant::kBalanced
                                                   : Variant::kThroughput;
}

// Launch shapes of a dispatch. A sending warp group reads a token once, and sends its row to several ranks. A receiving
// warp group writes a row once per expert. "Tokens" are the tokens of one rank. The shapes from kFewSms on are for
// calls with a limit on SMs, all others for calls without one.
namespace dispatch_shapes {

inline constexpr int32_t kAny = WarpsPerRow::kAnyNumber;
inline constexpr WarpsPerRow kReceiveWithMoreForFewRows = WarpsPerRow::at_most(4, 4).more_for_few_rows(kAny, 1);

// The smallest decodes: 1 or 2 tokens on more than two ranks; also 3 to 16 tokens if tokens * ranks is at most 16. A
// whole row is in flight at once. A receiving warp takes two chunks of a row at once: with one chunk per warp, the
// launch would need more blocks.
inline constexpr Shape kSmallestDecode = {Variant::kLowLatency, BlockWarps{8},
                                          Send{WarpsPerRow::at_most(16, 1).but_at_least(8)},
                                          Receive{WarpsPerRow::at_most(32, 2)}, ReceiverSixteenths{10}};
// 1 or 2 tokens on at most two ranks. A receiving warp takes one chunk. There are few rows, and more blocks per row are
// faster (measured).
inline constexpr Shape kSmallestDecodeOnTwoRanks = {Variant::kLowLatency, BlockWarps{8}, kSmallestDecode.send,
                                                    Receive{WarpsPerRow::at_most(32, 1)}, ReceiverSixteenths{10}};
// Decode of 3 to 16 tokens, if tokens * ranks is more than 16.
inline constexpr Shape kDecode = {Variant::kLowLatency, BlockWarps{8},
                                  Send{WarpsPerRow::at_most(16, 1).but_at_least(8)},
                                  Receive{WarpsPerRow::at_most(16, 2)}, ReceiverSixteenths{10}};
// Decode of 17 to 32 tokens.
inline constexpr Shape kLargeDecode = {Variant::kLowLatency, BlockWarps{8}, Send{WarpsPerRow::of(8)},
                                       Receive{WarpsPerRow::at_most(8, 1)}, ReceiverSixteenths{10}};
// Decode of a large batch, or a short prompt: 33 to 256 tokens with three or more experts per token, in all cases that
// kLargeBatchOfLongRows does not cover. Also all_to_all with 33 to 256 tokens.
inline constexpr Shape kLargeBatch = {Variant::kBalanced, BlockWarps{16},
                                      Send{WarpsPerRow::at_most(4, 1).more_for_few_rows(16, 1)},
                                      Receive{kReceiveWithMoreForFewRows}, ReceiverSixteenths{8}};
// 33 to 256 tokens with one or two experts per token. A row gets several warps only if all rows still take one round.
inline constexpr Shape kFewExperts = {Variant::kBalanced, BlockWarps{16}, kLargeBatch.send,
                                      Receive{WarpsPerRow::of(1).more_for_few_rows(kAny, 1)}, ReceiverSixteenths{8}};
// 33 to 256 tokens with three or more experts per token, on more than two ranks, with rows longer than 4 KB and at
// least 512 rows. Receivers need several rounds, so the rows should not all arrive at the end. Few blocks send the
// tokens one after another; they keep the link as busy as many blocks would.
inline constexpr Shape kLargeBatchOfLongRows = {Variant::kBalanced,        BlockWarps{16},
                                                Send{WarpsPerRow::of(16)}, Receive{kReceiveWithMoreForFewRows},
                                                ReceiverSixteenths{10},    Fewest::kSenders};
// Training, or a prompt: more than 256 tokens, on any number of ranks but two.
inline constexpr Shape kManyTokens = {Variant::kThroughput, BlockWarps{16},
                                      Send{WarpsPerRow::at_most(4, 2).more_for_few_rows(16, 2)},
                                      Receive{kReceiveWithMoreForFewRows}, ReceiverSixteenths{8}};
// More than 256 tokens on two ranks, with rows of at most 8 KB. A sender has little to do: it sends each row to one
// other rank.
inline constexpr Shape kManyTokensOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, kManyTokens.send,
                                                kManyTokens.receive, ReceiverSixteenths{10}};
// 257 to 2047 tokens on two ranks, with rows longer than 8 KB. Receivers have more to write than with shorter rows.
inline constexpr Shape kLongRowsOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, kManyTokens.send,
                                              kManyTokens.receive, ReceiverSixteenths{11}};
// 2048 tokens or more on two ranks, with rows longer than 8 KB. Two warps per received row are faster than four
// (measured).
inline constexpr Shape kMostTokensOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, kManyTokens.send,
                                                Receive{WarpsPerRow::of(2)}, ReceiverSixteenths{11}};
// The backward pass of combine with 33 to 1023 tokens. Few blocks send, because receivers do most of the work: for each
// expert of a token, they read y and write a row.
inline constexpr Shape kCombineBack = {Variant::kThroughput,
                                       BlockWarps{16},
                                       Send{WarpsPerRow::at_most(4, 2)},
                                       Receive{WarpsPerRow::at_most(8, 2).more_for_few_rows(kAny, 1)},
                                       ReceiverSixteenths{14},
                                       Fewest::kSenders};
// The same with 1024 tokens or more. There, four warps per received row are faster than eight (measured on two ranks,
// and with 4096 tokens on four).
inline constexpr Shape kCombineBackOfManyTokens = {Variant::kThroughput,   BlockWarps{16},
                                                   kCombineBack.send,      Receive{WarpsPerRow::at_most(4, 2)},
                                                   kCombineBack.receivers, Fewest::kSenders};
// The same on two ranks. The receivers' share is measured.
inline constexpr Shape kCombineBackOnTwoRanks = {Variant::kThroughput,   BlockWarps{16},
                                                 kCombineBack.send,      kCombineBackOfManyTokens.receive,
                                                 ReceiverSixteenths{12}, Fewest::kSenders};
// Any number of tokens, if the user limits the SMs, or in a split-phase call, in all cases that kFewSmsAndFewRows and
// the shapes for own rows do not cover. The receivers' share is measured on two ranks. On four ranks, and in combine's
// backward pass, 8/16 was as fast.
inline constexpr Shape kFewSms = {Variant::kThroughput, BlockWarps{16},
                                  Send{WarpsPerRow::of(1).more_for_few_rows(kAny, 2)},
                                  Receive{WarpsPerRow::of(1).more_for_few_rows(kAny, 2)}, ReceiverSixteenths{9}};
// The same for has_few_rows_per_sm(). Two warps share a received row, unless it is short. With one, the warps' shares
// may differ much: for 128 tokens of two ranks on 24 SMs, some warps would receive two rows, and others one.
inline constexpr Shape kFewSmsAndFewRows = {Variant::kThroughput, BlockWarps{16}, kFewSms.send,
                                            Receive{WarpsPerRow::at_most(2, 4).more_for_few_rows(kAny, 2)},
                                            kFewSms.receivers};

// A limit on SMs, a cast, and at least 64 tokens per SM: senders also write own rows
// (LaunchPlan::tokens_with_own_items). On more than two ranks, kFewSms has the best share (measured on four). On two
// ranks, receivers have little left to do.
inline constexpr Shape kOwnRowsOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, Send{WarpsPerRow::of(1)},
                                             Receive{WarpsPerRow::of(1)}, ReceiverSixteenths{5}};
// The same with 20 to 63 tokens per SM. Receivers write a large part of the own rows: those of the first two steps.
inline constexpr Shape kSomeOwnRowsOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, Send{WarpsPerRow::of(1)},
                                                 Receive{WarpsPerRow::of(1)}, ReceiverSixteenths{6.7}};

}  // namespace dispatch_shapes

// True if a rank may receive at most 24 rows per SM, and so per block of 16 warps. (Measured with 12 and 24 SMs: with
// twice as many rows, two warps per received row gain little; with four times as many, they lose.)
constexpr bool has_few_rows_per_sm(int64_t num_rows, int32_t num_sms) { return num_rows <= 24 * num_sms; }

// Plans a dispatch. `is_combine_back`: the backward pass of combine. `num_chunks`: the chunks of a row in transit.
// `casts`: senders cast the rows of a new route.
constexpr LaunchPlan plan_dispatch(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks,
                                   int32_t num_sms, int32_t device_sms, bool is_combine_back, bool casts = false) {
  using namespace dispatch_shapes;
  const int64_t num_rows = num_tokens * num_ranks;
  const int32_t sms = usable_sms(num_sms, device_sms);
  // With fewer tokens, senders would have sent almost all of them before they may write own rows. Without a cast, the
  // dispatch would be slower (measured).
  const bool senders_write_own =
      num_sms > 0 && casts && !is_combine_back && num_ranks > 1 && num_tokens >= int64_t{20} * sms;
  const auto choose_shape = [=]() -> const Shape& {
    if (senders_write_own && num_ranks == 2) {
      return num_tokens >= int64_t{64} * sms ? kOwnRowsOnTwoRanks : kSomeOwnRowsOnTwoRanks;
    }
    if (num_sms > 0) return has_few_rows_per_sm(num_rows, sms) ? kFewSmsAndFewRows : kFewSms;
    if (is_combine_back && !has_few_tokens(num_tokens)) {
      if (num_tokens < 1024) return kCombineBack;
      return num_ranks == 2 ? kCombineBackOnTwoRanks : kCombineBackOfManyTokens;
    }
    switch (variant_for(num_tokens, num_sms)) {
      case Variant::kLowLatency:
        if (num_tokens <= 2 && num_ranks <= 2) return kSmallestDecodeOnTwoRanks;
        return num_tokens <= 2 || num_rows <= 16 ? kSmallestDecode : num_tokens <= 16 ? kDecode : kLargeDecode;
      case Variant::kBalanced: {
        if (top_k > 0 && top_k <= 2) return kFewExperts;
        const int64_t most_rows = num_tokens * std::min(top_k, num_ranks);
        return num_ranks > 2 && num_chunks > 8 && most_rows >= 512 ? kLargeBatchOfLongRows : kLargeBatch;
      }
      default:
        if (num_ranks != 2) return kManyTokens;
        if (num_chunks <= 16) return kManyTokensOnTwoRanks;
        return num_tokens >= 2048 ? kMostTokensOnTwoRanks : kLongRowsOnTwoRanks;
    }
  };
  const Shape& shape = choose_shape();
  LogWarps log_warps = {shape.send.warps.log_for(num_tokens, num_chunks, sms),
                        shape.receive.warps.log_for(num_rows, num_chunks, sms)};
  if (is_combine_back ||
      !is_low_latency(shape.variant)) {  // the warps of a warp group share data in the block's memory
    log_warps.receive = std::min(log_warps.receive, log2_ceil(shape.block_warps.number));
  }
  LaunchPlan plan = plan_launch(num_tokens, num_rows, shape, log_warps, sms);
  plan.senders_enter_first = let_senders_enter_first(num_tokens, num_ranks, num_sms);
  if (senders_write_own) {
    constexpr int32_t kStepsWithOwnItems = 2;
    plan.tokens_with_own_items = kStepsWithOwnItems * WarpGroup::of_senders(plan, 0, 0).num_groups;
  }
  return plan;
}

// Launch shapes of a combine. Senders sum the experts' rows for each token of another rank, and send the sum. Receivers
// add the sums that arrive. If LaunchPlan::sums_own is true, receivers also sum the rows of this rank's own tokens. A
// combine has "much to read" if a rank's tokens name 12 MiB of rows or more (kMuch in plan_combine).
namespace combine_shapes {

// Decode of 1 to 32 tokens, except for is_large_decode_on_two_ranks(). Each chunk of a sent row has its own warp, if
// there are warps for all rows at once.
inline constexpr Shape kDecode = {Variant::kLowLatency, BlockWarps{8},
                                  Send{WarpsPerRow::at_most(16, 2).more_for_few_rows(32, 1)},
                                  Receive{WarpsPerRow::at_most(32, 1)}, kAsNeeded};
// 33 to 256 tokens, no cast, and one or two experts per token; on at most two ranks, only without much to read. Each
// row has few warps, so that one round is enough for all tokens.
inline constexpr Shape kFewExperts = {Variant::kBalanced, BlockWarps{16}, Send{WarpsPerRow::at_most(4, 2)},
                                      Receive{WarpsPerRow::of(1).more_for_few_rows(32, 1)}, ReceiverSixteenths{8}};
// 33 to 256 tokens, no cast, much to read, more than two ranks, and 3 to 2 * ranks experts per token. Receivers read
// most of the data, because they sum the rows of this rank's own tokens.
inline constexpr Shape kReceiversRead = {Variant::kBalanced, BlockWarps{16}, Send{WarpsPerRow::at_most(16, 2)},
                                         Receive{WarpsPerRow::at_most(32, 1)}, ReceiverSixteenths{12}};
// 33 to 256 tokens, no cast, and three or more experts per token, in all cases that neither kReceiversRead nor
// kManyTokensOnTwoRanks covers. Also all_to_all_back of at most 256 tokens, and is_large_decode_on_two_ranks().
inline constexpr Shape kLargeBatch = {Variant::kBalanced, BlockWarps{16}, Send{WarpsPerRow::at_most(16, 2)},
                                      Receive{WarpsPerRow::at_most(32, 1)}, ReceiverSixteenths{8}};
inline constexpr WarpsPerRow kWarpPerPart = WarpsPerRow::at_most(WarpsPerRow::kAnyNumber, kChunksOfPart);
inline constexpr WarpsPerRow kWarpPerTwoParts = WarpsPerRow::at_most(WarpsPerRow::kAnyNumber, 2 * kChunksOfPart);
// plan_combine may replace kWarpPerRow by kWarpPerPart or kWarpPerTwoParts.
inline constexpr WarpsPerRow kWarpPerRow = WarpsPerRow::of(1);
// More than two ranks, without a limit on SMs: more than 256 tokens; or more than 32, if the combine casts.
inline constexpr Shape kManyTokens = {Variant::kThroughput, BlockWarps{16}, Send{kWarpPerPart}, Receive{kWarpPerPart},
                                      ReceiverSixteenths{8}};
// At most two ranks, without a limit on SMs: more than 256 tokens; or more than 32, if the combine casts or has much to
// read. Also all_to_all_back of more than 256 tokens on at most two ranks.
inline constexpr Shape kManyTokensOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, Send{kWarpPerRow},
                                                Receive{kWarpPerRow}, ReceiverSixteenths{11}};
// More than two ranks, if the user limits the SMs, or in a split-phase call, in all cases that kFewSmsForTokenRows does
// not cover. Also all_to_all_back of more than 256 tokens on more than two ranks.
inline constexpr Shape kManyTokensByRow = {Variant::kThroughput, BlockWarps{16}, Send{kWarpPerRow},
                                           Receive{kWarpPerRow}, ReceiverSixteenths{8}};
// More than two ranks, if the user limits the SMs, or in a split-phase call, in the layout "token" without a cast
// (CombineArgs::holds_token_once). Senders only copy rows, so receivers do most of the work.
inline constexpr Shape kFewSmsForTokenRows = {Variant::kThroughput, BlockWarps{16}, Send{kWarpPerRow},
                                              Receive{kWarpPerRow}, ReceiverSixteenths{9.5}};
// At most two ranks, if the user limits the SMs, or in a split-phase call.
inline constexpr Shape kFewSmsOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, Send{kWarpPerRow},
                                            Receive{kWarpPerRow}, ReceiverSixteenths{9.5}};
// At most two ranks, if the user limits the SMs, or in a split-phase call, in the layout "token" without a cast.
inline constexpr Shape kFewSmsForTokenRowsOnTwoRanks = {Variant::kThroughput, BlockWarps{16}, Send{kWarpPerRow},
                                                        Receive{kWarpPerRow}, ReceiverSixteenths{10}};

}  // namespace combine_shapes

// A combine that casts has no kBalanced kernel: kThroughput was faster, except for short rows (hidden 2048).
constexpr bool combine_has(Variant variant, bool casts) { return !casts || variant != Variant::kBalanced; }

// True for 17 to 32 tokens on two ranks, with rows of y longer than 4 KB and three or more experts per token.
// kLowLatency has one small block per SM, and these rows need more warps than that.
constexpr bool is_large_decode_on_two_ranks(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks) {
  return num_ranks == 2 && num_tokens > 16 && has_few_tokens(num_tokens) && top_k > 2 && num_chunks > 8;
}

// The variant of a combine: variant_for(), with three exceptions. all_to_all_back is kBalanced in place of kLowLatency:
// its senders wait for a word from role 0 of each peer, so the block that enters first must get role 0 (roles by
// ticket). `is_large_decode` without a cast is kBalanced in place of kLowLatency, too. A combine that casts, or should
// prefetch y, is kThroughput in place of kBalanced.
constexpr Variant combine_variant_for(int64_t num_tokens, int32_t num_sms, bool is_all_to_all, bool is_large_decode,
                                      bool should_prefetch, bool casts) {
  const Variant any = variant_for(num_tokens, num_sms);
  const bool is_balanced = is_all_to_all || (is_large_decode && !casts);
  const Variant variant = is_balanced && is_low_latency(any) ? Variant::kBalanced : any;
  const bool prefetches = variant == Variant::kBalanced && (should_prefetch || !combine_has(variant, casts));
  return prefetches ? Variant::kThroughput : variant;
}

// Plans a combine. `num_chunks`: of a row of y. `units_read`: the number of units of y for one unit that is sent; more
// than one means that sums are cast. `holds_token_once`: a token has at most one row on a rank.
//
// "Own rows" are the rows of this rank's own tokens. Usually, receivers sum own rows (LaunchPlan::sums_own). In two
// cases without a cast, senders sum them, and their sums go through the arena: in kLowLatency, and in kBalanced with 33
// tokens or more, three or more experts per token and less than kMuch to read. An all_to_all_back (top_k == 0) sums
// nothing, and sends own rows like a peer's.
constexpr LaunchPlan plan_combine(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks,
                                  int32_t units_read, int32_t num_sms, int32_t device_sms,
                                  bool holds_token_once = false) {
  using namespace combine_shapes;
  const int32_t sms = usable_sms(num_sms, device_sms);
  const bool casts = units_read > 1;
  const bool copies_on_few_sms = num_sms > 0 && holds_token_once && !casts;  // senders copy rows
  constexpr int64_t kMuch = 24 * 1024;                                       // chunks of y: 12 MiB
  const bool has_few_experts = top_k > 0 && top_k <= 2, reads_much = num_tokens * top_k * num_chunks >= kMuch;
  // With more than two ranks, the link sets the pace, and prefetching does not help (measured).
  const bool is_large_decode = is_large_decode_on_two_ranks(num_tokens, num_ranks, top_k, num_chunks);
  const Variant variant =
      combine_variant_for(num_tokens, num_sms, top_k == 0, is_large_decode, reads_much && num_ranks <= 2, casts);
  const bool sums_own =
      top_k > 0 && (casts || (variant == Variant::kBalanced ? has_few_experts || reads_much || is_large_decode
                                                            : variant == Variant::kThroughput));
  const int64_t num_rows = num_tokens * (num_ranks - sums_own);
  const auto choose_shape = [=]() -> const Shape& {
    switch (variant) {
      case Variant::kLowLatency:
        return kDecode;
      case Variant::kBalanced:
        if (has_few_experts) return kFewExperts;
        return reads_much && top_k <= 2 * num_ranks ? kReceiversRead : kLargeBatch;
      default:
        if (num_ranks > 2 && copies_on_few_sms) return kFewSmsForTokenRows;
        if (num_ranks > 2) return num_sms > 0 || top_k == 0 ? kManyTokensByRow : kManyTokens;
        if (copies_on_few_sms) return kFewSmsForTokenRowsOnTwoRanks;
        return num_sms > 0 ? kFewSmsOnTwoRanks : kManyTokensOnTwoRanks;
    }
  };
  Shape shape = choose_shape();
  if (variant == Variant::kThroughput && (num_ranks <= 2 || num_sms > 0 || top_k == 0)) {
    // With several warps per row, there are more rounds, but each round is shorter. Several warps are used only if the
    // estimated time is at most 7/8 of that of a warp per row. Each warp gets one part; two parts if senders copy rows
    // on few SMs (measured on four ranks only).
    const int32_t most_blocks = num_rows > 0 ? sms / 2 : sms - 1;  // with one role; one block moves no rows
    const int32_t warps = std::max(most_blocks - 1, 1) * kMaxBlockWarps;
    const int64_t parts = divide_up(num_chunks, kChunksOfPart), most_rows = std::max(num_rows, num_tokens);
    const auto rounds = [=](int32_t log) { return divide_up(most_rows, std::max(warps >> log, 1)); };
    const WarpsPerRow& warps_for_parts = copies_on_few_sms ? kWarpPerTwoParts : kWarpPerPart;
    const int32_t log_parts = warps_for_parts.log_for(most_rows, num_chunks, sms);
    const int64_t parts_of_warp = divide_up(parts, 1 << log_parts);
    if (8 * parts_of_warp * rounds(log_parts) <= 7 * parts * rounds(0)) {
      shape.send.warps = shape.receive.warps = warps_for_parts;
    }
  }
  const int32_t most_log_warps = log2_ceil(static_cast<int32_t>(divide_up(num_chunks, units_read)));
  const auto log_warps_for = [=](const WarpsPerRow& warps, int64_t rows) {
    const int32_t log = warps.log_for(rows, num_chunks, sms);
    return casts ? std::min(log, most_log_warps) : log;  // a warp sums at least one chunk that is sent
  };
  const LogWarps log_warps = {log_warps_for(shape.send.warps, num_rows),
                              log_warps_for(shape.receive.warps, num_tokens)};
  const auto plan_shape = is_low_latency(variant) ? plan_low_latency_combine : plan_launch;
  LaunchPlan plan = plan_shape(num_rows, num_tokens, shape, log_warps, sms);
  plan.sums_own = sums_own;
  plan.senders_enter_first = let_senders_enter_first(num_tokens, num_ranks, num_sms);
  return plan;
}

}  // namespace jax_ep
