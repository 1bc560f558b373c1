// Receivers of a dispatch. They wait for rows, and write each row to the rows of its experts.
#pragma once

#include "ffi/cuda/combine_backward.cuh"

namespace jax_ep {

template <typename Config>
struct DispatchReceiver : CombineBackward<Config> {
  using Base = CombineBackward<Config>;
  using Base::args, Base::prefetch_y, Base::uses_rail_peers, Base::bytes_in_transit, Base::chunk_of, Base::chunks,
      Base::combine_back, Base::experts_per_rank, Base::has_header, Base::has_scales, Base::has_unit, Base::end_token,
      Base::first_token, Base::in_rounds, Base::has_result_unit, Base::is_last_round, Base::is_own, Base::kDelivery,
      Base::kHasRounds, Base::kSendersWriteOwn, Base::kIsLowLatency, Base::kMayHaveScales, Base::kReceiveBatch,
      Base::kStealsRows, Base::kUnitsRead, Base::kUnitsTaken, Base::learn_destinations, Base::load_chunk,
      Base::look_at_batch, Base::new_route, Base::new_row, Base::op, Base::out_row, Base::pad, Base::place_of,
      Base::rows_from, Base::zero_claimed_padding, Base::peers, Base::row_here, Base::batch_at,
      Base::await_destinations, Base::plan, Base::scratch, Base::sends_numbers, Base::shared, Base::sum_products,
      Base::sync_warp_group, Base::take_batch, Base::result_unit, Base::write_counts, Base::zero_row;
  using typename Base::Arriving;
  using typename Base::ArrivingBatch;
  using typename Base::BatchAddresses;

  // Receives rows. A warp group processes one item at a time. An item is a row that may arrive; find_row_of_item() maps
  // it to its source and index. In a receiver block, each warp group first takes the item with its own index. While the
  // control warp computes the destinations, the other warps load the parts of their first rows that have arrived. A
  // block that steals claims all its items, also the first.
  __device__ void receive() const {
    stamp(Stamp::kEntered);
    // A block that steals has warp groups as the last block, a receiver, has them. Their indices do not matter, because
    // it claims all its items.
    const int32_t role_of_groups = is_stealing() ? plan.num_blocks - 1 : op.state.role;
    const WarpGroup warp_group = WarpGroup::of_receivers(plan, role_of_groups, warp_id());
    const bool takes_rows =
        !is_stealing() && plan.row_receiver(role_of_groups) >= 0 && warp_group.index < warp_group.num_groups;
    const Destinations destinations(scratch, peers.num_ranks, experts_per_rank());
    if (op.state.role == plan.first_receiver && op.waits_for_peers()) {
      const int32_t* num_rows = sends_numbers() ? nullptr : args.known_num_recv_per_rank;
      op.wait_peers(op.state, &PeerCounters::arrived, num_rows, bytes_in_transit());
    }
    const uint32_t end = takes_rows ? num_items() : 0;
    uint32_t item = warp_group.index;
    Arriving arriving = {};
    // If the operation has failed, nothing may touch the arena: close() may have unmapped it.
    const bool looks = !op.warp_has_failed() && item < end;
    if (looks) arriving = look_for_row(item, warp_group, [&](int32_t source) { return rows_from(source); });
    if (kStealsRows) open_claims();
    if (!kIsLowLatency) learn_destinations();
    if (kIsLowLatency && arriving.is_sent) await_row(arriving, warp_group);  // all rows arrive at about the same time
    stamp(Stamp::kLooked);
    if (!await_destinations()) return;
    stamp(Stamp::kRouted);
    if (op.state.role == plan.first_receiver && is_last_round()) write_counts(destinations);
    if constexpr (kStealsRows) {
      if (!args.is_all_to_all && is_last_round()) pad(destinations);
      if (!takes_rows) item = claimed_item(claim_item(warp_group), warp_group);
      receive_claimed_items(item, arriving, looks, destinations, warp_group);
    } else {
      // The balanced variant pads before it delivers rows, since they are still in transit.
      if (!kIsLowLatency && !args.is_all_to_all) pad(destinations);
#pragma unroll 1
      while (item < end) {
        if (!kIsLowLatency && arriving.is_sent) await_row(arriving, warp_group);
        deliver_row(arriving, destinations, warp_group);
        item += warp_group.num_groups;
        if (item >= end) break;
        arriving = look_for_row(item, warp_group, [&](int32_t source) {
          return kIsLowLatency ? rows_from(source) : known_rows_from(source);
        });
        if (kIsLowLatency && arriving.is_sent) await_row(arriving, warp_group);
      }
      if (kIsLowLatency && !args.is_all_to_all) pad(destinations);
    }
  }

