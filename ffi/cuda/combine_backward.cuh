// The backward pass of combine. For a row that arrives, it computes weight * row for each expert's row, and the
// products of the row with the rows of y.
#pragma once

#include "ffi/cuda/dispatch_arrival.cuh"

namespace jax_ep {

template <typename Config>
struct CombineBackward : DispatchArrival<Config> {
  using Base = DispatchArrival<Config>;
  using Base::args, Base::chunk_of, Base::experts_per_rank, Base::has_result_unit, Base::kCasts, Base::kReceiveBatch,
      Base::kUnitsRead, Base::out_row, Base::peers, Base::scratch, Base::shared, Base::sync_warp_group,
      Base::result_unit, Base::wire_cast;
  using typename Base::Arriving;
  using typename Base::X;
  static constexpr int kChannelsInUnit = kUnitsRead * Vector<X>::kSize;  // of a unit in transit

  // Prefetches the first kRowsAhead rows of y, before the row arrives with which they are multiplied. Each of them goes
  // to a stage in shared memory. When a row of y has been used, the next row of y takes its stage. A lane writes and
  // reads only its own units of a stage. (A PrefetchRing has pieces of contiguous chunks. Here, the chunks of a warp
  // are num_warps apart.)
  __device__ void prefetch_y(int32_t row, int32_t first, const WarpGroup& warp_group) const {
    uint32_t left = args.y ? __ballot_sync(kAllLanes, row >= 0) : 0;
#pragma unroll 1
    for (int32_t stage = 0; stage < kRowsAhead; ++stage) left = prefetch_row_of_y(left, stage, row, first, warp_group);
  }

  // Issues cp.async for the lowest row in `left`, into `stage`. Returns `left` without the row. Commits a group even if
  // it is empty, so that wait_group counts stay aligned.
  __device__ uint32_t prefetch_row_of_y(uint32_t left, int32_t stage, int32_t row, int32_t first,
                                        const WarpGroup& warp_group) const {
    if (left) {
      const int64_t target = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      const auto* row_of_y = static_cast<const uint8_t*>(args.y) + target * args.out_row_bytes;
#pragma unroll
      for (int i = 0; i < kReceiveBatch; ++i) {
#pragma unroll
        for (int v = 0; v < kUnitsRead; ++v) {
          const int32_t unit = result_unit(chunk_of(first, i, warp_group), v);
          if (has_result_unit(unit)) copy_unit_async(y_unit(stage, i, v), row_of_y + unit * kUnitBytes);
        }
      }
    }
    end_copies();
    return left & (left - 1);
  }

  __device__ uint4* y_unit(int32_t stage, int i, int v) const {
    auto* y = static_cast<uint8_t*>(scratch) + dispatch_scratch_bytes(peers.num_ranks, experts_per_rank());
    const int32_t number = ((warp_id() * kRowsAhead + stage) * kReceiveBatch + i) * kUnitsRead + v;
    return reinterpret_cast<uint4*>(y) + number * kChunkUnits + lane_id();
  }

  // Writes weight * g to the result's row, where g are the channels of the i-th unit of the batch. Returns the dot
  // product of g and the same channels of the row of y in `stage`.
  __device__ float combine_back_unit(const float (&g)[kChannelsInUnit], int32_t stage, int i, int64_t row,
                                     int32_t chunk, float weight) const {
    float product = 0;
#pragma unroll
    for (int v = 0; v < kUnitsRead; ++v) {
      const int32_t unit = result_unit(chunk, v);
      if (!has_result_unit(unit)) continue;
      Vector<X> y, cotangent;
      y.bits = args.y ? *y_unit(stage, i, v) : uint4{};
#pragma unroll
      for (int e = 0; e < Vector<X>::kSize; ++e) {
        const float channel = g[v * Vector<X>::kSize + e];
        cotangent.element[e] = from_float<X>(weight * channel);
        product += channel * to_float(y.element[e]);
      }
      out_row(row)[unit] = cotangent.bits;
    }
    return product;
  }

  // Writes cotangents of combine: weight * row to each expert's row. Adds up the row's products with y.
  __device__ void combine_back(const Arriving& arriving, int32_t first, uint32_t targets,
                               const WarpGroup& warp_group) const {
    uint32_t ahead = targets;  // rows of y that have yet to be prefetched
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) ahead &= ahead - 1;
    int32_t stage = 0;
    float g[kReceiveBatch][kChannelsInUnit];
    // A unit of fp8 is converted once, not per expert. Other units are converted in the loop: that is cheap, and the
    // unit takes fewer registers.
    if constexpr (kCasts) {
#pragma unroll
      for (int i = 0; i < kReceiveBatch; ++i) {
        const float scale = scale_of_block(arriving.batch.scales(), i);
        cast_from_fp8(pair_channels(arriving.batch.units[i]), scale, wire_cast(), g[i]);
      }
    }
#pragma unroll 1
    for (uint32_t left = targets; left; left &= left - 1) {
      const int32_t k = __ffs(left) - 1;
      const int64_t target = __shfl_sync(kAllLanes, arriving.row, k);
      const float weight = __shfl_sync(kAllLanes, arriving.weight, k);
      await_copies<kRowsAhead - 1>();
      float product = 0;
#pragma unroll
      for (int i = 0; i < kReceiveBatch; ++i) {
        const int32_t chunk = chunk_of(first, i, warp_group);
        if constexpr (!kCasts) {
          Vector<X> unit;
          unit.bits = arriving.batch.units[i];
          to_floats(unit, g[i]);
        }
        product += combine_back_unit(g[i], stage, i, target, chunk, weight);
      }
      __syncwarp();
      if (!args.y) continue;
      product = warp_sum(product);
      if (lane_id() == 0) shared.products[warp_id()][k] += product;
      ahead = prefetch_row_of_y(ahead, stage, arriving.row, first, warp_group);  // this row of y has been used
      stage = stage + 1 == kRowsAhead ? 0 : stage + 1;
    }
  }

  // Adds the products of the warps that share a row, in the order of warps. They are in one block.
  __device__ void sum_products(int32_t row, const WarpGroup& warp_group) const {
    if (!args.y) return;
    sync_warp_group(warp_group);
    if (warp_group.warp == 0 && row >= 0) {
      float total = 0;
#pragma unroll 1
      for (int32_t w = 0; w < warp_group.num_warps; ++w) total += shared.products[warp_id() + w][lane_id()];
      args.weights_cotangent[row] = total;
    }
    sync_warp_group(warp_group);
  }
};

}  // namespace jax_ep
