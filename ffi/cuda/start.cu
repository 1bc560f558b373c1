#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/protocol.cuh"
#include "ffi/cuda/start.h"

namespace jax_ep {
namespace {

constexpr int32_t kWarp = 32;

// One warp: with more, a start would hold up what XLA has behind it.
__global__ void __launch_bounds__(kWarp)
    start_kernel(const __grid_constant__ Peers peers, const __grid_constant__ Call call) {
  __shared__ State state;
  const Operation op = {peers, call, call.epoch, state, kWarp};
  wait_for_dependencies();
  op.stamp(0);
  const uint32_t blocks_before = op.begin(false);
  if (threadIdx.x == 0) *call.epoch = state.epoch;
  op.tell_former_finished();
  op.end(blocks_before, [] {});
}

}  // namespace

cudaError_t launch_start(const Peers& peers, const Call& call, cudaStream_t stream) {
  start_kernel<<<1, kWarp, 0, stream>>>(peers, call);
  return cudaGetLastError();
}

cudaError_t load_start() { return load_kernel(start_kernel, 0); }

}  // namespace jax_ep
