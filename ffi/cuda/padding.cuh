// Padding: the rows of a dispatch's result that hold no token.
#pragma once

#include "ffi/cuda/dispatch_send.cuh"

namespace jax_ep {

template <typename Config>
struct Padding : DispatchSender<Config> {
  using Base = DispatchSender<Config>;
  using Base::args, Base::experts_per_rank, Base::kStealsRows, Base::op, Base::out_row, Base::plan;

  // Pads the rows behind each group, and the rows behind the last group. Their weights become zero, and their
  // recv_topk_idx -1. The rows themselves become zero with zero_pad, or if alignment has added them. With zero_pad and
  // no work stealing, all receivers share the work. Otherwise, the first receiver does it. With zero_pad and work
  // stealing, this function does not zero rows: zero_claimed_padding() does.
  __device__ void pad(const Destinations& destinations) const {
    const bool zeroes = args.zero_pad && !kStealsRows;  // zeroes all padding
    const bool zeroes_gaps = zeroes || (!has_buffer_per_expert(args.layout) && !args.zero_pad);
    const bool is_first = op.state.role == plan.first_receiver;
    if (!zeroes && !is_first) return;
    const int32_t worker = (zeroes ? op.state.role - plan.first_receiver : 0) * plan.block_warps() + warp_id();
    const int32_t workers = (zeroes ? plan.num_receivers() : 1) * plan.block_warps();
    int32_t last = 0;
#pragma unroll 1
    for (int32_t base = 0; base < experts_per_rank(); base += 32) {
      const int32_t expert = base + lane_id();
      int32_t begin = 0, end = 0;  // the gap behind the group of this lane's expert
      if (expert < experts_per_rank()) {
        begin = destinations.first_row[expert] + destinations.counts[expert];
        end = destinations.first_row[expert] + (has_buffer_per_expert(args.layout) ? static_cast<int32_t>(args.capacity)
                                                                                   : destinations.group_sizes[expert]);
      }
      last = __reduce_max_sync(kAllLanes, max(last, end));
#pragma unroll 1
      for (uint32_t gaps = __ballot_sync(kAllLanes, begin < end); gaps; gaps &= gaps - 1) {
        const int32_t lane = __ffs(gaps) - 1;
        pad_rows(__shfl_sync(kAllLanes, begin, lane), __shfl_sync(kAllLanes, end, lane), zeroes_gaps, worker, workers);
      }
    }
    pad_rows(last, static_cast<int32_t>(args.num_rows), zeroes, worker, workers);
  }

  __device__ void pad_rows(int32_t begin, int32_t end, bool zero, int32_t worker, int32_t workers) const {
    const int64_t per_row = args.weights_per_row();
#pragma unroll 1
    for (int64_t i = begin * per_row + worker * 32 + lane_id(); i < end * per_row; i += workers * 32) {
      if (args.weights) args.weights[i] = 0;
      if (args.weights_cotangent) args.weights_cotangent[i] = 0;
      if (args.recv_topk_idx) args.recv_topk_idx[i] = -1;
    }
#pragma unroll 1
    for (int32_t row = begin + worker; zero && row < end; row += workers) zero_row(row);
  }

  // With work stealing: a warp claims the next range of rows of the result, and zeroes the rows that hold no token.
  // Returns false if no rows are left. All claims add to one word. If there are many rows, a range has several rows, so
  // that there are fewer additions.
  __device__ bool zero_claimed_padding(const Destinations& destinations) const {
    constexpr int32_t kClaimsPerWarp = 2, kMaxRowsPerClaim = 8;
    const auto num_rows = static_cast<int32_t>(args.num_rows);
    const int32_t claims = kClaimsPerWarp * plan.num_blocks * plan.block_warps();
    const int32_t rows_per_claim = min(max(num_rows / claims, 1), kMaxRowsPerClaim);
    const uint32_t claimed = __shfl_sync(kAllLanes, lane_id() == 0 ? op.claim(&Control::claimed_padding) : 0, 0);
    const uint64_t begin = uint64_t{claimed} * rows_per_claim;
    if (begin >= num_rows) return false;
    const int32_t row = static_cast<int32_t>(begin) + lane_id();
    const bool zeroes_row = lane_id() < rows_per_claim && row < num_rows && is_padding(destinations, row);
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kAllLanes, zeroes_row); left; left &= left - 1)
      zero_row(static_cast<int32_t>(begin) + __ffs(left) - 1);
    return true;
  }

  // True if the row holds no token. The groups must be in ascending order of first_row. Finds the last expert whose
  // group begins at or before the row: the row is in this group, or in the gap after it.
  __device__ bool is_padding(const Destinations& destinations, int32_t row) const {
    int32_t expert = 0;
#pragma unroll 1
    for (int32_t end = experts_per_rank(); end - expert > 1;) {
      const int32_t middle = (expert + end) / 2;
      (destinations.first_row[middle] <= row ? expert : end) = middle;
    }
    return row >= destinations.first_row[expert] + destinations.counts[expert];
  }

  __device__ void zero_row(int32_t row) const {
#pragma unroll 1
    for (int32_t i = lane_id(); i < args.out_row_bytes / kUnitBytes; i += 32) out_row(row)[i] = uint4{};
    if constexpr (Base::kMayHaveScales && Base::kDelivery == Delivery::kCopy) {
      if (args.out_scales) ScalesWriter{args}.zero(row);
    }
  }
};

}  // namespace jax_ep
