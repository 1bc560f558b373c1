// Checks of the results and the counters of operations.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "exchange_ranks.h"

namespace {

// Fails if an element of `got` differs from the one in `expected` by more than `tolerance`. `of_token`: more tolerance
// for the elements of each token.
void expect_near(const std::vector<float>& got, const std::vector<float>& expected, float tolerance, const char* what,
                 const std::vector<float>& of_token = {}) {
  float worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const float difference = std::fabs(got[i] - expected[i]) - (of_token.empty() ? 0 : of_token[i / kHidden]);
    if (!(difference <= worst)) worst = difference;  // also if it is NaN, which std::fmax would leave out
    if (std::isnan(worst)) break;
  }
  if (worst <= tolerance) return;
  ++check::failures;
  std::cerr << what << " is off by " << worst << "\n";
}

bool same_bits(const float* a, const float* b) { return std::memcmp(a, b, kRowBytes) == 0; }

// Checks that each row has arrived with the bits that were sent. If a token has only one row, its bits must also have
// come back.
void check_bits(const std::vector<std::unique_ptr<Rank>>& ranks) {
  for (auto& rank : ranks) rank->send_index.download(), rank->recv_row.download(), rank->recv.download();
  for (size_t s = 0; s < ranks.size(); ++s) {
    Rank& source = *ranks[s];
    source.x_cotangent.download();
    for (int32_t token = 0; token < num_tokens; ++token) {
      const float* x = &source.x.host[token * kHidden];
      int32_t num_rows = 0;
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t expert = source.ids.host[token * top_k + k];
        if (!is_expert(expert, source.experts)) continue;
        Rank& target = *ranks[rank_of_expert(expert, experts_per_rank)];
        const int32_t index = source.send_index.host[token * ranks.size() + rank_of_expert(expert, experts_per_rank)];
        const int32_t row = target.recv_row.host[(s * num_tokens + index) * top_k + k];
        EXPECT_EQ(same_bits(&target.recv.host[int64_t{row} * kHidden], x), true);
        ++num_rows;
      }
      if (num_rows == 1) EXPECT_EQ(same_bits(&source.x_cotangent.host[token * kHidden], x), true);
    }
  }
}

// `cast_error`: the largest error of a peer's sum of one row; 0 without a cast.
void check_rank(Rank& rank, float tolerance, float cast_error) {
  std::vector<float> combined(num_tokens * kHidden), summed(num_tokens * kHidden), returned(num_tokens * top_k);
  std::vector<float> of_casts(num_tokens);
  for (int32_t token = 0; token < num_tokens; ++token) {
    for (int32_t k = 0; k < top_k; ++k) {
      const int32_t entry = token * top_k + k;
      if (!is_expert(rank.ids.host[entry], rank.experts)) continue;
      returned[entry] = rank.topk_weights.host[entry];
      const bool is_own = rank_of_expert(rank.ids.host[entry], experts_per_rank) == rank.axis_index.host[0];
      if (!is_own) of_casts[token] += cast_error;
      for (int32_t h = 0; h < kHidden; ++h) {
        combined[token * kHidden + h] += rank.topk_weights.host[entry] * rank.x.host[token * kHidden + h];
        summed[token * kHidden + h] += rank.x.host[token * kHidden + h];
      }
    }
  }
  expect_near(rank.out.download(), combined, tolerance, "combine", of_casts);
  expect_near(rank.x_cotangent.download(), summed, tolerance, "dispatch (backward), x", of_casts);
  expect_near(rank.topk_cotangent.download(), returned, 0, "dispatch (backward), topk_weights");
  rank.recv.download(), rank.weights.download(), rank.cotangent.download();
  expect_near(rank.like.download(), rank.recv.host, tolerance, "dispatch_like");
  std::vector<float> weighted(rank.recv.host.size()), products(rank.weights.host.size());
  for (size_t i = 0; i < weighted.size(); ++i) {
    const float weight = rank.weights.host[i / kHidden];
    weighted[i] = weight * rank.like.host[i];
    float g = rank.like.host[i];
    if (cast_error) {
      // A value of E5M2 is off by an eighth of it at most. The rest is for the rounding to bfloat16.
      const auto [least, most] = std::minmax({weighted[i] * 0.86f, weighted[i] * 1.14f});
      weighted[i] = std::clamp(rank.cotangent.host[i], least, most);
      // No buffer has the row that was multiplied by y. So this check computes it.
      g = weight > 0 ? rank.cotangent.host[i] / weight : 0;
    }
    products[i / kHidden] += rank.y.host[i] * g;
  }
  expect_near(rank.cotangent.host, weighted, cast_error ? 1e-3f : tolerance, "combine (backward), y");
  // With a cast, y is truncated to bfloat16, and the cotangents are rounded to it.
  expect_near(rank.weights_cotangent.download(), products, cast_error ? 0.5f : 1e-3f, "combine (backward), weights");
  EXPECT_EQ(rank.num_dropped.download()[0], 0);
}

