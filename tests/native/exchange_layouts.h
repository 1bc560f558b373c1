// The layouts "ragged" and "expert", with room for all rows and with less. A plain loop over all tokens computes which
// rows each expert must get, and which are dropped.
#pragma once

#include "exchange.h"

namespace {

// Shares `room` rows: in each round, each one that needs more gets one row. (share_rows() computes the same with a
// level.)
std::vector<int32_t> share_round_robin(const std::vector<int32_t>& need, int64_t room, int32_t start) {
  const auto num = static_cast<int32_t>(need.size());
  std::vector<int32_t> kept(num);
  for (bool served = true; room > 0 && served;) {
    served = false;
    for (int32_t i = start; i < start + num && room > 0; ++i) {
      if (kept[i % num] == need[i % num]) continue;
      ++kept[i % num], --room, served = true;
    }
  }
  return kept;
}

// The rows that the experts of one rank must have.
struct ExpectedRows {
  struct Row {
    int32_t source = -1, token, k;  // source: -1 where the row is padding
  };
  std::vector<Row> rows;
  std::vector<int32_t> counts, group_sizes;
  int32_t num_dropped = 0;
};

ExpectedRows expected_rows_of(const std::vector<std::unique_ptr<Rank>>& ranks, int32_t index, Layout layout,
                              int64_t capacity) {
  ExpectedRows held;
  const bool is_ragged = layout == Layout::kRagged;
  held.rows.resize(is_ragged ? capacity : experts_per_rank * capacity);
  const auto num_ranks = static_cast<int32_t>(ranks.size());
  std::vector<std::vector<std::vector<ExpectedRows::Row>>> all(experts_per_rank);  // by expert and source
  std::vector<std::vector<int32_t>> needs(experts_per_rank);
  std::vector<int32_t> totals, tiles;
  for (int32_t expert = 0; expert < experts_per_rank; ++expert) {
    all[expert].resize(num_ranks);
    int32_t total = 0;
    for (int32_t source = 0; source < num_ranks; ++source) {
      for (int32_t token = 0; token < num_tokens; ++token) {
        for (int32_t k = 0; k < top_k; ++k) {
          const int32_t id = ranks[source]->ids.host[token * top_k + k];
          if (id == index * experts_per_rank + expert) all[expert][source].push_back({source, token, k});
        }
      }
      needs[expert].push_back(static_cast<int32_t>(all[expert][source].size()));
      total += needs[expert].back();
    }
    totals.push_back(total);
    tiles.push_back((total + kAlignment - 1) / kAlignment);
  }
  if (is_ragged) tiles = share_round_robin(tiles, capacity / kAlignment, 0);
  int64_t first = 0;
  for (int32_t expert = 0; expert < experts_per_rank; ++expert) {
    const int64_t room = is_ragged ? tiles[expert] * kAlignment : capacity;
    const auto count = static_cast<int32_t>(std::min<int64_t>(totals[expert], room));
    const auto kept = share_round_robin(needs[expert], count, (index * experts_per_rank + expert) % num_ranks);
    if (!is_ragged) first = expert * capacity;
    auto row = held.rows.begin() + first;
    for (int32_t source = 0; source < num_ranks; ++source) {
      row = std::copy_n(all[expert][source].begin(), kept[source], row);
    }
    held.counts.push_back(count);
    held.group_sizes.push_back(is_ragged ? (count + kAlignment - 1) / kAlignment * kAlignment : count);
    held.num_dropped += totals[expert] - count;
    first += held.group_sizes.back();
  }
  return held;
}

// The results that must come back to the tokens: sums over the rows that were kept.
struct Returned {
  std::vector<float> combined, summed, weights;