  // Work stealing. A sender or forwarder block that has sent all its rows steals work from the receivers of its launch.
  // Receivers usually have more to do, and the block's SM would be idle. The block claims items and ranges of padding
  // that no other block has claimed. Receivers claim their work in the same way, except the first item of each warp
  // group.
  //
  // Returns true if the block may steal. The caller then calls receive(). A block may steal if all blocks of its launch
  // have entered. A block that waits for rows keeps its SM. If a sender of its launch still needed the SM, this sender
  // could not start. If a peer did the same, each rank would wait for rows that the other rank's sender never sends.
  // All workers call this function. It is a barrier, also between send() and receive(), which use the same memory.
  __device__ bool sync_and_decide_to_steal() const {
    static_assert(!kStealsRows || !has_extra_control_warp(Base::kVariant));  // all threads are workers
    const bool decides = op.is_control_warp() && lane_id() == 0;             // one thread decides for the block
    return !named_barrier_or(kWorkersBarrier, op.num_worker_threads, decides && !op.all_have_entered());
  }
  // Only for receive(). There, a block with the role of a sender or forwarder steals, in the throughput variant.
  __device__ bool is_stealing() const { return kStealsRows && op.state.role < plan.first_receiver; }
  // A block that steals has stamped these times as a sender.
  __device__ void stamp(Stamp time) const {
    if (!is_stealing()) op.stamp(time);
  }

  __device__ uint32_t num_items() const {
    const int32_t num_tokens = end_token() - first_token();
    if (!kSendersWriteOwn) return peers.num_ranks * num_tokens;
    return (peers.num_ranks - 1) * num_tokens + min(num_tokens, plan.tokens_with_own_items);
  }
  // The first item that warp groups claim. The receivers' warp groups take the items before it without a claim: each
  // warp group takes the item with its own index.
  __device__ uint32_t first_claimable_item() const {
    return WarpGroup::of_receivers(plan, plan.num_blocks - 1, 0).num_groups;
  }

  __device__ void open_claims() const {
    if (lane_id() != 0 || op.state.failed) return;
    op.open_claims(&Control::claimed_items, first_claimable_item());
    if (claims_padding()) op.open_claims(&Control::claimed_padding, 0);
  }
  // True if warps claim ranges of padding. (In all_to_all, deliver_row() zeroes the rows that no source sends.)
  __device__ bool claims_padding() const { return args.zero_pad && !args.is_all_to_all && is_last_round(); }

  // Receives item `item`, and then the items that the warp group claims, until no item is left. `looked`: true if
  // look_for_row() has been called for `item`. While the row of an item is in transit, a warp claims and zeroes
  // padding. After the last item, it does so until no padding is left.
  __device__ void receive_claimed_items(uint32_t item, Arriving& arriving, bool looked,
                                        const Destinations& destinations, const WarpGroup& warp_group) const {
    bool has_padding_left = claims_padding();
#pragma unroll 1
    while (true) {
      const bool has_item = item < num_items();
      if (has_item && !looked)
        arriving = look_for_row(item, warp_group, [&](int32_t source) { return known_rows_from(source); });
      looked = false;
#pragma unroll 1
      while (has_padding_left && !op.warp_has_failed() && (!has_item || first_batch_is_missing(arriving))) {
        has_padding_left = zero_claimed_padding(destinations);
        if (has_item) look_at_batch(arriving.address, warp_group.warp, warp_group, arriving.batch);
      }
      if (!has_item) return;
      if (arriving.is_sent) await_row(arriving, warp_group);
      const uint32_t claimed = claim_item(warp_group);  // the claim's latency overlaps the writes of this row
      deliver_row(arriving, destinations, warp_group);
      item = claimed_item(claimed, warp_group);
    }
  }

  // True if units of this warp's first batch are missing. All lanes get the same answer. (A row that comes with a
  // signal must not be loaded before the signal has come. So for such a row, the answer is false.)
  __device__ bool first_batch_is_missing(const Arriving& arriving) const {
    if (!arriving.is_sent || arriving.is_own || arrives_by_signal(arriving.source)) return false;
    bool is_missing = false;
#pragma unroll
    for (const uint4& unit : arriving.batch.units) is_missing |= is_sentinel(unit);
    return __any_sync(kAllLanes, is_missing);
  }

