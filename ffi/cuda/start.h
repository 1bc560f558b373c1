// What a start is on XLA's stream: a split-phase operation takes its turn, and what comes then is held until the rest
// of the operation, its body, has the SMs that it is to run on. It would not get them before the kernel that took them
// ends.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"

namespace jax_ep {

cudaError_t launch_start(const Peers& peers, const Call& call, cudaStream_t stream);
// `ticket`: the start's. The body has `num_blocks`.
cudaError_t launch_hold(const Peers& peers, const PendingCall* pending, int32_t num_blocks, cudaStream_t stream);

// Loads the kernels on the current device: a kernel loaded while a peer waits can deadlock.
cudaError_t load_start();

}  // namespace jax_ep
