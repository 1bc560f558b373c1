// Two groups on the same emulated GPUs, whose operations the ranks run in one order or in different orders.
#pragma once

#include <optional>
#include <random>
#include <vector>

#include "exchange_emulated.h"
#include "exchange_failures.h"

namespace {

// Notes a rank's calls as a handler does.
void note_call(Session& session, int32_t rank, cudaStream_t stream, int32_t num_sms) {
  note_device_call(session.group().members()[rank].entry, stream, num_sms, false);
}

std::optional<FailureReason> reason_of(const Session& session) {
  const std::optional<FailureRecord> failure = session.group().failure();
  return failure ? std::optional(static_cast<FailureReason>(failure->reason)) : std::nullopt;
}

// Each rank has one stream for both groups. Some ranks run an operation of the one group first, and the other ranks an
// operation of the other group. At least one group must fail with kOtherOrder, and no kernel may wait for its time-out.
// Perhaps each rank has a start before its operation of the one group. A start waits for no other rank, so ranks that
// run the other group first have not begun it.
void run_groups_in_other_order(Session& one, Session& other, std::mt19937& random) {
  const auto num_in_one_order = static_cast<int32_t>(1 + random() % (one.num_ranks() - 1));
  const bool has_start = random() % 2;
  const uint64_t begun = emulator::now_ns();
  for (int32_t r = 0; r < one.num_ranks(); ++r) {
    const cudaStream_t stream = one.ranks()[r]->streams[0];
    const auto run = [&](Session& session) {
      if (has_start && &session == &one) one.start_on(r, [](Rank& rank) { return rank.dispatch_split(0, 0); });
      session.whole_on(r, [](Rank& rank) { return rank.dispatch(0); }, stream);
    };
    run(r < num_in_one_order ? one : other);
    run(r < num_in_one_order ? other : one);
  }
  one.wait();
  EXPECT_EQ(emulator::now_ns() - begun < kSoonNs, true);
  const bool has_failed =
      reason_of(one) == FailureReason::kOtherOrder || reason_of(other) == FailureReason::kOtherOrder;
  EXPECT_EQ(has_failed, true);
  for (const Session* session : {&one, &other}) {
    EXPECT_EQ(reason_of(*session) != FailureReason::kTimeout, true);
  }
}

constexpr uint64_t kLateNs = 8'000'000'000;  // longer than a kernel waits before it looks at other groups

// All ranks run both groups in one order. One rank comes late to the first operation, or between the two.
void run_groups_with_late_rank(Session& one, Session& other, std::mt19937& random) {
  const auto late = static_cast<int32_t>(random() % one.num_ranks());
  const auto dispatch = [](Rank& rank) { return rank.dispatch(0); };
  const bool is_late_between = random() % 2;
  for (Session* session : {&one, &other}) {
    for (int32_t r = 0; r < one.num_ranks(); ++r) {
      if (r != late) session->whole_on(r, dispatch, one.ranks()[r]->streams[0]);
    }
  }
  if (is_late_between) one.whole_on(late, dispatch, one.ranks()[late]->streams[0]);
  emulator::run_for(kLateNs);
  if (!is_late_between) one.whole_on(late, dispatch, one.ranks()[late]->streams[0]);
  other.whole_on(late, dispatch, one.ranks()[late]->streams[0]);
  one.wait();
  for (const Session* session : {&one, &other}) session->expect_no_failure();
}

// The ranks call the two groups in different order, and each group has a stream of its own. Both operations fit on a
// device together. So a rank that waits for one group may still be called for the other.
void run_groups_side_by_side(Session& one, Session& other) {
  emulator::set_num_sms(2 * kMostBlocks);
  const ResidentBlocks enough(kNoBlockLimit);
  const auto call = [&](Session& session, int32_t r) {
    const cudaStream_t stream = session.ranks()[r]->streams[0];
    note_call(session, r, stream, 1);
    session.whole_on(r, [](Rank& rank) { return rank.dispatch(0); }, stream);
  };
  for (int32_t r = 0; r < one.num_ranks(); ++r) call(r % 2 ? one : other, r);
  for (int32_t r = 0; r < one.num_ranks(); ++r) {  // a handler has called all before
    for (Session* session : {&one, &other}) note_call(*session, r, session->ranks()[r]->streams[0], 1);
  }
  emulator::run_for(kLateNs);
  for (int32_t r = 0; r < one.num_ranks(); ++r) call(r % 2 ? other : one, r);
  one.wait();
  for (const Session* session : {&one, &other}) session->expect_no_failure();
}

// The same, but the host does not know that the operations run at the same time: a CUDA graph has them, for example.
// All ranks but one run both operations, which wait for the late rank.
void run_groups_at_the_same_time(Session& one, Session& other, std::mt19937& random) {
  emulator::set_num_sms(2 * kMostBlocks);
  const ResidentBlocks enough(kNoBlockLimit);
  const auto late = static_cast<int32_t>(random() % one.num_ranks());
  const auto dispatch = [](Rank& rank) { return rank.dispatch(0); };
  for (Session* session : {&one, &other}) session->whole(dispatch, late);
  emulator::run_for(kLateNs);
  for (Session* session : {&one, &other}) session->whole_of(late, dispatch);
  one.wait();
  for (const Session* session : {&one, &other}) session->expect_no_failure();
}

// One rank has told another that an operation of `one` keeps it from `other`. This is no longer true: `one` has failed,
// or was closed and opened again. So the other rank may wait for it in `other`.
void run_group_after_old_words(Session& one, Session& other, std::mt19937& random) {
  const bool has_failed = random() % 2;
  const auto dispatch = [](Rank& rank) { return rank.dispatch(0); };
  const auto run = [&](Session& session, int32_t late, bool comes) {
    for (int32_t r = 0; r < one.num_ranks(); ++r) {
      if (r != late) session.whole_on(r, dispatch, one.ranks()[r]->streams[0]);
    }
    emulator::run_for(kLateNs);
    if (comes) session.whole_on(late, dispatch, one.ranks()[late]->streams[0]);
    one.wait();
  };
  run(one, 1, !has_failed);
  EXPECT_EQ(one.group().failure().has_value(), has_failed);
  if (!has_failed) one.open_group();
  run(other, 0, true);
  other.expect_no_failure();
}

void run_two_groups(uint64_t seed) {
  const Settings former;
  std::mt19937 random(static_cast<uint32_t>(seed));
  num_tokens = 4, top_k = 2, experts_per_rank = 3;
  const auto num_ranks = pick<int32_t>(random, {2, 3, 4});
  const PlanOverrides blocks =
      pick<PlanOverrides>(random, {{0, Variant::kLowLatency}, {2, Variant::kBalanced}, {2, Variant::kThroughput}});
  emulator::set_num_sms(2);
  Session one(num_ranks, 0, blocks, kTimeout), other(num_ranks, 0, blocks, kTimeout);
  for (Session* session : {&one, &other}) session->randomize(random);
  switch (random() % 5) {
    case 0:
      return run_groups_in_other_order(one, other, random);
    case 1:
      return run_groups_with_late_rank(one, other, random);
    case 2:
      return run_groups_at_the_same_time(one, other, random);
    case 3:
      return run_group_after_old_words(one, other, random);
    default:
      return run_groups_side_by_side(one, other);
  }
}

}  // namespace
