// Senders of a combine, on the experts' side. They send each token's partial sum to the token's rank.
#pragma once

#include "ffi/cuda/combine_sums.cuh"

namespace jax_ep {

template <typename Config>
struct CombineSender : CombineSums<Config> {
  using Base = CombineSums<Config>;
  using Base::args, Base::await_ranges, Base::end_token, Base::first_token, Base::in_rounds, Base::issue_row_loads,
      Base::is_all_to_all, Base::uses_rail_peers, Base::chunk_of, Base::bytes_in_transit, Base::chunks,
      Base::end_of_parts, Base::has_unit, Base::kCasts, Base::kSenderLoadsAhead, Base::kHasRing, Base::kVariant,
      Base::kChunksAtOnce, Base::num_destinations, Base::op, Base::partial_sums, Base::payload_bytes, Base::peers,
      Base::place_of, Base::plan, Base::ranges, Base::complete_row, Base::send_num_rows, Base::step, Base::sums_own,
      Base::weight_cotangent_to_send;
  using typename Base::RowsOfToken;
  using typename Base::Sums;

  __device__ void notify() const {
    if (!op.state.failed) {
      if (in_rounds()) {
        if (args.num_sent) {
          send_ranges_of_splits(op.state, args.num_sent, 1);
        } else {
          send_ranges_of_route(op.state, args.send_index);
        }
      } else if (args.num_sent) {
        send_num_rows(op.state, args.num_sent);
      }
      for_rank_of_thread(peers, op.num_worker_threads, [&](int32_t peer) { op.notify(peer); });
    }
    op.tell_former_finished();
  }

  // True if prepare() sums the first part of a sender's first row. This needs a second copy of the code that sums. In
  // the other variants, a second copy would take registers from the loops that sum.
  static constexpr bool kPrepares = is_low_latency(kVariant);

  // A row that a warp group sends, and the warp's first part of its sum.
  struct Outgoing {
    RowsOfToken row;
    Sums sums;
  };

  // In the low-latency variant: loads and sums a sender's first row, before the block has entered.
  __device__ Outgoing prepare(int32_t role) const {
    const WarpGroup warp_group = WarpGroup::of_senders(plan, role, warp_id());
    const bool sends = plan.sends_rows(role) && warp_group.index < warp_group.num_groups;
    if (!sends || warp_group.index >= num_destinations() * args.num_tokens) return {};
    const RowsOfToken row = complete_row(issue_row_loads(warp_group.index));
    return {row, partial_sums(row, warp_group.warp, warp_group)};
  }

  // Sends rows. An item is a row that may exist. Consecutive items go to different ranks, beginning with the rank after
  // this one. `first`: with kPrepares, what prepare() has returned.
  __device__ void send([[maybe_unused]] const Outgoing& first) const {
    const WarpGroup warp_group = WarpGroup::of_senders(plan, op.state.role, warp_id());
    const int32_t num_tokens = end_token() - first_token();
    uint32_t num_items = warp_group.index < warp_group.num_groups ? num_destinations() * num_tokens : 0;
    uint32_t item = warp_group.index;
    if (in_rounds()) await_ranges();
    const bool loads_ahead = kSenderLoadsAhead && !is_all_to_all();
    RowsOfToken next = {};
    Sums sums = {};
    if (loads_ahead && item < num_items) {
      next = issue_row_loads(item);
      // These loads overlap those above.
      if (kHasRing && sums_own()) num_items = num_destinations() * most_rows_of_peer();
    }
    op.stamp(Stamp::kEntered);
    bool gives_up = op.warp_has_failed();
    // The warps of a warp group meet at a barrier for each row to a remote rank. So they must agree: all of them go on
    // to the end, or none begins.
    if (kHasNetwork) gives_up = any_of_warp_group(warp_group, kFirstBarrier, gives_up);
    if (gives_up) return;
#pragma unroll 1
    for (; item < num_items; item += warp_group.num_groups) {
      RowsOfToken row;
      if (kPrepares && item < warp_group.num_groups) {
        row = first.row, sums = first.sums;
      } else {
        const RowsOfToken issued = loads_ahead ? next : issue_row_loads(item);
        const uint32_t next_item = item + warp_group.num_groups;
        if (loads_ahead && next_item < num_items) next = issue_row_loads(next_item);
        row = complete_row(issued);
        if (kPrepares) sums = partial_sums(row, warp_group.warp, warp_group);
      }
      if (row.present) send_row(row, sums, warp_group);
      if (is_remote(peers, row.peer) && !uses_rail_peers())
        put_staged(row.peer, peers.rank, row.index, row.present, warp_group);
    }
  }

