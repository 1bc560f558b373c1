// Partial sums: a token's rows on this rank, times their weights, added in float32.
#pragma once

#include "ffi/cuda/combine_operands.cuh"

namespace jax_ep {

template <typename Config>
struct CombineSums : CombineOperands<Config> {
  using Base = CombineOperands<Config>;
  using Base::add_weighted, Base::args, Base::first_token, Base::in_rounds, Base::is_all_to_all, Base::chunk_of,
      Base::chunks, Base::has_unit, Base::kCasts, Base::kSenderLoadsAhead, Base::kHasRing, Base::kPartBytes,
      Base::kReadsOnce, Base::kRowsAtOnce, Base::kSize, Base::kChunksAtOnce, Base::kUnitsRead, Base::op, Base::packed,
      Base::peers, Base::ranges, Base::ring, Base::row_bytes, Base::start_sum, Base::sums_own, Base::next_piece;
  using typename Base::RowsOfToken;
  using typename Base::X;

  // For all_to_all_back. These functions are not inlined, so that other operations need no registers for them.
  __device__ __noinline__ static void send_num_rows(State& state, const int32_t* num_rows) {
    operation_of<Operation>(state).send_num_rows(num_rows);
  }
  __device__ __noinline__ static int32_t wait_num_rows(State& state, int32_t source) {
    return operation_of<Operation>(state).wait_num_rows(source);
  }

  // Issues the loads of the metadata of a token's rows, and does not wait for them. complete_row() makes the metadata
  // usable. With kSenderLoadsAhead, complete_row() also computes `present`, because a comparison here would wait for
  // the loads. Otherwise, this function computes it.
  __device__ RowsOfToken issue_row_loads(uint32_t item) const {
    const Divisor& by_destinations = sums_own() ? peers.by_others : peers.by_ranks;
    int32_t peer = peers.rank + 1 + by_destinations.remainder(item);
    if (peer >= peers.num_ranks) peer -= peers.num_ranks;
    return issue_row_loads(peer, first_index_of(peer) + by_destinations.quotient(item));
  }

  // The index of the first row of this round for a rank. For an own token, it is the number of the token.
  __device__ int32_t first_index_of(int32_t peer) const {
    if (!in_rounds()) return 0;
    return peer == peers.rank && !is_all_to_all() ? first_token() : ranges[peer].begin;
  }

  // In rounds: waits until all ranks have told which indices their rows have. Ends with a barrier of the workers.
  __device__ void await_ranges() const {
    for_rank_of_thread(peers, op.num_worker_threads,
                       [&](int32_t peer) { ranges[peer] = wait_range_of(op.state, peer); });
    op.sync_workers();
  }

  // For an own token, `index` is the token's number.
  __device__ RowsOfToken issue_row_loads(int32_t peer, int32_t index) const {
    RowsOfToken token = {};
    token.peer = peer;
    token.index = index;
    const int32_t recv_index = token.peer * args.num_tokens + token.index;
    token.row = -1;
    if (is_all_to_all()) {
      if (lane_id() == 0) token.row = recv_index;
    } else if (lane_id() < args.top_k) {
      token.row = __ldg(args.recv_row + int64_t{recv_index} * args.top_k + lane_id());
    }
    if (peer != peers.rank || is_all_to_all()) {
      token.num_rows_or_index = num_rows_of(token.peer);
      if (!kSenderLoadsAhead) token.present = token.index < token.num_rows_or_index;
    } else {
      token.num_rows_or_index = sums_own() ? index : __ldg(args.send_index + int64_t{index} * peers.num_ranks + peer);
      if (!kSenderLoadsAhead) token.present = token.num_rows_or_index >= 0;
    }
    return token;
  }

  __device__ RowsOfToken complete_row(RowsOfToken token) const {
    if (kSenderLoadsAhead) token.present = is_present(token);
    if (!token.present) token.row = -1;
    token.weight = args.row_weights && token.row >= 0 ? __ldg(args.row_weights + token.row) : 1.0f;
    token.rows = __ballot_sync(kAllLanes, token.row >= 0);
    return token;
  }

  __device__ bool is_present(const RowsOfToken& token) const {
    return token.peer != peers.rank || is_all_to_all() ? token.index < token.num_rows_or_index
                                                       : token.num_rows_or_index >= 0;
  }

  // The number of rows that came from `peer`, and so go back; in rounds, of this round and all earlier rounds.
  // (all_to_all_back has no route: it waits for the number, which the peer sends before any row. One lane waits, so
  // that all lanes get the same number even if the operation fails.)
  __device__ int32_t num_rows_of(int32_t peer) const {
    if (in_rounds()) return ranges[peer].end;
    if (!is_all_to_all()) return __ldg(args.num_recv_per_rank + peer);
    int32_t number = 0;
    if (lane_id() == 0) number = wait_num_rows(op.state, peer);
    return __shfl_sync(kAllLanes, number, 0);
  }

