// Short exchanges between emulated GPUs. A seed decides the number of ranks, the kernels' variant, the inputs, the
// operations, what fails, and the order of everything: the same seed gives the same run.
#pragma once

#include <iostream>
#include <string>

#include "exchange_all_to_all.h"
#include "exchange_layouts.h"
#include "ffi/emulator/adversary.h"
#include "ffi/emulator/machine.h"
#include "ffi/emulator/runtime.h"

namespace {

constexpr int32_t kMostBlocks = 12;  // of a launch here

template <typename T>
T pick(std::mt19937& random, const std::vector<T>& from) {
  return from[random() % from.size()];
}

// --- operations that fail ------------------------------------------------------------------------------------------

constexpr double kTimeout = 60.0;  // seconds
// Within which all ranks hear of a failure, in nanoseconds. (A block waits for others for a second at most.)
constexpr uint64_t kSoonNs = 30'000'000'000;

bool all_nan(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

// An operation that is to fail. Its results are garbage before.
struct Failing {
  bool goes_back;

  explicit Failing(Session& session, std::mt19937& random) : goes_back(random() % 2) {
    for (auto& rank : session.ranks()) {
      must(cudaMemset(rank->recv.device, goes_back ? 0 : 1, rank->recv.host.size() * sizeof(float)));
      must(cudaMemset(rank->out.device, 1, rank->out.host.size() * sizeof(float)));
    }
  }
  // adjust() gets a rank and its call.
  template <typename Adjust>
  void launch(Session& session, int32_t missing_rank, Adjust adjust) const {
    const auto adjusted = [&](Rank& rank, auto args) {
      adjust(rank, args);
      return args;
    };
    if (goes_back) {
      session.whole([&](Rank& rank) { return adjusted(rank, rank.combine()); }, missing_rank);
    } else {
      session.whole([&](Rank& rank) { return adjusted(rank, rank.dispatch(0)); }, missing_rank);
    }
  }
  // No result is handed out.
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

// A group that has failed, for this reason, fails all that follows, at once.
void check_failed(Session& session, FailureReason reason, int32_t peer = -1) {
  const std::optional<FailureRecord> failure = session.group().failure();
  EXPECT_EQ(failure.has_value(), true);
  if (!failure) return;
  EXPECT_EQ(static_cast<int32_t>(failure->reason), static_cast<int32_t>(reason));
  if (peer >= 0) EXPECT_EQ(static_cast<int32_t>(failure->peer), peer);
  const uint64_t begun = emulator::now_ns();
  session.whole([](Rank& rank) { return rank.combine(); });
  session.wait();
  EXPECT_EQ(emulator::now_ns() - begun < kSoonNs, true);
  for (auto& rank : session.ranks()) EXPECT_EQ(all_nan(rank->out.download()), true);
}

// A rank that never comes: all others say so, and none hands out a result.
void run_without_rank(Session& session, std::mt19937& random) {
  if (session.num_ranks() == 1) return;
  const auto missing = static_cast<int32_t>(random() % session.num_ranks());
  const Failing operation(session, random);
  operation.launch(session, missing, [](auto&&...) {});
  session.wait();
  for (int32_t r = 0; r < session.num_ranks(); ++r) {
    if (r != missing) operation.check(*session.ranks()[r]);
  }
  check_failed(session, FailureReason::kTimeout, missing);
}

// The ranks see the failure at once, and not when their time is up. As soon as the host sees a record, it is complete.
void run_until_failure(Session& session, const Failing& operation, FailureReason reason, int32_t peer) {
  const uint64_t begun = emulator::now_ns();
  std::optional<FailureRecord> first;
  while (!first && emulator::now_ns() - begun < kSoonNs) {
    emulator::run_for(200);
    first = session.group().failure();
    // A rank that has heard of the failure may write its own record before the host sees the record that says why.
    if (first && static_cast<FailureReason>(first->reason) == FailureReason::kElsewhere) first.reset();
  }
  EXPECT_EQ(first.has_value(), true);
  session.wait();
  EXPECT_EQ(emulator::now_ns() - begun < kSoonNs, true);
  if (first) {
    EXPECT_EQ(static_cast<int32_t>(first->reason), static_cast<int32_t>(reason));
    EXPECT_EQ(first->epoch != 0, true);
    EXPECT_EQ(first->expected != first->seen, true);
  }
  for (auto& rank : session.ranks()) operation.check(*rank);
  check_failed(session, reason, peer);
}

// Ranks in different operations: an error by name.
void run_other_operation(Session& session, std::mt19937& random) {
  if (session.num_ranks() == 1) return;
  const Rank* const other = session.ranks()[random() % session.num_ranks()].get();
  const Failing operation(session, random);
  operation.launch(session, -1, [&](Rank& rank, auto& args) { args.hash += &rank == other; });
  run_until_failure(session, operation, FailureReason::kOtherOp, -1);
}

// A rank that the mesh has at another place.
void run_wrong_rank(Session& session, std::mt19937& random) {
  const auto wrong = static_cast<int32_t>(random() % session.num_ranks());
  Array<int32_t>& axis_index = session.ranks()[wrong]->axis_index;
  ++axis_index.host[0];
  axis_index.upload();
  const Failing operation(session, random);
  operation.launch(session, -1, [](auto&&...) {});
  run_until_failure(session, operation, FailureReason::kWrongRank, wrong);
}

// Two launches of one group at the same time on each device: an error by name. If two devices begin with different
// launches, a rank may also find that a peer is in another operation. (Over a network, a rank may first hear of it when
// its time is up.)
void run_overlap(Session& session, std::mt19937& random) {
  if (session.num_ranks() == 1 || !session.are_local(0, session.num_ranks() - 1)) return;
  const auto missing = static_cast<int32_t>(random() % session.num_ranks());
  const Failing operation(session, random);
  session.wait();
  emulator::set_num_sms(2 * kMostBlocks);                // room for both launches
  operation.launch(session, missing, [](auto&&...) {});  // waits for the missing rank
  session.whole([](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); }, missing, 1);
  session.wait();
  const std::optional<FailureRecord> failure = session.group().failure();
  const auto reason = failure ? static_cast<FailureReason>(failure->reason) : FailureReason::kTimeout;
  EXPECT_EQ(reason == FailureReason::kOverlap || (reason == FailureReason::kOtherOp && session.num_ranks() > 2), true);
  check_failed(session, reason);
}

// A peer that is late, and late again: the operation still ends within one time-out. The host plays the peer: it says
// that rows come, which never do.
void run_late_twice(int32_t cast, Blocks blocks) {
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
  control.op[kSlot][kPeer] = tagged(static_cast<uint32_t>(OpKind::kDispatch));
  for (auto& words : control.num_rows[kSlot]) words[kPeer] = tagged(kRows);
  auto* const counts = reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(&control) +
                                                   counts_offset(kSlot, kPeer, 2, experts_per_rank));
  for (int32_t expert = 0; expert < experts_per_rank; ++expert) counts[expert] = tagged(expert == 0 ? kRows : 0);
  EXPECT_EQ(session.group().failure().has_value(), false);
  emulator::run_for(static_cast<uint64_t>(0.6e9 * kShortTimeout));
  EXPECT_EQ(session.group().failure().has_value(), true);
  session.wait();
}

// The host fails the group while a kernel writes its own failure record, or after that. The record that the host reads
// is one of the two, and no mixture.
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

// A start that is never done keeps its slot, which another operation then waits for.
void run_never_done(Session& session) {
  session.start([&](Rank& rank) { return rank.dispatch_split(session.cast()); });
  for (int32_t i = 0; i < session.num_slots(); ++i) {
    session.whole([](Rank& rank) { return rank.combine(); });
  }
  session.wait();
  check_failed(session, FailureReason::kSlotTaken);
}

// --- operations that succeed ---------------------------------------------------------------------------------------

// Only the cotangents of the router's weights go back.
void run_weights_back(Session& session) {
  session.whole([](Rank& rank) {
    CombineArgs args = rank.dispatch_back();
    args.y = nullptr, args.out = nullptr, args.row_bytes = 0;
    return args;
  });
  session.check_results();
}

// Launches a whole operation that needs no other results than those of run_whole().
void launch_any(Session& session, std::mt19937& random) {
  const auto choice = random() % 3;
  if (choice == 0) {
    session.whole([](Rank& rank) { return rank.dispatch_back(); });
  } else if (choice == 1) {
    session.whole([](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
  } else {
    session.whole([](Rank& rank) { return rank.combine_back(); });
  }
}

// Whole operations and split-phase calls, all launched before any is looked at. Several starts are under way at once,
// in the slots that later operations then wait for.
void run_far_ahead(Session& session, std::mt19937& random) {
  struct Started {
    bool is_dispatch;
    int32_t pending, number;  // of the operation
  };
  std::vector<Started> under_way;
  const auto done = [&](size_t index) {
    const Started started = under_way[index];
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(index));
    if (started.is_dispatch) {
      session.done([&](Rank& rank) { return rank.dispatch_split(session.cast(), started.pending); });
    } else {
      session.done([&](Rank& rank) { return rank.combine_split(started.pending); });
    }
  };
  const auto start = [&](int32_t number) {
    const bool is_dispatch = random() % 2;
    const auto has = [&](int32_t pending) {
      return std::any_of(under_way.begin(), under_way.end(), [&](const Started& started) {
        return started.is_dispatch == is_dispatch && started.pending == pending;
      });
    };
    int32_t pending = 0;
    while (pending < kPending && has(pending)) ++pending;
    if (pending == kPending) return false;
    if (is_dispatch) {
      session.start([&](Rank& rank) { return rank.dispatch_split(session.cast(), pending); });
    } else {
      session.start([&](Rank& rank) { return rank.combine_split(pending); });
    }
    under_way.push_back({is_dispatch, pending, number});
    return true;
  };
  if (random() % 2) session.open_group();
  const int32_t num_slots = session.num_slots();
  const auto start_share = 2 + random() % 3;
  const auto most_behind = num_slots - 1 + static_cast<int32_t>(random() % 3);
  for (int32_t number = 0; number < 14; ++number) {
    if (random() % start_share != 0 || !start(number)) launch_any(session, random);
    const auto behind_first = [&] { return under_way.empty() ? 0 : number - under_way.front().number; };
    while (behind_first() >= most_behind) done(0);
    // Bodies run one after the other: one for whose slot another operation waits comes before that one's.
    if (!under_way.empty() && random() % 4 == 0) done(behind_first() >= num_slots ? 0 : random() % under_way.size());
  }
  while (!under_way.empty()) done(0);
  session.check_results();
}

// Launches of one group on several streams, in an order that events give them.
void run_streams(Session& session) {
  for (int32_t i = 0; i < 3 * kStreams; ++i) {
    const int32_t stream = i % kStreams;
    session.order_streams((stream + kStreams - 1) % kStreams, stream);
    switch (stream) {
      case 0:
        session.whole([](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); }, -1, stream);
        break;
      case 1:
        session.whole([](Rank& rank) { return rank.combine(); }, -1, stream);
        break;
      case 2:
        session.whole([](Rank& rank) { return rank.combine_back(); }, -1, stream);
        break;
      default:
        session.whole([](Rank& rank) { return rank.dispatch_back(); }, -1, stream);
    }
  }
  session.check_results();
}

// Dispatches with this capacity, and checks which rows are kept: their weights tell.
void check_kept_rows(Session& session, Layout layout, int64_t capacity) {
  session.whole([&](Rank& rank) {
    DispatchArgs args = rank.dispatch(session.cast());
    args.layout = layout, args.capacity = capacity;
    args.alignment = layout == Layout::kRagged ? kAlignment : 1;
    args.num_rows = layout == Layout::kRagged ? capacity : experts_per_rank * capacity;
    return args;
  });
  session.wait();
  session.expect_no_failure();
  for (int32_t r = 0; r < session.num_ranks(); ++r) {
    Rank& rank = *session.ranks()[r];
    const Held held = held_by(session.ranks(), r, layout, capacity);
    EXPECT_EQ(rank.counts.download(), held.counts);
    EXPECT_EQ(rank.group_sizes.download(), held.group_sizes);
    EXPECT_EQ(rank.num_dropped.download()[0], held.num_dropped);
    rank.weights.download();
    for (size_t i = 0; i < held.rows.size(); ++i) {
      const Held::Row row = held.rows[i];
      const float weight =
          row.source < 0 ? 0 : session.ranks()[row.source]->topk_weights.host[row.token * top_k + row.k];
      EXPECT_EQ(rank.weights.host[i], weight);
    }
  }
}

// More rows than there is room for: the places of those that are dropped are empty for later operations, too.
void run_dropped(Session& session, std::mt19937& random) {
  for (int32_t i = 0; i < 5; ++i) {
    session.whole([&](Rank& rank) {
      DispatchArgs args = rank.dispatch(session.cast());
      args.capacity = args.num_rows = kAlignment;
      return args;
    });
  }
  for (int64_t tiles : {1, 3, 8}) {
    check_kept_rows(session, Layout::kRagged, std::min(tiles * kAlignment, session.ranks()[0]->num_rows));
    check_kept_rows(session, Layout::kExpert, std::min(tiles, session.ranks()[0]->num_rows / experts_per_rank));
  }
  session.randomize(random);
  session.run_whole();
}

// Each operation has its own time-out, which begins with the operation's first long wait. Two operations of one slot
// wait for a late rank. Each wait is shorter than the time-out. A pause between the two operations is longer.
void run_after_pause(Session& session) {
  // A waiting thread reads the clock at every 64th poll. It polls a few times in each step of run_for(), of 20 ms.
  constexpr auto kLateNs = static_cast<uint64_t>(0.04e9 * kTimeout);
  const int32_t late_rank = session.num_ranks() - 1;
  const auto combine = [](Rank& rank) { return rank.combine(); };
  const auto run_with_late_rank = [&] {
    session.whole(combine, late_rank);
    emulator::run_for(kLateNs);
    session.whole_of(late_rank, combine);
  };
  run_with_late_rank();
  for (int32_t i = 1; i < session.num_slots(); ++i) session.whole(combine);
  session.wait();
  emulator::run_for(static_cast<uint64_t>(2e9 * kTimeout));
  run_with_late_rank();
  session.check_results();
}

// A done with other buffers than its start is refused, and does no harm to the start.
void run_refused_done(Session& session) {
  const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(session.cast()); };
  session.start(dispatch);
  for (int32_t r = 0; r < session.num_ranks(); ++r) {
    Rank& rank = *session.ranks()[r];
    Buffers others = buffers_of(dispatch(rank));
    others.front() = rank.like.device;
    bool is_refused = false;
    try {
      session.group().members()[r].split_phase->done(others, rank.streams[0]);
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    EXPECT_EQ(is_refused, true);
  }
  session.done(dispatch);
  session.check_results();
}

// --- what a seed chooses -------------------------------------------------------------------------------------------

// As many blocks of a device's as one scenario needs at once, if the seed limits them.
class ResidentBlocks {
 public:
  explicit ResidentBlocks(int needed) : former_(emulator::adversary.resident_blocks) {
    if (former_ != 0) emulator::adversary.resident_blocks = needed;
  }
  ~ResidentBlocks() { emulator::adversary.resident_blocks = former_; }

