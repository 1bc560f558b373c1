// Receivers of a combine, on the tokens' side. They wait for the ranks' partial sums, and add them in the order of
// ranks.
#pragma once

#include "ffi/cuda/combine_send.cuh"

namespace jax_ep {

template <typename Config>
struct CombineReceiver : CombineSender<Config> {
  using Base = CombineSender<Config>;
  using Base::add_weighted, Base::args, Base::issue_row_loads, Base::uses_rail_peers, Base::chunk_of,
      Base::end_of_parts, Base::has_unit, Base::kLoadsAhead, Base::kVariant, Base::kHasRing, Base::kRanksAtOnce,
      Base::kSize, Base::kSumsAtOnce, Base::op, Base::partial_sums, Base::peers, Base::plan, Base::complete_row,
      Base::ring, Base::row_bytes, Base::row_number, Base::start_sum, Base::step, Base::sums_own, Base::weight_to_send,
      Base::with_out_type;
  using typename Base::RowsOfToken;
  using typename Base::Sums;
  using typename Base::X;

  __device__ void receive() const {
    const WarpGroup warp_group = WarpGroup::of_receivers(plan, op.state.role, warp_id());
    const bool takes_tokens = plan.row_receiver(op.state.role) >= 0 && warp_group.index < warp_group.num_groups;
    int32_t token = takes_tokens ? warp_group.index : args.num_tokens;
    Returning issued = {};
    if (kLoadsAhead && token < args.num_tokens) issued = issue_token_loads(token);
    op.stamp(Stamp::kEntered);
    if (op.warp_has_failed()) return;
    if (op.state.role == plan.first_receiver && op.waits_for_peers()) {
      const int32_t header_bytes = args.weights_to_send ? args.top_k * kUnitBytes : 0;
      op.wait_peers(op.state, &PeerCounters::returned, args.num_recv_per_rank, row_bytes() + header_bytes);
    }
#pragma unroll 1
    for (; token < args.num_tokens; token += warp_group.num_groups) {
      const Returning now = kLoadsAhead ? issued : issue_token_loads(token);
      const int32_t next = token + warp_group.num_groups;
      if (kLoadsAhead && next < args.num_tokens) issued = issue_token_loads(next);
      receive_token(token, now, warp_group);
    }
  }

  // A token whose sums come back.
  struct Returning {
    int32_t index;    // the index of its row among the rows that rank = lane got
    RowsOfToken own;  // its rows here; call complete_row() before use
  };

  __device__ Returning issue_token_loads(int32_t token) const {
    Returning issued = {-1};
    if (lane_id() < peers.num_ranks)
      issued.index = __ldg(args.send_index + int64_t{token} * peers.num_ranks + lane_id());
    if (sums_own()) issued.own = issue_row_loads(peers.rank, token);
    return issued;
  }

  __device__ void receive_token(int32_t token, const Returning& issued, const WarpGroup& warp_group) const {
    const RowsOfToken own = sums_own() ? complete_row(issued.own) : RowsOfToken{};
    const int32_t rank = lane_id();
    int32_t index = issued.index, source = rank;
    if (uses_rail_peers()) {
      const Nodes& nodes = nodes_of(peers);
      index = rail_index(nodes, index, token);
      if (!nodes.is_in_own_node(rank)) source = nodes.source_of(rank / nodes.size);
    }
    if (kHasNetwork && index >= 0) await_signal(op, rank, source, index);
    __syncwarp();                                         // some lanes have waited; now all lanes may read
    const int32_t arena_row = row_number(source, index);  // of rank = lane
    const uint32_t sources = __ballot_sync(kAllLanes, index >= 0), here = sums_own() ? 1u << peers.rank : 0;
    if (args.topk_weights && warp_group.warp == warp_group.num_warps - 1) {  // this warp has least to do
      float weight = weight_of(arena_row, sources & ~here);
      if (here) weight += weight_to_send(own.row);
      if (lane_id() < args.top_k) args.topk_weights[int64_t{token} * args.top_k + lane_id()] = weight;
    }
    if constexpr (kVariant == Variant::kBalanced) {
      // If few ranks have sums, and this warp sums no own rows, registers are left for more chunks.
      if (!(sources & here) && __popc(sources) <= kRanksAtOnce / 2) {
        return add_parts<2, kRanksAtOnce / 2>(token, arena_row, sources, 0, own, warp_group);
      }
    }
    if constexpr (kHasRing) {
      add_parts_of_ring(token, arena_row, sources, here & sources, own, warp_group);
    } else {
      add_parts<1, kRanksAtOnce>(token, arena_row, sources, here, own, warp_group);
    }
  }

