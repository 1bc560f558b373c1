// Dispatch sends each token's row once to each destination rank, which writes it to the rows of its experts. The same
// kernel serves dispatch, dispatch_like, the backward pass of combine, and all_to_all.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "ffi/cuda/call.h"
#include "ffi/layout.h"
#include "ffi/plan.h"

namespace jax_ep {

// What the receiver does with a row that arrives.
enum class Delivery : int32_t {
  kCopy,         // copies the row, with its scales, to the row of each of its experts
  kDequantize,   // the same, as bfloat16
  kCombineBack,  // backward pass of combine: writes weight * row, and the dot product of the row and a row of y.
                 // Converts a row in fp8 to float32 first.
};

struct DispatchArgs : Call {
  // The tokens' side: num_tokens rows.
  const void* x;          // [T, row_bytes]
  const float* x_scales;  // [T, num_scales] if the rows of x are fp8 already, else null
  int64_t row_bytes;      // of x
  int32_t cast;           // Cast: how senders cast x
  int32_t num_scales;     // of a row in transit: one per 128 channels, rounded up; 0 if the row is not fp8
  // The routing is one of these two: a new route, which this dispatch computes, or a known route, which an earlier
  // dispatch computed. (For all_to_all, Python computes known_send_index from the splits.)
  const int32_t* topk_idx;          // [T, K]: a new route
  const int32_t* named_slot;        // [T, K] with topk_idx, in the layout "token": all expert slots that a token names.
                                    // topk_idx has only the first of these slots on each rank, once.
  const float* topk_weights;        // [T, K] with topk_idx; null for weights of 1
  const int32_t* known_send_index;  // [T, R]: the `send_index` of a known route
  const int32_t* splits;            // [E] for all_to_all, with known_send_index: the number of rows for each expert
  // [T, R], a result of a new route: the row's index among the rows that this rank sends to rank r, or -1. For this
  // rank itself, it is the number of the token. Over a network, [2 T, R]. The second half is for rows that this rank
  // forwards: at [T + t, r] is the row of token t of this rank's rail peer in r's node, at the rank of this node that
  // has r's number.
  int32_t* send_index;

  // The experts' side: num_rows rows of the result.
  Delivery delivery;
  bool is_all_to_all;  // row `index` of rank r is row r * num_tokens + index of the result
  Layout layout;
  bool zero_pad;
  int64_t num_rows, capacity, alignment;
  void* out;  // [num_rows, out_row_bytes]
  int64_t out_row_bytes;
  // The scales of the rows of the result, or null. The forms with rows are [num_rows, num_scales]. Those with columns
  // are [columns, capacity], one such array per expert if the layout has a buffer per expert. The columns are the
  // scales, or words of four exponents. All forms but kFloat32 need a capacity that is a multiple of four.
  void* out_scales;
  ScalesFormat scales_format;
  // Results of a new route:
  float* weights;                               // [num_rows]; in the layout "token", [num_rows, K]
  int32_t *counts, *group_sizes, *num_dropped;  // for all_to_all: counts [R, E_local], the others null
  int32_t* recv_row;                            // [R, T, K]: the row of each (source, index, k), or -1
  int32_t* num_recv_per_rank;                   // [R]
  // Results of a new route in the layout "token", else null:
  int32_t* recv_topk_idx;      // [num_rows, K]: the local expert slots of each row, -1 for none
  int32_t* num_rows_per_rank;  // [R]: the rows of the result from each rank
  // Operands of a known route, if topk_idx is null and is_all_to_all is false:
  const int32_t *known_recv_row, *known_num_recv_per_rank, *known_counts, *known_group_sizes;
  // Operands and results of kCombineBack:
  const float* row_weights;  // [num_rows]
  const void* y;             // [num_rows, out_row_bytes] or null
  float* weights_cotangent;  // [num_rows] or null

  // The payload bytes of a row in transit, without its scales. A cast halves the payload. `casts`: whether `cast` is
  // not 0; a kernel knows it at compile time.
  constexpr int64_t payload_bytes(bool casts) const { return casts ? row_bytes / 2 : row_bytes; }
  constexpr int64_t out_scales_bytes() const {
    if (scales_format == ScalesFormat::kUe8m0) return num_rows * num_scales;
    return num_rows * 4 * (scales_format == ScalesFormat::kUe8m0Columns ? divide_up(num_scales, 4) : num_scales);
  }
  // True if senders cast the rows of a new route. (all_to_all and combine's backward pass may cast, too.)
  constexpr bool casts_new_rows() const { return cast != 0 && topk_idx != nullptr; }
  // True for a new route in the layout "token".
  constexpr bool has_token_rows() const { return recv_topk_idx != nullptr; }
  constexpr int64_t weights_per_row() const { return has_token_rows() ? top_k : 1; }
};

// Dynamic shared memory of a block. It holds a sender's counts, or the destinations of rows, per source and expert. So
// it limits the number of experts. The sizes are multiples of 16 bytes.
// Over a network, DispatchShared takes more of the block's memory.
constexpr int64_t max_dispatch_scratch(bool has_network) { return (has_network ? 90 : 96) * 1024; }
constexpr int64_t send_counts_bytes(int32_t num_ranks, int32_t experts_per_rank) {
  return align_up(int64_t{8} * num_ranks * (experts_per_rank + 1), 16);
}
constexpr int64_t destinations_bytes(int32_t num_ranks, int32_t experts_per_rank) {
  return align_up(int64_t{4} * (num_ranks + 3) * experts_per_rank, 16);
}
constexpr int64_t dispatch_scratch_bytes(int32_t num_ranks, int32_t experts_per_rank) {
  return std::max(send_counts_bytes(num_ranks, experts_per_rank), destinations_bytes(num_ranks, experts_per_rank));
}
// If senders write own rows, a sender keeps both in this memory.
constexpr int64_t scratch_bytes_with_own_rows(int32_t num_ranks, int32_t experts_per_rank) {
  return send_counts_bytes(num_ranks, experts_per_rank) + destinations_bytes(num_ranks, experts_per_rank);
}

// The plan for a launch of this module's kernels, from the plan that plan_dispatch() gives: over a network, it differs.
LaunchPlan adapt_dispatch_plan(const Peers& peers, const DispatchArgs& args, const LaunchPlan& plan);

// Enqueues one kernel. `plan` is adapted.
cudaError_t launch_dispatch(const Peers& peers, const DispatchArgs& args, ElementType type, const LaunchPlan& plan,
                            cudaStream_t stream);

// Loads the kernels on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_dispatch();

}  // namespace jax_ep
