// Operations that fail, between emulated GPUs. Each failure must have a record, and all results must be poisoned.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "exchange_emulated.h"
#include "ffi/emulator/machine.h"

namespace {

// All ranks must learn of a failure within this time. (A block waits for others for at most one second.)
constexpr uint64_t kSoonNs = 30'000'000'000;

bool all_nan(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

// An operation that will fail. Before that, its results have arbitrary values.
struct Failing {
  bool goes_back, has_weights;  // has_weights: of the combine

  explicit Failing(Session& session, std::mt19937& random) : goes_back(random() % 2), has_weights(random() % 2) {
    for (auto& rank : session.ranks()) {
      must(cudaMemset(rank->recv.device, goes_back ? 0 : 1, rank->recv.host.size() * sizeof(float)));
      must(cudaMemset(rank->out.device, 1, rank->out.host.size() * sizeof(float)));
    }
  }
  // adjust(rank, args) changes the arguments of a rank's call.
  template <typename Adjust>
  void launch(Session& session, int32_t missing_rank, Adjust adjust) const {
    const auto adjusted = [&](Rank& rank, auto args) {
      adjust(rank, args);
      return args;
    };
    if (goes_back) {
      const auto combine = [&](Rank& rank) {
        CombineArgs args = rank.combine();
        if (!has_weights) args.row_weights = nullptr;  // some kernels then copy a token's only row
        return adjusted(rank, args);
      };
      session.whole(combine, missing_rank);
    } else {
      session.whole([&](Rank& rank) { return adjusted(rank, rank.dispatch(0)); }, missing_rank);
    }
  }
  // Checks that the results of a rank are poisoned.
  void check(Rank& rank) const {
    if (goes_back) {
      EXPECT_EQ(all_nan(rank.out.download()), true);
      return;
    }
    EXPECT_EQ(all_nan(rank.recv.download()), true);
    EXPECT_EQ(all_nan(rank.weights.download()), true);
    EXPECT_EQ(rank.num_dropped.download()[0], -1);
    const std::vector<int32_t>& rows = rank.recv_row.download();
    EXPECT_EQ(std::all_of(rows.begin(), rows.end(), [](int32_t row) { return row == -1; }), true);
  }
};

// The time in which an operation of a failed group ends. Each of its rounds is a launch.
uint64_t soon_ns(const Session& session) { return divide_up(num_tokens, session.round_tokens()) * kSoonNs; }

// Checks that the group has failed for this reason, and that a later operation fails at once.
void check_failed(Session& session, FailureReason reason, int32_t peer = -1) {
  const std::optional<FailureRecord> failure = session.group().failure();
  EXPECT_EQ(failure.has_value(), true);
  if (!failure) return;
  EXPECT_EQ(static_cast<int32_t>(failure->reason), static_cast<int32_t>(reason));
  if (peer >= 0) EXPECT_EQ(static_cast<int32_t>(failure->peer), peer);
  const uint64_t begun = emulator::now_ns();
  session.whole([](Rank& rank) { return rank.combine(); });
  session.wait();
  EXPECT_EQ(emulator::now_ns() - begun < soon_ns(session), true);
  for (auto& rank : session.ranks()) EXPECT_EQ(all_nan(rank->out.download()), true);
}

// One rank launches nothing. All others must time out and poison their results. `blames_it`: the failure names this
// rank, and no rank that waits for it.
void run_without_rank(Session& session, std::mt19937& random, bool blames_it = true) {
  if (session.num_ranks() == 1) return;
  const auto missing = static_cast<int32_t>(random() % session.num_ranks());
  const Failing operation(session, random);
  operation.launch(session, missing, [](auto&&...) {});
  session.wait();
  for (int32_t r = 0; r < session.num_ranks(); ++r) {
    if (r != missing) operation.check(*session.ranks()[r]);
  }
  check_failed(session, FailureReason::kTimeout, blames_it ? missing : -1);
}

// Checks that the ranks fail at once, and not when their time is up, and that a record is complete when the host sees
// it.
void run_until_failure(Session& session, const Failing& operation, FailureReason reason, int32_t peer) {
  const uint64_t begun = emulator::now_ns();
  std::optional<FailureRecord> first;
  while (!first && emulator::now_ns() - begun < kSoonNs) {
    emulator::run_for(200);
    first = session.group().failure();
    // A rank that has learned of the failure may write its own record before the host sees the record with the reason.
    if (first && static_cast<FailureReason>(first->reason) == FailureReason::kElsewhere) first.reset();
  }
  EXPECT_EQ(first.has_value(), true);
  session.wait();
  EXPECT_EQ(emulator::now_ns() - begun < soon_ns(session), true);
  if (first) {
    EXPECT_EQ(static_cast<int32_t>(first->reason), static_cast<int32_t>(reason));
    EXPECT_EQ(first->epoch != 0, true);
    EXPECT_EQ(first->expected != first->seen, true);
  }
  for (auto& rank : session.ranks()) operation.check(*rank);
  check_failed(session, reason, peer);
}

// One rank calls another operation. The group must fail with kOtherOp.
void run_other_operation(Session& session, std::mt19937& random) {
  if (session.num_ranks() == 1) return;
  const Rank* const other = session.ranks()[random() % session.num_ranks()].get();
  const Failing operation(session, random);
  operation.launch(session, -1, [&](Rank& rank, auto& args) { args.hash += &rank == other; });
  run_until_failure(session, operation, FailureReason::kOtherOp, -1);
}

// One rank has a wrong position in the mesh. The group must fail with kWrongRank.
void run_wrong_rank(Session& session, std::mt19937& random) {
  const auto wrong = static_cast<int32_t>(random() % session.num_ranks());
  Array<int32_t>& axis_index = session.ranks()[wrong]->axis_index;
  ++axis_index.host[0];
  axis_index.upload();
  const Failing operation(session, random);
  operation.launch(session, -1, [](auto&&...) {});
  run_until_failure(session, operation, FailureReason::kWrongRank, wrong);
}

// Runs four rounds, each in a new session. A round runs all operations. Then one rank gets a wrong position in the
// mesh, and the next operation must fail.
void repeat_wrong_rank(std::mt19937& random, int32_t num_ranks, PlanOverrides blocks) {
  for (int32_t round = 0; round < 4 && check::failures == 0; ++round) {
    Session session(num_ranks, 0, blocks, kTimeout, 0, num_tokens, {}, pick<int32_t>(random, {0, 1}));
    session.randomize(random);
    session.run_whole();
    run_wrong_rank(session, random);
  }
}

// A wrong position in a low-latency dispatch. A block's role is its index. So block 0 notifies the peers, and may
// not be the first block to enter. So it must check the rank itself. Here, blocks often enter at the same time, so
// block 0 does not learn of the failure from another block.
void run_wrong_rank_of_few_tokens(uint64_t seed) {
  const Settings former;
  emulator::adversary.shuffles_blocks = emulator::adversary.shuffles_warps = emulator::adversary.delays_stores = true;
  emulator::adversary.delays_launches = false;
  emulator::adversary.resident_blocks = kNoBlockLimit;
  emulator::adversary.stall_share = emulator::adversary.held_share = 0;
  emulator::adversary.held_blocks_share = emulator::adversary.switch_share = 0.5;
  emulator::set_num_sms(1);
  num_tokens = 4, top_k = 2, experts_per_rank = 3;
  std::mt19937 random(static_cast<uint32_t>(seed));
  repeat_wrong_rank(random, 2, {0, Variant::kLowLatency});
}

// One rank has a wrong position in the mesh. About half of the blocks stall once, so some blocks find the failure long
// before others. The block that poisons the results must wait for the stalled blocks, because they may still write
// results.
void run_wrong_rank_with_stalled_blocks(uint64_t seed) {
  const Settings former;
  emulator::adversary.shuffles_blocks = emulator::adversary.shuffles_warps = true;
  emulator::adversary.delays_stores = emulator::adversary.delays_launches = false;
  emulator::adversary.resident_blocks = kNoBlockLimit;
  emulator::adversary.stall_share = emulator::adversary.switch_share = 0.5;
  emulator::set_num_sms(6);
  num_tokens = 12, top_k = 4, experts_per_rank = 3;
  std::mt19937 random(static_cast<uint32_t>(seed));
  repeat_wrong_rank(random, pick<int32_t>(random, {1, 2}), {6, Variant::kThroughput, true, true});
}

// Two launches of one group overlap on each device but one. The group must fail with kOverlap. Both launches are the
// same operation, so no rank finds its peer in another operation. There are two cases:
//  - The second launch enters before the first one has opened the next epoch. The launches have different results, and
//    so different tags.
//  - The second launch enters later: the block that entered last, a sender of a low-latency combine, has left, and
//    receivers still wait. Then only the number of blocks that have left shows the overlap. Launches with even and odd
//    epochs have a number each.
void run_overlap(int32_t num_ranks, int32_t cast, PlanOverrides blocks, std::mt19937& random) {
  constexpr int32_t kSmsForSenders = 24;  // enough for blocks that only send
  constexpr uint64_t kSendersLeaveNs = 50'000'000;
  const Settings former;
  const int32_t former_tokens = num_tokens;
  const bool senders_leave = random() % 2;
  if (senders_leave) {
    blocks = {0, Variant::kLowLatency}, num_tokens = std::min(num_tokens, 2);
    emulator::set_num_sms(kSmsForSenders);
    emulator::adversary.shuffles_blocks = true;
  }
  emulator::adversary.resident_blocks = kNoBlockLimit;
  Session session(num_ranks, cast, blocks);
  session.randomize(random);
  session.whole([&](Rank& rank) { return rank.dispatch(cast); });
  if (random() % 2) session.whole([](Rank& rank) { return rank.combine(); });
  session.wait();
  emulator::set_num_sms(2 * std::max(kMostBlocks, kSmsForSenders));  // room for both launches
  const auto missing = static_cast<int32_t>(random() % num_ranks);
  for (int32_t stream = 0; stream < 2; ++stream) {
    if (senders_leave) {
      session.whole([](Rank& rank) { return rank.combine(); }, missing, stream);
      emulator::run_for(kSendersLeaveNs);
      continue;
    }
    const auto launch = [=](Rank& rank) {
      return rank.dispatch_with_route(OpKind::kDispatchLike, stream == 0 ? rank.like : rank.recv);
    };
    session.whole(launch, missing, stream);
  }
  session.wait();
  check_failed(session, FailureReason::kOverlap);
  num_tokens = former_tokens;
}

// A peer notifies late, and then its rows never arrive. The operation has one time-out for both waits together. The
// host acts as the peer: it writes the words by which a peer notifies.
void run_late_twice(int32_t cast, PlanOverrides blocks) {
  constexpr double kShortTimeout = 10.0;
  Session session(2, cast, blocks, kShortTimeout);
  std::mt19937 random(0);
  session.randomize(random);
  session.whole([&](Rank& rank) { return rank.dispatch(cast); }, 1);
  emulator::run_for(static_cast<uint64_t>(0.7e9 * kShortTimeout));
  const Peers& peers = session.group().members()[0].peers;
  const auto tagged = [](uint32_t value) { return uint64_t{1} << 32 | value; };  // of the first operation
  Control& control = *peers.control;
  constexpr int32_t kSlot = 1, kPeer = 1, kRows = 1;
  control.notified[kSlot][kPeer] = tagged(static_cast<uint32_t>(OpKind::kDispatch));
  for (int32_t copy = 0; copy < kNumRowsCopies; ++copy) {
    control.num_rows[kSlot][num_rows_index(copy, kPeer)] = tagged(kRows);
  }
  auto* const counts = reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(&control) +
                                                   counts_offset(kSlot, kPeer, 2, experts_per_rank));
  for (int32_t expert = 0; expert < experts_per_rank; ++expert) counts[expert] = tagged(expert == 0 ? kRows : 0);
  EXPECT_EQ(session.group().failure().has_value(), false);
  emulator::run_for(static_cast<uint64_t>(0.6e9 * kShortTimeout));
  EXPECT_EQ(session.group().failure().has_value(), true);
  session.wait();
}

// The host fails the group while a kernel writes its own failure record, or after that. The host must read one of the
// two records, and never a mixture.
void run_host_fails(uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  emulator::set_num_sms(2);
  Session session(2, 0, {2, Variant::kBalanced}, kTimeout);
  session.randomize(random);
  session.whole([](Rank& rank) {
    DispatchArgs args = rank.dispatch(0);
    args.hash += rank.axis_index.host[0];  // ranks in different calls: one of them fails
    return args;
  });
  constexpr uint64_t kStepNs = 10;
  const std::vector<Member>& members = session.group().members();
  const uint32_t& failed = members[0].peers.control->failed;
  while (failed == 0) emulator::run_for(kStepNs);
  const auto rank = static_cast<int32_t>(failed) - 1;
  const Member& member = members[rank];
  emulator::run_for(kStepNs * (random() % 20));
  FailureRecord why = {};
  why.reason = static_cast<uint32_t>(FailureReason::kOtherOrder);
  why.op = static_cast<uint32_t>(OpKind::kCombine);
  why.rank = rank, why.peer = 1 - rank, why.expected = 7, why.seen = 9;
  session.group().fail(member, why);
  session.wait();
  const FailureRecord seen = session.group().failure().value();
  const bool is_of_host = static_cast<FailureReason>(seen.reason) == FailureReason::kOtherOrder;
  EXPECT_EQ(is_of_host || static_cast<FailureReason>(seen.reason) == FailureReason::kOtherOp, true);
  EXPECT_EQ(seen.op, is_of_host ? why.op : static_cast<uint32_t>(OpKind::kDispatch));
  EXPECT_EQ(seen.peer, static_cast<uint32_t>(1 - rank));
  EXPECT_EQ(seen.epoch, is_of_host ? 0u : 1u);
  EXPECT_EQ(seen.expected == why.expected && seen.seen == why.seen, is_of_host);
}

// A start without a done keeps its slot, and a later operation waits for the slot.
void run_never_done(Session& session) {
  session.start([&](Rank& rank) { return rank.dispatch_split(session.cast()); });
  for (int32_t i = 0; i < session.num_slots(); ++i) {
    session.whole([](Rank& rank) { return rank.combine(); });
  }
  session.wait();
  check_failed(session, FailureReason::kSlotTaken);
}

void run_failure(Session& session, std::mt19937& random, PlanOverrides blocks, uint32_t scenario) {
  switch (scenario) {
    case 0:
      return run_without_rank(session, random);
    case 1:
      return run_overlap(std::max(2, session.num_ranks()), session.cast(), blocks, random);
    case 2:
      return run_late_twice(session.cast(), blocks);
    case 3:
      return run_never_done(session);
    case 4:
      return run_other_operation(session, random);
    default:
      return run_wrong_rank(session, random);
  }
}
constexpr uint32_t kFailures = 6;

}  // namespace
