// Receivers of a combine, on the tokens' side. They wait for the ranks' partial sums, and add them in the order of
// ranks.
#pragma once

#include "ffi/cuda/combine_send.cuh"

namespace jax_ep {

template <typename Config>
struct CombineReceiver : CombineSender<Config> {
  using Base = CombineSender<Config>;
  using Base::args, Base::bytes_in_transit, Base::cast, Base::chunks, Base::end_token, Base::first_token,
      Base::place_of, Base::issue_row_loads, Base::uses_rail_peers, Base::chunk_of, Base::end_of_parts, Base::has_unit,
      Base::kCasts, Base::kReceiverLoadsAhead, Base::kVariant, Base::kHasRing, Base::kRanksAtOnce, Base::kSize,
      Base::kChunksAtOnce, Base::op, Base::payload_bytes, Base::peers, Base::plan, Base::complete_row, Base::ring,
      Base::rounded, Base::row_bytes, Base::row_number, Base::start_sum, Base::step, Base::sums_own,
      Base::weight_cotangent_to_send, Base::with_out_type;
  using typename Base::RowsOfToken;
  using typename Base::Sums;
  using typename Base::X;

  __device__ void receive() const {
    const WarpGroup warp_group = WarpGroup::of_receivers(plan, op.state.role, warp_id());
    const bool takes_tokens = plan.row_receiver(op.state.role) >= 0 && warp_group.index < warp_group.num_groups;
    int32_t token = takes_tokens ? first_token() + warp_group.index : end_token();
    Returning issued = {};
    if (kReceiverLoadsAhead && token < end_token()) issued = issue_token_loads(token);
    op.stamp(Stamp::kEntered);
    if (op.warp_has_failed()) return;
    if (op.state.role == plan.first_receiver && op.waits_for_peers()) {
      const int32_t header_bytes = args.weights_cotangent ? args.top_k * kUnitBytes : 0;
      op.wait_peers(op.state, &PeerCounters::returned, args.num_recv_per_rank, bytes_in_transit() + header_bytes);
    }
#pragma unroll 1
    for (; token < end_token(); token += warp_group.num_groups) {
      const Returning now = kReceiverLoadsAhead ? issued : issue_token_loads(token);
      const int32_t next = token + warp_group.num_groups;
      if (kReceiverLoadsAhead && next < end_token()) issued = issue_token_loads(next);
      receive_token(token, now, warp_group);
    }
  }

  // A token whose sums come back.
  struct Returning {
    PerRank index;         // its row's index at each rank, or -1
    RowsOfToken own_rows;  // its rows here, if sums_own(); call complete_row() before use
  };

  __device__ Returning issue_token_loads(int32_t token) const {
    Returning issued = {PerRank::all(-1), {}};
    for_rank_of_lane(peers, [&](int w, int32_t rank) {
      issued.index.of_word[w] = __ldg(args.send_index + int64_t{token} * peers.num_ranks + rank);
    });
    if (sums_own()) issued.own_rows = issue_row_loads(peers.rank, token);
    return issued;
  }

  // The source under which this rank keeps the sum from `rank`.
  __device__ int32_t source_of(int32_t rank) const {
    if (!uses_rail_peers() || nodes_of(peers).is_in_own_node(rank)) return rank;
    return nodes_of(peers).source_of(rank / nodes_of(peers).size);
  }

