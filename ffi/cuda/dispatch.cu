#include <algorithm>

#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/node_forward.cuh"

namespace jax_ep {
namespace {

template <typename X, bool kCasts, Delivery kDelivery, Variant kVariant,
          bool kMayHaveScales = kCasts || kDelivery != Delivery::kCombineBack, bool kSendersWriteOwn = false>
__global__ void __launch_bounds__(most_block_threads(kVariant), dispatch_blocks_per_sm(kVariant))
    dispatch_kernel(const __grid_constant__ Peers peers, const __grid_constant__ DispatchArgs args,
                    const __grid_constant__ LaunchPlan plan) {
  if (!Operation::is_control_warp()) fetch_arguments(peers, args, plan);
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  JAX_EP_SHARED(DispatchShared, shared);
  const int32_t num_worker_threads = static_cast<int32_t>(blockDim.x) - (has_extra_control_warp(kVariant) ? 32 : 0);
  using Dispatch =
      NodeForward<DispatchConfig<X, kCasts, kDelivery, kVariant, kMayHaveScales, kSendersWriteOwn>>;  // the last layer
  using Outgoing = typename Dispatch::Outgoing;
  constexpr bool kRoleByIndex = is_low_latency(kVariant);
  const auto payload = static_cast<int32_t>(args.payload_bytes(kCasts));
  const Dispatch dispatch = {peers,  args,    plan,   {peers, args, args.out, shared.state, num_worker_threads},
                             shared, scratch, payload};
  wait_for_dependencies();
  dispatch.op.stamp(Stamp::kBegun);
  const auto forwards = [&](int32_t role) { return dispatch.uses_rail_peers() && plan.forwards(role); };
  if (dispatch.op.is_control_warp()) {
    if (lane_id() == 0) shared.gives_up = 0, shared.step_with_repeats = -1;
    dispatch.op.template enter<kRoleByIndex>([&](int32_t role) { return plan.is_sender(role) || forwards(role); },
                                             plan.senders_enter_first ? plan.num_senders : 0);
  }
  // Only if roles are by index: one thread of a sender counts the sender before the barrier, so that receivers wait
  // less. One thread of a receiver waits for all senders before the barrier.
  const bool is_role_thread = kRoleByIndex && dispatch.op.is_control_warp() && lane_id() == 0;
  const bool counts_sender = is_role_thread && plan.is_sender(blockIdx.x);
  const unsigned long long counts_before = counts_sender ? dispatch.op.count_sender() : 0;
  if (is_role_thread && !counts_sender && !dispatch.op.await_senders(shared.state, plan.num_senders)) {
    shared.state.role = kNoRole;
  }
  Outgoing outgoing = {};
  if (kRoleByIndex && dispatch.op.is_worker()) outgoing = dispatch.prepare(blockIdx.x);
  __syncthreads();  // the block has entered
  int32_t role = shared.state.role;
  if (dispatch.op.is_worker()) {
    if (!kRoleByIndex) outgoing = dispatch.prepare(role);
    if (role == 0) dispatch.notify(outgoing.ids);
    if (role == 0 && plan.sends_rows(0)) {
      dispatch.op.sync_workers();  // all have read the counts of notify(), which send() keeps in the same memory
      // No barrier follows. This block is the only sender and begins with the first token of the round. If this is
      // token 0, its first count_tokens() has no earlier token to count, and ends with a barrier. Otherwise,
      // count_tokens() also begins with a barrier.
      dispatch.clear(dispatch.send_counts());
    }
    if (plan.sends_rows(role)) dispatch.send(outgoing);
    if constexpr (kHasNetwork) {
      if (forwards(role)) dispatch.forward();
    }
  } else if (counts_sender) {
    dispatch.op.learn_roles_to_take(counts_before, plan.num_senders);
  }
  // send() keeps counts, and destinations if senders write own rows. receive() keeps destinations in the same scratch
  // memory. So a barrier is between them:
  // sync_and_decide_to_steal() for a block that steals, __syncthreads() for a block with both roles, and
  // take_given_role() for a block that takes a role.
  const bool steals = Dispatch::kStealsRows && role < plan.first_receiver && dispatch.sync_and_decide_to_steal();
  if (plan.is_sender(role) && role >= plan.first_receiver) __syncthreads();
  const bool takes_roles = kRoleByIndex && plan.is_sender(role) && role < plan.first_receiver;
  if (takes_roles) role = dispatch.op.take_given_role();
  while ((role >= plan.first_receiver || steals) && role != kNoRole) {
    if (dispatch.op.is_worker()) {
      dispatch.receive();
    } else {
      dispatch.learn_destinations();
    }
    role = takes_roles ? dispatch.op.take_given_role() : kNoRole;
  }
  dispatch.op.end([&] { dispatch.poison(); });
}

using Kernel = void (*)(Peers, DispatchArgs, LaunchPlan);

// Each way to process the elements of a row has a kernel of its own. So each kernel is small: in a kernel of a few
// microseconds, the main cost of an instruction is its fetch.
template <Variant kVariant>
Kernel kernel_of(ElementType type, bool casts, Delivery delivery, bool has_scales) {
  switch (delivery) {
    case Delivery::kCombineBack:
      if (casts) return dispatch_kernel<__nv_bfloat16, true, Delivery::kCombineBack, kVariant>;
      return with_element_type(type, [](auto element) -> Kernel {
        return dispatch_kernel<decltype(element), false, Delivery::kCombineBack, kVariant>;
      });
    case Delivery::kDequantize:
      return casts ? dispatch_kernel<__nv_bfloat16, true, Delivery::kDequantize, kVariant>
                   : dispatch_kernel<__nv_bfloat16, false, Delivery::kDequantize, kVariant>;
    default:
      if (casts) return dispatch_kernel<__nv_bfloat16, true, Delivery::kCopy, kVariant>;
      // A copy moves bytes, so float stands for elements of any type. In the low-latency variant, rows without scales
      // have a kernel without the code for scales.
      if constexpr (is_low_latency(kVariant)) {
        if (!has_scales) return dispatch_kernel<float, false, Delivery::kCopy, kVariant, false>;
      }
      return dispatch_kernel<float, false, Delivery::kCopy, kVariant>;
  }
}

// The kernel in which senders write own rows. It casts, so rows of x are bfloat16. See senders_can_write_own().
Kernel kernel_with_own_rows(Delivery delivery) {
  constexpr Variant kVariant = Variant::kThroughput;
  return delivery == Delivery::kCopy
             ? dispatch_kernel<__nv_bfloat16, true, Delivery::kCopy, kVariant, true, true>
             : dispatch_kernel<__nv_bfloat16, true, Delivery::kDequantize, kVariant, true, true>;
}

Kernel kernel_of(ElementType type, bool casts, Delivery delivery, bool has_scales, Variant variant) {
  switch (variant) {
    case Variant::kLowLatency:
      return kernel_of<Variant::kLowLatency>(type, casts, delivery, has_scales);
    case Variant::kBalanced:
      return kernel_of<Variant::kBalanced>(type, casts, delivery, has_scales);
    default:
      return kernel_of<Variant::kThroughput>(type, casts, delivery, has_scales);
  }
}

// True if senders can write own rows in this call: it casts, its route is new, and the memory of a block suffices.
// (all_to_all cannot: its own rows go through the arena. Combine's backward pass cannot: it needs y for own rows.)
bool senders_can_write_own(const Peers& peers, const DispatchArgs& args) {
  const int64_t scratch = scratch_bytes_with_own_rows(peers.num_ranks, peers.experts_per_rank);
  return args.casts_new_rows() && scratch <= max_dispatch_scratch(kHasNetwork);
}

}  // namespace

LaunchPlan adapt_dispatch_plan(const Peers& peers, const DispatchArgs& args, const LaunchPlan& plan) {
  LaunchPlan adapted = kHasNetwork ? over_network(plan, needs_rail_peers(peers, args)) : plan;
  if (!senders_can_write_own(peers, args)) adapted.tokens_with_own_items = LaunchPlan::kAllTokens;
  return adapted;
}

cudaError_t launch_dispatch(const Peers& peers, const DispatchArgs& args, ElementType type, const LaunchPlan& plan,
                            cudaStream_t stream) {
  if (!plan.is_possible_dispatch(args.phase)) return cudaErrorInvalidConfiguration;
  if (plan.senders_write_own()) {
    const int64_t scratch = scratch_bytes_with_own_rows(peers.num_ranks, peers.experts_per_rank);
    return launch(kernel_with_own_rows(args.delivery), {plan.num_blocks, plan.block_threads(), scratch}, stream, peers,
                  args, plan);
  }
  const int64_t scratch = dispatch_scratch_bytes(peers.num_ranks, peers.experts_per_rank) +
                          int64_t{plan.block_warps()} * prefetched_y_bytes(args.delivery, plan.variant, args.cast != 0);
  const Kernel kernel = kernel_of(type, args.cast != 0, args.delivery, args.num_scales > 0, plan.variant);
  return launch(kernel, {plan.num_blocks, plan.block_threads(), scratch}, stream, peers, args, plan);
}

cudaError_t load_dispatch() {
  cudaError_t status = cudaSuccess;
  for (Delivery delivery : {Delivery::kCopy, Delivery::kDequantize}) {
    if (status == cudaSuccess) status = load_kernel(kernel_with_own_rows(delivery), max_dispatch_scratch(kHasNetwork));
  }
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    for (Delivery delivery : {Delivery::kCopy, Delivery::kDequantize, Delivery::kCombineBack}) {
      for (bool casts : {false, true}) {
        for (Variant variant : kVariants) {
          for (bool has_scales : {false, true}) {
            if (status != cudaSuccess) return status;
            status = load_kernel(
                kernel_of(type, casts, delivery, has_scales, variant),
                max_dispatch_scratch(kHasNetwork) + kMaxBlockWarps * prefetched_y_bytes(delivery, variant, casts));
          }
        }
      }
    }
  }
  return status;
}

}  // namespace jax_ep
