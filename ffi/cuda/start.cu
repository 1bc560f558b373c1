#include "ffi/cuda/control_words.cuh"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/start.h"

namespace jax_ep {
namespace {

constexpr int32_t kWarp = 32;

// A start has one warp. A larger start would delay the kernels that XLA enqueues behind it.
__global__ void __launch_bounds__(kWarp)
    start_kernel(const __grid_constant__ Peers peers, const __grid_constant__ Call call) {
  JAX_EP_SHARED(State, state);
  const Operation op = {peers, call, call.pending, state, kWarp};
  wait_for_dependencies();
  op.stamp(Stamp::kBegun);
  op.enter([](int32_t) { return false; });
  if (threadIdx.x == 0) {
    store_relaxed(&call.pending->epoch, state.epoch);
    store_relaxed(&call.pending->num_entered, 0);
  }
  op.tell_former_finished();
  op.end([] {});
}

// Waits until `num_blocks` blocks of the done's kernel have entered. Gives up after kPatienceNs, because the host may
// not have launched that kernel yet, or other kernels may occupy the SMs.
__global__ void __launch_bounds__(kWarp)
    hold_kernel(const __grid_constant__ Peers peers, const PendingCall* pending, int32_t num_blocks) {
  constexpr uint64_t kPatienceNs = 50'000;
  wait_for_dependencies();
  if (threadIdx.x != 0) return;
  const uint64_t start_ns = globaltimer_ns();
  while (load_relaxed(&pending->num_entered) < static_cast<uint32_t>(num_blocks) &&
         load_relaxed(&peers.control->failed) == 0 && globaltimer_ns() - start_ns < kPatienceNs) {
    poll_pause();
  }
}

}  // namespace

cudaError_t launch_start(const Peers& peers, const Call& call, cudaStream_t stream) {
  return launch(start_kernel, {1, kWarp, 0}, stream, peers, call);
}

cudaError_t launch_hold(const Peers& peers, const PendingCall* pending, int32_t num_blocks, cudaStream_t stream) {
  return launch(hold_kernel, {1, kWarp, 0}, stream, peers, pending, num_blocks);
}

cudaError_t load_start() {
  const cudaError_t status = load_kernel(start_kernel, 0);
  return status != cudaSuccess ? status : load_kernel(hold_kernel, 0);
}

}  // namespace jax_ep
