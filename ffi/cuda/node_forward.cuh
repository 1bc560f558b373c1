// Forwarders of a dispatch over a network. A row arrives at a node once, and a forwarder there sends it to the node's
// ranks.
#pragma once

#include "ffi/cuda/dispatch_receive.cuh"

namespace jax_ep {

template <typename Config>
struct NodeForward : DispatchReceiver<Config> {
  using Base = DispatchReceiver<Config>;
  using Base::args, Base::chunk_of, Base::chunks, Base::end_token, Base::first_token, Base::place_of,
      Base::kMayHaveScales, Base::kReceiveBatch, Base::look_at_batch, Base::new_route, Base::num_items,
      Base::num_experts, Base::op, Base::peers, Base::row_here, Base::plan, Base::send_chunks, Base::take_batch;
  using typename Base::ArrivingBatch;
  using typename Base::Route;

  // Forwards the rows of this rank's rail peers to their destinations in this node. They arrive there as if the rail
  // peer itself had sent them.
  __device__ void forward() const {
    const WarpGroup warp_group = WarpGroup::of_forwarders(plan, op.state.role, warp_id());
    const Nodes& nodes = nodes_of(peers);
    const int32_t num_items =
        warp_group.index < warp_group.num_groups ? nodes.num_others() * (end_token() - first_token()) : 0;
#pragma unroll 1
    for (int32_t item = warp_group.index; item < num_items; item += warp_group.num_groups) {
      const int32_t number = item / nodes.num_others(), node = nodes.other(item - number * nodes.num_others());
      const int32_t token = first_token() + number, source = nodes.rail_peer_in(node);
      const RowAddress from = row_here(nodes.source_of(node), token);
      const Route route = forwarded_route(nodes, node, token, from, warp_group);
      if (__any_sync(kAllLanes, op.state.failed)) return;
      if (!RankSet::of(route.index).any()) continue;
      const RowAtRanks to(op, route.index, [&](int32_t) { return source; }, [&](int32_t of) { return place_of(of); });
      const OrderedRanks ranks(peers, RankSet::of(route.index));
#pragma unroll 1
      for (int32_t first = warp_group.warp; first < chunks(); first += kReceiveBatch * warp_group.num_warps) {
        ArrivingBatch taken;
        look_at_batch(from, first, warp_group, taken);
        take_batch(source, from, first, warp_group, taken, [] { return true; });
        if (__any_sync(kAllLanes, op.state.failed)) return;  // the row may be garbage
        send_taken(taken, first, route, ranks, to, warp_group);
      }
    }
  }

  // Waits for the row of a token from another node, and returns the token's destinations in this node. With a new
  // route, the row's header has the destinations, and this function writes them to args.send_index, in the columns of
  // the other node's ranks. With a known route, args.known_send_index has them in these columns.
  __device__ Route forwarded_route(const Nodes& nodes, int32_t node, int32_t token, const RowAddress& from,
                                   const WarpGroup& warp_group) const {
    Route route = {PerRank::all(-1), -1, 0, 1.0f, -1, {}};
    // The place, in send_index, of the row's index at a rank of this node.
    const auto kept = [&](int32_t rank) {
      return (int64_t{args.num_tokens} + token) * peers.num_ranks + nodes.rail_peer(rank, node);
    };
    if (!new_route()) {
      for_rank_of_lane(peers, [&](int w, int32_t rank) {
        if (nodes.is_in_own_node(rank)) route.index.of_word[w] = __ldg(args.known_send_index + kept(rank));
      });
    }
    bool is_sent = new_route() || RankSet::of(route.index).any();
    if (is_sent && lane_id() == 0) {
      is_sent = await_signal(op, nodes.rail_peer_in(node), nodes.source_of(node), place_of(token));
    }
    is_sent = __shfl_sync(kAllLanes, is_sent, 0);
    __syncwarp();  // one lane has waited; now all lanes may read
    if (!is_sent) route.index = PerRank::all(-1);
    if (!new_route()) return route;
    RowHeader header = {-1, 0, 0, 0};
    if (is_sent && lane_id() < args.top_k) header = load_header(from.header(lane_id()));
    const int32_t rank = is_expert(header.expert, num_experts()) ? peers.rank_of(header.expert) : -1;
    if (rank >= 0 && nodes.is_in_own_node(rank)) route.expert = header.expert;
    route.position_in_source = header.position_in_source;
    route.weight = header.weight;
#pragma unroll 1
    for (int32_t k = 0; k < args.top_k; ++k) {
      const uint32_t index = __shfl_sync(kAllLanes, header.epoch, k);
      const int32_t rank_of_k = __shfl_sync(kAllLanes, rank, k);
      // The index may be any number if the source is in another call.
      if (rank_of_k < 0 || !nodes.is_in_own_node(rank_of_k) || index >= args.num_tokens) continue;
      for_each_word(peers, [&](int w) {
        if (rank_of_lane(w) == rank_of_k) route.index.of_word[w] = static_cast<int32_t>(index);
      });
    }
    if (warp_group.warp != 0) return route;
    for_rank_of_lane(peers, [&](int w, int32_t own) {
      if (nodes.is_in_own_node(own)) args.send_index[kept(own)] = route.index.of_word[w];
    });
    return route;
  }

  __device__ void send_taken(const ArrivingBatch& batch, int32_t first, const Route& route, const OrderedRanks& ranks,
                             const RowAtRanks& to, const WarpGroup& warp_group) const {
    uint4 units[kReceiveBatch];
#pragma unroll
    for (int i = 0; i < kReceiveBatch; ++i) units[i] = batch.units[i];
    const uint4 scales = kMayHaveScales ? batch.units[Base::kUnitsTaken - 1] : uint4{};
    const auto chunk_at = [=](int i) { return chunk_of(first, i, warp_group); };
    send_chunks(Base::pack_chunks(units, scales, chunk_at), chunk_at, route, ranks, to);
  }
};

}  // namespace jax_ep
