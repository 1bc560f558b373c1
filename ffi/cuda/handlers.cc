// XLA FFI handlers of the CUDA backend. A handler looks up the group's memory on this device, checks the kernel's
// requirements, and launches the kernel. It allocates no device memory, and waits for nothing. An operand or result
// with no elements stands for "none".
//
// XLA may replay the launch of a whole operation from a CUDA graph without calling the handler. So host state may
// change from call to call in two cases only: for split-phase calls, which XLA does not record in CUDA graphs, and for
// the order of calls, which ignores groups with calls in CUDA graphs.
#include "ffi/cuda/handlers.h"

#include "ffi/cuda/enqueue.h"

namespace jax_ep {

// Attributes that every call has.
struct CallAttrs {
  int64_t group, hash;
};

struct DispatchAttrs {
  int64_t group, hash, layout, capacity, alignment, cast;
  bool dequantize, zero_pad;
};

struct RouteAttrs {
  int64_t group, hash, layout, capacity, alignment;
};

struct AllToAllAttrs {
  int64_t group, hash, cast;
  bool dequantize, zero_pad;
};

namespace {

void set_route(DispatchArgs& args, int64_t layout, int64_t capacity, int64_t alignment) {
  args.layout = static_cast<Layout>(layout);
  args.capacity = capacity;
  args.alignment = alignment;
}

void set_out(DispatchArgs& args, const ffi::AnyBuffer& out) {
  args.out = out.untyped_data();
  args.num_rows = num_rows(out);
  args.out_row_bytes = row_bytes(out);
}

// The rows to send: in x's dtype; fp8 already, with their scales; or bfloat16, to be cast on their way.
void set_wire(DispatchArgs& args, int64_t cast, const Operand& x, const Operand& x_scales) {
  args.row_bytes = row_bytes(x);
  args.x_scales = data<float>(x_scales);
  args.cast = static_cast<int32_t>(cast);
  const bool is_fp8 = args.x_scales != nullptr || args.cast != 0;
  args.num_scales = is_fp8 ? static_cast<int32_t>(x.dimensions()[1] / kChannelsPerScale) : 0;
}

// The kernels cast rows of bfloat16 only, to fp8 and back.
ffi::Error check_bfloat16(const char* op, const char* name, const ffi::AnyBuffer& buffer, bool is_cast) {
  if (!is_cast || buffer.element_type() == ffi::BF16) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(op) + ": the kernel casts " + name + ", which must be bfloat16");
}

DispatchArgs new_route(const DispatchAttrs& attrs, Operand axis_index, Operand x, Operand x_scales, Operand topk_idx,
                       Operand topk_weights) {
  DispatchArgs args = {};
  args.op = OpKind::kDispatch;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(topk_idx.dimensions()[0]);
  args.top_k = static_cast<int32_t>(topk_idx.dimensions()[1]);
  args.x = x.untyped_data();
  set_wire(args, attrs.cast, x, x_scales);
  args.topk_idx = data<int32_t>(topk_idx);
  args.topk_weights = data<float>(topk_weights);
  set_route(args, attrs.layout, attrs.capacity, attrs.alignment);
  return args;
}

void set_results(DispatchArgs& args, const DispatchAttrs& attrs, Operand out, Operand out_scales, Operand weights,
                 Operand counts, Operand group_sizes, Operand num_dropped, Operand send_slot, Operand recv_row,
                 Operand num_recv_per_rank) {
  args.send_slot = data<int32_t>(send_slot);
  args.arrival = attrs.dequantize ? Arrival::kDequantize : Arrival::kCopy;
  args.zero_pad = attrs.zero_pad;
  set_out(args, out);
  args.out_scales = data<float>(out_scales);
  args.weights = data<float>(weights);
  args.counts = data<int32_t>(counts);
  args.group_sizes = data<int32_t>(group_sizes);
  args.num_dropped = data<int32_t>(num_dropped);
  args.recv_row = data<int32_t>(recv_row);
  args.num_recv_per_rank = data<int32_t>(num_recv_per_rank);
}

ffi::Error dispatch(cudaStream_t stream, int32_t ordinal, DispatchAttrs attrs, Operand axis_index, Operand x,
                    Operand x_scales, Operand topk_idx, Operand topk_weights, Result out, Result out_scales,
                    Result weights, Result counts, Result group_sizes, Result num_dropped, Result send_slot,
                    Result recv_row, Result num_recv_per_rank) {
  ffi::Error error = check_bfloat16("dispatch", "x", x, attrs.cast != 0);
  if (error.success()) error = check_bfloat16("dispatch", "out", *out, attrs.dequantize);
  if (error.failure()) return error;
  DispatchArgs args = new_route(attrs, axis_index, x, x_scales, topk_idx, topk_weights);
  set_results(args, attrs, *out, *out_scales, *weights, *counts, *group_sizes, *num_dropped, *send_slot, *recv_row,
              *num_recv_per_rank);
  return enqueue_dispatch("dispatch", stream, ordinal, attrs.group, element_type(x), args);
}

ffi::Error dispatch_start(cudaStream_t stream, int32_t ordinal, DispatchAttrs attrs, Operand axis_index, Operand x,
                          Operand x_scales, Operand topk_idx, Operand topk_weights, Operand out, Operand out_scales,
                          Operand weights, Operand counts, Operand group_sizes, Operand num_dropped, Operand send_slot,
                          Operand recv_row, Operand num_recv_per_rank, Result ticket) {
  ffi::Error error = check_bfloat16("dispatch_start", "x", x, attrs.cast != 0);
  if (error.success()) error = check_bfloat16("dispatch_start", "out", out, attrs.dequantize);
  if (error.failure()) return error;
  DispatchArgs args = new_route(attrs, axis_index, x, x_scales, topk_idx, topk_weights);
  set_results(args, attrs, out, out_scales, weights, counts, group_sizes, num_dropped, send_slot, recv_row,
              num_recv_per_rank);
  args.phase = Phase::kDone;
  args.pending = data<PendingCall>(ticket);
  return enqueue_dispatch("dispatch_start", stream, ordinal, attrs.group, element_type(x), args,
                          addresses(x, x_scales, topk_idx, topk_weights, out, out_scales, weights, counts, group_sizes,
                                    num_dropped, send_slot, recv_row, num_recv_per_rank, ticket));
}

ffi::Error dispatch_done(cudaStream_t stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                         ffi::RemainingRets) {
  return done("dispatch_done", OpKind::kDispatch, stream, ordinal, group, operands);
}

DispatchArgs along_route(OpKind op, const RouteAttrs& attrs, const Operand& axis_index, const Operand& x,
                         const Operand& send_slot, const Operand& recv_row, const Operand& num_recv_per_rank,
                         const Operand& counts, const Operand& group_sizes, Result out) {
  DispatchArgs args = {};
  args.op = op;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(recv_row.dimensions()[1]);
  args.top_k = static_cast<int32_t>(recv_row.dimensions()[2]);
  args.x = x.untyped_data();
  args.row_bytes = row_bytes(x);
  args.known_send_slot = data<int32_t>(send_slot);
  args.known_recv_row = data<int32_t>(recv_row);
  args.known_num_recv_per_rank = data<int32_t>(num_recv_per_rank);
  args.known_counts = data<int32_t>(counts);
  args.known_group_sizes = data<int32_t>(group_sizes);
  args.zero_pad = true;
  set_route(args, attrs.layout, attrs.capacity, attrs.alignment);
  set_out(args, *out);
  return args;
}

ffi::Error dispatch_like(cudaStream_t stream, int32_t ordinal, RouteAttrs attrs, Operand axis_index, Operand x,
                         Operand send_slot, Operand recv_row, Operand num_recv_per_rank, Operand counts,
                         Operand group_sizes, Result out) {
  DispatchArgs args = along_route(OpKind::kDispatchLike, attrs, axis_index, x, send_slot, recv_row, num_recv_per_rank,
                                  counts, group_sizes, out);
  args.arrival = Arrival::kCopy;
  return enqueue_dispatch("dispatch_like", stream, ordinal, attrs.group, element_type(x), args);
}

ffi::Error combine_back(cudaStream_t stream, int32_t ordinal, RouteAttrs attrs, Operand axis_index, Operand g,
                        Operand send_slot, Operand recv_row, Operand num_recv_per_rank, Operand counts,
                        Operand group_sizes, Operand y, Operand row_weights, Result y_cotangent,
                        Result weights_cotangent) {
  DispatchArgs args = along_route(OpKind::kCombineBack, attrs, axis_index, g, send_slot, recv_row, num_recv_per_rank,
                                  counts, group_sizes, y_cotangent);
  args.arrival = Arrival::kCombineBack;
  args.row_weights = data<float>(row_weights);
  args.y = data<void>(y);
  args.weights_cotangent = data<float>(weights_cotangent);
  return enqueue_dispatch("combine (backward)", stream, ordinal, attrs.group, element_type(g), args);
}

ffi::Error all_to_all(cudaStream_t stream, int32_t ordinal, AllToAllAttrs attrs, Operand axis_index, Operand x,
                      Operand x_scales, Operand splits, Operand send_slot, Result out, Result out_scales,
                      Result out_splits) {
  ffi::Error error = check_bfloat16("all_to_all", "x", x, attrs.cast != 0);
  if (error.success()) error = check_bfloat16("all_to_all", "out", *out, attrs.dequantize);
  if (error.failure()) return error;
  DispatchArgs args = {};
  args.op = OpKind::kAllToAll;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(x.dimensions()[0]);
  args.top_k = 1;
  args.x = x.untyped_data();
  set_wire(args, attrs.cast, x, x_scales);
  args.splits = data<int32_t>(splits);
  args.known_send_slot = data<int32_t>(send_slot);
  args.arrival = attrs.dequantize ? Arrival::kDequantize : Arrival::kCopy;
  args.is_all_to_all = true;
  args.zero_pad = attrs.zero_pad;
  set_out(args, *out);
  args.out_scales = data<float>(out_scales);
  args.counts = data<int32_t>(out_splits);
  return enqueue_dispatch("all_to_all", stream, ordinal, attrs.group, element_type(x), args);
}

CombineArgs weighted_sum(const CallAttrs& attrs, Operand axis_index, Operand y, Operand row_weights, Operand send_slot,
                         Operand recv_row, Operand num_recv_per_rank, Operand out) {
  CombineArgs args = {};
  args.op = OpKind::kCombine;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(recv_row.dimensions()[1]);
  args.top_k = static_cast<int32_t>(recv_row.dimensions()[2]);
  args.y = y.untyped_data();
  args.row_bytes = row_bytes(y);
  args.row_weights = data<float>(row_weights);
  args.recv_row = data<int32_t>(recv_row);
  args.num_recv_per_rank = data<int32_t>(num_recv_per_rank);
  args.send_slot = data<int32_t>(send_slot);
  args.out = data<void>(out);
  args.out_type = element_type(out);
  return args;
}

ffi::Error combine(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                   Operand row_weights, Operand send_slot, Operand recv_row, Operand num_recv_per_rank, Result out) {
  const CombineArgs args =
      weighted_sum(attrs, axis_index, y, row_weights, send_slot, recv_row, num_recv_per_rank, *out);
  return enqueue_combine("combine", stream, ordinal, attrs.group, element_type(y), args);
}

ffi::Error combine_start(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                         Operand row_weights, Operand send_slot, Operand recv_row, Operand num_recv_per_rank,
                         Operand out, Result ticket) {
  CombineArgs args = weighted_sum(attrs, axis_index, y, row_weights, send_slot, recv_row, num_recv_per_rank, out);
  args.phase = Phase::kDone;
  args.pending = data<PendingCall>(ticket);
  return enqueue_combine("combine_start", stream, ordinal, attrs.group, element_type(y), args,
                         addresses(y, row_weights, send_slot, recv_row, num_recv_per_rank, out, ticket));
}

ffi::Error combine_done(cudaStream_t stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                        ffi::RemainingRets) {
  return done("combine_done", OpKind::kCombine, stream, ordinal, group, operands);
}

ffi::Error dispatch_back(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                         Operand weights, Operand send_slot, Operand recv_row, Operand num_recv_per_rank, Result out,
                         Result topk_weights) {
  CombineArgs args = {};
  args.op = OpKind::kDispatchBack;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(recv_row.dimensions()[1]);
  args.top_k = static_cast<int32_t>(recv_row.dimensions()[2]);
  args.y = data<void>(y);
  args.row_bytes = args.y ? row_bytes(y) : 0;
  args.weights_to_send = data<float>(weights);
  args.recv_row = data<int32_t>(recv_row);
  args.num_recv_per_rank = data<int32_t>(num_recv_per_rank);
  args.send_slot = data<int32_t>(send_slot);
  args.out = data<void>(out);
  args.out_type = element_type(*out);
  args.topk_weights = data<float>(topk_weights);
  return enqueue_combine("dispatch (backward)", stream, ordinal, attrs.group, element_type(y), args);
}

ffi::Error all_to_all_back(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                           Operand num_sent, Operand send_slot, Result out) {
  CombineArgs args = {};
  args.op = OpKind::kAllToAllBack;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(y.dimensions()[1]);
  args.top_k = 1;
  args.y = y.untyped_data();
  args.row_bytes = row_bytes(y);
  args.num_sent = data<int32_t>(num_sent);
  args.send_slot = data<int32_t>(send_slot);
  args.out = data<void>(out);
  args.out_type = element_type(*out);
  return enqueue_combine("all_to_all_back", stream, ordinal, attrs.group, element_type(y), args);
}

// Wraps a handler. XLA passes one more operand and one more result, the order token (jax_ep/_ordered_calls.py). The
// handler neither reads nor writes it.
template <typename Attrs, typename... Buffers>
auto with_order_token(ffi::Error (*handler)(cudaStream_t, int32_t, Attrs, Buffers...)) {
  return [handler](cudaStream_t stream, int32_t ordinal, Attrs attrs, Operand, Result, Buffers... buffers) {
    return handler(stream, ordinal, attrs, buffers...);
  };
}

// A binding of `operands` operands and `results` results, after the parameters that every handler has.
template <typename Attrs>
auto bind_call() {
  return ffi::Ffi::Bind()
      .Ctx<CallStream>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attrs<Attrs>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}
template <int operands, int results, typename Binding>
auto with_buffers(Binding binding) {
  if constexpr (operands > 0) {
    return with_buffers<operands - 1, results>(std::move(binding).template Arg<ffi::AnyBuffer>());
  } else if constexpr (results > 1) {
    return with_buffers<0, results - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  } else {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  }
}

auto bind_done() {
  return ffi::Ffi::Bind()
      .Ctx<CallStream>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attr<int64_t>("group")
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

constexpr auto kTraits = {ffi::Traits::kCmdBufferCompatible};
JAX_EP_DEFINE_HANDLER(kDispatch, with_order_token(dispatch), (with_buffers<5, 9>(bind_call<DispatchAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kDispatchLike, with_order_token(dispatch_like), (with_buffers<7, 1>(bind_call<RouteAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kCombineBack, with_order_token(combine_back), (with_buffers<9, 2>(bind_call<RouteAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kAllToAll, with_order_token(all_to_all), (with_buffers<5, 3>(bind_call<AllToAllAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kCombine, with_order_token(combine), (with_buffers<6, 1>(bind_call<CallAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kDispatchBack, with_order_token(dispatch_back), (with_buffers<6, 2>(bind_call<CallAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kAllToAllBack, with_order_token(all_to_all_back), (with_buffers<4, 1>(bind_call<CallAttrs>())),
                      kTraits);

// XLA does not record split-phase calls in CUDA graphs, and calls their handlers each time.
XLA_FFI_DEFINE_HANDLER(kRoom, room, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
JAX_EP_DEFINE_HANDLER(kDispatchStart, with_order_token(dispatch_start),
                      (with_buffers<14, 1>(bind_call<DispatchAttrs>())));
JAX_EP_DEFINE_HANDLER(kDispatchDone, with_order_token(dispatch_done), bind_done());
JAX_EP_DEFINE_HANDLER(kCombineStart, with_order_token(combine_start), (with_buffers<7, 1>(bind_call<CallAttrs>())));
JAX_EP_DEFINE_HANDLER(kCombineDone, with_order_token(combine_done), bind_done());

}  // namespace

std::vector<std::pair<const char*, XLA_FFI_Handler*>> backend_targets() {
  return {
      {"jax_ep_dispatch", kDispatch},
      {"jax_ep_room", kRoom},
      {"jax_ep_dispatch_start", kDispatchStart},
      {"jax_ep_dispatch_done", kDispatchDone},
      {"jax_ep_dispatch_like", kDispatchLike},
      {"jax_ep_dispatch_back", kDispatchBack},
      {"jax_ep_combine", kCombine},
      {"jax_ep_combine_start", kCombineStart},
      {"jax_ep_combine_done", kCombineDone},
      {"jax_ep_combine_back", kCombineBack},
      {"jax_ep_all_to_all", kAllToAll},
      {"jax_ep_all_to_all_back", kAllToAllBack},
  };
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::CallAttrs, StructMember<int64_t>("group"), StructMember<int64_t>("hash"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::DispatchAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("layout"),
                                      StructMember<int64_t>("capacity"), StructMember<int64_t>("alignment"),
                                      StructMember<int64_t>("cast"), StructMember<bool>("dequantize"),
                                      StructMember<bool>("zero_pad"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::RouteAttrs, StructMember<int64_t>("group"), StructMember<int64_t>("hash"),
                                      StructMember<int64_t>("layout"), StructMember<int64_t>("capacity"),
                                      StructMember<int64_t>("alignment"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::AllToAllAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("cast"),
                                      StructMember<bool>("dequantize"), StructMember<bool>("zero_pad"));
