#pragma once

#include <cuda_runtime_api.h>

#include "ffi/dispatch_layout.h"

namespace jax_ep {

// The number of counters that fit in the shared memory that every kernel may use.
inline constexpr int32_t kMaxExpertsPerRank = 48 * 1024 / sizeof(int32_t);

// Enqueues one kernel. Its results are the same bits on every run.
cudaError_t dispatch_layout_on_device(const DispatchLayoutArgs& args, cudaStream_t stream);

// Loads the kernel on the current device. Loading a kernel while a peer waits can deadlock.
cudaError_t load_dispatch_layout();

}  // namespace jax_ep
