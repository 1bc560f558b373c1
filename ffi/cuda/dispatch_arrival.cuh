// Rows that arrive at a rank: the state of a row that may arrive, and how a warp takes a batch of its units. A receiver
// and a forwarder use them, for every operation that is a dispatch.
#pragma once

#include "ffi/cuda/padding.cuh"

namespace jax_ep {

template <typename Config>
struct DispatchArrival : Padding<Config> {
  using Base = Padding<Config>;
  using Base::chunk_of, Base::chunks, Base::has_scales, Base::kMayHaveScales, Base::kReceiveBatch, Base::op,
      Base::payload_bytes;

  // The units of a batch that a lane takes: one in each chunk. If rows may have scales, lane i also takes the unit with
  // the scales of the i-th chunk.
  static constexpr int kUnitsTaken = kReceiveBatch + kMayHaveScales;
  struct ArrivingBatch {
    uint4 units[kUnitsTaken];
    __device__ __forceinline__ const uint4& scales() const { return units[kReceiveBatch]; }  // only if kMayHaveScales
  };

  // A row that may arrive.
  struct Arriving {
    int32_t source, index;
    bool is_own;  // only its header must arrive: the row is in x
    bool is_sent;
    RowAddress address;
    RowHeader header;     // for k = lane; only rows of a new route have headers
    int32_t row;          // the row of the result for k = lane, if the route is known
    float weight;         // of that row, for the backward pass of combine
    ArrivingBatch batch;  // the batch that this warp processes
  };

  // The addresses at which a batch arrives.
  struct BatchAddresses {
    uint8_t *units, *scales;  // this lane's unit of the first chunk; the scales of the chunk with its number
    int32_t step;             // between chunks, in bytes
    int32_t bytes_left;       // of the payload, from the first unit on
    bool has_scales;
    __device__ __forceinline__ bool has(int i) const { return i < kReceiveBatch ? i * step < bytes_left : has_scales; }
    __device__ __forceinline__ uint8_t* at(int i) const { return i < kReceiveBatch ? units + i * step : scales; }
  };

  __device__ BatchAddresses batch_at(const RowAddress& row, int32_t first, const WarpGroup& warp_group) const {
    const int32_t chunk = chunk_of(first, lane_id(), warp_group);
    return {row.unit(op, first), row.scales(op, payload_bytes, chunk), warp_group.num_warps * kChunkBytes,
            payload_bytes - (first * kChunkBytes + lane_id() * kUnitBytes),
            has_scales() && lane_id() < kReceiveBatch && chunk < chunks()};
  }

  __device__ void look_at_batch(const RowAddress& row, int32_t first, const WarpGroup& warp_group,
                                ArrivingBatch& batch) const {
    look_at_units(batch.units, batch_at(row, first, warp_group));
  }

  template <typename PollMore>
  __device__ void take_batch(int32_t source, const RowAddress& row, int32_t first, const WarpGroup& warp_group,
                             ArrivingBatch& batch, PollMore poll_more) const {
    const auto resolve = [&](int i) {
      const bool is_unit = i < kReceiveBatch;
      const int32_t escape_mask =
          is_unit ? chunk_of(first, i, warp_group) : chunks() + chunk_of(first, lane_id(), warp_group);
      return true_unit(op.state, source, row.escape_masks + escape_mask, is_unit ? lane_id() : 0);
    };
    take_units(op, [=](int) { return source; }, batch.units, batch_at(row, first, warp_group), resolve, poll_more);
    __syncwarp();
  }
};

}  // namespace jax_ep
