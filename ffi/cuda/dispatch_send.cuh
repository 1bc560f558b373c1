// Senders of a dispatch. They send each token's row once to each rank that has one of its experts.
#pragma once

#include "ffi/cuda/result_rows.cuh"

namespace jax_ep {

template <typename Config>
struct DispatchSender : ResultRows<Config> {
  using Base = ResultRows<Config>;
  using Base::args, Base::uses_rail_peers, Base::chunks, Base::clear, Base::clear_groups, Base::count_earlier,
      Base::count_tokens, Base::experts_per_rank, Base::has_scales, Base::has_unit, Base::ids_to_count, Base::in_rounds,
      Base::is_own, Base::end_token, Base::first_token, Base::kClearsBeforeEntry, Base::kSendBatch,
      Base::kSendersWriteOwn, Base::kUnitsRead, Base::load_chunk, Base::send_counts, Base::new_route, Base::num_experts,
      Base::op, Base::pair, Base::payload_bytes, Base::peers, Base::place_of, Base::row_here, Base::plan, Base::scratch,
      Base::shared;
  using typename Base::Ids;
  using typename Base::RowOfX;

  // The units of x that a warp reads at once.
  struct Batch {
    uint4 units[kSendBatch][kUnitsRead];
    float scales[kSendBatch];  // if x is fp8 already
  };

  // N chunks of a row in the wire format. Units that equal the sentinel or the escape are not replaced yet. In
  // `scales`, lane i has the unit with the scales of the i-th chunk.
  template <int N>
  struct PackedChunks {
    uint4 units[N], scales;
    bool may_have_escapes;  // a unit of any lane, or a unit of scales, begins like the sentinel
  };
  using Packed = PackedChunks<kSendBatch>;
  // True if a sender packs a row's first batch before it knows the row's route. False in the throughput variant: there,
  // the code of pack() is in the kernel once, so the loop that sends has more registers.
  static constexpr bool kPacksFirst = Base::kVariant != Variant::kThroughput;
  using FirstBatch = std::conditional_t<kPacksFirst, Packed, Batch>;

  // The destinations of a token.
  struct Route {
    PerRank index;  // of the row, among the rows sent to each rank; -1 if it is not sent there
    // Lane k has the values for k ("for k = lane"). Only the first warp of the warp group has `position_in_source` and
    // `weight`: it writes the headers.
    int32_t expert, position_in_source;  // expert: -1 for none
    float weight;
    int32_t named_slot;  // for k = lane; only if loads_slots_ahead()
    RankSet ranks;       // the destinations, if the route is new
  };

  // The rows of the result that a sender writes for its token: for k = lane, or -1.
  struct OwnRow {
    int32_t row;
    uint32_t targets;  // the k that have a row
  };

  // What a warp group loads of a token that it sends.
  struct Outgoing {
    Route route;
    Batch batch;
    Ids ids;  // the first ids of the tokens that the block counts before it sends this one
  };

  // Loads what a sender needs of its first token, or the ids that the notifying block counts first. (In rounds,
  // count_all_tokens() loads these ids.) A sender block also zeroes its counts and its bits of warp groups.
  __device__ Outgoing prepare(int32_t role) const {
    if (plan.is_sender(role)) clear(this->send_counts());
    if (plan.is_sender(role) && has_several_groups()) clear_groups(this->send_counts());
    const WarpGroup warp_group = WarpGroup::of_senders(plan, role, warp_id(), true);
    const bool sends = plan.sends_rows(role) && warp_group.index < warp_group.num_groups;
    Outgoing outgoing = sends ? load_token(first_token() + warp_group.index, 0, warp_group) : Outgoing{};
    if (role == 0 && new_route() && !in_rounds()) outgoing.ids = ids_to_count(0, args.num_tokens);
    return outgoing;
  }

  // `counted`: the number of tokens that the block has counted.
  __device__ Outgoing load_token(int32_t token, int32_t counted, const WarpGroup& warp_group) const {
    const Ids ids = ids_ahead(counted, token - group_in_block());
    if (token >= end_token()) return {load_route(token, warp_group), {}, ids};
    return {load_route(token, warp_group), load(Base::row_of_x(token), warp_group.warp), ids};
  }

  __device__ int32_t group_in_block() const { return warp_id() >> plan.log_send_warps; }
  __device__ bool has_several_groups() const { return plan.log_send_warps < plan.log_block_warps; }  // in a block