  // Sums a part, in the format in which sums are sent.
  __device__ UnitSums<kChunksAtOnce> partial_sums(const RowsOfToken& token, int32_t part,
                                                  const WarpGroup& warp_group) const {
    UnitSums<kChunksAtOnce> sums;
    if constexpr (kHasRing && !kCasts) {
      if (is_one_row(token)) {
        if (part == warp_group.warp) begin_rows<false>(token, warp_group);
        if (part * kPartBytes < row_bytes()) copy_piece(token.rows, warp_group, sums.unit);
        return sums;
      }
    }
    float total[kChunksAtOnce][kSize];
    sum_part<kChunksAtOnce, false>(token, part, warp_group, total);
#pragma unroll
    for (int c = 0; c < kChunksAtOnce; ++c) {
      sums.unit[c] = packed(total[c], Base::template chunk_of<kChunksAtOnce>(part, c, warp_group), sums.scale[c]);
    }
    return sums;
  }

  // Sums a part: for a sender or, if kIsOwn, for a receiver that sums own rows. With a ring, the caller must go
  // through all parts of a row in their order.
  template <int N, bool kIsOwn>
  __device__ void sum_part(const RowsOfToken& token, int32_t part, const WarpGroup& warp_group,
                           float (&total)[N][kSize]) const {
#pragma unroll
    for (int c = 0; c < N; ++c) start_sum(total[c]);
    if constexpr (kHasRing) {
      add_pieces(token, part, warp_group, total);
    } else if constexpr (!kIsOwn) {
      add_rows(token, part, warp_group, total);
    } else {
      static_assert(N == 1);
      add_own_rows(token, part, total[0]);
    }
  }