  __device__ void receive_token(int32_t token, const Returning& issued, const WarpGroup& warp_group) const {
    const RowsOfToken own_rows = sums_own() ? complete_row(issued.own_rows) : RowsOfToken{};
    const PerRank index = uses_rail_peers() ? rail_index(nodes_of(peers), issued.index, token) : issued.index;
    PerRank arena_row = {};  // of the sum from each rank
    for_each_word(peers, [&](int w) {
      const int32_t rank = rank_of_lane(w), source = source_of(rank);
      if (kHasNetwork && index.of_word[w] >= 0) await_signal(op, rank, source, place_of(index.of_word[w]));
      arena_row.of_word[w] = row_number(source, index.of_word[w]);
    });
    __syncwarp();  // some lanes have waited; now all lanes may read
    const RankSet sources = RankSet::of(index);
    const RankSet here = sums_own() ? RankSet::only(peers.rank) : RankSet{};  // of which receivers sum the rows
    if (args.topk_weights_cotangent &&
        warp_group.warp == warp_group.num_warps - 1) {  // the last warp has the fewest chunks
      float weight = await_weight_cotangent(arena_row, sources.without(here));
      if (sums_own()) weight += weight_cotangent_to_send(own_rows.row);
      if (lane_id() < args.top_k) args.topk_weights_cotangent[int64_t{token} * args.top_k + lane_id()] = weight;
    }
    if constexpr (kVariant == Variant::kBalanced) {
      // If few ranks have sums, and this warp sums no own rows, there are registers for more chunks.
      if (!sources.intersection(here).any() && sources.size() <= kRanksAtOnce / 2) {
        return add_parts<2, kRanksAtOnce / 2>(token, arena_row, sources, {}, own_rows, warp_group);
      }
    }
    if constexpr (kHasRing) {
      const RankSet summed_here = sources.intersection(here);
      if (has_no_own_sum(sources, summed_here, own_rows)) {
        add_prefetched_rows(token, arena_row, sources.words[0], summed_here.words[0], own_rows, warp_group);
      } else {
        add_parts_of_ring(token, arena_row, sources, summed_here, own_rows, warp_group);
      }
    } else {
      add_parts<1, kRanksAtOnce>(token, arena_row, sources, here, own_rows, warp_group);
    }
  }

  // The own sum is the sum of a token's own rows. With a ring, add_parts_of_ring keeps a lane's part of the own sum in
  // the ring's spare room until the part is added. If sums are cast, the own sum stays in float32, and takes kUnitsKept
  // units for each unit of a peer's sum. Otherwise, it is rounded like a peer's sum, and takes one unit.
  static constexpr int kUnitsKept = kCasts ? kSize * sizeof(float) / kUnitBytes : 1;
  __device__ static void store_own_sum(uint32_t kept, const float (&sum)[kSize]) {
#pragma unroll
    for (int i = 0; i < kUnitsKept; ++i) {
      Vector<float> unit;
#pragma unroll
      for (int e = 0; e < Vector<float>::kSize; ++e) unit.element[e] = sum[Vector<float>::kSize * i + e];
      store_shared_unit(kept + i * kChunkBytes, unit.bits);
    }
  }
  __device__ static void add_own_sum(uint32_t kept, float (&total)[kChunksAtOnce][kSize]) {
#pragma unroll
    for (int i = 0; i < kUnitsKept * kChunksAtOnce; ++i) {
      Vector<float> unit;
      unit.bits = load_shared_unit(kept + i * kChunkBytes);
#pragma unroll
      for (int e = 0; e < Vector<float>::kSize; ++e) {
        total[i / kUnitsKept][i % kUnitsKept * Vector<float>::kSize + e] += unit.element[e];
      }
    }
  }