  // Sends the tokens of the round. In each step, a block's warp groups send consecutive tokens, one each. A warp group
  // loads its next token's row while it counts and sends the current one. `now`: what prepare() has returned.
  __device__ void send(Outgoing now) const {
    const SendCounts counts = this->send_counts();
    const WarpGroup warp_group = WarpGroup::of_senders(plan, op.state.role, warp_id(), true);
    if (warp_group.index >= warp_group.num_groups) return;
    const int32_t group_in_block = this->group_in_block();
    int32_t token = first_token() + warp_group.index, counted = 0;
    PublishedRoute former = {-1, {}};
#pragma unroll 1
    for (int32_t step = 0; token - group_in_block < end_token(); ++step) {
      const int32_t first_of_step = token - group_in_block;  // the first token that this block sends in this step
      const int32_t next_token = token + warp_group.num_groups;
      const bool has_next_step = next_token - group_in_block < end_token();
      Outgoing next = {};
      if (has_next_step) next = load_token(next_token, first_of_step, warp_group);
      const FirstBatch first_batch = first_batch_of(now.batch, warp_group);
      Route& route = now.route;
      if (new_route()) {
        begin_route(route, warp_group);
        count_tokens(counts, counted, first_of_step, now.ids, kClearsBeforeEntry && step == 0,
                     [&] { publish_route(counts, route, former, step, warp_group); });
        finish_route(counts, route, step, warp_group);
        former = {route.expert, route.ranks};
        if (args.named_slot) name_slots(route, token, warp_group);
        for_each_word(peers, [&](int w) {
          int32_t& index = route.index.of_word[w];
          if (is_own(rank_of_lane(w)) && index >= 0) index = token;
        });
      }
      counted = first_of_step;
      op.stamp(Stamp::kRouted);
      if (args.send_index && warp_group.warp == 0 && token < end_token()) keep_route(token, route.index);
      const bool sends = !op.warp_has_failed();
      const PerRank index = index_to_send(route, token);
      if (sends) send_row(token, first_batch, route, index, warp_group);
      if constexpr (kHasNetwork) put_rows(token, index, warp_group, sends);
      op.stamp(Stamp::kMoved);
      // All warps of the block pass a barrier in count_tokens() before they use these destinations.
      const bool begins_own_rows = has_next_step && writes_own_row(next_token) && !writes_own_row(token);
      if (begins_own_rows && op.is_control_warp()) compute_destinations_of_own(shared, plan, scratch, payload_bytes);
      token = next_token;
      now = next;
    }
  }

  // The destinations with which a sender finds own rows, in the memory behind its counts.
  __device__ Destinations destinations_of_own() const {
    return Destinations(static_cast<uint8_t*>(scratch) + send_counts_bytes(peers.num_ranks, experts_per_rank()),
                        peers.num_ranks, experts_per_rank());
  }
  // One warp calls it. It is not inlined, and takes what operation_of() explains: the loop of senders needs registers.
  __device__ __noinline__ static void compute_destinations_of_own(DispatchShared& shared, const LaunchPlan& plan,
                                                                  void* scratch, int32_t payload_bytes) {
    State& state = shared.state;
    const DispatchSender sender = {*state.peers, static_cast<const DispatchArgs&>(*state.call),
                                   plan,         operation_of<Operation>(state),
                                   shared,       scratch,
                                   payload_bytes};
    sender.compute_destinations(sender.destinations_of_own());
  }
  // True if the token's sender also writes its own row.
  __device__ bool writes_own_row(int32_t token) const {
    return kSendersWriteOwn && token - first_token() >= plan.tokens_with_own_items;
  }
  // Finds and keeps the rows of the result for a token whose own row the sender writes.
  __device__ OwnRow find_own_row(int32_t token, const Route& route) const {
    const RowHeader header = header_for(route, peers.rank);
    const int32_t row = Base::new_row(peers.rank, header, destinations_of_own());
    Base::keep_row(peers.rank, token, header, row);
    return {row, __ballot_sync(kAllLanes, row >= 0)};
  }

  __device__ Ids ids_ahead(int32_t first, int32_t last) const {
    return new_route() ? ids_to_count(first, min(last, end_token())) : Ids{};
  }

