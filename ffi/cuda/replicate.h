// Replicate copies experts to the ranks whose replica slots name them. Its backward pass adds the copies' gradients to
// the home expert's, in place.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"
#include "ffi/layout.h"
#include "ffi/plan_balance.h"

namespace jax_ep {

struct ReplicateArgs : Call {  // kReplicate or kReplicateBack
  const int32_t* slots;        // [R, B]: the global expert in each replica slot of each rank; -1 for none
  Divisor by_home_experts;     // of a rank
  uint8_t* home;               // [E_local, expert_bytes]: the home experts; kReplicate only reads them
  uint8_t* copies;             // [B, expert_bytes]: the replica slots; kReplicateBack only reads them
  int64_t expert_bytes;        // a multiple of kUnitBytes
  bool clears_slots;           // kReplicate: whether slots without a copy become zero
};

// Enqueues one kernel. The group has replicas, and its ranks map each other's memory. The type matters for
// kReplicateBack only.
cudaError_t launch_replicate(const Peers& peers, const ReplicateArgs& args, ElementType type, const CopyPlan& plan,
                             cudaStream_t stream);

// Loads the kernels on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_replicate();

}  // namespace jax_ep
