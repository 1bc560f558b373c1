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

ffi::Error balance(CallStream stream, int32_t ordinal, BalanceAttrs attrs, Operand axis_index, Operand topk_idx,
                   Result slot_expert, Result num_rows, Result home_rows, Result slots, Result topk_slot, Result work) {
  const auto member = member_for("balance", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  if (sizes.replicas == 0 || attrs.tolerance < 0 || attrs.tolerance > sizes.num_ranks * kToleranceUnitsPerOne) {
    return ffi::Error::InvalidArgument("balance: the group has " + std::to_string(sizes.replicas) +
                                       " replicas and tolerance is " + std::to_string(attrs.tolerance) +
                                       "; they must be at least 1, and 0 to " +
                                       std::to_string(sizes.num_ranks * kToleranceUnitsPerOne));
  }
  const Dims topk = sizes.topk(size(topk_idx, 0));
  const int64_t work_words = balance_work_words(sizes.num_ranks * sizes.num_home_experts(), sizes.num_ranks);
  const ffi::Error error =
      first_error({check_axis_index("balance", axis_index),
                   check_buffers("balance", {{"topk_idx", topk_idx, ffi::S32, topk},
                                             {"slot_expert", *slot_expert, ffi::S32, {sizes.replicas}},
                                             {"num_rows", *num_rows, ffi::S32, {}},
                                             {"home_rows", *home_rows, ffi::S32, {}},
                                             {"slots", *slots, ffi::S32, {sizes.num_ranks, sizes.replicas}},
                                             {"topk_slot", *topk_slot, ffi::S32, topk},
                                             {"work", *work, ffi::S32, {work_words}}})});
  if (error.failure()) return error;
  BalanceArgs args = {};
  args.op = OpKind::kBalance;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(topk_idx.dimensions()[0]);
  args.top_k = static_cast<int32_t>(topk_idx.dimensions()[1]);
  args.topk_idx = data<int32_t>(topk_idx);
  args.tolerance_units = static_cast<int32_t>(attrs.tolerance);
  args.by_home_experts = Divisor(static_cast<uint32_t>(sizes.num_home_experts()));
  args.slot_expert = data<int32_t>(slot_expert);
  args.num_rows = data<int32_t>(num_rows);
  args.home_rows = data<int32_t>(home_rows);
  args.slots = data<int32_t>(slots);
  args.topk_slot = static_cast<int32_t*>(topk_slot->untyped_data());
  args.work = data<int32_t>(work);
  return enqueue_balance("balance", stream, **member, attrs.group, args);
}

// A call of replicate or of its backward pass. `experts` has the experts' size and dtype. is_in_place: whether the
// result has the memory that it must have.
ffi::Error enqueue_copies(OpKind op, CallStream stream, const Member& member, const CallAttrs& attrs,
                          const Operand& axis_index, const Operand& experts, const Operand& slots, bool is_in_place,
                          ReplicateArgs args) {
  const char* const name = name_of(op);
  const Sizes sizes(member);
  const ffi::Error error =
      first_error({check_axis_index(name, axis_index),
                   check_buffers(name, {{"slots", slots, ffi::S32, {sizes.num_ranks, sizes.replicas}}})});
  if (error.failure()) return error;
  if (sizes.replicas == 0 || sizes.has_network || row_bytes(experts) % kUnitBytes != 0 || !is_in_place) {
    return ffi::Error::InvalidArgument(std::string(name) + ": the group must have replicas and no network, an expert " +
                                       "must have a multiple of 16 bytes, and out must have the memory of experts");
  }
  args.op = op;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.slots = data<int32_t>(slots);
  args.by_home_experts = Divisor(static_cast<uint32_t>(sizes.num_home_experts()));
  args.expert_bytes = row_bytes(experts);
  return enqueue_replicate(name, stream, member, attrs.group, element_type(experts), args);
}

// In place, in an array that has home experts and slots.
ffi::Error replicate(CallStream stream, int32_t ordinal, ReplicateAttrs attrs, Operand axis_index, Operand experts,
                     Operand slots, Result out) {
  const auto member = member_for("replicate", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  const Dims all = {sizes.experts_per_rank, last_size(experts)};
  const ffi::Error error =
      check_buffers("replicate", {{"experts", experts, Types::any(), all}, {"out", *out, experts.element_type(), all}});
  if (error.failure()) return error;
  ReplicateArgs args = {};
  args.home = static_cast<uint8_t*>(out->untyped_data());
  args.copies = args.home + sizes.num_home_experts() * row_bytes(experts);
  args.clears_slots = attrs.clears_slots;
  return enqueue_copies(OpKind::kReplicate, stream, **member, {attrs.group, attrs.hash}, axis_index, experts, slots,
                        experts.untyped_data() == out->untyped_data(), args);
}

// Into an array of slots only. Slots without a copy stay as they are.
ffi::Error copy_experts(CallStream stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand experts,
                        Operand slots, Result out) {
  const auto member = member_for("replicate", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  const int64_t channels = last_size(experts);
  const ffi::Error error =
      check_buffers("replicate", {{"experts", experts, Types::any(), {sizes.num_home_experts(), channels}},
                                  {"out", *out, experts.element_type(), {sizes.replicas, channels}}});
  if (error.failure()) return error;
  ReplicateArgs args = {};
  args.home = static_cast<uint8_t*>(experts.untyped_data());
  args.copies = static_cast<uint8_t*>(out->untyped_data());
  return enqueue_copies(OpKind::kReplicate, stream, **member, attrs, axis_index, experts, slots, true, args);
}

// Adds the gradients of copies to those of the home experts, in place.
ffi::Error replicate_back(CallStream stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand experts,
                          Operand copies, Operand slots, Result out) {
  const char* const name = name_of(OpKind::kReplicateBack);
  const auto member = member_for(name, attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  const Dims home = {sizes.num_home_experts(), last_size(experts)};
  const ffi::Error error =
      check_buffers(name, {{"experts", experts, Types::floats(), home},
                           {"copies", copies, experts.element_type(), {sizes.replicas, last_size(experts)}},
                           {"out", *out, experts.element_type(), home}});
  if (error.failure()) return error;
  ReplicateArgs args = {};
  args.home = static_cast<uint8_t*>(out->untyped_data());
  args.copies = static_cast<uint8_t*>(copies.untyped_data());
  return enqueue_copies(OpKind::kReplicateBack, stream, **member, attrs, axis_index, experts, slots,
                        experts.untyped_data() == out->untyped_data(), args);
}

JAX_EP_DEFINE_HANDLER(kBalance, with_order_token(balance, "balance"), (with_buffers<2, 6>(bind_call<BalanceAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kReplicate, with_order_token(replicate, "replicate"),
                      (with_buffers<3, 1>(bind_call<ReplicateAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kCopyExperts, with_order_token(copy_experts, "replicate"),
                      (with_buffers<3, 1>(bind_call<CallAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kReplicateBack, with_order_token(replicate_back, name_of(OpKind::kReplicateBack)),
                      (with_buffers<4, 1>(bind_call<CallAttrs>())), kTraits);

}  // namespace

std::vector<std::pair<const char*, XLA_FFI_Handler*>> balance_targets() {
  return {{"jax_ep_balance", kBalance},
          {"jax_ep_replicate", kReplicate},
          {"jax_ep_copy_experts", kCopyExperts},
          {"jax_ep_replicate_back", kReplicateBack}};
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::BalanceAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("tolerance"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::ReplicateAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<bool>("clears_slots"));
