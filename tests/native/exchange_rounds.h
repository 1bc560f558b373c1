// Exchanges between emulated GPUs whose arena is so small that operations have rounds (Round in call.h).
#pragma once

#include <random>
#include <string>
#include <vector>

#include "exchange_emulated.h"
#include "exchange_failures.h"
#include "exchange_layouts.h"
#include "exchange_successes.h"

namespace {

std::string run_rounds(uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed + 104729));
  const int32_t tokens = num_tokens, k = top_k, experts = experts_per_rank;
  struct Ranks {
    int32_t number, node_size;  // node_size: 0 for no network
    bool has_rails;             // rows go through rail peers
  };
  const auto ranks = pick<Ranks>(random, {{1, 0, false},
                                          {2, 0, false},
                                          {3, 0, false},
                                          {4, 0, false},
                                          {8, 0, false},
                                          {2, 1, false},
                                          {4, 2, false},
                                          {4, 2, true}});
  experts_per_rank = pick<int32_t>(random, {1, 3, 3, 20});
  num_tokens = ranks.has_rails ? 33 + static_cast<int32_t>(random() % 8) : pick<int32_t>(random, {2, 7, 12, 13, 20});
  top_k = ranks.has_rails ? 1 + static_cast<int32_t>(random() % 2) : pick<int32_t>(random, {1, 4, 4, 8});
  const int32_t round_tokens =
      ranks.has_rails ? 9 + static_cast<int32_t>(random() % 24) : 1 + static_cast<int32_t>(random() % (num_tokens - 1));
  const auto cast = pick<int32_t>(random, {0, 0, 1, 2});
  // Only plans for many tokens have rounds. They may have any number of blocks.
  const PlanOverrides blocks = pick<PlanOverrides>(random, {{0, Variant::kThroughput},
                                                            {1, Variant::kThroughput},
                                                            {2, Variant::kThroughput},
                                                            {3, Variant::kThroughput},
                                                            {6, Variant::kThroughput, true, true}});
  emulator::set_num_sms(pick<int32_t>(random, {1, 2, 3, 6}));
  // In one of four seeds, the epoch wraps around to 0, as in run_scenarios().
  const uint32_t newest_epoch = random() % 4 == 0 ? -(7 + random() % 4) : 0;
  {
    Session session(ranks.number, cast, blocks, kTimeout, newest_epoch, num_tokens, {}, ranks.node_size, 0,
                    round_tokens);
    EXPECT_EQ(session.num_slots(), kSlotsWithRounds);
    EXPECT_EQ(session.round_tokens() < num_tokens, true);
    session.set_cast_after_dispatch(pick<int32_t>(random, {0, 0, 1, 2, 3}));
    session.randomize(random);
    session.run_whole();
    if (check::failures == 0 && random() % 3 == 0) run_all_to_all(session, random, Splits::kRagged, random() % 2);
    switch (check::failures == 0 ? random() % 8 : 0) {
      case 2:
        run_dropped(session, random);
        break;
      case 3:
        run_token_rows(session, random);
        break;
      case 4:
        run_weights_back(session);
        run_streams(session);
        break;
      case 5:
        session.run_look_like_sentinels(random);
        break;
      case 6:
        // The senders of a combine wait for the ranges of all ranks, and a receiver may wait for such a sender.
        run_without_rank(session, random, false);
        break;
      case 7:
        random() % 2 ? run_other_operation(session, random) : run_wrong_rank(session, random);
        break;
      default:
        session.randomize(random);
        session.run_whole();
        session.run_whole();
    }
  }
  const std::string what = std::to_string(ranks.number) + " ranks in nodes of " + std::to_string(ranks.node_size) +
                           ", " + std::to_string(num_tokens) + " tokens in rounds of " + std::to_string(round_tokens) +
                           ", top_k " + std::to_string(top_k) + ", " + std::to_string(experts_per_rank) +
                           " experts per rank, cast " + std::to_string(cast) + " on " + std::to_string(blocks.number) +
                           " SMs";
  num_tokens = tokens, top_k = k, experts_per_rank = experts;
  return what;
}

}  // namespace
