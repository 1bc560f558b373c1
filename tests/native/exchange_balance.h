// Balanced placement between the ranks of a Session: the properties of a plan. (tests/test_balance.py compares plans
// with an oracle.)
#pragma once

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "exchange.h"
#ifdef JAX_EP_EMULATOR
#include "exchange_emulated.h"
#endif

namespace {

// Sizes of a group, and a tolerance.
struct BalanceCase {
  int32_t num_ranks, home_experts, replicas, tolerance_units = 0, node_size = 0;
};

// The results of one rank.
struct PlanOfRank {
  Rank& rank;
  const int32_t index = rank.axis_index.host[0];
  Array<int32_t> slot_expert, num_rows{1}, home_rows{1}, slots, topk_slot{size_t(num_tokens) * top_k}, work;

  PlanOfRank(Rank& rank, const BalanceCase& sizes)
      : rank(rank),
        slot_expert(sizes.replicas),
        slots(size_t(sizes.num_ranks) * sizes.replicas),
        work(balance_work_words(sizes.num_ranks * sizes.home_experts, sizes.num_ranks)) {
    for (auto* array : {&slot_expert, &num_rows, &home_rows, &slots, &topk_slot}) {
      std::fill(array->host.begin(), array->host.end(), -2);
      array->upload();
    }
  }

  BalanceArgs args(int32_t home_experts, int32_t tolerance_units) const {
    BalanceArgs args = {};
    args.op = OpKind::kBalance;
    args.hash = static_cast<uint32_t>(args.op);
    args.axis_index = rank.axis_index.device;
    args.num_tokens = num_tokens, args.top_k = top_k;
    args.topk_idx = rank.ids.device;
    args.tolerance_units = tolerance_units;
    args.by_home_experts = Divisor(home_experts);
    args.slot_expert = slot_expert.device, args.num_rows = num_rows.device, args.home_rows = home_rows.device;
    args.slots = slots.device, args.topk_slot = topk_slot.device, args.work = work.device;
    return args;
  }
  void download() {
    for (auto* array : {&slot_expert, &num_rows, &home_rows, &slots, &topk_slot}) array->download();
  }
};

using Plans = std::vector<std::unique_ptr<PlanOfRank>>;

struct Row {
  int32_t expert, to;  // the rank that computes it
};

// Checks the rows of all ranks, in the order of source ranks, tokens and k. Each row must be at the home of its expert,
// or at a copy of the expert.
std::vector<Row> rows_of(const Plans& plans, int32_t home_experts, int32_t replicas) {
  const int32_t slots_per_rank = home_experts + replicas;
  const auto num_experts = static_cast<int32_t>(plans.size()) * home_experts;
  std::vector<Row> rows;
  int32_t num_wrong = 0;
  for (const auto& plan : plans) {
    EXPECT_EQ(plan->slots.host == plans[0]->slots.host, true);
    for (size_t i = 0; i < plan->topk_slot.host.size(); ++i) {
      const int32_t id = plan->rank.ids.host[i], at = plan->topk_slot.host[i];
      if (id < 0 || id >= num_experts) {
        num_wrong += at != -1;
        continue;
      }
      const int32_t to = at / slots_per_rank, slot = at % slots_per_rank;
      if (at < 0 || to >= static_cast<int32_t>(plans.size())) {
        ++num_wrong;
        continue;
      }
      const bool is_home = slot < home_experts;
      num_wrong +=
          id != (is_home ? to * home_experts + slot : plans[0]->slots.host[to * replicas + slot - home_experts]);
      rows.push_back({id, to});
    }
  }
  EXPECT_EQ(num_wrong, 0);
  return rows;
}

// Checks that in each rank's queue of rows, the rows that another rank takes are next to each other.
void check_intervals(std::vector<Row> rows, const std::vector<int32_t>& needs, int32_t home_experts) {
  std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) {
    const auto key = [&](const Row& row) {
      return std::tuple(row.expert / home_experts, -needs[row.expert], row.expert);
    };
    return key(a) < key(b);
  });
  std::set<std::pair<int32_t, int32_t>> begun;
  std::pair<int32_t, int32_t> newest = {-1, -1};
  for (const Row& row : rows) {
    const int32_t home = row.expert / home_experts;
    const std::pair<int32_t, int32_t> interval = {home, row.to};
    if (row.to != home && interval != newest) EXPECT_EQ(begun.insert(interval).second, true);
    newest = interval;
  }
}

