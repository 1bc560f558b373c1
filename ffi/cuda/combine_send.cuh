// Senders of a combine, on the experts' side: each token's partial sum, to the token's rank.
#pragma once

#include "ffi/cuda/combine_sums.cuh"

namespace jax_ep {

template <typename Config>
struct CombineSender : CombineSums<Config> {
  using Base = CombineSums<Config>;
  using Base::args, Base::ask_for_row, Base::blocks, Base::by_node, Base::chunk_of, Base::end_of_parts, Base::has_unit,
      Base::kAsksAhead, Base::kHasRing, Base::kSumsAtOnce, Base::num_destinations, Base::op, Base::partial_sums,
      Base::peers, Base::plan, Base::resolved, Base::row_bytes, Base::send_num_rows, Base::step, Base::take_rest;
  using typename Base::SourceRow;
  using typename Base::Sums;

  __device__ void announce() const {
    if (!op.state.failed) {
      if (args.num_sent) send_num_rows(op, args.num_sent);
      if (threadIdx.x < peers.num_ranks) op.announce(threadIdx.x);
    }
    op.tell_former_finished();
  }

  // The possible rows, interleaving the ranks they go to, beginning behind this rank.
  __device__ void send() const {
    const Team team = Team::of_senders(plan, op.state.ticket, warp_id());
    const uint32_t num_candidates = team.index < team.num_teams ? num_destinations() * args.num_tokens : 0;
    uint32_t item = team.index;
    SourceRow row = {}, next = {};
    Sums sums = {};
    const auto sum_row = [&](SourceRow asked) {
      const uint32_t next_item = item + team.num_teams;
      if (kAsksAhead && !blocks() && next_item < num_candidates) next = ask_for_row(next_item);
      row = resolved(asked);
      sums = partial_sums(row, team.warp, team);
    };
    if (item < num_candidates && !blocks()) sum_row(ask_for_row(item));
    op.stamp(1);
    bool gives_up = op.warp_has_failed();
    // Warps that meet at a barrier for a far rank's rows must agree: they go on to the end, or do not begin.
    if (kHasNetwork) gives_up = any_of_team(team, kFirstBarrier, gives_up);
    if (gives_up) {
      if constexpr (kHasRing) take_rest(row);
      return;
    }
#pragma unroll 1
    for (; item < num_candidates; item += team.num_teams) {
      if (item >= team.num_teams || blocks()) sum_row(kAsksAhead && !blocks() ? next : ask_for_row(item));
      if (row.present) send_row(row, sums, team);
      if (is_far(peers, row.peer) && !by_node()) put_staged(row.peer, peers.rank, row.index, row.present, team);
    }
  }

  // `sums`: of the first chunks that this warp sends.
  __device__ void send_row(const SourceRow& row, Sums sums, const Team& team) const {
    const Hop to = next_hop(row.peer);
    const RowPlace place(op, to.rank, to.source, row.index);
    if (args.weights_to_send && team.warp == 0 && lane_id() < args.top_k) {
      send_header(op, place.header(lane_id()), {0, 0, row.row < 0 ? 0 : __ldg(args.weights_to_send + row.row), 0});
    }
#pragma unroll 1
    for (int32_t part = team.warp; part < end_of_parts(); part += step(team)) {
      if (part != team.warp) sums = partial_sums(row, part, team);
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) {
        const int32_t chunk = chunk_of(part, i, team);
        const bool present = has_unit(chunk);
        Chunk::of(sums.unit[i], present)
            .send(op, to.rank, place.unit(op, chunk), [&] { return place.marks + chunk; }, present);
      }
    }
  }

  // The rank that a sum for `peer` is sent to, and what it is kept as there.
  struct Hop {
    int32_t rank, source;
  };

  // By node, the far rank's counterpart here, and as if from this rank's counterpart there, whose own rows never come
  // this way.
  __device__ Hop next_hop(int32_t peer) const {
    if (!by_node() || !is_far(peers, peer)) return {peer, peers.rank};
    const Nodes& nodes = nodes_of(peers);
    return {nodes.counterpart(peer, nodes.own), nodes.counterpart(peers.rank, peer / nodes.size)};
  }

  // When the team has staged a row for a far rank, its first warp puts it.
  __device__ void put_staged(int32_t peer, int32_t source, int32_t index, bool present, const Team& team) const {
    if (any_of_team(team, kFirstBarrier, !present || op.state.failed) || team.warp != 0) return;
    const int32_t begin = args.weights_to_send ? 0 : peers.layout.header_bytes;
    put_row(op, peer, source, index, begin, peers.layout.header_bytes - begin + row_bytes());
  }
};

}  // namespace jax_ep
