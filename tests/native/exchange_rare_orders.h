// A few operations of a separate group. Their settings make it likely that a missing memory order causes a failure.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "exchange_all_to_all.h"
#include "exchange_emulated.h"

namespace {

// Runs all operations of run_whole() except dispatch, and checks the results.
void run_all_but_dispatch(Session& session) {
  session.whole([](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); });
  session.whole([](Rank& rank) { return rank.combine_back(); });
  session.whole([](Rank& rank) { return rank.combine(); });
  session.whole([](Rank& rank) { return rank.dispatch_back(); });
  session.check_results();
}

// dispatch_like of x_cotangent, with results in `cotangent`.
DispatchArgs dispatch_x_cotangent(Rank& rank) {
  DispatchArgs args = rank.dispatch_with_route(OpKind::kDispatchLike, rank.cotangent);
  args.x = rank.x_cotangent.device;
  return args;
}
void check_dispatched_x_cotangent(Session& session) {
  session.wait();
  session.expect_no_failure();
  for (auto& rank : session.ranks()) rank->send_index.download(), rank->recv_row.download(), rank->cotangent.download();
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
            target.recv_row.host[(s * num_tokens + source.send_index.host[token * num_ranks + rank]) * top_k + k];
        EXPECT_EQ(same_bits(&target.cotangent.host[int64_t{row} * kHidden], &source.x_cotangent.host[token * kHidden]),
                  true);
      }
    }
  }
}

// The operation num_slots after a start needs the start's slot. It is launched before the done, so it waits for the
// slot. The done frees the slot while that operation waits, on all ranks.
//
// The blocks of the done restore the sentinels in the units that they read. If a block's stores of sentinels are not
// ordered before the stores to `finished`, the next operation of the slot can begin while they are pending:
//  - A peer writes new rows to the slot, and the pending stores then overwrite the rows. A receiver waits for the rows
//    forever. The stores may be those of the last block (release of `finished`; the fence before it, over a network),
//    or those of the other blocks (`atomic_add_acq_rel_gpu`).
//  - This rank reads the old rows again, as if they were the new rows (release of its own `finished`). The new rows
//    must differ, or no check would notice.
// The end of the done's kernel makes all its stores visible. So the kernel must end late, and some stores must be held.
void run_slots_handed_over(Session& session, std::mt19937& random) {
  const Settings former;
  emulator::Adversary& adversary = emulator::adversary;
  adversary.delays_stores = adversary.delays_launches = true;
  adversary.resident_blocks = kNoBlockLimit;
  adversary.late_share = 0.8;
  adversary.settle_share = pick(random, std::vector{0.05, 0.3});
  adversary.held_share = pick(random, std::vector{0.02, 0.1});
  adversary.held_blocks_share = pick(random, std::vector{0.0, 0.0, 0.3});
  const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(session.cast()); };
  const int32_t num_slots = session.num_slots();
  const auto launch_one = [&] {
    if (random() % 2) {
      session.whole([](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); });
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
    session.whole(dispatch_x_cotangent);
    session.done(dispatch);
    for (auto left = random() % (2 * num_slots); left > 0; --left) launch_one();
    check_dispatched_x_cotangent(session);
  }
  run_all_but_dispatch(session);
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
  adversary.resident_blocks = kNoBlockLimit;
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
  run_all_but_dispatch(session);
  constexpr uint64_t kAllArriveNs = 1'000'000;
  emulator::run_for(kAllArriveNs);
  session.run_split_phase();
}

// PlanOverrides of a done start in any order, and fewer blocks run at a time than there are receivers. The blocks that
// start first must be the senders, whatever their indices. Otherwise, receivers would wait forever for senders that
// cannot start.
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
  run_all_but_dispatch(session);
}

// Blocks start in any order, and fewer run at a time than there are senders. The senders of all_to_all_back wait for
// the numbers of rows that a block of each peer sends. So that block must be the first that starts, whatever its index.
// Otherwise, senders would hold all SMs and wait forever.
void run_all_to_all_in_any_order(Session& session, std::mt19937& random) {
  const Settings former;
  emulator::adversary.shuffles_blocks = true;
  emulator::adversary.resident_blocks = pick(random, std::vector{1, 2, 3});
  run_all_to_all(session, random, Splits::kRagged, random() % 2);
}

// Few tokens on many SMs, so that a combine has senders and receivers in blocks of their own. Blocks start in any
// order, and fewer run at a time than there are receivers.
void run_few_tokens_in_any_order(Session& session, std::mt19937& random) {
  const Settings former;
  emulator::adversary.shuffles_blocks = true;
  emulator::adversary.resident_blocks = pick(random, std::vector{1, 3, 20});
  session.whole([&](Rank& rank) { return rank.dispatch(session.cast()); });
  run_all_but_dispatch(session);
}

// Chooses one of the scenarios above, and runs it with a group of its own.
std::string run_rare_orders(uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed) * 2654435761u);
  const auto scenario = random() % 6;
  const bool is_of_network = scenario == 3;
  if (is_of_network && random() % 3 != 0) return "no rare order";
  const auto num_ranks = pick<int32_t>(random, {2, 2, 2, 3, 4});
  const auto node_size = is_of_network ? 1 : num_ranks == 3 ? 0 : pick<int32_t>(random, {0, 1});
  const auto cast = pick<int32_t>(random, {0, 0, 1});
  experts_per_rank = pick<int32_t>(random, {1, 3});
  num_tokens = pick<int32_t>(random, {2, 4, 8}), top_k = pick<int32_t>(random, {1, 2});
  if (scenario == 5) num_tokens = pick<int32_t>(random, {1, 2, 5});
  const auto any = pick<PlanOverrides>(random, {{0, Variant::kLowLatency},
                                                {2, Variant::kBalanced},
                                                {5, Variant::kBalanced},
                                                {6, Variant::kBalanced},
                                                {6, Variant::kThroughput}});
  const PlanOverrides blocks = scenario >= 4 ? PlanOverrides{0, Variant::kLowLatency} : any;
  // The number of tokens decides whether the arena has two or four slots.
  const int32_t max_tokens = is_of_network ? num_tokens : 4000 / num_ranks;
  emulator::set_num_sms(scenario == 5 ? pick<int32_t>(random, {24, 132}) : pick<int32_t>(random, {6, 10}));
  Session session(num_ranks, cast, blocks, kTimeout, 0, max_tokens, {}, node_size);
  EXPECT_EQ(session.num_slots(), is_of_network ? 4 : 2);
  session.randomize(random);
  if (scenario == 0) {
    run_done_in_any_order(session, random);
    return "a done in any order";
  }
  if (scenario == 5) {
    run_few_tokens_in_any_order(session, random);
    return "few tokens in any order";
  }
  if (scenario == 4) {
    run_all_to_all_in_any_order(session, random);
    return "all_to_all in any order";
  }
  const std::string where = " by " + std::to_string(num_ranks) + " ranks in nodes of " + std::to_string(node_size) +
                            ", variant " + std::to_string(static_cast<int>(blocks.variant));
  if (is_of_network) {
    run_words_in_order(session, random);
    return "words in order" + where;
  }
  run_slots_handed_over(session, random);
  return "slots handed over" + where;
}

}  // namespace
