// How a warp writes rows of a dispatch's result, and records where a row of a new route has gone.
#pragma once

#include "ffi/cuda/routing.cuh"
#include "ffi/cuda/scales.cuh"

namespace jax_ep {

template <typename Config>
struct ResultRows : Routing<Config> {
  using Base = Routing<Config>;
  using Base::args, Base::chunks, Base::has_result_unit, Base::has_scales, Base::has_unit, Base::kDelivery,
      Base::kEvictsResultsFirst, Base::kMayHaveScales, Base::kStealsRows, Base::new_row, Base::out_row,
      Base::result_unit;

  // Records the rows of the result to which an arriving row goes, in recv_row. Writes the weights of these rows and, in
  // the layout "token", their expert slots. `row`: the row of the result for k = lane, or -1. A whole warp calls it,
  // once for each row of a new route.
  __device__ void keep_row(int32_t source, int32_t index, const RowHeader& header, int32_t row) const {
    if (lane_id() < args.top_k) {
      args.recv_row[(int64_t{source} * args.num_tokens + index) * args.top_k + lane_id()] = row;
      if (row >= 0 && !args.recv_topk_idx) args.weights[row] = header.weight;
    }
    if (args.recv_topk_idx) write_pairs(header, row);
  }

  // In the layout "token": writes the expert slots and the weights of a token's row here. Only the first k that names
  // this rank has a `row` of 0 or more.
  __device__ void write_pairs(const RowHeader& header, int32_t row) const {
    const int32_t row_of_token = __reduce_max_sync(kAllLanes, row);
    if (row_of_token < 0 || lane_id() >= args.top_k) return;
    const int64_t pair = int64_t{row_of_token} * args.top_k + lane_id();
    args.recv_topk_idx[pair] = header.expert;
    args.weights[pair] = header.expert < 0 ? 0 : header.weight;
  }

  // Writes N chunks, in the form in which a row travels, to the rows of the result that `targets` names: bit k for
  // `row` of lane k. units[i] is this lane's unit of chunk chunk_at(i). `scales` of lane i is the unit with the
  // scales of the i-th chunk.
  template <int N, typename ChunkAt>
  __device__ void write_chunks(const uint4* units, const uint4& scales, ChunkAt chunk_at, int32_t row,
                               uint32_t targets) const {
    if constexpr (kDelivery == Delivery::kCopy) copy<N>(units, scales, chunk_at, row, targets);
    if constexpr (kDelivery == Delivery::kDequantize) dequantize<N>(units, scales, chunk_at, row, targets);
  }

  // Copies chunks unchanged to each expert's row. One loop writes both units and scales, because each iteration waits
  // for a shuffle.
  template <int N, typename ChunkAt>
  __device__ void copy(const uint4* units, const uint4& scales, ChunkAt chunk_at, int32_t row, uint32_t targets) const {
    const int32_t chunk_of_scales = chunk_at(lane_id());
    const bool writes_scales = has_scales() && lane_id() < N && chunk_of_scales < chunks();
#pragma unroll(kStealsRows ? 2 : 1)
    for (uint32_t left = targets; left; left &= left - 1) {
      const int32_t row_of_k = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      uint4* const out = out_row(row_of_k) + lane_id();
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int32_t chunk = chunk_at(i);
        if (!has_unit(chunk)) continue;
        if constexpr (kEvictsResultsFirst) {
          __stcs(out + chunk * kChunkUnits, units[i]);
        } else {
          out[chunk * kChunkUnits] = units[i];
        }
      }
      if constexpr (kMayHaveScales) {
        if (writes_scales) ScalesWriter{args}.write(scales, chunk_of_scales, row_of_k);
      }
    }
  }

  // Dequantizes chunks into each expert's row, in bfloat16.
  template <int N, typename ChunkAt>
  __device__ void dequantize(const uint4* units, const uint4& scales, ChunkAt chunk_at, int32_t row,
                             uint32_t targets) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      ChannelsOfUnit x;
      const float scale = scale_of_block(scales, i);
      cast_from_fp8(pair_channels(units[i]), scale, Cast::kAmax, x);
#pragma unroll 1
      for (uint32_t left = targets; left; left &= left - 1) {
        uint4* const out = out_row(__shfl_sync(kAllLanes, row, __ffs(left) - 1));
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int32_t unit = result_unit(chunk_at(i), v);
          if (has_result_unit(unit)) out[unit] = x[v].bits;
        }
      }
    }
  }
};

}  // namespace jax_ep