  // Writes the token's route for later operations.
  __device__ void keep_route(int32_t token, const PerRank& index) const {
    for_rank_of_lane(peers, [&](int w, int32_t rank) {
      int32_t* const kept = args.send_index + int64_t{token} * peers.num_ranks + rank;
      *kept = index.of_word[w];
      const bool is_forwarded = uses_rail_peers() && is_remote(peers, rank);
      if (kHasNetwork && !is_forwarded) kept[args.num_tokens * peers.num_ranks] = -1;
    });
  }

  // The number of batches in a row.
  __device__ int32_t num_batches() const { return (chunks() + kSendBatch - 1) / kSendBatch; }

  // The index of the row at each rank, or -1 if it is not sent there.
  __device__ PerRank index_to_send(const Route& route, int32_t token) const {
    PerRank index = uses_rail_peers() ? rail_index(nodes_of(peers), route.index, token) : route.index;
    for_each_word(peers, [&](int w) {
      if (is_own(rank_of_lane(w))) index.of_word[w] = -1;
    });
    return index;
  }

  // Sends a row. `batch` is the first batch of this warp. Each next batch is loaded before the current one is stored,
  // because a load waits until the stores before it are issued.
  __device__ void send_row(int32_t token, FirstBatch batch, const Route& route, const PerRank& index,
                           const WarpGroup& warp_group) const {
    const RowAtRanks row(
        op, index, [&](int32_t rank) { return source_at(rank); }, [&](int32_t of) { return place_of(of); });
    const RowOfX row_of_x = Base::row_of_x(token);
    const OrderedRanks ranks(peers, RankSet::of(index));
    const bool writes_own = writes_own_row(token) && token < end_token();
    const OwnRow own = writes_own ? find_own_row(token, route) : OwnRow{-1, 0};
    const int32_t end = ranks.any() || own.targets ? num_batches() : 0;
    // If receivers write the token's own row, one of them waits for its header, even if the token has no expert here.
    // The first warp writes this header before its batches. In the low-latency variant, it writes the header after
    // them, because the latency of the peers' rows matters more.
    const auto write_own_header = [&] {
      if (warp_group.warp != 0 || !new_route() || token >= end_token() || writes_own) return;
      write_header(row_here(peers.rank, token), route, peers.rank);
    };
    if (!Base::kIsLowLatency) write_own_header();
#pragma unroll 1
    for (int32_t batch_index = warp_group.warp; batch_index < end; batch_index += warp_group.num_warps) {
      const int32_t next = batch_index + warp_group.num_warps;
      Batch ahead = {};  // without the zeros, the compiler spills more registers
      if (next < end) ahead = load(row_of_x, next);
      if constexpr (kPacksFirst) {
        send_batch(batch, batch_index, route, ranks, row);
        if (next < end) batch = pack(ahead, next);
      } else {
        const Packed packed = pack(batch, batch_index);
        send_batch(packed, batch_index, route, ranks, row);
        if constexpr (kSendersWriteOwn) write_own_batch(packed, batch_index, own);
        batch = ahead;
      }
    }
    if (Base::kIsLowLatency) write_own_header();
  }

  // The number of the source under which rank `rank` keeps this rank's rows in its arena. With rail peers, a remote
  // rank keeps them under the number of this rank's node.
  __device__ int32_t source_at(int32_t rank) const {
    return uses_rail_peers() && is_remote(peers, rank) ? nodes_of(peers).source_of(nodes_of(peers).own_node)
                                                       : peers.rank;
  }

  // Loads a token's route. A token out of range has no destinations.
  __device__ Route load_route(int32_t token, const WarpGroup& warp_group) const {
    Route route = {PerRank::all(-1), -1, 0, 1.0f, -1, {}};
    if (token >= end_token()) return route;
    if (new_route()) {
      if (lane_id() >= args.top_k) return route;
      const int64_t pair = int64_t{token} * args.top_k + lane_id();
      route.expert = __ldg(args.topk_idx + pair);
      if (args.topk_weights && warp_group.warp == 0) route.weight = __ldg(args.topk_weights + pair);
      if (args.named_slot && loads_slots_ahead()) route.named_slot = __ldg(args.named_slot + pair);
    } else {
      for_rank_of_lane(peers, [&](int w, int32_t rank) {
        route.index.of_word[w] = __ldg(args.known_send_index + int64_t{token} * peers.num_ranks + rank);
      });
    }
    return route;
  }

