// Exchanges over an emulated network between more than 32 ranks, so that a warp has more ranks than lanes (ranks.cuh).
#pragma once

#include <random>
#include <string>
#include <vector>

#include "exchange_emulated.h"
#include "exchange_failures.h"
#include "exchange_successes.h"

namespace {

struct ManyRanks {
  int32_t num_ranks, node_size;
};
// Groups that take at most 5 GB and 20 seconds to emulate, and the groups of each larger number of ranks.
const std::vector<ManyRanks> kFewMoreThanLanes = {{33, 1}, {33, 11}, {36, 12}, {40, 8}, {40, 20}, {40, 40}, {66, 11}};
const std::vector<ManyRanks> kRanksOf64 = {{64, 1}, {64, 8}, {64, 16}, {64, 32}, {64, 64}};
const std::vector<ManyRanks> kRanksOf72 = {{72, 8}, {72, 36}, {72, 72}};
const std::vector<ManyRanks> kRanksOf256 = {{256, 8}, {256, 64}, {256, 128}};

// `num_ranks`: 64, 72 or 256; or 0 for one of kFewMoreThanLanes, of 33 to 66 ranks.
std::string run_many_ranks(uint64_t seed, int32_t num_ranks = 0) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  // With more than 32 tokens, rows go through rail peers. One expert per rank keeps their memory small.
  const bool has_rails = num_ranks == 0 && seed / 16 % 8 == 1;
  const ManyRanks ranks = pick<ManyRanks>(random, has_rails          ? std::vector<ManyRanks>{{33, 11}}
                                                  : num_ranks == 64  ? kRanksOf64
                                                  : num_ranks == 72  ? kRanksOf72
                                                  : num_ranks == 256 ? kRanksOf256
                                                                     : kFewMoreThanLanes);
  const int32_t tokens = num_tokens, k = top_k, experts = experts_per_rank;
  const int32_t most_tokens = ranks.num_ranks == 256 || ranks.num_ranks == 66 ? 1 : 4;
  experts_per_rank = has_rails ? 1 : 1 + static_cast<int32_t>(random() % 2);
  num_tokens = has_rails ? 33 : 1 + static_cast<int32_t>(random() % most_tokens);
  top_k = has_rails ? 2 : 1 + static_cast<int32_t>(random() % 8);
  const PlanOverrides blocks = pick<PlanOverrides>(random, {{0, Variant::kLowLatency},
                                                            {0, Variant::kLowLatency, true, true},
                                                            {2, Variant::kBalanced},
                                                            {2, Variant::kThroughput, true, true}});
  emulator::set_num_sms(2);
  const auto cast = pick<int32_t>(random, {0, 1});
  {
    Session session(ranks.num_ranks, cast, blocks, kTimeout, 0, num_tokens, {}, ranks.node_size);
    session.set_cast_after_dispatch(pick<int32_t>(random, {0, 2}));
    session.randomize(random);
    session.run_whole();
    if (!has_rails) {
      const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(cast); };
      const auto combine = [&](Rank& rank) { return rank.combine_split(); };
      session.start(dispatch);
      session.done(dispatch);
      session.start(combine);
      session.done(combine);
      session.run_whole();  // these operations need the slots of the former ones
      if (random() % 4 == 0) run_without_rank(session, random);
    }
  }
  const std::string what = ", then " + std::to_string(ranks.num_ranks) + " ranks in nodes of " +
                           std::to_string(ranks.node_size) + ", " + std::to_string(num_tokens) + " tokens, top_k " +
                           std::to_string(top_k);
  num_tokens = tokens, top_k = k, experts_per_rank = experts;
  return what;
}

}  // namespace
