// Dispatch: from tokens to the rows of their experts, once per destination rank. Serves dispatch, dispatch_like, the
// backward pass of combine, and all_to_all.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "ffi/cuda/call.h"
#include "ffi/layout.h"
#include "ffi/plan.h"

namespace jax_ep {

// What the receiver does with a row.
enum class Arrival : int32_t {
  kCopy,         // to each of its experts' rows, with its scales
  kDequantize,   // the same, as bfloat16
  kCombineBack,  // combine's cotangents: weight * row, and the dot product of the row and y
};

struct DispatchArgs : Call {
  // Source side: num_tokens rows.
  const void* x;          // [T, row_bytes]
  const float* x_scales;  // [T, num_scales], of rows that are fp8 already, or null
  int64_t row_bytes;      // of x
  int32_t cast;           // Cast: of x on its way
  int32_t num_scales;     // of a row under way, 0 if it is not fp8
  // The routing, one of the two:
  const int32_t* topk_idx;  // [T, K] with topk_weights, null for 1: a new route
  const float* topk_weights;
  const int32_t* known_place;  // [T, R]: an old route's `place`
  const int32_t* splits;       // [E] for all_to_all: the rows for each expert, beside known_place
  // [T, R] out: index among the rows sent to a rank (to this one: the token), -1 if none is; for a new route. Over a
  // network, behind it another one, of rows forwarded: of token t of this rank's rail_peer in the node of rank r, at
  // the rank here of r's number.
  int32_t* place;

  // Experts' side: num_rows rows of the result.
  Arrival arrival;
  bool is_all_to_all;  // all_to_all: row `index` of rank r is row r * num_tokens + index
  Layout layout;
  bool zero_pad;
  int64_t num_rows, capacity, alignment;
  void* out;  // [num_rows, out_row_bytes]
  int64_t out_row_bytes;
  float* out_scales;  // [num_rows, num_scales] or null
  // A new route's results:
  float* weights;                               // [num_rows]
  int32_t *counts, *group_sizes, *num_dropped;  // all_to_all: counts [R, E_local], the others null
  int32_t* rows;                                // [R, T, K]: row of each (source, index, k), -1 if none
  int32_t* num_arrived;                         // [R]
  // An old route's, where topk_idx is null and blocks is false:
  const int32_t *known_rows, *known_num_arrived, *known_counts, *known_group_sizes;
  // Of kCombineBack:
  const float* row_weights;  // [num_rows]
  const void* y;             // [num_rows, out_row_bytes] or null
  float* weights_cotangent;  // [num_rows] or null
};

// Shared memory that the kernels have besides their own: where rows go, of each source and expert, or what a sender has
// counted. It limits the number of experts. A multiple of 16 bytes.
inline constexpr int64_t kMaxScratch = 96 * 1024;
constexpr int64_t dispatch_scratch_bytes(int32_t num_ranks, int32_t experts_per_rank) {
  const int64_t num_experts = int64_t{num_ranks} * experts_per_rank;
  return align_up(4 * std::max(num_experts + num_ranks, num_experts + 3 * experts_per_rank), 16);
}

// Enqueues one kernel.
cudaError_t launch_dispatch(const Peers& peers, const DispatchArgs& args, ElementType type, const LaunchPlan& plan,
                            cudaStream_t stream);

// Loads the kernels on the current device: a kernel loaded while a peer waits can deadlock.
cudaError_t load_dispatch();

}  // namespace jax_ep
