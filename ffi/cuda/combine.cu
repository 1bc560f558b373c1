#include "ffi/cuda/combine.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/node_sum.cuh"

namespace jax_ep {
namespace {

template <typename X, Variant kVariant, bool kCasts>
__global__ void __launch_bounds__(most_block_threads(kVariant), 1)
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
  IndexRange* ranges = nullptr;
  if constexpr (has_rounds(kVariant)) {
    JAX_EP_SHARED(RangesOfRanks, of_ranks);
    ranges = of_ranks.of_rank;
  }
  const int32_t num_worker_threads = static_cast<int32_t>(blockDim.x) - (has_extra_control_warp(kVariant) ? 32 : 0);
  const void* result = args.out ? args.out : args.topk_weights_cotangent;
  using Combine = NodeSum<CombineConfig<X, kVariant, kCasts>>;  // the last layer
  using Outgoing = typename Combine::Outgoing;
  constexpr bool kRoleByIndex = is_low_latency(kVariant);
  const Combine combine = {peers, args,       plan,  {peers, args, result, state, num_worker_threads},
                           ring,  next_piece, ranges};
  wait_for_dependencies();
  combine.op.stamp(Stamp::kBegun);
  const auto forwards = [&](int32_t role) { return combine.uses_rail_peers() && plan.forwards(role); };
  if (combine.op.is_control_warp()) {
    combine.op.template enter<kRoleByIndex>([&](int32_t role) { return plan.is_sender(role) || forwards(role); },
                                            plan.senders_enter_first ? plan.num_senders : 0);
  }
  const bool is_worker = !kRoleByIndex || combine.op.is_worker();
  // Only if roles are by index: one thread of a sender counts the sender before the barrier, so that receivers wait
  // less. One thread of a receiver waits for all senders; if the block is also a sender, the workers send meanwhile.
  const bool is_role_thread = kRoleByIndex && combine.op.is_control_warp() && lane_id() == 0;
  const bool counts_sender = is_role_thread && plan.is_sender(blockIdx.x);
  const unsigned long long counts_before = counts_sender ? combine.op.count_sender() : 0;
  const Outgoing outgoing = Combine::kPrepares && is_worker ? combine.prepare(blockIdx.x) : Outgoing{};
  __syncthreads();  // the block has entered
  const int32_t role = state.role;
  bool gives_role_away = false;
  if (is_worker) {
    if (role == 0) combine.notify();
    if (plan.sends_rows(role)) combine.send(outgoing);
  } else if (is_role_thread) {
    if (counts_sender) combine.op.learn_roles_to_take(counts_before, plan.num_senders);
    gives_role_away = role >= plan.first_receiver && !combine.op.await_senders(state, plan.num_senders);
  }
  if (forwards(role)) {
    if (plan.sends_rows(role)) __syncthreads();  // forward() uses the same ids of named barriers as send() has used
    combine.forward();
  }
  // With kRoleByIndex, a block receives when all senders of the launch have entered, and its own warps have sent.
  bool receives = role >= plan.first_receiver, takes_roles = kRoleByIndex && plan.is_sender(role);
  if (kRoleByIndex && receives) {
    receives = !__syncthreads_or(gives_role_away);
    takes_roles = takes_roles && state.roles_to_take > 0;  // known since the barrier
  }
  do {
    if (receives && is_worker) combine.receive();
    receives = takes_roles && combine.op.take_given_role() != kNoRole;
  } while (receives);
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
  if (!plan.is_possible(args.phase)) return cudaErrorInvalidConfiguration;
  if (is_low_latency(plan.variant) && !args.recv_row) return cudaErrorInvalidConfiguration;  // all_to_all_back
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