  // The experts of a token, for k = lane (-1 for none), and the ranks that have them.
  struct PublishedRoute {
    int32_t expert;
    RankSet ranks;
  };

  // Begins a route: finds the token's ranks and, for each k, counts the lower k of the token that name the same expert.
  __device__ void begin_route(Route& route, const WarpGroup& warp_group) const {
    const bool present = is_expert(route.expert, num_experts());
    if (!present) route.expert = -1;
    route.ranks = RankSet::of_lanes(present, present ? peers.rank_of(route.expert) : 0);
    if (warp_group.warp == 0) route.position_in_source = count_earlier(route.expert, lane_id());
  }

  // Sets this warp group's bits for the token's experts and ranks. First clears its bits for the token of the previous
  // step (`former`). count_tokens() calls it between its two barriers. After the first barrier, all warp groups have
  // finished their routes of the previous step. After the second, they read the bits of this step.
  __device__ void publish_route(const SendCounts& counts, const Route& route, const PublishedRoute& former,
                                int32_t step, const WarpGroup& warp_group) const {
    if (warp_group.warp != 0 || !has_several_groups()) return;
    const uint32_t bit = 1u << group_in_block();
    if (former.expert >= 0) atomicAnd(&counts.groups_of_expert[former.expert], ~bit);
    for_each_word(peers, [&](int w) {
      if (former.ranks.words[w] >> lane_id() & 1) atomicAnd(&counts.groups_of_rank[rank_of_lane(w)], ~bit);
    });
    // A lane may clear the bit of an expert that another lane sets below. So all lanes clear first.
    __syncwarp();
    if (lane_id() < args.top_k) shared.experts[group_in_block() * args.top_k + lane_id()] = route.expert;
    if (route.expert >= 0 && route.position_in_source > 0) shared.step_with_repeats = step;
    if (route.expert >= 0) atomicOr(&counts.groups_of_expert[route.expert], bit);
    for_each_word(peers, [&](int w) {
      if (route.ranks.words[w] >> lane_id() & 1) atomicOr(&counts.groups_of_rank[rank_of_lane(w)], bit);
    });
  }

  // Sets route.index and completes route.position_in_source, from the counts of the tokens before the block's first
  // token of this step, and from the bits of warp groups with a lower group_in_block.
  __device__ void finish_route(const SendCounts& counts, Route& route, int32_t step,
                               const WarpGroup& warp_group) const {
    const uint32_t groups_before = (1u << group_in_block()) - 1;
    for_each_word(peers, [&](int w) {
      const int32_t rank = rank_of_lane(w);
      if (!(route.ranks.words[w] >> lane_id() & 1)) return;
      route.index.of_word[w] = counts.ranks[rank];
      if (groups_before) route.index.of_word[w] += __popc(counts.groups_of_rank[rank] & groups_before);
    });
    if (warp_group.warp != 0) return;
    if (route.expert >= 0) route.position_in_source += counts.experts[route.expert];
    if (!groups_before) return;
    if (shared.step_with_repeats == step) {
      count_pairs(route);
    } else if (route.expert >= 0) {
      route.position_in_source += __popc(counts.groups_of_expert[route.expert] & groups_before);
    }
  }

  // For each k, adds to route.position_in_source the number of this step's pairs (token, k) that name the same expert,
  // in warp groups with a lower group_in_block. It is slow. It runs only if a token of this step names an expert twice,
  // because a bit cannot count two pairs. The lanes hold the experts of 32 pairs at a time.
  __device__ void count_pairs(Route& route) const {
    const int32_t num_pairs = group_in_block() * args.top_k;
#pragma unroll 1
    for (int32_t first = 0; first < num_pairs; first += 32) {
      const int32_t pair = first + lane_id(), expert = pair < num_pairs ? shared.experts[pair] : -1;
#pragma unroll 1
      for (int32_t k = 0; k < args.top_k; ++k) {
        const int32_t number = __popc(__ballot_sync(kAllLanes, expert == __shfl_sync(kAllLanes, route.expert, k)));
        if (lane_id() == k && route.expert >= 0) route.position_in_source += number;
      }
    }
  }

