// Forwarders of a combine over a network. A forwarder adds up its node's partial sums of a token, and sends one sum to
// the token's node.
#pragma once

#include "ffi/cuda/combine_receive.cuh"

namespace jax_ep {

template <typename Config>
struct NodeSum : CombineReceiver<Config> {
  using Base = CombineReceiver<Config>;
  using Base::add_all, Base::args, Base::chunks, Base::end_token, Base::first_token, Base::place_of, Base::has_unit,
      Base::kCasts, Base::kRanksAtOnce, Base::kSize, Base::op, Base::packed, Base::peers, Base::plan, Base::put_staged,
      Base::row_number, Base::send_scales, Base::start_sum, Base::await_weight_cotangent;

  // Adds up this node's partial sums of the tokens of this rank's rail peers, and sends the totals to the rail peers.
  // The warps of a warp group meet at a barrier for each token. So none of them may return early, even if the operation
  // fails.
  __device__ void forward() const {
    const WarpGroup warp_group = WarpGroup::of_forwarders(plan, op.state.role, warp_id());
    if (any_of_warp_group(warp_group, kFirstBarrier, op.state.failed)) return;
    const Nodes& nodes = nodes_of(peers);
    const int32_t as = nodes.source_of(nodes.own_node);
    const int32_t num_items =
        warp_group.index < warp_group.num_groups ? nodes.num_others() * (end_token() - first_token()) : 0;
#pragma unroll 1
    for (int32_t item = warp_group.index; item < num_items; item += warp_group.num_groups) {
      const int32_t number = item / nodes.num_others(), node = nodes.other(item - number * nodes.num_others());
      const int32_t token = first_token() + number;
      PerRank index = PerRank::all(-1), arena_row = {};  // of the sum from each rank of this node
      for_each_word(peers, [&](int w) {
        const int32_t rank = rank_of_lane(w), source = nodes.rail_peer(rank, node);  // `rank` sends under this source
        const int64_t kept = (int64_t{args.num_tokens} + token) * peers.num_ranks + source;
        if (nodes.is_in_own_node(rank)) index.of_word[w] = __ldg(args.send_index + kept);
        arena_row.of_word[w] = row_number(source, index.of_word[w]);
      });
      const RankSet sources = RankSet::of(index);
      if (!sources.any()) continue;
      const int32_t peer = nodes.rail_peer_in(node);
      const RowAddress to(op, peer, as, place_of(token));
      if (args.weights_cotangent && warp_group.warp == 0) {
        const float weight = await_weight_cotangent(arena_row, sources);
        if (lane_id() < args.top_k) send_header(op, to.header(lane_id()), {0, 0, weight, 0});
      }
#pragma unroll 1
      for (int32_t chunk = warp_group.warp; chunk < chunks(); chunk += warp_group.num_warps) {
        const int32_t chunks_added[] = {chunk};
        float total[1][kSize];
        start_sum(total[0]);
        Base::template add_all<1, kRanksAtOnce>(arena_row, sources, {}, chunks_added, total,
                                                [](int, float (&)[1][kSize]) {});
        const bool present = has_unit(chunk);
        float scale = 0;
        const uint4 unit = packed(total[0], chunk, scale);
        Chunk::of(unit, present).send(op, peer, to.unit(op, chunk), [&] { return to.escape_masks + chunk; }, present);
        if constexpr (kCasts) send_scales(peer, to, chunk, scale);
      }
      put_staged(peer, as, token, true, warp_group);
    }
  }
};

}  // namespace jax_ep
