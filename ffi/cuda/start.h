// The kernels of a split-phase start, on XLA's stream. start_kernel takes the epoch. hold_kernel then delays the next
// kernel of the stream until all blocks of the done's kernel run. Without the hold, the next kernel could take the SMs,
// and the done's kernel would wait until that kernel ends.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"

namespace jax_ep {

cudaError_t launch_start(const Peers& peers, const Call& call, cudaStream_t stream);
// `pending`: of the start. The done's kernel has `num_blocks` blocks.
cudaError_t launch_hold(const Peers& peers, const PendingCall* pending, int32_t num_blocks, cudaStream_t stream);

// Loads the kernels on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_start();

}  // namespace jax_ep