void check_plans(const Plans& plans, int32_t home_experts, int32_t replicas, int32_t tolerance_units) {
  const auto num_ranks = static_cast<int32_t>(plans.size());
  const std::vector<Row> rows = rows_of(plans, home_experts, replicas);
  std::vector<int32_t> needs(num_ranks * home_experts), at_home(num_ranks), computed(num_ranks);
  std::set<std::pair<int32_t, int32_t>> sources;
  for (const Row& row : rows) {
    ++needs[row.expert], ++at_home[row.expert / home_experts], ++computed[row.to];
    if (row.to != row.expert / home_experts) sources.insert({row.to, row.expert / home_experts});
  }
  const int64_t mean = (static_cast<int64_t>(rows.size()) + num_ranks - 1) / num_ranks;
  const int64_t limit = mean + mean * tolerance_units / kToleranceUnitsPerOne;
  const int32_t most_at_home = *std::max_element(at_home.begin(), at_home.end());
  int32_t most = most_at_home;
  if (replicas == home_experts) most = std::min<int64_t>(most, limit);
  for (const auto& plan : plans) {
    const int32_t rank = plan->index;
    EXPECT_EQ(plan->num_rows.host[0], computed[rank]);
    EXPECT_EQ(plan->home_rows.host[0], at_home[rank]);
    EXPECT_EQ(computed[rank] <= most, true);
    const auto first = plan->slots.host.begin() + rank * replicas;
    EXPECT_EQ(std::equal(first, first + replicas, plan->slot_expert.host.begin()), true);
    if (most_at_home <= limit) EXPECT_EQ(std::count(first, first + replicas, -1), replicas);
    int32_t num_sources = 0;
    for (const auto& [to, from] : sources) num_sources += to == rank;
    EXPECT_EQ(num_sources <= 1, true);
  }
  check_intervals(rows, needs, home_experts);
}

// Chooses random ids. A random share of them, from none to all, names the expert `preferred` or the next one.
void choose_ids(std::vector<int32_t>& ids, int32_t num_experts, uint32_t preferred, std::mt19937& random) {
  const uint32_t share = random() % 5;
  for (int32_t& id : ids) {
    id = std::uniform_int_distribution<int32_t>(-1, num_experts)(random);
    if (random() % 4 < share) id = (preferred + random() % 2) % num_experts;
  }
}

// Runs the operation with the ids that choose(rank) has set on the host, often enough that slots are used again.
template <typename Choose>
Plans check_balance(Session& session, const BalanceCase& sizes, int32_t num_times, Choose choose) {
  Plans plans;
  for (auto& rank : session.ranks()) {
    must(cudaSetDevice(device_of(rank->axis_index.host[0])));
    choose(*rank);
    rank->ids.upload();
    plans.push_back(std::make_unique<PlanOfRank>(*rank, sizes));
  }
  session.wait();
  const auto args = [&](Rank& rank) {
    return plans[rank.axis_index.host[0]]->args(sizes.home_experts, sizes.tolerance_units);
  };
  for (int32_t i = 0; i < num_times; ++i) session.whole(args);
  session.wait();
  session.expect_no_failure();
  for (auto& plan : plans) plan->download();
  check_plans(plans, sizes.home_experts, sizes.replicas, sizes.tolerance_units);
  return plans;
}

// The weights of one rank's experts and copies, or their gradients.
struct Experts {
  const PlanOfRank& plan;
  const BalanceCase& sizes;
  const int64_t channels;
  Array<float> values{size_t((sizes.home_experts + sizes.replicas) * channels)};