  // Adds a token's sums, if y is prefetched. The own rows are summed first. Their sum waits in shared memory until it
  // is added in the order of ranks. This takes few instructions, which matters most here.
  __device__ void add_parts_of_ring(int32_t token, int32_t arena_row, uint32_t sources, uint32_t here,
                                    const RowsOfToken& own, const WarpGroup& warp_group) const {
    const uint32_t kept = ring.spare() + lane_id() * kUnitBytes;
#pragma unroll 1
    for (int32_t part = warp_group.warp; part < end_of_parts(); part += step(warp_group)) {
      if (here) {
        const Sums sums = partial_sums(own, part, warp_group);
#pragma unroll
        for (int c = 0; c < kSumsAtOnce; ++c) store_shared_unit(kept + c * kChunkBytes, sums.unit[c]);
      }
      float total[kSumsAtOnce][kSize];
#pragma unroll
      for (int c = 0; c < kSumsAtOnce; ++c) start_sum(total[c], sources != 0);
#pragma unroll 1
      for (uint32_t left = sources; left; left &= left - 1) {
        Sums sums;
        if (left & -left & here) {
#pragma unroll
          for (int c = 0; c < kSumsAtOnce; ++c) sums.unit[c] = load_shared_unit(kept + c * kChunkBytes);
        } else {
          sums = take_sums(__ffs(left) - 1, arena_row, part);
        }
#pragma unroll
        for (int c = 0; c < kSumsAtOnce; ++c) {
          Vector<X> unit;
          unit.bits = sums.unit[c];
          add_weighted(unit, 1.0f, total[c]);
        }
      }
      store_sums(token, part, total);
    }
  }

  // The addresses of this lane's units in an arriving part, whose chunks are contiguous.
  struct PartAddresses {
    uint8_t* units;
    int32_t bytes_left;
    __device__ __forceinline__ bool has(int i) const { return i * kChunkBytes < bytes_left; }
    __device__ __forceinline__ uint8_t* at(int i) const { return units + i * kChunkBytes; }
  };

  // Waits for a part of the sum from `source`, and takes it.
  __device__ Sums take_sums(int32_t source, int32_t arena_row, int32_t part) const {
    const RowAddress from(op, __shfl_sync(kAllLanes, arena_row, source));
    const int32_t first = part * kSumsAtOnce;
    const PartAddresses addresses = {from.unit(op, first),
                                     row_bytes() - (first * kChunkBytes + lane_id() * kUnitBytes)};
    const auto resolve = [&](int i) { return true_unit(op.state, source, from.escape_masks + first + i, lane_id()); };
    Sums sums;
    look_at_units(sums.unit, addresses);
    take_units(op, [=](int) { return source; }, sums.unit, addresses, resolve, [] { return true; });
    __syncwarp();
    return sums;
  }

  __device__ void store_sums(int32_t token, int32_t part, const float (&total)[kSumsAtOnce][kSize]) const {
    const int32_t first = part * kSumsAtOnce * kChunkUnits + lane_id();  // unit of the row
    const int32_t units = row_bytes() / kUnitBytes;
    const int64_t index = (int64_t{token} * units + first) * kSize;
    const auto store = [&](auto* out) {
#pragma unroll
      for (int c = 0; c < kSumsAtOnce; ++c) {
        if (first + c * kChunkUnits < units) store_elements(out + index + c * kChunkUnits * kSize, total[c]);
      }
    };
    with_out_type(store);
  }

  // Adds a token's sums, by parts of `kChunks` chunks. A lane awaits units of `kRanks` ranks at once. Own rows are
  // summed while the other ranks' sums are in transit.
  template <int kChunks, int kRanks>
  __device__ __forceinline__ void add_parts(int32_t token, int32_t arena_row, uint32_t sources, uint32_t here,
                                            const RowsOfToken& own, const WarpGroup& warp_group) const {
#pragma unroll 1
    for (int32_t part = warp_group.warp; part < Base::template end_of_parts<kChunks>();
         part += Base::template step<kChunks>(warp_group)) {
      float total[kChunks][kSize];
      int32_t chunk[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        chunk[i] = Base::template chunk_of<kChunks>(part, i, warp_group);
        start_sum(total[i], sources != 0);
      }
      add_all<kChunks, kRanks>(arena_row, sources, here, chunk, total, [&](int i) {
        return Base::template partial_sums<1>(own, chunk[i], warp_group)
            .unit[0];  // a part of one chunk has the chunk's number
      });
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (has_unit(chunk[i])) store_sum(token, chunk[i], total[i]);
      }
    }
  }