  // True if load_route() loads a token's slots. This is faster if a sent row has one warp, as on few SMs. (In the
  // low-latency variant, one value more ahead would make the compiler spill registers.)
  __device__ bool loads_slots_ahead() const { return Base::kStealsRows && plan.log_send_warps == 0; }

  // In the layout "token", the headers tell all expert slots that the token names. The header of the first k that names
  // a rank has the position of the token's row there, and the other headers have -1.
  __device__ void name_slots(Route& route, int32_t token, const WarpGroup& warp_group) const {
    if (warp_group.warp != 0 || token >= end_token() || lane_id() >= args.top_k) return;
    if (route.expert < 0) route.position_in_source = -1;
    const int32_t slot =
        loads_slots_ahead() ? route.named_slot : __ldg(args.named_slot + int64_t{token} * args.top_k + lane_id());
    route.expert = is_expert(slot, num_experts()) ? slot : -1;
  }

  __device__ Batch load(const RowOfX& row, int32_t batch_index) const {
    Batch batch;
#pragma unroll
    for (int i = 0; i < kSendBatch; ++i) {
      load_chunk(row, batch_index * kSendBatch + i, batch.units[i], batch.scales[i]);
    }
    return batch;
  }

  __device__ Packed pack(const Batch& batch, int32_t batch_index) const {
    const auto chunk_at = [=](int i) { return batch_index * kSendBatch + i; };
    uint4 units[kSendBatch], scales = {};
    Base::cast_batch(batch.units, batch.scales, units, &scales);
    return pack_chunks(units, scales, chunk_at);
  }

  __device__ FirstBatch first_batch_of(const Batch& batch, const WarpGroup& warp_group) const {
    if constexpr (kPacksFirst) {
      return pack(batch, warp_group.warp);
    } else {
      return batch;
    }
  }

  // Packs N chunks. The warp votes whether a unit may need an escape. units[i] is this lane's unit of chunk
  // chunk_at(i).
  template <int N, typename ChunkAt>
  __device__ PackedChunks<N> pack_chunks(const uint4 (&units)[N], const uint4& scales, ChunkAt chunk_at) const {
    PackedChunks<N> packed;
    bool may_have_escapes = has_scales() && lane_id() < N && begins_like_sentinel(scales);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      packed.units[i] = units[i];
      may_have_escapes |= has_unit(chunk_at(i)) && begins_like_sentinel(units[i]);
    }
    packed.scales = scales;
    packed.may_have_escapes = __any_sync(kAllLanes, may_have_escapes);
    return packed;
  }

  __device__ void write_own_batch(const Packed& packed, int32_t batch_index, const OwnRow& own) const {
    const auto chunk_at = [=](int i) { return batch_index * kSendBatch + i; };
    Base::template write_chunks<kSendBatch>(packed.units, packed.scales, chunk_at, own.row, own.targets);
  }

  __device__ void send_batch(const Packed& packed, int32_t batch_index, const Route& route, const OrderedRanks& ranks,
                             const RowAtRanks& row) const {
    send_chunks(packed, [=](int i) { return batch_index * kSendBatch + i; }, route, ranks, row);
  }