  // The first thread of a warp group claims an item. claimed_item() returns the item to all threads of the warp group.
  __device__ uint32_t claim_item(const WarpGroup& warp_group) const {
    return warp_group.warp == 0 && lane_id() == 0 ? op.claim(&Control::claimed_items) : 0;
  }
  __device__ uint32_t claimed_item(uint32_t claimed, const WarpGroup& warp_group) const {
    if (warp_group.num_warps == 1) return __shfl_sync(kAllLanes, claimed, 0);
    uint32_t& item = shared.claimed[warp_id() / warp_group.num_warps];
    sync_warp_group(warp_group);  // all have read the former item
    if (warp_group.warp == 0 && lane_id() == 0) item = claimed;
    sync_warp_group(warp_group);
    return item;
  }

  // Maps an item to (source, index), in the order in which senders send rows. The index counts from the first row of
  // the round.
  __device__ void find_row_of_item(uint32_t item, Arriving& arriving) const {
    arriving.source = peers.rank + 1 + peers.by_ranks.remainder(item);
    arriving.index = peers.by_ranks.quotient(item);
    if (kSendersWriteOwn && arriving.index >= plan.tokens_with_own_items) {
      item -= plan.tokens_with_own_items * peers.num_ranks;
      arriving.source = peers.rank + 1 + peers.by_others.remainder(item);
      arriving.index = plan.tokens_with_own_items + peers.by_others.quotient(item);
    }
    if (arriving.source >= peers.num_ranks) arriving.source -= peers.num_ranks;
  }

  // The range of indices that learn_destinations() has stored.
  __device__ IndexRange known_rows_from(int32_t source) const {
    return {kHasRounds ? shared.first_index_from[source] : 0, shared.end_index_from[source]};
  }

  // Finds the row of `item`, and loads the units of this warp's first batch that have arrived. Does not wait for the
  // other units. range_from(source) returns the indices of the rows from a source.
  template <typename RangeFrom>
  __device__ Arriving look_for_row(uint32_t item, const WarpGroup& warp_group, RangeFrom range_from) const {
    Arriving arriving = {};
    find_row_of_item(item, arriving);
    arriving.is_own = is_own(arriving.source);
    arriving.is_sent = arriving.is_own;
    if (arriving.is_own) {
      arriving.index += first_token();
    } else {
      const IndexRange rows = range_from(arriving.source);
      arriving.index += rows.begin;
      // After a failure, only some lanes may know the number of rows. The vote gives all lanes the same answer.
      arriving.is_sent = __any_sync(kAllLanes, arriving.index < rows.end);
      if (in_rounds() && !arriving.is_sent) arriving.index = index_not_sent(arriving.index, rows);
    }
    if (!arriving.is_sent) return arriving;
    arriving.address = row_here(arriving.source, arriving.index);
    if (!new_route() && !args.is_all_to_all) {
      const int64_t recv_index = int64_t{arriving.source} * args.num_tokens + arriving.index;
      arriving.row = lane_id() < args.top_k ? __ldg(args.known_recv_row + recv_index * args.top_k + lane_id()) : -1;
    }
    if (arriving.is_own) {
      read_own(arriving, warp_group.warp, warp_group);
      if (has_header()) arriving.header = load_header(arriving.address.header(lane_id()));
      if (!new_route()) arriving.is_sent = __any_sync(kAllLanes, arriving.row >= 0);
    } else if (arrives_by_signal(arriving.source)) {
      // Before the signal, a unit may be half written. So all units count as missing.
      const BatchAddresses addresses = batch_at(arriving.address, warp_group.warp, warp_group);
      for (int i = 0; i < kUnitsTaken; ++i) arriving.batch.units[i] = addresses.has(i) ? sentinel_unit() : uint4{};
      arriving.header = no_header(op);
    } else {
      look_at_batch(arriving.address, warp_group.warp, warp_group, arriving.batch);
      if (has_header()) arriving.header = load_header(arriving.address.header(lane_id()));
    }
    if constexpr (kDelivery == Delivery::kCombineBack) {
      if (arriving.row >= 0) arriving.weight = __ldg(args.row_weights + arriving.row);
      prefetch_y(arriving.row, warp_group.warp, warp_group);
    }
    return arriving;
  }

  // In rounds, deliver_row() must record once for each index that the source never sends that no row has come: for n to
  // num_tokens - 1, if the source sends n rows in all rounds together. Each item without a row takes one of these
  // indices, from the highest down. Earlier rounds took first_token() - rows.begin of them.
  __device__ int32_t index_not_sent(int32_t index, const IndexRange& rows) const {
    return args.num_tokens - 1 - (first_token() - rows.begin) - (index - rows.end);
  }