  Returned() : combined(num_tokens * kHidden), summed(num_tokens * kHidden), weights(num_tokens * top_k) {}
};

void check_rows(const std::vector<std::unique_ptr<Rank>>& ranks, int32_t index, std::vector<Returned>& returned) {
  static const std::vector<float> zeros(kHidden);
  Rank& rank = *ranks[index];
  const ExpectedRows held = expected_rows_of(ranks, index, rank.shape.layout, rank.capacity);
  EXPECT_EQ(rank.counts.download(), held.counts);
  EXPECT_EQ(rank.group_sizes.download(), held.group_sizes);
  EXPECT_EQ(rank.num_dropped.download()[0], held.num_dropped);
  rank.recv.download(), rank.like.download(), rank.cotangent.download(), rank.weights.download();
  std::vector<float> weights(rank.num_rows), products(rank.num_rows), weighted(kHidden);
  int32_t wrong_rows = 0, wrong_like = 0, wrong_cotangents = 0;
  for (int64_t i = 0; i < rank.num_rows; ++i) {
    const ExpectedRows::Row row = held.rows[i];
    const float* x = zeros.data();
    if (row.source >= 0) {
      Rank& source = *ranks[row.source];
      x = &source.x.host[row.token * kHidden];
      weights[i] = source.topk_weights.host[row.token * top_k + row.k];
      Returned& there = returned[row.source];
      there.weights[row.token * top_k + row.k] = weights[i];
      for (int32_t h = 0; h < kHidden; ++h) {
        there.combined[row.token * kHidden + h] += weights[i] * x[h];
        there.summed[row.token * kHidden + h] += x[h];
      }
    }
    for (int32_t h = 0; h < kHidden; ++h) {
      weighted[h] = weights[i] * x[h];
      products[i] += rank.y.host[i * kHidden + h] * x[h];
    }
    wrong_rows += !same_bits(&rank.recv.host[i * kHidden], x);
    wrong_like += !same_bits(&rank.like.host[i * kHidden], x);
    wrong_cotangents += !std::equal(weighted.begin(), weighted.end(), &rank.cotangent.host[i * kHidden]);
  }
  EXPECT_EQ(wrong_rows, 0);
  EXPECT_EQ(wrong_like, 0);
  EXPECT_EQ(wrong_cotangents, 0);
  expect_near(rank.weights.host, weights, 0, "dispatch, weights");
  expect_near(rank.weights_cotangent.download(), products, 1e-3f, "combine (backward), weights");
}

// Runs a dispatch without zero_pad. Checks that rows added by alignment are zero, and that rows after the last group
// are unchanged.
void check_rows_without_zero_pad(Session& session) {
  for (auto& rank : session.ranks()) must(cudaMemset(rank->recv.device, 0xff, rank->recv.host.size() * sizeof(float)));
  session.wait();
  session.whole([](Rank& rank) {
    DispatchArgs args = rank.dispatch(0);
    args.zero_pad = false;
    return args;
  });
  session.wait();
  session.expect_no_failure();
  const std::vector<float> zeros(kHidden);
  for (int32_t r = 0; r < session.num_ranks(); ++r) {
    Rank& rank = *session.ranks()[r];
    const ExpectedRows held = expected_rows_of(session.ranks(), r, rank.shape.layout, rank.capacity);
    rank.recv.download();
    int64_t row = 0;
    int32_t num_not_zero = 0, num_written = 0;
    for (int32_t expert = 0; expert < experts_per_rank; ++expert) {
      const int64_t end = row + held.group_sizes[expert];
      for (row += held.counts[expert]; row < end; ++row)
        num_not_zero += !same_bits(&rank.recv.host[row * kHidden], zeros.data());
    }
    for (; row < rank.num_rows; ++row) num_written += !std::isnan(rank.recv.host[row * kHidden]);
    EXPECT_EQ(num_not_zero, 0);
    EXPECT_EQ(num_written, 0);
  }
}

// Runs each operation once. Before that, the results have arbitrary values.
void run_layout(Session& session) {
  for (auto& rank : session.ranks()) {
    for (Array<float>* result :
         std::initializer_list<Array<float>*>{&rank->recv, &rank->weights, &rank->like, &rank->out, &rank->cotangent,
                                              &rank->weights_cotangent, &rank->x_cotangent, &rank->topk_cotangent}) {
      must(cudaMemset(result->device, 0xff, result->host.size() * sizeof(float)));
    }
  }
  session.wait();
  session.whole([](Rank& rank) { return rank.dispatch(0); });
  session.whole([](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); });
  session.whole([](Rank& rank) { return rank.combine_back(); });
  session.whole([](Rank& rank) { return rank.combine(); });
  session.whole([](Rank& rank) { return rank.dispatch_back(); });
  session.wait();
  session.expect_no_failure();
  std::vector<Returned> returned(session.num_ranks());
  for (int32_t r = 0; r < session.num_ranks(); ++r) check_rows(session.ranks(), r, returned);
  for (int32_t r = 0; r < session.num_ranks(); ++r) {
    Rank& rank = *session.ranks()[r];
    const float tolerance = 3e-6f * std::max(top_k, 3);  // as many rows are summed
    expect_near(rank.out.download(), returned[r].combined, tolerance, "combine");
    expect_near(rank.x_cotangent.download(), returned[r].summed, tolerance, "dispatch (backward), x");
    expect_near(rank.topk_cotangent.download(), returned[r].weights, 0, "dispatch (backward), topk_weights");
  }
  if (session.ranks()[0]->shape.layout == Layout::kRagged) check_rows_without_zero_pad(session);
}

// The capacities leave room for most rows, for some rows, and for one row.
void run_layouts(int32_t num_ranks, PlanOverrides blocks, std::mt19937& random) {
  const int64_t expert_rows = int64_t{num_ranks} * num_tokens;
  for (Rows shape : {Rows{Layout::kExpert, expert_rows}, Rows{Layout::kExpert, 5}, Rows{Layout::kExpert, 1},
                     Rows{Layout::kRagged, 0}, Rows{Layout::kRagged, 2 * kAlignment}}) {
    Session session(num_ranks, 0, blocks, 60.0, 0, num_tokens, shape);
    for (int32_t round = 0; round < 2; ++round) {
      session.randomize(random);
      run_layout(session);
    }
  }
}

}  // namespace