  // Adds a token's sums, if y is prefetched. The own rows are summed first. The own sum stays in shared memory until it
  // is added in the order of ranks. This takes few instructions, which matters most here.
  __device__ void add_parts_of_ring(int32_t token, const PerRank& arena_row, const RankSet& sources,
                                    const RankSet& here, const RowsOfToken& own_rows,
                                    const WarpGroup& warp_group) const {
    static_assert(kChunksAtOnce * kUnitsKept * kChunkBytes <= Base::Ring::kBytesOfSpare);
    const uint32_t kept = ring.spare() + lane_id() * kUnitBytes;
#pragma unroll 1
    for (int32_t part = warp_group.warp; part < end_of_parts(); part += step(warp_group)) {
      if (here.any()) {
        float sum[kChunksAtOnce][kSize];
        Base::template sum_part<kChunksAtOnce, true>(own_rows, part, warp_group, sum);
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; ++c) {
          if constexpr (kCasts) {
            store_own_sum(kept + c * kUnitsKept * kChunkBytes, sum[c]);
          } else {
            store_shared_unit(kept + c * kChunkBytes, rounded(sum[c]));
          }
        }
      }
      add_sources(token, part, arena_row, sources, here, [&](Sums& own, float (&total)[kChunksAtOnce][kSize]) {
        if constexpr (kCasts) {
          add_own_sum(kept, total);
        } else {
#pragma unroll
          for (int c = 0; c < kChunksAtOnce; ++c) own.unit[c] = load_shared_unit(kept + c * kChunkBytes);
        }
      });
    }
  }

  // True if this rank has no row of the token, or one row that is added unchanged (is_one_row). Then the ring can
  // prefetch everything that is added. It has a lane per rank, so there are at most kMaxLocalRanks ranks.
  __device__ bool has_no_own_sum(const RankSet& sources, const RankSet& here, const RowsOfToken& own_rows) const {
    if (kCasts || !sources.any() || peers.num_ranks > kMaxLocalRanks) return false;
    return !here.any() || Base::is_one_row(own_rows);
  }