  // Reads a batch of an own row from x, in the form in which it would arrive.
  __device__ void read_own(Arriving& arriving, int32_t first, const WarpGroup& warp_group) const {
    uint4 read[kReceiveBatch][kUnitsRead];
    float scales[kReceiveBatch] = {};
    const auto row = Base::row_of_x(arriving.index);
#pragma unroll
    for (int i = 0; i < kReceiveBatch; ++i) load_chunk(row, chunk_of(first, i, warp_group), read[i], scales[i]);
    Base::cast_batch(read, scales, arriving.batch.units, &arriving.batch.units[kUnitsTaken - 1]);
  }

  // True if the source's rows come over the network with signals. With rail peers, a local rank forwards them.
  __device__ bool arrives_by_signal(int32_t source) const { return is_remote(peers, source) && !uses_rail_peers(); }

  // Waits for the row's header and its first batch.
  __device__ void await_row(Arriving& arriving, const WarpGroup& warp_group) const {
    const bool has_header = this->has_header();
    const auto header_arrived = [&] {
      return !has_header || look_at_header(op, arriving.address.header(lane_id()), arriving.header);
    };
    if (arriving.is_own) {
      op.wait_until(peers.rank, header_arrived);
      __syncwarp();
    } else {
      if constexpr (kHasNetwork) {
        if (lane_id() == 0 && !uses_rail_peers())
          await_signal(op, arriving.source, arriving.source, place_of(arriving.index));
        __syncwarp();
      }
      take_batch(arriving.source, arriving.address, warp_group.warp, warp_group, arriving.batch, header_arrived);
    }
    if (op.state.failed) arriving.header.expert = -1;  // the header may be garbage
  }

  __device__ void deliver_row(Arriving& arriving, const Destinations& destinations, const WarpGroup& warp_group) const {
    const int32_t source = arriving.source;
    const int64_t recv_index = int64_t{source} * args.num_tokens + arriving.index;
    const bool keeps_route = new_route() && warp_group.warp == warp_group.num_warps - 1;
    if (!arriving.is_sent) {
      if (keeps_route && lane_id() < args.top_k) args.recv_row[recv_index * args.top_k + lane_id()] = -1;
      if (args.is_all_to_all && args.zero_pad && warp_group.warp == 0) zero_row(static_cast<int32_t>(recv_index));
      return;
    }
    int32_t row = -1;  // of the result, for k = lane
    if (args.is_all_to_all) {
      if (lane_id() == 0) row = static_cast<int32_t>(recv_index);
    } else if (lane_id() < args.top_k) {
      row = new_route() ? new_row(source, arriving.header, destinations) : arriving.row;
    }
    if (keeps_route) Base::keep_row(source, arriving.index, arriving.header, row);
    const uint32_t targets = __ballot_sync(kAllLanes, row >= 0);
    op.stamp(Stamp::kMoved);
    if (args.weights_cotangent) shared.products[warp_id()][lane_id()] = 0;
    // A peer's row is taken even if no expert keeps it, because taking it puts the sentinels back.
    const int32_t end = arriving.is_own && !targets ? 0 : chunks();
#pragma unroll 1
    for (int32_t first_chunk = warp_group.warp; first_chunk < end;
         first_chunk += kReceiveBatch * warp_group.num_warps) {
      if (first_chunk != warp_group.warp) {
        if (arriving.is_own) {
          read_own(arriving, first_chunk, warp_group);
        } else {
          look_at_batch(arriving.address, first_chunk, warp_group, arriving.batch);
        }
        if constexpr (kDelivery == Delivery::kCombineBack) prefetch_y(row, first_chunk, warp_group);
        if (!arriving.is_own)
          take_batch(source, arriving.address, first_chunk, warp_group, arriving.batch, [] { return true; });
      }
      op.stamp(Stamp::kWrites);
      if constexpr (kDelivery == Delivery::kCombineBack) {
        combine_back(arriving, first_chunk, targets, warp_group);
      } else {
        const auto chunk_at = [=](int i) { return chunk_of(first_chunk, i, warp_group); };
        const uint4& scales = arriving.batch.units[kUnitsTaken - 1];  // not read if rows never have scales
        Base::template write_chunks<kReceiveBatch>(arriving.batch.units, scales, chunk_at, row, targets);
      }
      op.stamp(Stamp::kWritten);
    }
    if constexpr (kDelivery == Delivery::kCombineBack) sum_products(row, warp_group);
  }
};

}  // namespace jax_ep
