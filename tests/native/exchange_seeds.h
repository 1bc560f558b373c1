// Short exchanges between emulated GPUs. A seed decides the number of ranks, the kernels' form, the inputs, the
// operations, what fails, and the order of everything: the same seed gives the same run.
#pragma once

#include <iostream>
#include <string>

#include "exchange.h"
#include "ffi/emulator/adversary.h"
#include "ffi/emulator/runtime.h"

namespace {

constexpr int32_t kMostBlocks = 8;  // of a launch here

template <typename T>
T pick(std::mt19937& random, const std::vector<T>& from) {
  return from[random() % from.size()];
}

// A rank that never comes: all others say so, and none hands out a result.
void run_without_rank(Session& session, std::mt19937& random) {
  const auto missing = static_cast<int32_t>(random() % session.num_ranks());
  session.whole([](Rank& rank) { return rank.dispatch(0); }, missing);
  session.whole([](Rank& rank) { return rank.combine(); }, missing);
  session.wait();
  const std::optional<FailureRecord> failure = session.group().failure();
  EXPECT_EQ(failure.has_value(), true);
  if (!failure) return;
  EXPECT_EQ(static_cast<int32_t>(failure->reason), static_cast<int32_t>(FailureReason::kTimeout));
  EXPECT_EQ(static_cast<int32_t>(failure->peer), missing);
  for (int32_t r = 0; r < session.num_ranks(); ++r) {
    if (r == missing) continue;
    Rank& rank = *session.ranks()[r];
    EXPECT_EQ(rank.num_dropped.download()[0], -1);
    const std::vector<float>& out = rank.out.download();
    EXPECT_EQ(std::all_of(out.begin(), out.end(), [](float value) { return std::isnan(value); }), true);
  }
}

// A launch whose turn never comes, as another one has taken it and does not end: it gives up without an epoch.
void run_without_turn(Session& session, std::mt19937& random) {
  const auto stuck = static_cast<int32_t>(random() % session.num_ranks());
  const uint32_t other_launch = 2;
  must(cudaMemcpy(&session.group().members()[stuck].peers.control->owner, &other_launch, sizeof(other_launch),
                  cudaMemcpyHostToDevice));
  session.whole([](Rank& rank) { return rank.dispatch(0); });
  session.wait();
  const std::optional<FailureRecord> failure = session.group().failure();
  EXPECT_EQ(failure.has_value(), true);
  if (failure) EXPECT_EQ(static_cast<int32_t>(failure->peer), stuck);
}

// A peer that is late, and late again: the operation still ends within one time-out. The host plays the peer: it says
// that rows come, which never do.
void run_late_twice(int32_t cast, Blocks blocks) {
  constexpr double kTimeout = 10.0;
  Session session(2, cast, blocks, kTimeout);
  std::mt19937 random(0);
  session.randomize(random);
  session.whole([&](Rank& rank) { return rank.dispatch(cast); }, 1);
  emulator::run_for(static_cast<uint64_t>(0.7e9 * kTimeout));
  const Peers& peers = session.group().members()[0].peers;
  const auto tagged = [](uint32_t value) { return uint64_t{1} << 32 | value; };  // of the first operation
  Control& control = *peers.control;
  constexpr int32_t kSlot = 1, kPeer = 1, kRows = 3;
  control.op[kSlot][kPeer] = tagged(static_cast<uint32_t>(OpKind::kDispatch));
  for (auto& words : control.num_rows[kSlot]) words[kPeer] = tagged(kRows);
  auto* const counts = reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(&control) +
                                                   counts_offset(kSlot, kPeer, 2, experts_per_rank));
  for (int32_t expert = 0; expert < experts_per_rank; ++expert) counts[expert] = tagged(expert == 0 ? kRows : 0);
  EXPECT_EQ(session.group().failure().has_value(), false);
  emulator::run_for(static_cast<uint64_t>(0.4e9 * kTimeout));
  EXPECT_EQ(session.group().failure().has_value(), true);
  session.wait();
}

// Only the cotangents of the router's weights go back.
void run_weights_back(Session& session) {
  session.whole([](Rank& rank) {
    GatherArgs args = rank.dispatch_back();
    args.y = nullptr, args.out = nullptr, args.row_bytes = 0;
    return args;
  });
  session.check_results();
}

