// Short exchanges between emulated GPUs. A seed decides the number of ranks, the kernels' variant, the inputs, the
// operations, what fails, and the order of everything: the same seed gives the same run.
#pragma once

#include <iostream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "exchange_balance.h"
#include "exchange_dispatch_layout.h"
#include "exchange_emulated.h"
#include "exchange_expand.h"
#include "exchange_failures.h"
#include "exchange_group_arrays.h"
#include "exchange_layouts.h"
#include "exchange_many_ranks.h"
#include "exchange_rare_orders.h"
#include "exchange_rounds.h"
#include "exchange_successes.h"
#include "exchange_two_groups.h"

namespace {

// Returns the number of ranks per node, or 0 for a group without a network. If nodes have several ranks, half of the
// groups get so many tokens that rows go through rail peers.
int32_t pick_node_size(std::mt19937& random, int32_t num_ranks) {
  const std::vector<int32_t> sizes = num_ranks == 8   ? std::vector<int32_t>{0, 0, 2, 4}
                                     : num_ranks == 4 ? std::vector<int32_t>{0, 0, 1, 2, 2}
                                     : num_ranks == 2 ? std::vector<int32_t>{0, 0, 1}
                                                      : std::vector<int32_t>{0};
  const auto size = pick(random, sizes);
  if (size > 1 && random() % 2) num_tokens = 33 + random() % 8, top_k = 1 + random() % 2;
  return size;
}

// Returns what the seed has chosen, for the report of a failure. With must_fail, exactly one scenario follows the first
// operations, one of exchange_failures.h. (With one rank, some of these do nothing.)
std::string run_scenarios(uint64_t seed, bool must_fail = false) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto num_ranks = pick<int32_t>(random, {1, 1, 2, 2, 3, 4, 4, 8});
  const auto cast = pick<int32_t>(random, {0, 0, 1, 2});
  experts_per_rank = pick<int32_t>(random, {1, 3, 3, 40});
  // {16, 32}: each warp of a block with many warps counts the experts of one token.
  struct Tokens {
    int32_t number, top_k;
  };
  const auto tokens = pick<Tokens>(random, {{1, 4}, {7, 1}, {12, 4}, {12, 4}, {12, 4}, {16, 32}});
  const bool is_large = num_ranks * tokens.top_k > 64;
  num_tokens = is_large ? 12 : tokens.number, top_k = is_large ? 4 : tokens.top_k;
  const PlanOverrides blocks = pick<PlanOverrides>(random, {{0, Variant::kLowLatency},
                                                            {0, Variant::kLowLatency, true, true},
                                                            {1, Variant::kThroughput},
                                                            {2, Variant::kBalanced},
                                                            {2, Variant::kThroughput},
                                                            {3, Variant::kBalanced, false},
                                                            {3, Variant::kThroughput},
                                                            {6, Variant::kThroughput}});
  // In one of six seeds, the epoch wraps around to 0. Then the words for which epoch 0 waits already have values of
  // earlier epochs.
  const bool has_wrapping_epochs = random() % 6 == 0 && !must_fail;
  const uint32_t newest_epoch = has_wrapping_epochs ? -(7 + random() % 4) : 0;
  // The network's choices use their own generator, so that they do not change the other choices of a seed.
  std::mt19937 of_network(static_cast<uint32_t>(~seed));
  const int32_t node_size = pick_node_size(of_network, num_ranks);
  std::mt19937 of_casts(static_cast<uint32_t>(seed + 7919));  // the same for the casts of operations after a dispatch
  // With so many tokens, the arena has two slots.
  const bool has_two_slots = num_ranks <= 3 && random() % 3 == 0;
  const int32_t max_tokens = has_two_slots ? 4000 / num_ranks : num_tokens;
  const auto num_sms = pick<int32_t>(random, {1, 2, 3, 4, 6});
  emulator::set_num_sms(num_sms);
  Session session(num_ranks, cast, blocks, kTimeout, newest_epoch, max_tokens, {}, node_size);
  EXPECT_EQ(session.num_slots(), has_two_slots ? 2 : 4);
  EXPECT_EQ(session.group().members()[0].num_sms, num_sms);
  session.set_cast_after_dispatch(pick<int32_t>(of_casts, {0, 0, 1, 2, 3}));
  session.randomize(random);
  session.run_whole();
  std::string scenarios;
  for (auto left = has_wrapping_epochs || must_fail ? 0 : random() % 3; left > 0 && check::failures == 0; --left) {
    const uint32_t scenario = random() % kSuccesses;
    scenarios += " " + std::to_string(scenario);
    run_success(session, random, scenario);
  }
  if (has_wrapping_epochs) {
    session.randomize(random);
    session.run_whole();
    session.run_whole();
  } else if ((must_fail || random() % 3 == 0) && check::failures == 0) {
    const uint32_t scenario = random() % kFailures;
    scenarios += ", failure " + std::to_string(scenario);
    run_failure(session, random, blocks, scenario);
  }
  const std::string nodes = node_size > 0 ? " in nodes of " + std::to_string(node_size) : "";
  return std::to_string(num_ranks) + " ranks" + nodes + ", " + std::to_string(num_tokens) + " tokens, top_k " +
         std::to_string(top_k) + ", cast " + std::to_string(cast) + ", later casts " +
         std::to_string(session.ranks()[0]->cast_after_dispatch) + ", " + std::to_string(experts_per_rank) +
         " experts per rank, variant " + std::to_string(static_cast<int>(blocks.variant)) + " on " +
         std::to_string(blocks.number) + " SMs of " + std::to_string(num_sms) + ", newest epoch " +
         std::to_string(static_cast<int32_t>(newest_epoch)) + ", scenarios" + scenarios;
}