  ReplicateArgs args(OpKind op, bool clears_slots) const {
    ReplicateArgs args = {};
    args.op = op;
    args.hash = static_cast<uint32_t>(op);
    args.axis_index = plan.rank.axis_index.device;
    args.slots = plan.slots.device;
    args.by_home_experts = Divisor(sizes.home_experts);
    args.expert_bytes = channels * sizeof(float);
    args.home = reinterpret_cast<uint8_t*>(values.device);
    args.copies = args.home + sizes.home_experts * args.expert_bytes;
    args.clears_slots = clears_slots;
    return args;
  }
  const float* at(const std::vector<float>& all, int32_t number) const { return &all[number * channels]; }
};

// Copies experts to the slots of the plans, and gradients back. Compares every bit.
void check_copies(Session& session, const BalanceCase& sizes, const Plans& plans, std::mt19937& random) {
  const auto channels = pick<int64_t>(random, {4, 20, 1152, 5000, 40'000});
  const bool clears_slots = random() % 2;
  const std::vector<int32_t>& slots = plans[0]->slots.host;
  std::vector<std::unique_ptr<Experts>> all;
  for (const auto& plan : plans) {
    must(cudaSetDevice(device_of(plan->index)));
    all.emplace_back(new Experts{*plan, sizes, channels});
  }
  const auto randomize = [&] {  // returns the values
    std::vector<std::vector<float>> values;
    for (const auto& experts : all) {
      for (float& value : experts->values.host) value = std::uniform_real_distribution<float>(-1, 1)(random);
      look_like_sentinels(experts->values.host, random);
      experts->values.upload();
      values.push_back(experts->values.host);
    }
    return values;
  };
  const auto run = [&](OpKind op) {
    session.wait();
    session.whole([&](Rank& rank) { return all[rank.axis_index.host[0]]->args(op, clears_slots); });
    session.wait();
    session.expect_no_failure();
    std::vector<std::vector<float>> results;
    for (const auto& experts : all) results.push_back(experts->values.download());
    return results;
  };
  const auto expert_in = [&](int32_t rank, int32_t slot) { return slots[rank * sizes.replicas + slot]; };
  const std::vector<float> zeros(channels);
  int32_t num_wrong = 0;
  const auto compare = [&](const float* found, const float* expected) {
    num_wrong += std::memcmp(found, expected, channels * sizeof(float)) != 0;
  };

  const std::vector<std::vector<float>> before = randomize();
  const std::vector<std::vector<float>> after = run(OpKind::kReplicate);
  for (const auto& experts : all) {
    const int32_t rank = experts->plan.index;
    for (int32_t e = 0; e < sizes.home_experts; ++e) compare(experts->at(after[rank], e), experts->at(before[rank], e));
    for (int32_t slot = 0; slot < sizes.replicas; ++slot) {
      const int32_t expert = expert_in(rank, slot);
      const float* const found = experts->at(after[rank], sizes.home_experts + slot);
      if (expert >= 0) {
        compare(found, experts->at(before[expert / sizes.home_experts], expert % sizes.home_experts));
      } else if (clears_slots) {
        compare(found, zeros.data());
      }
    }
  }
  EXPECT_EQ(num_wrong, 0);

  // Each copy gets other gradients. With equal ones, a wrong order of addition would give the same sum.
  const std::vector<std::vector<float>> gradients = randomize();
  const std::vector<std::vector<float>> added = run(OpKind::kReplicateBack);
  for (const auto& experts : all) {
    const int32_t rank = experts->plan.index;
    for (int32_t e = 0; e < sizes.home_experts; ++e) {
      std::vector<float> sum(experts->at(gradients[rank], e), experts->at(gradients[rank], e) + channels);
      for (int32_t slot = 0; slot < sizes.replicas; ++slot) {
        for (int32_t receiver = 0; receiver < sizes.num_ranks; ++receiver) {
          if (expert_in(receiver, slot) != rank * sizes.home_experts + e) continue;
          const float* const copy = experts->at(gradients[receiver], sizes.home_experts + slot);
          for (int64_t i = 0; i < channels; ++i) sum[i] += copy[i];
        }
      }
      compare(experts->at(added[rank], e), sum.data());
    }
  }
  EXPECT_EQ(num_wrong, 0);
}

constexpr int32_t kMaxExchangeTokens = 40;

Session session_of(const BalanceCase& sizes) {
  experts_per_rank = sizes.home_experts + sizes.replicas;
  const PlanOverrides blocks = kOneDevice ? PlanOverrides{5, Variant::kBalanced} : PlanOverrides{};
  // Above this limit, the test exchanges no rows. Each rank then gets a buffer of one row, because full buffers would
  // take gigabytes.
  const Rows rows = num_tokens <= kMaxExchangeTokens ? Rows{} : Rows{Layout::kRagged, 1};
  return Session(sizes.num_ranks, 0, blocks, 60.0, 0, num_tokens, rows, sizes.node_size, sizes.replicas);
}

// Runs balance with sizes that the seed chooses. Changes the global sizes.
std::string run_balance(uint64_t seed, int32_t most_ranks = 8) {
  std::mt19937 random(static_cast<uint32_t>(seed * 7919));
  BalanceCase sizes = {std::min(pick<int32_t>(random, {1, 2, 2, 3, 4, 4, 8}), most_ranks),
                       pick<int32_t>(random, {1, 2, 5, 40}), 1};
  sizes.replicas = random() % 2 ? sizes.home_experts : 1 + random() % sizes.home_experts;
  sizes.tolerance_units = random() % 2 ? 0 : random() % kToleranceUnitsPerOne;
  sizes.node_size = !kOneDevice && sizes.num_ranks == 4 && random() % 2 ? 2 : 0;
  num_tokens = 1 + random() % kMaxExchangeTokens, top_k = 1 + random() % 4;
  if (random() % 8 == 0) num_tokens = 5 * kPairThreads + random() % 100;  // several blocks count the pairs
  Session session = session_of(sizes);
  const int32_t num_experts = sizes.num_ranks * sizes.home_experts;
  for (int32_t num_times : {1, 1 + static_cast<int32_t>(random() % 5)}) {
    // In half of the cases, all ranks prefer the same two experts. Then an expert can have copies in different slots.
    const bool all_prefer_the_same = random() % 2;
    uint32_t preferred = random() % num_experts;
    const Plans plans = check_balance(session, sizes, num_times, [&](Rank& rank) {
      if (!all_prefer_the_same) preferred = random() % num_experts;
      choose_ids(rank.ids.host, num_experts, preferred, random);
    });
    if (sizes.node_size == 0) check_copies(session, sizes, plans, random);
  }
  if (num_tokens <= kMaxExchangeTokens && random() % 3 == 0 &&
      sizes.num_ranks <= 4) {  // split-phase calls ask which operations the peers have finished
#ifdef JAX_EP_EMULATOR
    const ResidentBlocks enough(kBlocksOfSplitPhase);
#endif
    session.randomize(random);
    session.run_whole();
    const Plans plans = check_balance(session, sizes, 1 + random() % 3, [](Rank&) {});
    if (sizes.node_size == 0) check_copies(session, sizes, plans, random);
    session.run_split_phase();
  }
  return ", then a balance: " + std::to_string(sizes.num_ranks) + " ranks, " + std::to_string(sizes.home_experts) +
         " experts per rank, " + std::to_string(sizes.replicas) + " replicas, tolerance " +
         std::to_string(sizes.tolerance_units) + ", " + std::to_string(num_tokens) + " tokens, top_k " +
         std::to_string(top_k);
}

// With one slot per rank, moving rows could increase the largest load. Checks that no load exceeds the largest load
// without balance.
void run_balance_without_gain() {
  constexpr int32_t kNeeds[] = {4, 2, 0, 1, 2, 1, 2, 4, 4, 0, 1, 1, 0, 3, 0, 1,
                                4, 2, 1, 2, 0, 0, 4, 1, 0, 0, 0, 0, 0, 3, 3, 3};
  std::vector<int32_t> ids;
  for (int32_t expert = 0; expert < 32; ++expert) ids.insert(ids.end(), kNeeds[expert], expert);
  const BalanceCase sizes = {8, 4, 1};
  num_tokens = 7, top_k = 1;
  ids.resize(sizes.num_ranks * num_tokens, -1);
  Session session = session_of(sizes);
  check_balance(session, sizes, 1, [&](Rank& rank) {
    std::copy_n(ids.begin() + rank.axis_index.host[0] * num_tokens, num_tokens, rank.ids.host.begin());
  });
}

}  // namespace