  // Sends chunks to `ranks`. packed.units[i] is this lane's unit of chunk chunk_at(i). The header goes with chunk 0.
  template <int N, typename ChunkAt>
  __device__ __forceinline__ void send_chunks(const PackedChunks<N>& packed, ChunkAt chunk_at, const Route& route,
                                              const OrderedRanks& ranks, const RowAtRanks& row) const {
    if (packed.may_have_escapes) return send_chunks_with_escapes(packed, chunk_at, route, ranks, row);
    const int32_t chunk_of_scales = chunk_at(lane_id());
    const bool sends_scales = has_scales() && lane_id() < N && chunk_of_scales < chunks();
    ranks.for_each(peers, [&](int32_t peer) {
      RowAddress to;
      to.begin = row.begin_at(peer);
      if (chunk_at(0) == 0 && new_route()) write_header(to, route, peer);
      uint8_t* const first = to.unit(op, chunk_at(0));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (has_unit(chunk_at(i))) store_unit(first + (chunk_at(i) - chunk_at(0)) * kChunkBytes, packed.units[i]);
      }
      if (sends_scales) store_unit(to.scales(op, payload_bytes, chunk_of_scales), packed.scales);
    });
  }

  // Like send_chunks(), but replaces each unit that equals the sentinel or the escape, and sends escape masks. It runs
  // rarely, so it sends one chunk after another, which takes few registers.
  template <int N, typename ChunkAt>
  __device__ void send_chunks_with_escapes(const PackedChunks<N>& packed, ChunkAt chunk_at, const Route& route,
                                           const OrderedRanks& ranks, const RowAtRanks& row) const {
    const auto to_each = [&](auto send) {
      ranks.for_each(peers, [&](int32_t peer) {
        RowAddress to;
        to.begin = row.begin_at(peer);
        send(peer, to, row.escape_masks_at(peer));
      });
    };
    if (chunk_at(0) == 0 && new_route()) {
      to_each([&](int32_t peer, const RowAddress& to, unsigned long long*) { write_header(to, route, peer); });
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int32_t chunk_index = chunk_at(i);
      const bool present = has_unit(chunk_index);
      const Chunk chunk = Chunk::of(packed.units[i], present);
      to_each([&](int32_t peer, const RowAddress& to, unsigned long long* masks) {
        chunk.send(op, peer, to.unit(op, chunk_index), [&] { return masks + chunk_index; }, present);
      });
    }
    const int32_t chunk_of_scales = chunk_at(lane_id());
    const bool present = has_scales() && lane_id() < N && chunk_of_scales < chunks();
    const Chunk scales = Chunk::of(packed.scales, present);
    to_each([&](int32_t peer, const RowAddress& to, unsigned long long* masks) {
      if (present) store_unit(to.scales(op, payload_bytes, chunk_of_scales), scales.unit);
      if (scales.has_escapes) scales.send_own_escape_mask(op, peer, masks + chunks() + chunk_of_scales, present);
    });
  }

  // Puts a row to its remote ranks, after the warp group has staged it. The warps of the warp group take the ranks
  // alternately. A forwarder of a new route cannot know which tokens come, so it gets a signal also for each token that
  // does not come.
  __device__ void put_rows(int32_t token, const PerRank& index, const WarpGroup& warp_group, bool staged) const {
    if (any_of_warp_group(warp_group, kWarpGroupsBarrier, !staged)) return;
    const int32_t begin = new_route() ? 0 : peers.layout.header_bytes;
    const int32_t scales = has_scales() ? chunks() * kUnitBytes : 0;
    const int32_t bytes = peers.layout.header_bytes - begin + payload_bytes + scales;
    int32_t num_remote = 0;
    OrderedRanks(peers, RankSet::of(index)).for_each(peers, [&](int32_t peer) {
      if (!is_remote(peers, peer) || num_remote++ % warp_group.num_warps != warp_group.warp) return;
      put_row(op, peer, source_at(peer), place_of(index.at(peer)), begin, bytes);
    });
    if (!uses_rail_peers() || !new_route() || token >= end_token() || warp_group.warp != 0) return;
    for_rank_of_lane(peers, [&](int w, int32_t rank) {
      if (index.of_word[w] < 0 && nodes_of(peers).is_rail_peer(rank))
        put_no_row(op, rank, source_at(rank), place_of(token));
    });
  }

  __device__ void write_header(const RowAddress& to, const Route& route, int32_t peer) const {
    if (uses_rail_peers() && is_remote(peers, peer)) return write_header_to_forward(to, route);
    if (lane_id() < args.top_k) send_header(op, to.header(lane_id()), header_for(route, peer));
  }
  // For k = lane.
  __device__ RowHeader header_for(const Route& route, int32_t peer) const {
    const int32_t expert = route.expert - peer * experts_per_rank();
    const bool is_there = route.expert >= 0 && expert >= 0 && expert < experts_per_rank();
    return {is_there ? expert : -1, route.position_in_source, route.weight, 0};
  }

  // Writes the header for a forwarder. It holds the global number of the expert and, in place of the epoch, the row's
  // index at its destination. The row's signal has the epoch.
  __device__ void write_header_to_forward(const RowAddress& to, const Route& route) const {
    const int32_t rank = route.expert >= 0 ? peers.rank_of(route.expert) : 0;
    const auto index = static_cast<uint32_t>(route.index.at_rank_of_lane(rank));
    const RowHeader header = {route.expert, route.position_in_source, route.weight, index};
    if (lane_id() < args.top_k) store_unit(to.header(lane_id()), *reinterpret_cast<const uint4*>(&header));
  }
};

}  // namespace jax_ep
