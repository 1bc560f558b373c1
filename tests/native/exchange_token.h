// The layout "token", with room for all rows and with less. A plain loop over all tokens computes which rows a rank
// must get, their slots and weights, and which weights must come back.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "exchange_layouts.h"

namespace {

// The buffers of one rank for the layout "token", in addition to those of a `Rank`.
struct TokenBuffers {
  int64_t capacity;
  Array<int32_t> sent{size_t(num_tokens) * top_k};  // the first slot of each rank that a token names, once
  Array<int32_t> recv_topk_idx{size_t(capacity) * top_k}, rows_per_rank;
  Array<float> weights{size_t(capacity) * top_k};

  TokenBuffers(const Rank& rank, int64_t capacity) : capacity(capacity), rows_per_rank(size_t(rank.ranks)) {
    for (int32_t token = 0; token < num_tokens; ++token) {
      std::vector<bool> is_named(rank.ranks);
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t id = rank.ids.host[token * top_k + k], owner = id / experts_per_rank;
        const bool is_sent = id >= 0 && id < rank.experts && !is_named[owner];
        sent.host[token * top_k + k] = is_sent ? owner * experts_per_rank : -1;
        if (is_sent) is_named[owner] = true;
      }
    }
    sent.upload();
  }

  DispatchArgs dispatch(Rank& rank, int32_t cast) {
    DispatchArgs args = rank.dispatch(cast);
    args.layout = Layout::kToken, args.capacity = args.num_rows = capacity, args.alignment = 1;
    args.topk_idx = sent.device, args.named_slot = rank.ids.device;
    args.weights = weights.device, args.recv_topk_idx = recv_topk_idx.device;
    args.num_rows_per_rank = rows_per_rank.device;
    return args;
  }

  CombineArgs dispatch_back(Rank& rank) const {
    CombineArgs args = rank.dispatch_back();
    args.weights_cotangent = weights.device, args.has_token_weights = true;
    return args;
  }
};

// Checks the results of rank `index`. Adds the weights of the pairs that it kept to `returned`, [rank][T, K].
void check_token_rows(const std::vector<std::unique_ptr<Rank>>& ranks, int32_t index, TokenBuffers& got,
                      std::vector<std::vector<float>>& returned) {
  Rank& rank = *ranks[index];
  const auto is_here = [&](int32_t id) { return id >= 0 && id < rank.experts && id / experts_per_rank == index; };
  std::vector<std::vector<int32_t>> tokens(ranks.size());  // that name this rank, by source
  std::vector<int32_t> needs;
  for (size_t source = 0; source < ranks.size(); ++source) {
    for (int32_t token = 0; token < num_tokens; ++token) {
      const int32_t* const ids = ranks[source]->ids.host.data() + token * top_k;
      if (std::any_of(ids, ids + top_k, is_here)) tokens[source].push_back(token);
    }
    needs.push_back(static_cast<int32_t>(tokens[source].size()));
  }
  const std::vector<int32_t> kept = share_round_robin(needs, got.capacity, 0);
  std::vector<int32_t> topk_idx(got.capacity * top_k, -1);
  std::vector<float> weights(got.capacity * top_k), rows(rank.recv.host.size());
  int64_t row = 0;
  for (size_t source = 0; source < ranks.size(); ++source) {
    for (int32_t i = 0; i < kept[source]; ++i, ++row) {
      const int64_t token = tokens[source][i];
      std::copy_n(ranks[source]->x.host.begin() + token * kHidden, kHidden, rows.begin() + row * kHidden);
      for (int32_t k = 0; k < top_k; ++k) {
        const int64_t pair = token * top_k + k;
        const int32_t id = ranks[source]->ids.host[pair];
        if (!is_here(id)) continue;
        topk_idx[row * top_k + k] = id - index * experts_per_rank;
        weights[row * top_k + k] = returned[source][pair] = ranks[source]->topk_weights.host[pair];
      }
    }
  }
  EXPECT_EQ(got.rows_per_rank.download(), kept);
  EXPECT_EQ(got.recv_topk_idx.download(), topk_idx);
  EXPECT_EQ(got.weights.download(), weights);
  EXPECT_EQ(rank.num_dropped.download()[0], std::accumulate(needs.begin(), needs.end(), -static_cast<int32_t>(row)));
  std::vector<float> found = rank.recv.download();
  found.resize(got.capacity * kHidden), rows.resize(found.size());
  expect_near(found, rows, rank.recv.is_bfloat16 ? 0.1f : 0, "dispatch, token rows");
}

// After it, all results are those of run_whole().
void run_token_rows(Session& session, std::mt19937& random) {
  const int64_t most = int64_t{session.num_ranks()} * num_tokens;
  for (int64_t capacity : {most, std::max<int64_t>(1, most / 3)}) {
    std::vector<std::unique_ptr<TokenBuffers>> buffers;
    for (const auto& rank : session.ranks()) buffers.push_back(std::make_unique<TokenBuffers>(*rank, capacity));
    const auto of = [&](const Rank& rank) -> TokenBuffers& { return *buffers[rank.axis_index.host[0]]; };
    session.whole([&](Rank& rank) { return of(rank).dispatch(rank, session.cast()); });
    session.whole([&](Rank& rank) { return of(rank).dispatch_back(rank); });
    session.wait();
    session.expect_no_failure();
    std::vector<std::vector<float>> returned(session.num_ranks(), std::vector<float>(num_tokens * top_k));
    for (int32_t r = 0; r < session.num_ranks(); ++r) check_token_rows(session.ranks(), r, *buffers[r], returned);
    for (int32_t r = 0; r < session.num_ranks(); ++r) {
      expect_near(session.ranks()[r]->topk_cotangent.download(), returned[r], 0, "dispatch (backward), token weights");
    }
  }
  session.randomize(random);
  session.run_whole();
}

}  // namespace