  // The largest number of rows that go to one peer in this round. Items from num_destinations() times this number on
  // have no row; with many ranks, these are most items.
  __device__ int32_t most_rows_of_peer() const {
    int32_t most = 0;
    for_rank_of_lane(peers, [&](int, int32_t peer) {
      if (peer == peers.rank) return;
      most = max(most, in_rounds() ? ranges[peer].end - ranges[peer].begin : __ldg(args.num_recv_per_rank + peer));
    });
    return __reduce_max_sync(kAllLanes, most);
  }

  // The rank to which a sum for `peer` is sent, and the source under which that rank keeps it.
  struct Hop {
    int32_t rank, source;
  };

  // Sends a partial sum. `sums`: with kPrepares, this warp's first part of it.
  __device__ void send_row(const RowsOfToken& row, Sums sums, const WarpGroup& warp_group) const {
    const Hop to = next_hop(row.peer);
    const RowAddress address(op, to.rank, to.source, place_of(row.index));
    if (args.weights_cotangent && warp_group.warp == 0) {
      const float weight = weight_cotangent_to_send(row.row);
      if (lane_id() < args.top_k) send_header(op, address.header(lane_id()), {0, 0, weight, 0});
    }
#pragma unroll 1
    for (int32_t part = warp_group.warp; part < end_of_parts(); part += step(warp_group)) {
      if (!kPrepares || part != warp_group.warp) sums = partial_sums(row, part, warp_group);
      if (kCasts || part_may_have_escapes(sums, part, warp_group)) {
        send_part_with_escapes(sums, part, to, address, warp_group);
      } else {
        send_part(sums, part, address, warp_group);
      }
    }
  }

  // True if a lane has a unit that begins like the sentinel. This is rare. One vote per part takes fewer instructions
  // than one per chunk.
  __device__ bool part_may_have_escapes(const Sums& sums, int32_t part, const WarpGroup& warp_group) const {
    bool may_have_escapes = false;
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i)
      may_have_escapes |= has_unit(chunk_of(part, i, warp_group)) && begins_like_sentinel(sums.unit[i]);
    return __any_sync(kAllLanes, may_have_escapes);
  }

  // Sends a part that has no escapes and no scales.
  __device__ void send_part(const Sums& sums, int32_t part, const RowAddress& address,
                            const WarpGroup& warp_group) const {
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      const int32_t chunk = chunk_of(part, i, warp_group);
      if (has_unit(chunk)) store_unit(address.unit(op, chunk), sums.unit[i]);
    }
  }

  // Sends a part that may have escapes. With kCasts, it sends every part, with its scales.
  __device__ void send_part_with_escapes(const Sums& sums, int32_t part, const Hop& to, const RowAddress& address,
                                         const WarpGroup& warp_group) const {
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      const int32_t chunk = chunk_of(part, i, warp_group);
      const bool present = has_unit(chunk);
      Chunk::of(sums.unit[i], present)
          .send(op, to.rank, address.unit(op, chunk), [&] { return address.escape_masks + chunk; }, present);
      if constexpr (kCasts) send_scales(to.rank, address, chunk, sums.scale[i]);
    }
  }

  // Sends the unit of scales of a chunk. `scale` is the scale of this lane's block.
  __device__ void send_scales(int32_t peer, const RowAddress& address, int32_t chunk, float scale) const {
    const bool present = lane_id() == 0 && chunk < chunks();
    Chunk::of(scales_unit(has_unit(chunk) ? scale : 0), present)
        .send(
            op, peer, address.scales(op, payload_bytes(), chunk),
            [&] { return address.escape_masks + chunks() + chunk; }, present);
  }

  // With rail peers, a sum for remote rank d first goes to p, the rank of this node with d's number in its node. In p's
  // arena, it takes the place of source q: this rank's rail peer in d's node. The place is free: q sends nothing to p
  // directly, because its sums also go through rail peers. (docs/network.md has a table.)
  __device__ Hop next_hop(int32_t peer) const {
    if (!uses_rail_peers() || !is_remote(peers, peer)) return {peer, peers.rank};
    const Nodes& nodes = nodes_of(peers);
    return {nodes.rail_peer(peer, nodes.own_node), nodes.rail_peer(peers.rank, peer / nodes.size)};
  }

  // Puts a row to a remote rank, after the warp group has staged it. The first warp puts it.
  __device__ void put_staged(int32_t peer, int32_t source, int32_t index, bool present,
                             const WarpGroup& warp_group) const {
    if (any_of_warp_group(warp_group, kFirstBarrier, !present || op.state.failed) || warp_group.warp != 0) return;
    const int32_t begin = args.weights_cotangent ? 0 : peers.layout.header_bytes;
    put_row(op, peer, source, place_of(index), begin, peers.layout.header_bytes - begin + bytes_in_transit());
  }
};

}  // namespace jax_ep