  // The weight for k = lane. Each (token, k) has its row on at most one rank; the other ranks send zero.
  __device__ float weight_of(int32_t arena_row, uint32_t sources) const {
    float total = 0;
#pragma unroll 1
    for (; sources; sources &= sources - 1) {
      const int32_t source = __ffs(sources) - 1;
      const RowAddress from(op, __shfl_sync(kAllLanes, arena_row, source));
      RowHeader header = no_header(op);
      const bool came = op.wait_until(
          source, [&] { return lane_id() >= args.top_k || look_at_header(op, from.header(lane_id()), header); });
      if (came) total += header.weight;
      __syncwarp();
    }
    return total;
  }

  // Adds the partial sums of all ranks: this lane's unit in each chunk of `chunk`. own(i) returns the unit of the rank
  // in `here`.
  template <int N, int kRanks, typename Own>
  __device__ __forceinline__ void add_all(int32_t arena_row, uint32_t sources, uint32_t here, const int32_t (&chunk)[N],
                                          float (&total)[N][kSize], Own own) const {
#pragma unroll 1
    while (sources) add_ranks<N, kRanks>(arena_row, sources, here, chunk, total, own);
  }

  // The addresses of this lane's units in N chunks, from each of kRanks ranks.
  template <int N, int kRanks>
  struct UnitOfRanks {
    const ArenaLayout& layout;
    uint8_t* of_first_row[N];  // the address in the arena's first row
    int32_t arena_row[kRanks];
    bool is_sent[kRanks], has_unit[N];
    __device__ __forceinline__ bool has(int i) const { return is_sent[i % kRanks] && has_unit[i / kRanks]; }
    __device__ __forceinline__ uint8_t* at(int i) const {
      return of_first_row[i / kRanks] + layout.row_offset(arena_row[i % kRanks]);
    }
  };

  // Adds the units of the next kRanks ranks, in the order of ranks.
  template <int N, int kRanks, typename Own>
  __device__ __forceinline__ void add_ranks(int32_t arena_row, uint32_t& left, uint32_t here, const int32_t (&chunk)[N],
                                            float (&total)[N][kSize], Own own) const {
    const auto source = [now = left](int i) {
      uint32_t behind = now;
      for (i %= kRanks; i > 0; --i) behind &= behind - 1;
      return __ffs(behind) - 1;
    };
    UnitOfRanks<N, kRanks> addresses = {peers.layout};
#pragma unroll
    for (int c = 0; c < N; ++c) {
      addresses.of_first_row[c] = RowAddress(op, 0).unit(op, chunk[c]);
      addresses.has_unit[c] = has_unit(chunk[c]);
    }
    bool is_here[kRanks], any_is_here = false;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      addresses.arena_row[i] = __shfl_sync(kAllLanes, arena_row, __ffs(left) - 1);
      is_here[i] = left & -left & here;
      any_is_here |= is_here[i];
      addresses.is_sent[i] = left != 0 && !is_here[i];
      left &= left - 1;
    }
    uint4 units[N * kRanks];
    look_at_units(units, addresses);
    uint4 unit_here[N] = {};
    if (any_is_here) {
#pragma unroll
      for (int c = 0; c < N; ++c) unit_here[c] = own(c);
    }
    const auto resolve = [&](int i) {
      const RowAddress from(op, addresses.arena_row[i % kRanks]);
      return true_unit(op.state, source(i), from.escape_masks + chunk[i / kRanks], lane_id());
    };
    take_units(op, source, units, addresses, resolve, [] { return true; });
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N * kRanks; ++i) {
      const int c = i / kRanks, rank = i % kRanks;
      Vector<X> part;
      part.bits = is_here[rank] ? unit_here[c] : units[i];
      float values[kSize];
      to_floats(part, values);
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        if (addresses.has(i) || is_here[rank]) total[c][e] += values[e];
      }
    }
  }

  __device__ void store_sum(int32_t token, int32_t chunk, const float (&total)[kSize]) const {
    const int64_t index =
        int64_t{token} * (row_bytes() / static_cast<int32_t>(sizeof(X))) + (chunk * kChunkUnits + lane_id()) * kSize;
    with_out_type([&](auto* out) { store_elements(out + index, total); });
  }
};

}  // namespace jax_ep
