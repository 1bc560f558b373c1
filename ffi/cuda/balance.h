// Balance plans which rank computes which rows, so that no rank computes more than its share (jax_ep/_placement.py).
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"
#include "ffi/layout.h"
#include "ffi/plan_balance.h"

namespace jax_ep {

struct BalanceArgs : Call {
  const int32_t* topk_idx;  // [T, K]
  int32_t tolerance_units;  // how much more than the mean a rank may compute, in units of 1 / kToleranceUnitsPerOne
  Divisor by_home_experts;  // of a rank
  // The results, which jax_ep.Plan describes:
  int32_t *slot_expert, *num_rows, *home_rows, *slots, *topk_slot;
  int32_t* work;  // [balance_work_words()]: data that a kernel leaves for the next (BalanceWork)
};

// Enqueues three kernels: pairs.cuh has the first and the last. The group has replicas, and at most kMaxBalancedExperts
// experts.
cudaError_t launch_balance(const Peers& peers, const BalanceArgs& args, const BalancePlan& plan, cudaStream_t stream);

// Loads the kernels on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_balance();

}  // namespace jax_ep
