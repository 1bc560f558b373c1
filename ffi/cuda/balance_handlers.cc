// XLA FFI handlers of balanced placement, as handlers.cc has those of the operations that move rows.
#include "ffi/cuda/bindings.h"
#include "ffi/cuda/checks.h"
#include "ffi/cuda/handlers.h"

namespace jax_ep {

struct BalanceAttrs {
  int64_t group, hash, tolerance;
};

struct ReplicateAttrs {
  int64_t group, hash;
  bool clears_slots;
};

namespace {

ffi::Error balance(cudaStream_t stream, int32_t ordinal, BalanceAttrs attrs, Operand axis_index, Operand topk_idx,
                   Result slot_expert, Result num_rows, Result home_rows, Result slots, Result topk_slot) {
  const auto member = member_for("balance", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  if (sizes.replicas == 0 || attrs.tolerance < 0 || attrs.tolerance > sizes.num_ranks * kToleranceUnit) {
    return ffi::Error::InvalidArgument("balance: the group has " + std::to_string(sizes.replicas) +
                                       " replicas and tolerance is " + std::to_string(attrs.tolerance) +
                                       "; they must be at least 1, and 0 to " +
                                       std::to_string(sizes.num_ranks * kToleranceUnit));
  }
  const Dims topk = sizes.topk(size(topk_idx, 0));
  const ffi::Error error =
      first_error({check_axis_index("balance", axis_index),
                   check_buffers("balance", {{"topk_idx", topk_idx, ffi::S32, topk},
                                             {"slot_expert", *slot_expert, ffi::S32, {sizes.replicas}},
                                             {"num_rows", *num_rows, ffi::S32, {}},
                                             {"home_rows", *home_rows, ffi::S32, {}},
                                             {"slots", *slots, ffi::S32, {sizes.num_ranks, sizes.replicas}},
                                             {"topk_slot", *topk_slot, ffi::S32, topk}})});
  if (error.failure()) return error;
  BalanceArgs args = {};
  args.op = OpKind::kBalance;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(topk_idx.dimensions()[0]);
  args.top_k = static_cast<int32_t>(topk_idx.dimensions()[1]);
  args.topk_idx = data<int32_t>(topk_idx);
  args.tolerance_units = static_cast<int32_t>(attrs.tolerance);
  args.by_home_experts = Divisor(static_cast<uint32_t>(sizes.experts_per_rank - sizes.replicas));
  args.slot_expert = data<int32_t>(slot_expert);
  args.num_rows = data<int32_t>(num_rows);
  args.home_rows = data<int32_t>(home_rows);
  args.slots = data<int32_t>(slots);
  args.topk_slot = static_cast<int32_t*>(topk_slot->untyped_data());
  return enqueue_balance("balance", stream, **member, attrs.group, args);
}

// Both directions work in place: the result has the memory of `experts`.
ffi::Error in_place(OpKind op, cudaStream_t stream, int32_t ordinal, int64_t group, uint32_t hash, bool clears_slots,
                    const Operand& axis_index, const Operand& experts, const Operand& slots, Result out) {
  const char* const name = name_of(op);
  const auto member = member_for(name, group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  const bool adds = op == OpKind::kReplicateBack;
  const ffi::Error error = first_error(
      {check_axis_index(name, axis_index),
       check_buffers(
           name,
           {{"experts", experts, adds ? Types::floats() : Types::any(), {sizes.experts_per_rank, last_size(experts)}},
            {"slots", slots, ffi::S32, {sizes.num_ranks, sizes.replicas}},
            {"out", *out, experts.element_type(), {sizes.experts_per_rank, last_size(experts)}}})});
  if (error.failure()) return error;
  if (sizes.replicas == 0 || sizes.has_network || row_bytes(experts) % kUnitBytes != 0 ||
      experts.untyped_data() != out->untyped_data()) {
    return ffi::Error::InvalidArgument(std::string(name) + ": the group must have replicas and no network, an expert " +
                                       "must have a multiple of 16 bytes, and out must have the memory of experts");
  }
  ReplicateArgs args = {};
  args.op = op;
  args.hash = hash;
  args.axis_index = data<int32_t>(axis_index);
  args.slots = data<int32_t>(slots);
  args.by_home_experts = Divisor(static_cast<uint32_t>(sizes.experts_per_rank - sizes.replicas));
  args.experts = static_cast<uint8_t*>(out->untyped_data());
  args.expert_bytes = row_bytes(experts);
  args.clears_slots = clears_slots;
  return enqueue_replicate(name, stream, **member, group, element_type(experts), args);
}

ffi::Error replicate(cudaStream_t stream, int32_t ordinal, ReplicateAttrs attrs, Operand axis_index, Operand experts,
                     Operand slots, Result out) {
  return in_place(OpKind::kReplicate, stream, ordinal, attrs.group, static_cast<uint32_t>(attrs.hash),
                  attrs.clears_slots, axis_index, experts, slots, out);
}

ffi::Error replicate_back(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand experts,
                          Operand slots, Result out) {
  return in_place(OpKind::kReplicateBack, stream, ordinal, attrs.group, static_cast<uint32_t>(attrs.hash), false,
                  axis_index, experts, slots, out);
}

JAX_EP_DEFINE_HANDLER(kBalance, with_order_token(balance, "balance"), (with_buffers<2, 5>(bind_call<BalanceAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kReplicate, with_order_token(replicate, "replicate"),
                      (with_buffers<3, 1>(bind_call<ReplicateAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kReplicateBack, with_order_token(replicate_back, name_of(OpKind::kReplicateBack)),
                      (with_buffers<3, 1>(bind_call<CallAttrs>())), kTraits);

}  // namespace

std::vector<std::pair<const char*, XLA_FFI_Handler*>> balance_targets() {
  return {{"jax_ep_balance", kBalance}, {"jax_ep_replicate", kReplicate}, {"jax_ep_replicate_back", kReplicateBack}};
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::BalanceAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("tolerance"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::ReplicateAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<bool>("clears_slots"));
