// all_to_all and all_to_all_back between the ranks of a Session: equal splits and ragged ones. Every bit is compared.
#pragma once

#include <iostream>

#include "exchange.h"

namespace {

// The buffers of one rank's all_to_all.
struct AllToAll {
  Rank& rank;
  const int32_t index = rank.axis_index.host[0];
  Array<float> x{size_t(num_tokens) * kHidden}, out{size_t(rank.ranks) * num_tokens * kHidden},
      back{size_t(num_tokens) * kHidden};
  // `send_index` is as in DispatchArgs. `sizes` are the rows for each rank. `out_splits` are the splits that arrive.
  Array<int32_t> splits{size_t(rank.experts)}, sizes{size_t(rank.ranks)}, send_index{size_t(num_tokens) * rank.ranks},
      out_splits{size_t(rank.experts)};

  explicit AllToAll(Rank& rank) : rank(rank) {}

  int32_t first_row(int32_t target) const {
    int32_t first = 0;
    for (int32_t peer = 0; peer < target; ++peer) first += sizes.host[peer];
    return first;
  }
  const float* sent(int32_t target, int32_t row) const { return &x.host[(first_row(target) + row) * kHidden]; }

  // `splits` must be set on the host.
  void upload() {
    std::fill(sizes.host.begin(), sizes.host.end(), 0);
    for (int32_t expert = 0; expert < rank.experts; ++expert) {
      sizes.host[rank_of_expert(expert, experts_per_rank)] += splits.host[expert];
    }
    for (int32_t target = 0; target < rank.ranks; ++target) {
      for (int32_t row = 0; row < num_tokens; ++row) {
        const int32_t place_there = row - first_row(target);
        const bool is_sent = place_there >= 0 && place_there < sizes.host[target];
        send_index.host[row * rank.ranks + target] = is_sent ? place_there : -1;
      }
    }
    x.upload(), splits.upload(), sizes.upload(), send_index.upload();
  }

  DispatchArgs there(bool zero_pad) const {
    DispatchArgs args = {};
    args.op = OpKind::kAllToAll;
    args.hash = static_cast<uint32_t>(args.op);
    args.axis_index = rank.axis_index.device;
    args.num_tokens = num_tokens, args.top_k = 1;
    args.x = x.device, args.row_bytes = args.out_row_bytes = kRowBytes;
    args.splits = splits.device, args.known_send_index = send_index.device;
    args.delivery = Delivery::kCopy, args.is_all_to_all = true, args.zero_pad = zero_pad;
    args.out = out.device, args.num_rows = int64_t{rank.ranks} * num_tokens, args.counts = out_splits.device;
    return args;
  }
  CombineArgs back_again() const {
    CombineArgs args = {};
    args.op = OpKind::kAllToAllBack;
    args.hash = static_cast<uint32_t>(args.op);
    args.axis_index = rank.axis_index.device;
    args.num_tokens = num_tokens, args.top_k = 1;
    args.y = out.device, args.row_bytes = kRowBytes;
    args.num_sent = sizes.device, args.send_index = send_index.device;
    args.out = back.device, args.out_type = ElementType::kFloat32;
    return args;
  }
};

enum class Splits { kEqual, kRagged, kOneExpert, kNothing };

void choose_splits(std::vector<int32_t>& splits, Splits kind, std::mt19937& random) {
  const auto experts = static_cast<int32_t>(splits.size());
  std::fill(splits.begin(), splits.end(), 0);
  if (kind == Splits::kEqual) {  // as equal as the number of experts lets them be
    for (int32_t e = 0; e < experts; ++e) splits[e] = num_tokens * (e + 1) / experts - num_tokens * e / experts;
  } else if (kind == Splits::kRagged) {
    for (auto left = random() % (num_tokens + 1); left > 0; --left) ++splits[random() % experts];
  } else if (kind == Splits::kOneExpert) {
    splits[random() % experts] = num_tokens;
  }
}

// Checks the rows that `source` sends, at each rank and after their return. With `zero_pad`, rows that are not sent are
// zero. all_to_all_back always makes them zero.
void check_source(const std::vector<std::unique_ptr<AllToAll>>& calls, int32_t source, bool zero_pad) {
  static const std::vector<float> zeros(kHidden);
  const AllToAll& from = *calls[source];
  int32_t wrong_rows = 0, wrong_splits = 0, wrong_back = 0, num_sent = 0;
  for (auto& to : calls) {
    const int32_t size = from.sizes.host[to->index];
    num_sent += size;
    for (int32_t row = 0; row < num_tokens; ++row) {
      const float* const arrived = &to->out.host[(int64_t{source} * num_tokens + row) * kHidden];
      if (row < size) wrong_rows += !same_bits(arrived, from.sent(to->index, row));
      if (row >= size && zero_pad) wrong_rows += !same_bits(arrived, zeros.data());
    }
    for (int32_t e = 0; e < experts_per_rank; ++e) {
      wrong_splits +=
          to->out_splits.host[source * experts_per_rank + e] != from.splits.host[to->index * experts_per_rank + e];
    }
  }
  for (int32_t row = 0; row < num_tokens; ++row) {
    const float* const expected = row < num_sent ? &from.x.host[row * kHidden] : zeros.data();
    wrong_back += !same_bits(&from.back.host[row * kHidden], expected);
  }
  EXPECT_EQ(wrong_rows, 0);
  EXPECT_EQ(wrong_splits, 0);
  EXPECT_EQ(wrong_back, 0);
}

// Checks that the counters have grown by one all_to_all and one all_to_all_back.
void check_growth(const Session& session, const std::vector<RankStats>& before, const std::vector<RankStats>& after,
                  const std::vector<std::unique_ptr<AllToAll>>& calls) {
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    std::vector<uint64_t> operations = before[rank].operations;
    ++operations[static_cast<size_t>(OpKind::kAllToAll)], ++operations[static_cast<size_t>(OpKind::kAllToAllBack)];
    EXPECT_EQ(after[rank].operations, operations);
    for (size_t peer = 0; peer < calls.size(); ++peer) {
      if (!session.are_local(rank, peer)) continue;
      const PeerStats &was = before[rank].peers[peer], &is = after[rank].peers[peer];
      // Each row goes to the peer and comes back, so both directions have the same number of rows.
      const auto rows = static_cast<uint64_t>(calls[rank]->sizes.host[peer] + calls[peer]->sizes.host[rank]);
      EXPECT_EQ(is.sent.rows - was.sent.rows, rows);
      EXPECT_EQ(is.received.rows - was.received.rows, rows);
      EXPECT_EQ(is.sent.bytes - was.sent.bytes, rows * kRowBytes);
      EXPECT_EQ(is.received.bytes - was.received.bytes, rows * kRowBytes);
    }
  }
}