  // Sums a part for a sender. The warps of a sender compete for instruction issue more than they wait for y. So each
  // row takes few instructions: values that are the same for all rows are computed once, and a lane that has no unit in
  // its chunk reads the row's last unit.
  template <int N>
  __device__ void add_rows(const RowsOfToken& token, int32_t part, const WarpGroup& warp_group,
                           float (&total)[N][kSize]) const {
    const auto bytes = static_cast<uint32_t>(row_bytes());
    const uint8_t* of_first_row[N];
    bool has_chunk[N];
#pragma unroll
    for (int c = 0; c < N; ++c) {
      const int32_t chunk = Base::template chunk_of<N>(part, c, warp_group);
      const auto offset = static_cast<uint32_t>(offset_in_y(chunk));
      of_first_row[c] = keep(static_cast<const uint8_t*>(args.y) + min(offset, bytes - kUnitsRead * kUnitBytes));
      has_chunk[c] = chunk < chunks();
    }
#pragma unroll 1
    for (uint32_t rows = token.rows; rows;) {
      Vector<X> y[kRowsAtOnce][N][kUnitsRead];
      uint32_t to_weigh = rows;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (!rows) break;
        const uint32_t row = __shfl_sync(kAllLanes, token.row, __ffs(rows) - 1);
        rows &= rows - 1;
#pragma unroll
        for (int c = 0; c < N; ++c) {
          if (has_chunk[c]) load_units_of_y(of_first_row[c] + uint64_t{row} * bytes, y[i][c]);
        }
      }
      // The weights are not used before this point, so that the loads of y need not wait for the weights.
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (!to_weigh) break;
        const float weight = weight_of_first(token, to_weigh);
        to_weigh &= to_weigh - 1;
#pragma unroll
        for (int c = 0; c < N; ++c) {
          if (has_chunk[c]) add_weighted(y[i][c], weight, total[c]);
        }
      }
    }
  }

  // Sums one chunk of own rows for a receiver. The receiver has time until the peers' sums arrive, but few free
  // registers: it holds the addresses of these sums. So for each row, it computes again the values that add_rows
  // computes once. If it kept these values, ptxas would spill them, or load the rows one by one.
  __device__ void add_own_rows(const RowsOfToken& token, int32_t chunk, float (&total)[kSize]) const {
#pragma unroll 1
    for (uint32_t rows = token.rows; rows;) {
      Vector<X> y[kRowsAtOnce][kUnitsRead];
      uint32_t to_weigh = rows;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const uint8_t* const row = row_of_y(token, rows);
#pragma unroll
        for (int v = 0; v < kUnitsRead; ++v) y[i][v].bits = uint4{};
        if (rows && has_unit(chunk)) load_units_of_y(row + offset_in_y(chunk), y[i]);
        rows &= rows - 1;
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (!to_weigh) break;
        add_weighted(y[i], weight_of_first(token, to_weigh), total);
        to_weigh &= to_weigh - 1;
      }
    }
  }

  // The offset, in a row of y, of the units that this lane sums for its unit of `chunk`.
  __device__ static int32_t offset_in_y(int32_t chunk) {
    return (chunk * kChunkUnits + lane_id()) * (kUnitsRead * kUnitBytes);
  }
  __device__ static void load_units_of_y(const uint8_t* address, Vector<X> (&y)[kUnitsRead]) {
#pragma unroll
    for (int v = 0; v < kUnitsRead; ++v) y[v].bits = load_unit_of_y<kReadsOnce>(address + v * kUnitBytes);
  }

  // The address of the first row in `rows`.
  __device__ const uint8_t* row_of_y(const RowsOfToken& token, uint32_t rows) const {
    const auto row = static_cast<uint32_t>(__shfl_sync(kAllLanes, token.row, __ffs(rows) - 1));
    return static_cast<const uint8_t*>(args.y) + uint64_t{row} * static_cast<uint32_t>(row_bytes());
  }

  __device__ static float weight_of_first(const RowsOfToken& token, uint32_t rows) {
    return __shfl_sync(kAllLanes, token.weight, __ffs(rows) - 1);
  }

  // True if the token has one row here, and sums have no weights. Then the sum is this row. It is so for tokens in the
  // layout "token", for rows of all_to_all_back, and for some tokens of the backward passes of dispatch and
  // dispatch_like. (A copy keeps -0, and a sum would be +0. Receivers add to +0, so their results are the same.) Such a
  // row is copied: the conversions to float32 and back would take most of the instructions.
  __device__ bool is_one_row(const RowsOfToken& token) const { return !args.row_weights && __popc(token.rows) == 1; }

  // Copies the next piece from the ring to registers. `lanes`: as for begin_pieces().
  // (drop() synchronizes the warp. So all lanes have loaded the piece before a lane prefetches into its stage.)
  __device__ void copy_piece(uint32_t lanes, const WarpGroup& warp_group, uint4 (&units)[kChunksAtOnce]) const {
    const uint32_t piece = ring.next();
#pragma unroll
    for (int c = 0; c < kChunksAtOnce; ++c) units[c] = load_shared_unit(piece + offset_in_y(c));
    ring.drop();
    prefetch_pieces<false>(lanes, warp_group);
  }

  // Sums a part from the ring, in which the pieces of a part follow one another in the order of rows. (Garbage behind
  // the end of a row's last piece is added, too, and is not stored.)
  template <int N>
  __device__ void add_pieces(const RowsOfToken& token, int32_t part, const WarpGroup& warp_group,
                             float (&total)[N][kSize]) const {
    static_assert(N == kChunksAtOnce);
    if (part == warp_group.warp) begin_rows<true>(token, warp_group);
#pragma unroll 1
    for (uint32_t rows = part * kPartBytes < row_bytes() ? token.rows : 0; rows; rows &= rows - 1) {
      const float weight = weight_of_first(token, rows);
      const uint32_t piece = ring.next();
      Vector<X> y[N][kUnitsRead];
#pragma unroll
      for (int c = 0; c < N; ++c) {
#pragma unroll
        for (int v = 0; v < kUnitsRead; ++v) y[c][v].bits = load_shared_unit(piece + offset_in_y(c) + v * kUnitBytes);
      }
#pragma unroll
      for (int c = 0; c < N; ++c) add_weighted(y[c], weight, total[c]);
      ring.drop();
      prefetch_pieces<true>(token.rows, warp_group);
    }
  }

  // Begins to prefetch a token's rows of y.
  template <bool kEvictsFirst>
  __device__ void begin_rows(const RowsOfToken& token, const WarpGroup& warp_group) const {
    begin_pieces<kEvictsFirst>(token.rows, static_cast<const uint8_t*>(args.y) + int64_t{token.row} * args.row_bytes,
                               warp_group);
  }

  // Begins to prefetch rows. Each of `lanes` prefetches the pieces of the row that it passes, as far ahead as the ring
  // has room. kEvictsFirst: the L2 cache evicts them first. (Measured: for rows that are added as they are, this is
  // slower.) The pieces of a part follow one another in the order of lanes. After this call, the warp must take all
  // pieces of the rows, even if the operation fails: a block must not end before its bulk copies have landed.
  template <bool kEvictsFirst>
  __device__ void begin_pieces(uint32_t lanes, const uint8_t* row, const WarpGroup& warp_group) const {
    const int32_t begin = warp_group.warp * kPartBytes;
    const uint32_t lanes_before = lanes & ((1u << lane_id()) - 1);
    next_piece = {ring.num_taken() + __popc(lanes_before), lanes >> lane_id() & 1 ? row_bytes() - begin : 0,
                  keep(row + begin)};
    prefetch_pieces<kEvictsFirst>(lanes, warp_group);
  }

  template <bool kEvictsFirst>
  __device__ void prefetch_pieces(uint32_t lanes, const WarpGroup& warp_group) const {
#pragma unroll 1
    while (next_piece.bytes_left > 0 && ring.has_room_for(next_piece.number)) {
      ring.template prefetch<kEvictsFirst>(next_piece.number, next_piece.from, min(next_piece.bytes_left, kPartBytes));
      next_piece.number += __popc(lanes);
      next_piece.from += warp_group.num_warps * kPartBytes;
      next_piece.bytes_left -= warp_group.num_warps * kPartBytes;
    }
  }
};

}  // namespace jax_ep