 private:
  int former_;
};
constexpr int kAllBlocks = 0;
// The bodies of two split-phase calls, and a block of a whole operation: plan.h leaves SMs for as many.
constexpr int kBlocksOfHalves = 2 * kMostBlocks + 1;

// Afterwards all results are those of run_whole().
void run_success(Session& session, std::mt19937& random, uint32_t scenario) {
  switch (scenario) {
    case 0: {
      const ResidentBlocks enough(kBlocksOfHalves);
      return session.run_split_phase();
    }
    case 1:
      session.run_look_like_sentinels(random);
      session.randomize(random);
      return session.run_whole();
    case 2:
      return run_weights_back(session);
    case 3:
      return run_dropped(session, random);
    case 4:
      return run_after_pause(session);
    case 5:
      return run_refused_done(session);
    case 6:  // slots are used again
      session.randomize(random);
      session.run_whole();
      return session.run_whole();
    case 7:
      return run_streams(session);
    case 15:
      return run_all_to_all(session, random, Splits::kRagged, random() % 2);
    default: {
      const ResidentBlocks enough(kBlocksOfHalves);
      return run_far_ahead(session, random);
    }
  }
}
constexpr uint32_t kSuccesses = 16;

void run_failure(Session& session, std::mt19937& random, Blocks blocks, uint32_t scenario) {
  switch (scenario) {
    case 0:
      return run_without_rank(session, random);
    case 1: {
      const ResidentBlocks enough(kAllBlocks);  // of both launches
      return run_overlap(session, random);
    }
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

// --- orders that seldom show ---------------------------------------------------------------------------------------

// A setting of the emulator's adversary that one scenario needs, in place of the seed's choice.
class Settings {
 public:
  Settings() : former_(emulator::adversary) {}
  Settings(const Settings&) = delete;
  ~Settings() {
    former_.random = emulator::adversary.random;
    emulator::adversary = former_;
  }

 private:
  emulator::Adversary former_;
};

// The results that run_whole() has beside those of dispatch.
void run_way_back(Session& session) {
  session.whole([](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
  session.whole([](Rank& rank) { return rank.combine_back(); });
  session.whole([](Rank& rank) { return rank.combine(); });
  session.whole([](Rank& rank) { return rank.dispatch_back(); });
  session.check_results();
}

// dispatch_like of other rows than x: of those in x_cotangent, to the place of the cotangent.
DispatchArgs dispatch_others(Rank& rank) {
  DispatchArgs args = rank.along_route(OpKind::kDispatchLike, rank.cotangent);
  args.x = rank.x_cotangent.device;
  return args;
}
void check_others(Session& session) {
  session.wait();
  session.expect_no_failure();
  for (auto& rank : session.ranks()) rank->send_slot.download(), rank->recv_row.download(), rank->cotangent.download();
  const size_t num_ranks = session.ranks().size();
  for (size_t s = 0; s < num_ranks && check::failures == 0; ++s) {
    const Rank& source = *session.ranks()[s];
    for (int32_t token = 0; token < num_tokens; ++token) {
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t expert = source.ids.host[token * top_k + k];
        if (!is_expert(expert, source.experts)) continue;
        const int32_t rank = rank_of_expert(expert, experts_per_rank);
        const Rank& target = *session.ranks()[rank];
        const int32_t row =
            target.recv_row.host[(s * num_tokens + source.send_slot.host[token * num_ranks + rank]) * top_k + k];
        EXPECT_EQ(same_bits(&target.cotangent.host[int64_t{row} * kHidden], &source.x_cotangent.host[token * kHidden]),
                  true);
      }
    }
  }
}

// A done hands its slot to an operation that already waits for the slot, on all ranks. The operation that is launched
// num_slots operations behind the start, and before the done, is that operation.
//
// The blocks of the done empty the units that they read. If a block's stores of the empty pattern are not ordered
// before the words that tell "finished", the next operation of the slot can begin while they are pending:
//  - A peer writes new rows to the slot, and the pending stores then overwrite the rows. Somebody waits for them
//  forever.
//    The stores may be those of the last block (release of `finished`; the fence before it, over a network), or those
//    of the other blocks (`atomic_add_acq_rel_gpu`).
//  - This rank reads the old rows again, as if they were the new ones (release of its own `finished`). The new rows
//  must
//    be other ones, or nobody sees the difference.
// The end of the done's kernel makes all its stores visible. So the kernel must end late, and some stores must be held.
void run_slots_handed_over(Session& session, std::mt19937& random) {
  const Settings former;
  emulator::Adversary& adversary = emulator::adversary;
  adversary.delays_stores = adversary.delays_launches = true;
  adversary.resident_blocks = kAllBlocks;
  adversary.late_share = 0.8;
  adversary.settle_share = pick(random, std::vector{0.05, 0.3});
  adversary.held_share = pick(random, std::vector{0.003, 0.02});
  adversary.held_blocks_share = pick(random, std::vector{0.0, 0.0, 0.3});
  const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(session.cast()); };
  const int32_t num_slots = session.num_slots();
  const auto launch_one = [&] {
    if (random() % 2) {
      session.whole([](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
    } else {
      session.whole([](Rank& rank) { return rank.combine(); });
    }
  };
  for (auto& rank : session.ranks()) {
    for (float& value : rank->x_cotangent.host) value = std::uniform_real_distribution<float>(2, 3)(random);
    rank->x_cotangent.upload();
  }
  session.whole([&](Rank& rank) { return rank.dispatch(session.cast()); });
  for (int32_t round = 0; round < 3 && check::failures == 0; ++round) {
    session.start(dispatch);
    for (int32_t i = 1; i < num_slots; ++i) launch_one();
    session.whole(dispatch_others);
    session.done(dispatch);
    for (auto left = random() % (2 * num_slots); left > 0; --left) launch_one();
    check_others(session);
  }
  run_way_back(session);
}

// Over a network, the word "finished" of an operation must arrive before the word of the next operation of the same
// slot, which replaces it. Otherwise an operation that asks for the later word waits forever.
//
// A start sends the earlier word, and nothing else. So no rank waits while only the puts of starts are under way. The
// whole operations that follow know that the slot is free, and do not ask for the word. The last whole operation sends
// the later word. When both words have arrived, the next start of the slot is done, and asks for the later word. The
// group must have four slots: with two slots, the operation behind the start asks for the earlier word.
void run_words_in_order(Session& session, std::mt19937& random) {
  const Settings former;
  emulator::Adversary& adversary = emulator::adversary;
  adversary.delays_stores = true;
  adversary.delays_launches = false;
  adversary.resident_blocks = kAllBlocks;
  adversary.stall_share = adversary.held_share = adversary.held_blocks_share = 0;
  adversary.settle_share = 0.3;
  const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(session.cast()); };
  const auto combine = [](Rank& rank) { return rank.combine_split(); };
  session.whole([&](Rank& rank) { return rank.dispatch(session.cast()); });
  session.start(combine);  // While it is under way, other starts end at once.
  launch_any(session, random);
  session.wait();
  adversary.held_blocks_share = 1;
  session.start(dispatch);
  session.wait();
  adversary.held_blocks_share = 0;
  session.done(combine);
  session.done(dispatch);
  run_way_back(session);
  constexpr uint64_t kAllArriveNs = 1'000'000;
  emulator::run_for(kAllArriveNs);
  session.run_split_phase();
}

// Blocks of a done start in any order, and fewer of them run at a time than are receivers. The first ones to start are
// the senders, whatever their indices: a receiver that runs in place of its rank's senders waits for them forever.
void run_done_in_any_order(Session& session, std::mt19937& random) {
  const Settings former;
  emulator::adversary.shuffles_blocks = true;
  emulator::adversary.resident_blocks = pick(random, std::vector{1, 2, 3});
  const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(session.cast()); };
  const auto combine = [&](Rank& rank) { return rank.combine_split(); };
  session.start(dispatch);
  session.done(dispatch);
  session.start(combine);
  session.done(combine);
  run_way_back(session);
}

// A few operations of a group of its own, whose settings make it likely that one order shows.
std::string run_rare_orders(uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed) * 2654435761u);
  const auto scenario = random() % 4;
  const bool is_of_network = scenario == 3;
  if (is_of_network && random() % 3 != 0) return "";
  const auto num_ranks = pick<int32_t>(random, {2, 2, 2, 3, 4});
  const auto node_size = is_of_network ? 1 : num_ranks == 3 ? 0 : pick<int32_t>(random, {0, 1});
  const auto cast = pick<int32_t>(random, {0, 0, 1});
  experts_per_rank = pick<int32_t>(random, {1, 3});
  num_tokens = pick<int32_t>(random, {2, 4, 8}), top_k = pick<int32_t>(random, {1, 2});
  const Blocks blocks = pick<Blocks>(random, {{0, Variant::kLowLatency},
                                              {2, Variant::kBalanced},
                                              {5, Variant::kBalanced},
                                              {6, Variant::kBalanced},
                                              {6, Variant::kThroughput}});
  // So many that the arena has two slots, or four.
  const int32_t max_tokens = is_of_network ? num_tokens : 4000 / num_ranks;
  emulator::set_num_sms(pick<int32_t>(random, {2, 3, 6}));
  Session session(num_ranks, cast, blocks, kTimeout, 0, max_tokens, {}, node_size);
  EXPECT_EQ(session.num_slots(), is_of_network ? 4 : 2);
  session.randomize(random);
  if (scenario == 0) {
    run_done_in_any_order(session, random);
    return ", then a done in any order";
  }
  const std::string where = " by " + std::to_string(num_ranks) + " ranks in nodes of " + std::to_string(node_size) +
                            ", variant " + std::to_string(static_cast<int>(blocks.variant));
  if (is_of_network) {
    run_words_in_order(session, random);
    return ", then words in order" + where;
  }
  run_slots_handed_over(session, random);
  return ", then slots handed over" + where;
}

// How many ranks are a node of a group over a network; 0 without one. Where nodes have several ranks, half of the
// groups get so many tokens that rows go by node.
int32_t pick_node_size(std::mt19937& random, int32_t num_ranks) {
  const std::vector<int32_t> sizes = num_ranks == 8   ? std::vector<int32_t>{0, 0, 2, 4}
                                     : num_ranks == 4 ? std::vector<int32_t>{0, 0, 1, 2, 2}
                                     : num_ranks == 2 ? std::vector<int32_t>{0, 0, 1}
                                                      : std::vector<int32_t>{0};
  const auto size = pick(random, sizes);
  if (size > 1 && random() % 2) num_tokens = 33 + random() % 8, top_k = 1 + random() % 2;
  return size;
}

// What the seed has chosen, for who looks for the reason of a failure.
std::string run_exchange(uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto num_ranks = pick<int32_t>(random, {1, 1, 2, 2, 3, 4, 4, 8});
  const auto cast = pick<int32_t>(random, {0, 0, 1, 2});
  experts_per_rank = pick<int32_t>(random, {1, 3, 3, 40});
  // With the last choice, each of a large block's warps counts the experts of one token.
  struct Tokens {
    int32_t number, top_k;
  };
  const auto tokens = pick<Tokens>(random, {{1, 4}, {7, 1}, {12, 4}, {12, 4}, {12, 4}, {16, 32}});
  const bool is_large = num_ranks * tokens.top_k > 64;
  num_tokens = is_large ? 12 : tokens.number, top_k = is_large ? 4 : tokens.top_k;
  const Blocks blocks = pick<Blocks>(random, {{0, Variant::kLowLatency},
                                              {0, Variant::kLowLatency, true, true},
                                              {1, Variant::kThroughput},
                                              {2, Variant::kBalanced},
                                              {2, Variant::kThroughput},
                                              {3, Variant::kBalanced, false},
                                              {3, Variant::kThroughput},
                                              {6, Variant::kThroughput}});
  // Epochs that wrap, where epoch 0 is behind operations that have written every word that it waits for.
  const bool has_wrapping_epochs = random() % 6 == 0;
  const uint32_t newest_epoch = has_wrapping_epochs ? -(7 + random() % 4) : 0;
  // Not of the random numbers of the rest, which would be others then.
  std::mt19937 of_network(static_cast<uint32_t>(~seed));
  const int32_t node_size = pick_node_size(of_network, num_ranks);
  // So many that the arena has two slots.
  const bool has_two_slots = num_ranks <= 3 && random() % 3 == 0;
  const int32_t max_tokens = has_two_slots ? 4000 / num_ranks : num_tokens;
  const auto num_sms = pick<int32_t>(random, {1, 2, 3, 4, 6});
  emulator::set_num_sms(num_sms);
  Session session(num_ranks, cast, blocks, kTimeout, newest_epoch, max_tokens, {}, node_size);
  EXPECT_EQ(session.num_slots(), has_two_slots ? 2 : 4);
  session.randomize(random);
  session.run_whole();
  std::string scenarios;
  for (auto left = has_wrapping_epochs ? 0 : random() % 3; left > 0 && check::failures == 0; --left) {
    const uint32_t scenario = random() % kSuccesses;
    scenarios += " " + std::to_string(scenario);
    run_success(session, random, scenario);
  }
  if (has_wrapping_epochs) {
    session.randomize(random);
    session.run_whole();
    session.run_whole();
  } else if (random() % 3 == 0 && check::failures == 0) {
    const uint32_t scenario = random() % kFailures;
    scenarios += ", failure " + std::to_string(scenario);
    run_failure(session, random, blocks, scenario);
  }
  const std::string nodes = node_size > 0 ? " in nodes of " + std::to_string(node_size) : "";
  return std::to_string(num_ranks) + " ranks" + nodes + ", " + std::to_string(num_tokens) + " tokens, top_k " +
         std::to_string(top_k) + ", cast " + std::to_string(cast) + ", " + std::to_string(experts_per_rank) +
         " experts per rank, variant " + std::to_string(static_cast<int>(blocks.variant)) + " on " +
         std::to_string(blocks.number) + " SMs of " + std::to_string(num_sms) + ", newest epoch " +
         std::to_string(static_cast<int32_t>(newest_epoch)) + ", scenarios" + scenarios;
}

std::string run_seed(uint64_t seed) {
  std::string what = run_exchange(seed);
  if (check::failures == 0) what += run_rare_orders(seed);
  std::mt19937 random(static_cast<uint32_t>(seed));
  if (check::failures == 0) run_group_arrays_of(random, 1 + random() % 40);
  if (check::failures == 0 && seed % 4 == 0) {
    what += ", then a failure by the host";
    run_host_fails(seed);
  }
  return what;
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