// Sends rows to their ranks and back, and checks them.
void run_all_to_all(Session& session, std::mt19937& random, Splits kind, bool zero_pad) {
  std::vector<std::unique_ptr<AllToAll>> calls;
  for (auto& rank : session.ranks()) {
    must(cudaSetDevice(device_of(rank->axis_index.host[0])));
    AllToAll& call = *calls.emplace_back(std::make_unique<AllToAll>(*rank));
    for (float& value : call.x.host)
      value = random() % 8 == 0 ? -0.0f : std::uniform_real_distribution<float>(-1, 1)(random);
    look_like_sentinels(call.x.host, random);
    choose_splits(call.splits.host, kind, random);
    call.upload();
    // NaN, because nothing may read a row that was not sent.
    must(cudaMemset(call.out.device, 0xff, call.out.host.size() * sizeof(float)));
    must(cudaMemset(call.back.device, 0xff, call.back.host.size() * sizeof(float)));
    must(cudaMemset(call.out_splits.device, 0xff, call.out_splits.host.size() * sizeof(int32_t)));
  }
  session.wait();
  const std::vector<RankStats> before = session.group().stats();
  const auto call_of = [&](Rank& rank) -> const AllToAll& { return *calls[rank.axis_index.host[0]]; };
  session.whole([&](Rank& rank) { return call_of(rank).there(zero_pad); });
  session.whole([&](Rank& rank) { return call_of(rank).back_again(); });
  session.wait();
  session.expect_no_failure();
  for (auto& call : calls) call->out.download(), call->out_splits.download(), call->back.download();
  for (auto& call : calls) check_source(calls, call->index, zero_pad);
  check_growth(session, before, session.group().stats(), calls);
}

void run_all_to_alls(Session& session, std::mt19937& random) {
  for (Splits kind : {Splits::kEqual, Splits::kRagged, Splits::kOneExpert, Splits::kNothing, Splits::kRagged}) {
    for (bool zero_pad : {false, true}) run_all_to_all(session, random, kind, zero_pad);
  }
}

}  // namespace