  // Adds a token's sums, if has_no_own_sum(). The ring prefetches the own row, from y, and the sums in the arena: lane
  // r prefetches those from rank r. `sources`, `here`: a bit per rank. A prefetch may read a unit before the unit
  // arrives. Then take_units() loads it again.
  __device__ void add_prefetched_rows(int32_t token, const PerRank& arena_row, uint32_t sources, uint32_t here,
                                      const RowsOfToken& own_rows, const WarpGroup& warp_group) const {
    const uint8_t* const own_row = Base::row_of_y(own_rows, own_rows.rows);
    const uint8_t* const sum = RowAddress(op, arena_row.of_word[0]).begin + peers.layout.header_bytes;
    Base::template begin_pieces<false>(sources, here >> lane_id() & 1 ? own_row : sum, warp_group);
#pragma unroll 1
    for (int32_t part = warp_group.warp; part < end_of_parts(); part += step(warp_group)) {
      float total[kChunksAtOnce][kSize];
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) start_sum(total[c]);
      uint32_t left = sources;
#pragma unroll 1
      do {  // There is a source. With `for`, the compiler would set the total to zero twice.
        uint4 units[kChunksAtOnce];
        Base::copy_piece(sources, warp_group, units);
        if ((left & -left & here) == 0) take_prefetched_sums(__ffs(left) - 1, arena_row, part, units);
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; ++c) add_sent(units[c], 0, total[c]);
        left &= left - 1;
      } while (left);
      store_sums(token, part, total);
    }
  }

  // Adds a part of the sums from all sources, in the order of ranks, and stores the total. `here` has this rank if
  // receivers sum its rows. For this rank, take_own(own, total) is called. Without a cast, it sets `own` to this rank's
  // sum, which is then added. With a cast, it adds the sum to `total` itself.
  template <typename TakeOwn>
  __device__ __forceinline__ void add_sources(int32_t token, int32_t part, const PerRank& arena_row,
                                              const RankSet& sources, const RankSet& here, TakeOwn take_own) const {
    float total[kChunksAtOnce][kSize];
#pragma unroll
    for (int c = 0; c < kChunksAtOnce; ++c) start_sum(total[c], sources.any());
    for_each_word(peers, [&](int w) {
#pragma unroll 1
      for (uint32_t left = sources.words[w]; left; left &= left - 1) {
        Sums sums;
        if ((left & -left & here.words[w]) != 0) {
          take_own(sums, total);
          if constexpr (kCasts) continue;
        } else {
          sums = take_sums(32 * w + __ffs(left) - 1, arena_row, part);
        }
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; ++c) add_sent(sums.unit[c], sums.scale[c], total[c]);
      }
    });
    store_sums(token, part, total);
  }

  // Adds a unit from a peer to `total`. `scale` is the scale of its block, and is used only if the unit is cast.
  __device__ void add_sent(const uint4& unit, float scale, float (&total)[kSize]) const {
    float values[kSize];
    if constexpr (kCasts) {
      cast_from_fp8(unit, scale, cast(), values);
    } else {
      Vector<X> part;
      part.bits = unit;
      to_floats(part, values);
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) total[e] += values[e];
  }

  // The addresses of this lane's units in an arriving part, whose chunks are contiguous. If the sum is cast, there is
  // one more unit: lane i takes the scales of the part's chunk i.
  struct PartAddresses {
    uint8_t *units, *scales;
    int32_t bytes_left;
    bool has_scales;
    __device__ __forceinline__ bool has(int i) const {
      return i < kChunksAtOnce ? i * kChunkBytes < bytes_left : has_scales;
    }
    __device__ __forceinline__ uint8_t* at(int i) const { return i < kChunksAtOnce ? units + i * kChunkBytes : scales; }
  };

  __device__ PartAddresses part_at(const RowAddress& from, int32_t part) const {
    const int32_t first = part * kChunksAtOnce, chunk_of_scales = first + lane_id();
    return {from.unit(op, first), from.scales(op, payload_bytes(), chunk_of_scales),
            payload_bytes() - (first * kChunkBytes + lane_id() * kUnitBytes),
            kCasts && lane_id() < kChunksAtOnce && chunk_of_scales < chunks()};
  }

  // Waits for a part of the sum from `source`, and takes it. `units`: what the addresses held at an earlier time.
  __device__ __forceinline__ void take_part(int32_t source, const RowAddress& from, int32_t part,
                                            const PartAddresses& addresses,
                                            uint4 (&units)[kChunksAtOnce + kCasts]) const {
    const int32_t first = part * kChunksAtOnce, chunk_of_scales = first + lane_id();
    const auto resolve = [&](int i) {
      const bool is_unit = i < kChunksAtOnce;
      return true_unit(op.state, source, from.escape_masks + (is_unit ? first + i : chunks() + chunk_of_scales),
                       is_unit ? lane_id() : 0);
    };
    take_units(op, [=](int) { return source; }, units, addresses, resolve, [] { return true; });
    __syncwarp();
  }

  __device__ Sums take_sums(int32_t source, const PerRank& arena_row, int32_t part) const {
    const RowAddress from(op, arena_row.at(source));
    const PartAddresses addresses = part_at(from, part);
    uint4 units[kChunksAtOnce + kCasts];
    look_at_units(units, addresses);
    take_part(source, from, part, addresses, units);
    Sums sums;
#pragma unroll
    for (int c = 0; c < kChunksAtOnce; ++c) {
      sums.unit[c] = units[c];
      if constexpr (kCasts) sums.scale[c] = scale_of_block(units[kChunksAtOnce], c);
    }
    return sums;
  }

  // The same for units that the ring has prefetched. (Where there is no unit, the ring has garbage.)
  __device__ void take_prefetched_sums(int32_t source, const PerRank& arena_row, int32_t part,
                                       uint4 (&units)[kChunksAtOnce]) const {
    if constexpr (!kCasts) {
      const RowAddress from(op, arena_row.at(source));
      const PartAddresses addresses = part_at(from, part);
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) {
        if (!addresses.has(c)) units[c] = uint4{};
      }
      take_part(source, from, part, addresses, units);
    }
  }

  __device__ void store_sums(int32_t token, int32_t part, const float (&total)[kChunksAtOnce][kSize]) const {
    const int32_t first = part * kChunksAtOnce * kChunkUnits + lane_id();  // unit of the row
    const int32_t units = payload_bytes() / kUnitBytes;
    const int64_t index = (int64_t{token} * units + first) * kSize;
    const auto store = [&](auto* out) {
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) {
        if (first + c * kChunkUnits < units) store_elements(out + index + c * kChunkUnits * kSize, total[c]);
      }
    };
    with_out_type(store);
  }

  // Adds a token's sums, by parts of `kChunks` chunks. A lane awaits units of `kRanks` ranks at once. Own rows are
  // summed while the other ranks' sums are in transit.
  template <int kChunks, int kRanks>
  __device__ __forceinline__ void add_parts(int32_t token, const PerRank& arena_row, const RankSet& sources,
                                            const RankSet& here, const RowsOfToken& own_rows,
                                            const WarpGroup& warp_group) const {
#pragma unroll 1
    for (int32_t part = warp_group.warp; part < Base::template end_of_parts<kChunks>();
         part += Base::template step<kChunks>(warp_group)) {
      float total[kChunks][kSize];
      int32_t chunk[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        chunk[i] = Base::template chunk_of<kChunks>(part, i, warp_group);
        start_sum(total[i], sources.any());
      }
      add_all<kChunks, kRanks>(arena_row, sources, here, chunk, total, [&](int i, float (&sum)[1][kSize]) {
        Base::template sum_part<1, true>(own_rows, chunk[i], warp_group,
                                         sum);  // the number of a one-chunk part is the chunk's number
      });
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (has_unit(chunk[i])) store_sum(token, chunk[i], total[i]);
      }
    }
  }

  // Waits for the cotangents of a token's weights, and returns the cotangent for k = lane. Each (token, k) has its row
  // on at most one rank; the other ranks send zero.
  __device__ float await_weight_cotangent(const PerRank& arena_row, const RankSet& sources) const {
    float total = 0;
    for_each_word(peers, [&](int w) {
#pragma unroll 1
      for (uint32_t left = sources.words[w]; left; left &= left - 1) {
        const int32_t source = 32 * w + __ffs(left) - 1;
        const RowAddress from(op, arena_row.at(source));
        RowHeader header = no_header(op);
        const bool came = op.wait_until(
            source, [&] { return lane_id() >= args.top_k || look_at_header(op, from.header(lane_id()), header); });
        if (came) total += header.weight;
        __syncwarp();
      }
    });
    return total;
  }

  // Adds the partial sums of all ranks: this lane's unit in each chunk of `chunk`. sum_own_rows(i, sum) sums chunk i of
  // the own rows, if `here` has this rank.
  template <int N, int kRanks, typename SumOwnRows>
  __device__ __forceinline__ void add_all(const PerRank& arena_row, const RankSet& sources, const RankSet& here,
                                          const int32_t (&chunk)[N], float (&total)[N][kSize],
                                          SumOwnRows sum_own_rows) const {
    for_each_word(peers, [&](int w) {
      uint32_t left = sources.words[w];
#pragma unroll 1
      while (left) add_ranks<N, kRanks>(w, arena_row.of_word[w], left, here.words[w], chunk, total, sum_own_rows);
    });
  }

  // The addresses of this lane's units in N chunks, from each of kRanks ranks. If the sums are cast, N is 1, and there
  // is one more unit: lane i takes the scales from rank i of the kRanks.
  template <int N, int kRanks>
  struct UnitOfRanks {
    const ArenaLayout& layout;
    uint8_t* of_first_row[N];  // the address in the arena's first row
    int32_t arena_row[kRanks];
    bool is_sent[kRanks], has_unit[N];
    uint8_t* scales;
    bool has_scales;
    __device__ __forceinline__ bool has(int i) const {
      return i < N * kRanks ? is_sent[i % kRanks] && has_unit[i / kRanks] : has_scales;
    }
    __device__ __forceinline__ uint8_t* at(int i) const {
      return i < N * kRanks ? of_first_row[i / kRanks] + layout.row_offset(arena_row[i % kRanks]) : scales;
    }
  };

  // Adds the units of the next kRanks ranks in `left`, in the order of ranks, and removes these ranks from `left`.
  // `arena_row`, `left` and `here` are those of word w.
  template <int N, int kRanks, typename SumOwnRows>
  __device__ __forceinline__ void add_ranks(int w, int32_t arena_row, uint32_t& left, uint32_t here,
                                            const int32_t (&chunk)[N], float (&total)[N][kSize],
                                            SumOwnRows sum_own_rows) const {
    const auto source = [w, now = left](int i) {
      uint32_t rest = now;
      for (i = i < N * kRanks ? i % kRanks : lane_id(); i > 0; --i) rest &= rest - 1;
      return 32 * w + __ffs(rest) - 1;
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
    int32_t row_of_scales = 0;
    if constexpr (kCasts) {
      static_assert(N == 1);
      bool is_sent = false;
#pragma unroll
      for (int i = 0; i < kRanks; ++i) {
        if (lane_id() == i) is_sent = addresses.is_sent[i], row_of_scales = addresses.arena_row[i];
      }
      addresses.has_scales = is_sent && chunk[0] < chunks();
      addresses.scales = RowAddress(op, row_of_scales).scales(op, payload_bytes(), chunk[0]);
    }
    uint4 units[N * kRanks + kCasts];
    look_at_units(units, addresses);
    OwnSum own_sum[N] = {};
    if (any_is_here) {
#pragma unroll
      for (int c = 0; c < N; ++c) {
        float sum[1][kSize];
        sum_own_rows(c, sum);
        own_sum[c] = own_sum_of(sum[0]);
      }
    }
    const auto resolve = [&](int i) {
      if (i == N * kRanks) {
        const RowAddress from(op, row_of_scales);
        return true_unit(op.state, source(i), from.escape_masks + chunks() + chunk[0], 0);
      }
      const RowAddress from(op, addresses.arena_row[i % kRanks]);
      return true_unit(op.state, source(i), from.escape_masks + chunk[i / kRanks], lane_id());
    };
    take_units(op, source, units, addresses, resolve, [] { return true; });
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N * kRanks; ++i) {
      const int c = i / kRanks, rank = i % kRanks;
      float values[kSize];
      if constexpr (kCasts) {
        cast_from_fp8(units[i], scale_of_block(units[N * kRanks], rank), cast(), values);
#pragma unroll
        for (int e = 0; e < kSize; ++e) values[e] = is_here[rank] ? own_sum[c].channels[e] : values[e];
      } else {
        Vector<X> part;
        part.bits = is_here[rank] ? own_sum[c].bits : units[i];
        to_floats(part, values);
      }
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        if (addresses.has(i) || is_here[rank]) total[c][e] += values[e];
      }
    }
  }

  // This lane's unit of the own sum, until it is added: rounded like a peer's sum or, if sums are cast, in float32.
  struct RoundedSum {
    uint4 bits;
  };
  struct FloatSum {
    float channels[kSize];
  };
  using OwnSum = std::conditional_t<kCasts, FloatSum, RoundedSum>;
  __device__ static OwnSum own_sum_of(const float (&sum)[kSize]) {
    if constexpr (kCasts) {
      FloatSum kept;
#pragma unroll
      for (int e = 0; e < kSize; ++e) kept.channels[e] = sum[e];
      return kept;
    } else {
      return {rounded(sum)};
    }
  }

  __device__ void store_sum(int32_t token, int32_t chunk, const float (&total)[kSize]) const {
    const int64_t index =
        int64_t{token} * (row_bytes() / static_cast<int32_t>(sizeof(X))) + (chunk * kChunkUnits + lane_id()) * kSize;
    with_out_type([&](auto* out) { store_elements(out + index, total); });
  }
};

}  // namespace jax_ep
