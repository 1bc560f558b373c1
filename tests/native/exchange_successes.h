// Operations between emulated GPUs that succeed, although they are late, share slots, or drop rows.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "exchange_all_to_all.h"
#include "exchange_emulated.h"
#include "exchange_layouts.h"
#include "exchange_token.h"

namespace {

// Runs dispatch's backward pass only for the weights of the router.
void run_weights_back(Session& session) {
  session.whole([](Rank& rank) {
    CombineArgs args = rank.dispatch_back();
    args.y = nullptr, args.out = nullptr, args.row_bytes = 0;
    return args;
  });
  session.check_results();
}

// Launches many whole operations and split-phase calls, and checks results only at the end. Several starts are in
// flight at once, and later operations wait for their slots.
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
    // Bodies run one after another. If an operation waits for the slot of a start, the done of that start must come
    // first.
    if (!under_way.empty() && random() % 4 == 0) done(behind_first() >= num_slots ? 0 : random() % under_way.size());
  }
  while (!under_way.empty()) done(0);
  session.check_results();
}

// Launches operations of one group on several streams, which events order.
void run_streams(Session& session) {
  for (int32_t i = 0; i < 3 * kStreams; ++i) {
    const int32_t stream = i % kStreams;
    session.order_streams((stream + kStreams - 1) % kStreams, stream);
    switch (stream) {
      case 0:
        session.whole([](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); }, -1,
                      stream);
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

// Dispatches with this capacity. Checks by the weights which rows are kept.
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
    const ExpectedRows held = expected_rows_of(session.ranks(), r, layout, capacity);
    EXPECT_EQ(rank.counts.download(), held.counts);
    EXPECT_EQ(rank.group_sizes.download(), held.group_sizes);
    EXPECT_EQ(rank.num_dropped.download()[0], held.num_dropped);
    rank.weights.download();
    for (size_t i = 0; i < held.rows.size(); ++i) {
      const ExpectedRows::Row row = held.rows[i];
      const float weight =
          row.source < 0 ? 0 : session.ranks()[row.source]->topk_weights.host[row.token * top_k + row.k];
      EXPECT_EQ(rank.weights.host[i], weight);
    }
  }
}

// Dispatches more rows than there is room for. The arena rows of dropped rows must also be empty for later operations.
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

// A done with other buffers than its start must be refused. The start stays valid.
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

// After a scenario, all results are those of run_whole().
void run_success(Session& session, std::mt19937& random, uint32_t scenario) {
  switch (scenario) {
    case 0: {
      const ResidentBlocks enough(kBlocksOfSplitPhase);
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
    case 8:
      return run_token_rows(session, random);
    case 15:
      return run_all_to_all(session, random, Splits::kRagged, random() % 2);
    default: {
      const ResidentBlocks enough(kBlocksOfSplitPhase);
      return run_far_ahead(session, random);
    }
  }
}
constexpr uint32_t kSuccesses = 16;

}  // namespace