// Whole operations and halves, all launched before any is looked at. Between a start and its done are up to three
// operations, as many as slots allow.
void run_far_ahead(Session& session, std::mt19937& random, int32_t cast) {
  const auto dispatch = [&](Rank& rank) { return rank.dispatch_in_halves(cast); };
  const auto combine = [](Rank& rank) { return rank.combine_in_halves(); };
  int32_t dispatch_age = -1, combine_age = -1;  // operations behind the start that is under way
  for (int32_t steps_left = 16; steps_left > 0 || dispatch_age >= 0 || combine_age >= 0; --steps_left) {
    const bool is_end = steps_left <= 0;
    if (dispatch_age == 3 || (dispatch_age >= 0 && (is_end || random() % 4 == 0))) {
      session.done(dispatch);
      dispatch_age = -1;
    } else if (combine_age == 3 || (combine_age >= 0 && (is_end || random() % 4 == 0))) {
      session.done(combine);
      combine_age = -1;
    } else {
      if (dispatch_age >= 0) ++dispatch_age;
      if (combine_age >= 0) ++combine_age;
      const auto choice = random() % 6;
      if (choice == 0 && dispatch_age < 0) {
        session.start(dispatch);
        dispatch_age = 0;
      } else if (choice == 1 && combine_age < 0) {
        session.start(combine);
        combine_age = 0;
      } else if (choice % 3 == 0) {
        session.whole([](Rank& rank) { return rank.dispatch_back(); });
      } else if (choice % 3 == 1) {
        session.whole([](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
      } else {
        session.whole([](Rank& rank) { return rank.combine_back(); });
      }
    }
  }
  session.check_results();
}

// Launches of one group on two streams, which run at once: they take turns.
void run_two_streams(Session& session, std::mt19937& random, int32_t cast) {
  Times times = kOneEach;
  std::vector<uint32_t> epochs;
  for (const Member& member : session.group().members()) epochs.push_back(member.peers.control->newest_epoch);
  for (int32_t i = 0; i < 10; ++i) {
    cudaStream_t Rank::* const stream = i % 2 ? &Rank::other_stream : &Rank::stream;
    const bool goes_out = random() % 2;
    // The results are others than those of the launch that still runs.
    if (i % 2 == 0 && goes_out) {
      session.whole([](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); }, -1, stream);
    } else if (i % 2 == 0) {
      session.whole([](Rank& rank) { return rank.combine(); }, -1, stream);
    } else if (goes_out) {
      session.whole([](Rank& rank) { return rank.combine_back(); }, -1, stream);
    } else {
      session.whole([](Rank& rank) { return rank.dispatch_back(); }, -1, stream);
    }
    const OpKind ops[] = {OpKind::kCombine, OpKind::kDispatchLike, OpKind::kDispatchBack, OpKind::kCombineBack};
    ++times[static_cast<size_t>(ops[2 * (i % 2) + goes_out])];
    // The next one comes when this one has its turn, everywhere: their order is the same on all ranks.
    for (size_t r = 0; r < epochs.size(); ++r) {
      const Control& control = *session.group().members()[r].peers.control;
      const uint32_t epoch = epochs[r] + i + 1;
      const auto has_come = [&] {
        return control.newest_epoch == epoch || (control.newest_epoch == epoch - 1 && control.owner != 0);
      };
      for (int32_t tries = 0; tries < 50'000 && !has_come(); ++tries) emulator::run_for(200);
      EXPECT_EQ(has_come(), true);
      if (!has_come()) return;
    }
  }
  session.check_results();
  check_stats(session.group(), session.ranks(), cast, times);
}

// More rows than there is room for: the places of those that are dropped are empty for later operations, too.
void run_dropped(Session& session, std::mt19937& random, int32_t cast) {
  for (int32_t i = 0; i < 5; ++i) {
    session.whole([&](Rank& rank) {
      ScatterArgs args = rank.dispatch(cast);
      args.capacity = args.num_rows = kAlignment;
      return args;
    });
  }
  session.randomize(random);
  session.run_whole();
}

// Ranks in different operations: an error by name.
void run_other_operation(Session& session, std::mt19937& random) {
  const auto other = static_cast<int32_t>(random() % session.num_ranks());
  session.whole([&](Rank& rank) {
    ScatterArgs args = rank.dispatch(0);
    if (&rank == session.ranks()[other].get()) ++args.hash;
    return args;
  });
  session.wait();
  const std::optional<FailureRecord> failure = session.group().failure();
  EXPECT_EQ(failure.has_value(), true);
  if (failure) {
    EXPECT_EQ(static_cast<int32_t>(failure->reason), static_cast<int32_t>(FailureReason::kOtherOp));
  }
}

// What the seed has chosen, for who looks for the reason of a failure.
std::string run_seed(uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto num_ranks = pick<int32_t>(random, {1, 2, 2, 3, 4, 4, 8});
  const auto scenario = random() % 13;
  const auto cast = scenario == 1 ? 0 : pick<int32_t>(random, {0, 0, 1, 2});
  experts_per_rank = pick<int32_t>(random, {1, 3, 3, 40});
  const Blocks blocks = pick<Blocks>(random, {{0, Form::kFewRows},
                                              {0, Form::kFewRowsDense},
                                              {1, Form::kManyRows},
                                              {2, Form::kUsual},
                                              {2, Form::kManyRows},
                                              {3, Form::kUsual, false},
                                              {3, Form::kManyRows}});
  // Epochs that wrap, where epoch 0 is behind operations that have written every word that it waits for.
  const bool has_other_order = scenario >= 7 && scenario <= 10;
  const uint32_t newest_epoch = random() % 4 == 0 && !has_other_order ? -(7 + random() % 4) : 0;
  const auto num_sms = scenario == 9 ? 4 : pick<int32_t>(random, {1, 2, 3, 4});
  emulator::set_num_sms(num_sms);
  Session session(num_ranks, cast, blocks, 60.0, newest_epoch);
  session.randomize(random);
  session.run_whole();
  switch (scenario) {
    case 0:
      // The bodies of two halves, and a block of a whole operation: plan.h leaves SMs for as many.
      if (emulator::adversary.resident_blocks != 0) emulator::adversary.resident_blocks = 2 * kMostBlocks + 1;
      session.run_halves();
      break;
    case 1:
      session.run_look_empty(random);
      break;
    case 2:
      if (num_ranks > 1) run_without_rank(session, random);
      break;
    case 3:
      if (num_ranks > 1) run_other_operation(session, random);
      break;
    case 4:
      run_without_turn(session, random);
      break;
    case 5:
      run_weights_back(session);
      break;
    case 6:
      run_late_twice(cast, blocks);
      break;
    case 7:
    case 8:
      if (emulator::adversary.resident_blocks != 0) emulator::adversary.resident_blocks = 2 * kMostBlocks + 1;
      run_far_ahead(session, random, cast);
      break;
    case 9:
      emulator::adversary.resident_blocks = 0;  // all blocks of both launches are on the device at once
      emulator::adversary.delays_launches = false;
      run_two_streams(session, random, cast);
      break;
    case 10:
      run_dropped(session, random, cast);
      break;
    default:  // slots are used again
      session.randomize(random);
      session.run_whole();
      session.run_whole();
  }
  return std::to_string(num_ranks) + " ranks, cast " + std::to_string(cast) + ", " + std::to_string(experts_per_rank) +
         " experts per rank, form " + std::to_string(static_cast<int>(blocks.form)) + " on " +
         std::to_string(blocks.number) + " SMs of " + std::to_string(num_sms) + ", newest epoch " +
         std::to_string(static_cast<int32_t>(newest_epoch)) + ", scenario " + std::to_string(scenario);
}

int run_seeds(uint64_t first, uint64_t count, const std::string& settings) {
  for (uint64_t seed = first; seed < first + count; ++seed) {
    emulator::set_adversary(seed, settings);
    const std::string what = run_seed(seed);
    if (check::failures == 0) continue;
    std::cerr << "seed " << seed << " has failed: " << what << "\n";
    return 1;
  }
  std::cerr << count << " seeds from " << first << " on: no failure\n";
  return 0;
}

}  // namespace
