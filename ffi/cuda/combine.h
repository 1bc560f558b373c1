// Combine sends the experts' rows back to their tokens, as one partial sum per token and rank. The same kernel serves
// combine, the backward passes of dispatch and dispatch_like, and all_to_all_back.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"
#include "ffi/plan.h"

namespace jax_ep {

struct CombineArgs : Call {
  // The experts' side.
  const void* y;                     // [num_rows, row_bytes]
  int64_t row_bytes;                 // 0 if only weights go back
  const float* row_weights;          // [num_rows], the weights of the sums. Null for weights of 1: in a combine in the
                                     // layout "token", and in all other operations.
  const float* weights_cotangent;    // [num_rows], the cotangents of dispatch's weights; or null
  int32_t cast;                      // Cast: how the sums travel
  bool has_token_weights;            // weights_cotangent is [num_rows, K], of a route in the layout "token"
  const int32_t* recv_row;           // [R, T, K] of the route; null for all_to_all_back
  const int32_t* num_recv_per_rank;  // [R] of the route; null for all_to_all_back, whose sources send the numbers

  // The tokens' side.
  const int32_t* send_index;  // of the route: as in DispatchArgs
  const int32_t* num_sent;    // [R] for all_to_all_back: the number of this rank's rows at each rank; else null
  void* out;                  // [T, elements of row_bytes], or null
  ElementType out_type;
  float* topk_weights_cotangent;  // [T, K], the sums of weights_cotangent over the ranks; or null

  // True if the call is known to have the layout "token", in which a token has at most one row on a rank. False for a
  // backward pass without cotangents of weights, whose arguments do not show the layout. Only the plan depends on it.
  constexpr bool holds_token_once() const {
    return op == OpKind::kCombine ? row_weights == nullptr : has_token_weights;
  }
  // The units of y for one unit of a sum that is sent. `element_bytes`: of an element of y.
  constexpr int32_t units_read(int32_t element_bytes) const { return cast ? element_bytes : 1; }
};

// The plan for a launch of this module's kernels, from the plan that plan_combine() gives: over a network, it differs.
LaunchPlan adapt_combine_plan(const Peers& peers, const CombineArgs& args, const LaunchPlan& plan);

// Enqueues one kernel. `type` is the element type of y. `plan` is adapted.
cudaError_t launch_combine(const Peers& peers, const CombineArgs& args, ElementType type, const LaunchPlan& plan,
                           cudaStream_t stream);
cudaError_t load_combine();

}  // namespace jax_ep
