#include "ffi/cuda/combine.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/node_sum.cuh"

namespace jax_ep {
namespace {

template <typename X, Variant kVariant, bool kCasts>
__global__ void __launch_bounds__(32 * most_block_warps(kVariant), blocks_per_sm(kVariant))
    combine_kernel(const __grid_constant__ Peers peers, const __grid_constant__ CombineArgs args,
                   const __grid_constant__ LaunchPlan plan) {
  if (!Operation::is_control_warp()) fetch_arguments(peers, args, plan);
  JAX_EP_SHARED(State, state);
  PrefetchRingOfY<kCasts> ring;
  Pieces next_piece = {};
  if constexpr (has_prefetch_ring(kVariant)) {
    JAX_EP_DYNAMIC_SHARED(128, pieces);
    JAX_EP_SHARED(typename PrefetchRingOfY<kCasts>::LandedOfWarps, landed);
    ring.open(pieces + warp_id() * ring.kBytes, landed[warp_id()]);
  }
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  const void* result = args.out ? args.out : args.topk_weights;
  using Combine = NodeSum<CombineConfig<X, kVariant, kCasts>>;  // the last layer
  const Combine combine = {peers, args, plan, {peers, args, result, state, num_threads}, ring, next_piece};
  wait_for_dependencies();
  combine.op.stamp(Stamp::kBegun);
  const auto forwards = [&](int32_t role) { return combine.uses_rail_peers() && plan.forwards(role); };
  if (combine.op.is_control_warp()) {
    combine.op.enter([&](int32_t role) { return plan.is_sender(role) || forwards(role); },
                     !is_low_latency(kVariant) && plan.senders_enter_first ? plan.num_senders : 0);
  }
  __syncthreads();  // the block has entered
  const int32_t role = state.role;
  if (role == 0) combine.notify();
  if (plan.sends_rows(role)) combine.send();
  if (forwards(role)) {
    if (plan.sends_rows(role)) __syncthreads();  // forward() uses the same ids of named barriers as send() has used
    combine.forward();
  }
  if (role >= plan.first_receiver) combine.receive();
  combine.op.end([&] { combine.poison(); });
}

// Call it only if combine_has(variant, kCasts).
template <typename X, bool kCasts>
auto kernel_of(Variant variant) {
  if constexpr (combine_has(Variant::kBalanced, kCasts)) {
    if (variant == Variant::kBalanced) return combine_kernel<X, Variant::kBalanced, kCasts>;
  }
  return is_low_latency(variant) ? combine_kernel<X, Variant::kLowLatency, kCasts>
                                 : combine_kernel<X, Variant::kThroughput, kCasts>;
}
template <typename X>
auto kernel_of(Variant variant, bool casts) {
  return casts ? kernel_of<X, true>(variant) : kernel_of<X, false>(variant);
}

}  // namespace

LaunchPlan adapt_combine_plan(const Peers& peers, const CombineArgs& args, const LaunchPlan& plan) {
  return kHasNetwork ? over_network(plan, needs_rail_peers(peers, args)) : plan;
}

cudaError_t launch_combine(const Peers& peers, const CombineArgs& args, ElementType type, const LaunchPlan& plan,
                           cudaStream_t stream) {
  if (!combine_has(plan.variant, args.cast != 0)) return cudaErrorInvalidValue;
  return with_element_type(type, [&](auto element) {
    const auto kernel = kernel_of<decltype(element)>(plan.variant, args.cast != 0);
    const int32_t scratch = plan.block_warps() * ring_bytes(plan.variant, args.cast != 0);
    return launch(kernel, {plan.num_blocks, plan.block_threads(), scratch}, stream, peers, args, plan);
  });
}

cudaError_t load_combine() {
  cudaError_t status = cudaSuccess;
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    with_element_type(type, [&](auto element) {
      for (bool casts : {false, true}) {
        for (Variant variant : kVariants) {
          if (status != cudaSuccess) return;
          if (!combine_has(variant, casts)) continue;
          status =
              load_kernel(kernel_of<decltype(element)>(variant, casts), kMaxBlockWarps * ring_bytes(variant, casts));
        }
      }
    });
  }
  return status;
}

}  // namespace jax_ep
