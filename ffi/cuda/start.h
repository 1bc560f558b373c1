// What comes before a done: an operation in halves takes its turn.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/call.h"

namespace jax_ep {

cudaError_t launch_start(const Peers& peers, const Call& call, cudaStream_t stream);

// Loads the kernel on the current device: a kernel loaded while a peer waits can deadlock.
cudaError_t load_start();

}  // namespace jax_ep