// The number of times that each operation has run, in the order of OpKind.
using Times = std::vector<uint64_t>;
const Times kOneEach = {1, 1, 1, 1, 1, 0, 0};  // no all_to_all

// Checks that the group's counters are those of `times` operations.
void check_stats(const Group& group, const std::vector<std::unique_ptr<Rank>>& ranks, int32_t cast,
                 const Times& times = kOneEach) {
  const auto tokens_to = [&](size_t source, size_t target) {
    uint64_t tokens = 0;
    for (int32_t token = 0; token < num_tokens; ++token) {
      bool is_sent = false;
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t expert = ranks[source]->ids.host[token * top_k + k];
        is_sent |= is_expert(expert, ranks[source]->experts) &&
                   rank_of_expert(expert, experts_per_rank) == static_cast<int32_t>(target);
      }
      tokens += is_sent;
    }
    return tokens;
  };
  const uint64_t header = top_k * kUnitBytes;
  const uint64_t fp8_row = kHidden + kUnitBytes * num_chunks(kHidden);
  const uint64_t dispatched = header + (cast ? fp8_row : kRowBytes);
  const bool casts_after_dispatch = ranks[0]->cast_after_dispatch != 0;
  const uint64_t cotangent_bytes = casts_after_dispatch ? fp8_row : kRowBytes;
  const uint64_t sum_bytes = casts_after_dispatch ? fp8_row : ranks[0]->recv.row_bytes();
  const auto times_of = [&](OpKind op) { return times[static_cast<size_t>(op)]; };
  const uint64_t dispatches = times_of(OpKind::kDispatch), backs = times_of(OpKind::kDispatchBack);
  const uint64_t rows_out = dispatches + times_of(OpKind::kDispatchLike) + times_of(OpKind::kCombineBack);
  const uint64_t rows_back = backs + times_of(OpKind::kCombine);
  const uint64_t bytes_out = dispatched * dispatches + kRowBytes * times_of(OpKind::kDispatchLike) +
                             cotangent_bytes * times_of(OpKind::kCombineBack);
  const uint64_t bytes_back = sum_bytes * rows_back + header * backs;
  Times all_times = times;
  all_times.resize(kNumOpKinds);  // the other kinds never run
  const std::vector<RankStats> stats = group.stats();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    EXPECT_EQ(stats[rank].operations, all_times);
    EXPECT_EQ(stats[rank].dropped, uint64_t{0});
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      const uint64_t out = tokens_to(rank, peer), back = tokens_to(peer, rank);
      const PeerStats& with_peer = stats[rank].peers[peer];
      EXPECT_EQ(with_peer.sent.rows, rows_out * out + rows_back * back);
      EXPECT_EQ(with_peer.sent.bytes, bytes_out * out + bytes_back * back);
      EXPECT_EQ(with_peer.received.rows, rows_out * back + rows_back * out);
      EXPECT_EQ(with_peer.received.bytes, bytes_out * back + bytes_back * out);
      EXPECT_EQ(with_peer.waited_ns < uint64_t{60'000'000'000}, true);
    }
  }
}

}  // namespace