// Runs this with the seed, unless a check has failed before, and adds its name to `what`.
void then(std::string& what, const char* name, void (*run)(uint64_t), uint64_t seed) {
  if (check::failures != 0) return;
  what += std::string(", then ") + name;
  run(seed);
}

std::string run_seed(uint64_t seed) {
  std::string what = run_scenarios(seed);
  if (check::failures == 0) what += ", then " + run_rare_orders(seed);
  std::mt19937 random(static_cast<uint32_t>(seed));
  // One seed of 16 has more groups than the kernel has threads (kThreads in groups.cu).
  const int32_t extra_groups = seed % 16 == 6 ? 1024 : 0;
  if (check::failures == 0) run_group_arrays_of(random, extra_groups + 1 + random() % 40);
  if (check::failures == 0 && seed % 4 == 3) {
    what += ", then expand";
    run_expand_and_reduce(random);
  }
  if (check::failures == 0 && seed % 8 == 2) {
    what += ", then dispatch_layout";
    run_dispatch_layout(1 + random() % 40, 4, 6, 2, 1, random);
  }
  if (check::failures == 0 && seed % 8 == 6) {
    what += ", then layouts";
    const PlanOverrides blocks = pick<PlanOverrides>(
        random,
        {{0, Variant::kLowLatency}, {2, Variant::kBalanced}, {1, Variant::kThroughput}, {3, Variant::kThroughput}});
    run_layouts(pick<int32_t>(random, {1, 2, 2, 4}), blocks, random);
  }
  if (check::failures == 0) what += run_balance(seed);
  if (check::failures == 0 && seed % 8 == 0) run_balance_without_gain();
  if (check::failures == 0 && seed % 16 == 13) what += run_many_ranks(seed);
  if (check::failures == 0 && seed % 2 == 1) what += ", then " + run_rounds(seed);
  if (seed % 4 == 0) then(what, "a failure by the host", run_host_fails, seed);
  if (seed % 4 == 1) then(what, "a wrong rank", run_wrong_rank_of_few_tokens, seed);
  if (seed % 4 == 2) then(what, "two groups", run_two_groups, seed);
  if (seed % 4 == 3) then(what, "a wrong rank with stalled blocks", run_wrong_rank_with_stalled_blocks, seed);
  return what;
}

// Four scenarios in which a group fails.
std::string run_failures(uint64_t seed) {
  std::string what = run_scenarios(seed, true);
  then(what, "a failure by the host", run_host_fails, seed);
  then(what, "a wrong rank", run_wrong_rank_of_few_tokens, seed);
  then(what, "a wrong rank with stalled blocks", run_wrong_rank_with_stalled_blocks, seed);
  return what;
}

std::string run_part_scenarios(uint64_t seed) { return run_scenarios(seed); }
std::string run_part_two_groups(uint64_t seed) {
  run_two_groups(seed);
  return "two groups";
}

// What runs with each seed: everything, or a part.
using RunSeed = std::string (*)(uint64_t seed);
const std::map<std::string, RunSeed> kPartsOfSeeds = {
    {"seeds", run_seed},    {"scenarios", run_part_scenarios}, {"failures", run_failures},
    {"rounds", run_rounds}, {"rare_orders", run_rare_orders},  {"two_groups", run_part_two_groups},
};

int run_seeds(RunSeed run_one, uint64_t first, uint64_t count, const std::string& settings) {
  for (uint64_t seed = first; seed < first + count; ++seed) {
    emulator::reset_scheduler();
    emulator::set_adversary(seed, settings);
    const std::string what = run_one(seed);
    if (check::failures == 0) continue;
    std::cerr << "seed " << seed << " has failed: " << what << "\n";
    return 1;
  }
  std::cerr << "seeds " << first << " to " << first + count - 1 << ": no failure; the last ended at virtual time "
            << emulator::now_ns() << " ns\n";
  return 0;
}

// Only run_many_ranks().
int run_many_ranks_of_seeds(int32_t num_ranks, uint64_t first, uint64_t count) {
  if (num_ranks != 0 && num_ranks != 64 && num_ranks != 72 && num_ranks != 256) {
    std::cerr << "many_ranks takes 64, 72 or 256 ranks, or 0 for 33 to 66, not " << num_ranks << "\n";
    return 2;
  }
  for (uint64_t seed = first; seed < first + count; ++seed) {
    emulator::reset_scheduler();
    emulator::set_adversary(seed, "");
    const std::string what = run_many_ranks(seed, num_ranks);
    std::cerr << "seed " << seed << what << ": " << check::failures << " failures\n";
    if (check::failures != 0) return 1;
  }
  return 0;
}

}  // namespace
