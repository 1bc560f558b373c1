// XLA FFI handlers of the CUDA backend. A handler looks up the group's memory on this device, checks the kernel's
// requirements, and launches the kernel. It allocates no device memory, and waits for nothing. An operand or result
// with no elements stands for "none".
//
// XLA may replay the launch of a whole operation from a CUDA graph without calling the handler. So host state may
// change from call to call in two cases only: for split-phase calls, which XLA does not record in CUDA graphs, and for
// the order of calls, which ignores groups with calls in CUDA graphs.
#include "ffi/cuda/handlers.h"

#include "ffi/cuda/bindings.h"
#include "ffi/cuda/checks.h"
#include "ffi/cuda/enqueue.h"

namespace jax_ep {

struct DispatchAttrs {
  int64_t group, hash, layout, capacity, alignment, cast;
  bool dequantize, zero_pad;
  int64_t scales_format;
};

struct RouteAttrs {
  int64_t group, hash, layout, capacity, alignment;
};

struct CombineAttrs {
  int64_t group, hash, cast;
};

struct CombineBackAttrs : RouteAttrs {
  int64_t cast;
};

struct DispatchBackAttrs {
  int64_t group, hash, layout, cast;
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

// Sets how rows of x travel. If `x_scales` is not null, x is already fp8. Otherwise, `cast` says how the kernel casts
// bfloat16 to fp8. If `cast` is 0, rows travel in x's dtype.
void set_wire(DispatchArgs& args, int64_t cast, const Operand& x, const float* x_scales) {
  args.row_bytes = row_bytes(x);
  args.x_scales = x_scales;
  args.cast = static_cast<int32_t>(cast);
  const bool is_fp8 = args.x_scales != nullptr || args.cast != 0;
  args.num_scales = is_fp8 ? static_cast<int32_t>(divide_up(x.dimensions()[1], kChannelsPerScale)) : 0;
}

DispatchArgs new_route(const DispatchAttrs& attrs, Operand axis_index, Operand x, Operand x_scales, Operand topk_idx,
                       Operand named_slot, Operand topk_weights) {
  DispatchArgs args = {};
  args.op = OpKind::kDispatch;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(topk_idx.dimensions()[0]);
  args.top_k = static_cast<int32_t>(topk_idx.dimensions()[1]);
  args.x = x.untyped_data();
  set_wire(args, attrs.cast, x, data<float>(x_scales));
  args.topk_idx = data<int32_t>(topk_idx);
  args.named_slot = data<int32_t>(named_slot);
  args.topk_weights = data<float>(topk_weights);
  set_route(args, attrs.layout, attrs.capacity, attrs.alignment);
  return args;
}

void set_results(DispatchArgs& args, const DispatchAttrs& attrs, Operand out, Operand out_scales, Operand weights,
                 Operand counts, Operand group_sizes, Operand num_dropped, Operand recv_topk_idx,
                 Operand num_rows_per_rank, Operand send_index, Operand recv_row, Operand num_recv_per_rank) {
  args.send_index = data<int32_t>(send_index);
  args.delivery = attrs.dequantize ? Delivery::kDequantize : Delivery::kCopy;
  args.zero_pad = attrs.zero_pad;
  set_out(args, out);
  args.out_scales = data<void>(out_scales);
  args.scales_format = static_cast<ScalesFormat>(attrs.scales_format);
  args.weights = data<float>(weights);
  args.counts = data<int32_t>(counts);
  args.group_sizes = data<int32_t>(group_sizes);
  args.num_dropped = data<int32_t>(num_dropped);
  args.recv_topk_idx = data<int32_t>(recv_topk_idx);
  args.num_rows_per_rank = data<int32_t>(num_rows_per_rank);
  args.recv_row = data<int32_t>(recv_row);
  args.num_recv_per_rank = data<int32_t>(num_recv_per_rank);
}

ffi::Error dispatch(CallStream stream, int32_t ordinal, DispatchAttrs attrs, Operand axis_index, Operand x,
                    Operand x_scales, Operand topk_idx, Operand named_slot, Operand topk_weights, Result out,
                    Result out_scales, Result weights, Result counts, Result group_sizes, Result num_dropped,
                    Result recv_topk_idx, Result num_rows_per_rank, Result send_index, Result recv_row,
                    Result num_recv_per_rank) {
  const auto member = member_for("dispatch", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error =
      check_dispatch("dispatch", **member, attrs, axis_index, x, x_scales, topk_idx, named_slot, topk_weights, *out,
                     *out_scales, *weights, *counts, *group_sizes, *num_dropped, *recv_topk_idx, *num_rows_per_rank,
                     *send_index, *recv_row, *num_recv_per_rank);
  if (error.failure()) return error;
  DispatchArgs args = new_route(attrs, axis_index, x, x_scales, topk_idx, named_slot, topk_weights);
  set_results(args, attrs, *out, *out_scales, *weights, *counts, *group_sizes, *num_dropped, *recv_topk_idx,
              *num_rows_per_rank, *send_index, *recv_row, *num_recv_per_rank);
  return enqueue_dispatch("dispatch", stream, **member, attrs.group, element_type(x), args);
}

ffi::Error dispatch_start(CallStream stream, int32_t ordinal, DispatchAttrs attrs, Operand axis_index, Operand x,
                          Operand x_scales, Operand topk_idx, Operand named_slot, Operand topk_weights, Operand out,
                          Operand out_scales, Operand weights, Operand counts, Operand group_sizes, Operand num_dropped,
                          Operand recv_topk_idx, Operand num_rows_per_rank, Operand send_index, Operand recv_row,
                          Operand num_recv_per_rank, Result pending) {
  const auto member = member_for("dispatch_start", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error =
      first_error({check_dispatch("dispatch_start", **member, attrs, axis_index, x, x_scales, topk_idx, named_slot,
                                  topk_weights, out, out_scales, weights, counts, group_sizes, num_dropped,
                                  recv_topk_idx, num_rows_per_rank, send_index, recv_row, num_recv_per_rank),
                   check_pending("dispatch_start", *pending)});
  if (error.failure()) return error;
  DispatchArgs args = new_route(attrs, axis_index, x, x_scales, topk_idx, named_slot, topk_weights);
  set_results(args, attrs, out, out_scales, weights, counts, group_sizes, num_dropped, recv_topk_idx, num_rows_per_rank,
              send_index, recv_row, num_recv_per_rank);
  args.phase = Phase::kDone;
  args.pending = data<PendingCall>(pending);
  return enqueue_dispatch(
      "dispatch_start", stream, **member, attrs.group, element_type(x), args,
      addresses(x, x_scales, topk_idx, named_slot, topk_weights, out, out_scales, weights, counts, group_sizes,
                num_dropped, recv_topk_idx, num_rows_per_rank, send_index, recv_row, num_recv_per_rank, pending));
}

ffi::Error dispatch_done(CallStream stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                         ffi::RemainingRets) {
  return done("dispatch_done", OpKind::kDispatch, stream, ordinal, group, operands);
}

DispatchArgs along_route(OpKind op, const RouteAttrs& attrs, const Operand& axis_index, const Operand& x,
                         const Operand& send_index, const Operand& recv_row, const Operand& num_recv_per_rank,
                         const Operand& counts, const Operand& group_sizes, const Operand& out, int64_t cast = 0) {
  DispatchArgs args = {};
  args.op = op;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(recv_row.dimensions()[1]);
  args.top_k = static_cast<int32_t>(recv_row.dimensions()[2]);
  args.x = x.untyped_data();
  set_wire(args, cast, x, nullptr);
  args.known_send_index = data<int32_t>(send_index);
  args.known_recv_row = data<int32_t>(recv_row);
  args.known_num_recv_per_rank = data<int32_t>(num_recv_per_rank);
  args.known_counts = data<int32_t>(counts);
  args.known_group_sizes = data<int32_t>(group_sizes);
  args.zero_pad = true;
  set_route(args, attrs.layout, attrs.capacity, attrs.alignment);
  set_out(args, out);
  return args;
}

ffi::Error dispatch_like(CallStream stream, int32_t ordinal, RouteAttrs attrs, Operand axis_index, Operand x,
                         Operand send_index, Operand recv_row, Operand num_recv_per_rank, Operand counts,
                         Operand group_sizes, Result out) {
  const auto member = member_for("dispatch_like", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  const int64_t num_tokens = size(x, 0), channels = last_size(x);
  const ffi::Error error = first_error(
      {check_axis_index("dispatch_like", axis_index),
       check_layout("dispatch_like", attrs.layout, attrs.capacity, attrs.alignment),
       check_buffers("dispatch_like",
                     {{"x", x, Types::any(), {num_tokens, channels}},
                      {"out", *out, x.element_type(), sizes.rows(attrs.layout, attrs.capacity).then(channels)}}),
       check_route("dispatch_like", sizes, num_tokens, send_index, recv_row, num_recv_per_rank),
       check_counts("dispatch_like", sizes, counts, group_sizes)});
  if (error.failure()) return error;
  DispatchArgs args = along_route(OpKind::kDispatchLike, attrs, axis_index, x, send_index, recv_row, num_recv_per_rank,
                                  counts, group_sizes, *out);
  args.delivery = Delivery::kCopy;
  return enqueue_dispatch("dispatch_like", stream, **member, attrs.group, element_type(x), args);
}

DispatchArgs weighted_rows(const CombineBackAttrs& attrs, Operand axis_index, Operand g, Operand send_index,
                           Operand recv_row, Operand num_recv_per_rank, Operand counts, Operand group_sizes, Operand y,
                           Operand row_weights, Operand y_cotangent, Operand weights_cotangent) {
  DispatchArgs args = along_route(OpKind::kCombineBack, attrs, axis_index, g, send_index, recv_row, num_recv_per_rank,
                                  counts, group_sizes, y_cotangent, attrs.cast);
  args.delivery = Delivery::kCombineBack;
  args.row_weights = data<float>(row_weights);
  args.y = data<void>(y);
  args.weights_cotangent = data<float>(weights_cotangent);
  return args;
}

ffi::Error combine_back(CallStream stream, int32_t ordinal, CombineBackAttrs attrs, Operand axis_index, Operand g,
                        Operand send_index, Operand recv_row, Operand num_recv_per_rank, Operand counts,
                        Operand group_sizes, Operand y, Operand row_weights, Result y_cotangent,
                        Result weights_cotangent) {
  const char* const op = name_of(OpKind::kCombineBack);
  const auto member = member_for(op, attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error =
      check_combine_back(op, **member, attrs, axis_index, g, send_index, recv_row, num_recv_per_rank, counts,
                         group_sizes, y, row_weights, *y_cotangent, *weights_cotangent);
  if (error.failure()) return error;
  return enqueue_dispatch(op, stream, **member, attrs.group, element_type(g),
                          weighted_rows(attrs, axis_index, g, send_index, recv_row, num_recv_per_rank, counts,
                                        group_sizes, y, row_weights, *y_cotangent, *weights_cotangent));
}

ffi::Error combine_back_start(CallStream stream, int32_t ordinal, CombineBackAttrs attrs, Operand axis_index, Operand g,
                              Operand send_index, Operand recv_row, Operand num_recv_per_rank, Operand counts,
                              Operand group_sizes, Operand y, Operand row_weights, Operand y_cotangent,
                              Operand weights_cotangent, Result pending) {
  const auto member = member_for("combine_back_start", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error = first_error(
      {check_combine_back("combine_back_start", **member, attrs, axis_index, g, send_index, recv_row, num_recv_per_rank,
                          counts, group_sizes, y, row_weights, y_cotangent, weights_cotangent),
       check_pending("combine_back_start", *pending)});
  if (error.failure()) return error;
  DispatchArgs args = weighted_rows(attrs, axis_index, g, send_index, recv_row, num_recv_per_rank, counts, group_sizes,
                                    y, row_weights, y_cotangent, weights_cotangent);
  args.phase = Phase::kDone;
  args.pending = data<PendingCall>(pending);
  return enqueue_dispatch("combine_back_start", stream, **member, attrs.group, element_type(g), args,
                          addresses(g, send_index, recv_row, num_recv_per_rank, counts, group_sizes, y, row_weights,
                                    y_cotangent, weights_cotangent, pending));
}

ffi::Error combine_back_done(CallStream stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                             ffi::RemainingRets) {
  return done("combine_back_done", OpKind::kCombineBack, stream, ordinal, group, operands);
}

ffi::Error all_to_all(CallStream stream, int32_t ordinal, AllToAllAttrs attrs, Operand axis_index, Operand x,
                      Operand x_scales, Operand splits, Operand send_index, Result out, Result out_scales,
                      Result out_splits) {
  const auto member = member_for("all_to_all", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  const int64_t num_sent = size(x, 0);
  const ffi::Error error =
      first_error({check_axis_index("all_to_all", axis_index),
                   check_wire("all_to_all", attrs.cast, attrs.dequantize, x, x_scales, {sizes.num_ranks, num_sent},
                              *out, *out_scales),
                   check_buffers("all_to_all",
                                 {{"splits", splits, ffi::S32, {sizes.num_ranks * sizes.experts_per_rank}},
                                  {"send_index", send_index, ffi::S32, {num_sent, sizes.num_ranks}},
                                  {"out_splits", *out_splits, ffi::S32, {sizes.num_ranks, sizes.experts_per_rank}}})});
  if (error.failure()) return error;
  DispatchArgs args = {};
  args.op = OpKind::kAllToAll;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(x.dimensions()[0]);
  args.top_k = 1;
  args.x = x.untyped_data();
  set_wire(args, attrs.cast, x, data<float>(x_scales));
  args.splits = data<int32_t>(splits);
  args.known_send_index = data<int32_t>(send_index);
  args.delivery = attrs.dequantize ? Delivery::kDequantize : Delivery::kCopy;
  args.is_all_to_all = true;
  args.zero_pad = attrs.zero_pad;
  set_out(args, *out);
  args.out_scales = data<void>(out_scales);
  args.counts = data<int32_t>(out_splits);
  return enqueue_dispatch("all_to_all", stream, **member, attrs.group, element_type(x), args);
}

CombineArgs weighted_sum(const CombineAttrs& attrs, Operand axis_index, Operand y, Operand row_weights,
                         Operand send_index, Operand recv_row, Operand num_recv_per_rank, Operand out) {
  CombineArgs args = {};
  args.op = OpKind::kCombine;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(recv_row.dimensions()[1]);
  args.top_k = static_cast<int32_t>(recv_row.dimensions()[2]);
  args.y = y.untyped_data();
  args.row_bytes = row_bytes(y);
  args.row_weights = data<float>(row_weights);
  args.cast = static_cast<int32_t>(attrs.cast);
  args.recv_row = data<int32_t>(recv_row);
  args.num_recv_per_rank = data<int32_t>(num_recv_per_rank);
  args.send_index = data<int32_t>(send_index);
  args.out = data<void>(out);
  args.out_type = element_type(out);
  return args;
}

ffi::Error combine(CallStream stream, int32_t ordinal, CombineAttrs attrs, Operand axis_index, Operand y,
                   Operand row_weights, Operand send_index, Operand recv_row, Operand num_recv_per_rank, Result out) {
  const auto member = member_for("combine", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error = check_combine("combine", **member, attrs.cast, axis_index, y, row_weights, send_index,
                                         recv_row, num_recv_per_rank, *out);
  if (error.failure()) return error;
  const CombineArgs args =
      weighted_sum(attrs, axis_index, y, row_weights, send_index, recv_row, num_recv_per_rank, *out);
  return enqueue_combine("combine", stream, **member, attrs.group, element_type(y), args);
}

ffi::Error combine_start(CallStream stream, int32_t ordinal, CombineAttrs attrs, Operand axis_index, Operand y,
                         Operand row_weights, Operand send_index, Operand recv_row, Operand num_recv_per_rank,
                         Operand out, Result pending) {
  const auto member = member_for("combine_start", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error = first_error({check_combine("combine_start", **member, attrs.cast, axis_index, y, row_weights,
                                                      send_index, recv_row, num_recv_per_rank, out),
                                        check_pending("combine_start", *pending)});
  if (error.failure()) return error;
  CombineArgs args = weighted_sum(attrs, axis_index, y, row_weights, send_index, recv_row, num_recv_per_rank, out);
  args.phase = Phase::kDone;
  args.pending = data<PendingCall>(pending);
  return enqueue_combine("combine_start", stream, **member, attrs.group, element_type(y), args,
                         addresses(y, row_weights, send_index, recv_row, num_recv_per_rank, out, pending));
}

ffi::Error combine_done(CallStream stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                        ffi::RemainingRets) {
  return done("combine_done", OpKind::kCombine, stream, ordinal, group, operands);
}

CombineArgs sum_back(const DispatchBackAttrs& attrs, Operand axis_index, Operand y, Operand weights, Operand send_index,
                     Operand recv_row, Operand num_recv_per_rank, Operand out, Operand topk_weights) {
  CombineArgs args = {};
  args.op = OpKind::kDispatchBack;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(recv_row.dimensions()[1]);
  args.top_k = static_cast<int32_t>(recv_row.dimensions()[2]);
  args.y = data<void>(y);
  args.row_bytes = args.y ? row_bytes(y) : 0;
  args.weights_cotangent = data<float>(weights);
  args.has_token_weights = has_elements(weights) && static_cast<Layout>(attrs.layout) == Layout::kToken;
  args.cast = static_cast<int32_t>(attrs.cast);
  args.recv_row = data<int32_t>(recv_row);
  args.num_recv_per_rank = data<int32_t>(num_recv_per_rank);
  args.send_index = data<int32_t>(send_index);
  args.out = data<void>(out);
  args.out_type = element_type(out);
  args.topk_weights_cotangent = data<float>(topk_weights);
  return args;
}

ffi::Error dispatch_back(CallStream stream, int32_t ordinal, DispatchBackAttrs attrs, Operand axis_index, Operand y,
                         Operand weights, Operand send_index, Operand recv_row, Operand num_recv_per_rank, Result out,
                         Result topk_weights) {
  const char* const op = name_of(OpKind::kDispatchBack);
  const auto member = member_for(op, attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error = check_dispatch_back(op, **member, attrs, axis_index, y, weights, send_index, recv_row,
                                               num_recv_per_rank, *out, *topk_weights);
  if (error.failure()) return error;
  return enqueue_combine(
      op, stream, **member, attrs.group, element_type(y),
      sum_back(attrs, axis_index, y, weights, send_index, recv_row, num_recv_per_rank, *out, *topk_weights));
}

ffi::Error dispatch_back_start(CallStream stream, int32_t ordinal, DispatchBackAttrs attrs, Operand axis_index,
                               Operand y, Operand weights, Operand send_index, Operand recv_row,
                               Operand num_recv_per_rank, Operand out, Operand topk_weights, Result pending) {
  const auto member = member_for("dispatch_back_start", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const ffi::Error error =
      first_error({check_dispatch_back("dispatch_back_start", **member, attrs, axis_index, y, weights, send_index,
                                       recv_row, num_recv_per_rank, out, topk_weights),
                   check_pending("dispatch_back_start", *pending)});
  if (error.failure()) return error;
  CombineArgs args =
      sum_back(attrs, axis_index, y, weights, send_index, recv_row, num_recv_per_rank, out, topk_weights);
  args.phase = Phase::kDone;
  args.pending = data<PendingCall>(pending);
  return enqueue_combine("dispatch_back_start", stream, **member, attrs.group, element_type(y), args,
                         addresses(y, weights, send_index, recv_row, num_recv_per_rank, out, topk_weights, pending));
}

ffi::Error dispatch_back_done(CallStream stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                              ffi::RemainingRets) {
  return done("dispatch_back_done", OpKind::kDispatchBack, stream, ordinal, group, operands);
}

ffi::Error all_to_all_back(CallStream stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                           Operand num_sent, Operand send_index, Result out) {
  const auto member = member_for("all_to_all_back", attrs.group, ordinal);
  if (member.has_error()) return member.error();
  const Sizes sizes(**member);
  const int64_t num_rows = size(y, 1), channels = last_size(y);
  const ffi::Error error =
      first_error({check_axis_index("all_to_all_back", axis_index),
                   check_buffers("all_to_all_back", {{"y", y, Types::floats(), {sizes.num_ranks, num_rows, channels}},
                                                     {"num_sent", num_sent, ffi::S32, {sizes.num_ranks}},
                                                     {"send_index", send_index, ffi::S32, {num_rows, sizes.num_ranks}},
                                                     {"out", *out, y.element_type(), {num_rows, channels}}})});
  if (error.failure()) return error;
  CombineArgs args = {};
  args.op = OpKind::kAllToAllBack;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(y.dimensions()[1]);
  args.top_k = 1;
  args.y = y.untyped_data();
  args.row_bytes = row_bytes(y);
  args.num_sent = data<int32_t>(num_sent);
  args.send_index = data<int32_t>(send_index);
  args.out = data<void>(out);
  args.out_type = element_type(*out);
  return enqueue_combine("all_to_all_back", stream, **member, attrs.group, element_type(y), args);
}

JAX_EP_DEFINE_HANDLER(kDispatch, with_order_token(dispatch, "dispatch"),
                      (with_buffers<6, 11>(bind_call<DispatchAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kDispatchLike, with_order_token(dispatch_like, "dispatch_like"),
                      (with_buffers<7, 1>(bind_call<RouteAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kCombineBack, with_order_token(combine_back, name_of(OpKind::kCombineBack)),
                      (with_buffers<9, 2>(bind_call<CombineBackAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kAllToAll, with_order_token(all_to_all, "all_to_all"),
                      (with_buffers<5, 3>(bind_call<AllToAllAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kCombine, with_order_token(combine, "combine"), (with_buffers<6, 1>(bind_call<CombineAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kDispatchBack, with_order_token(dispatch_back, name_of(OpKind::kDispatchBack)),
                      (with_buffers<6, 2>(bind_call<DispatchBackAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kAllToAllBack, with_order_token(all_to_all_back, "all_to_all_back"),
                      (with_buffers<4, 1>(bind_call<CallAttrs>())), kTraits);

// XLA does not record split-phase calls in CUDA graphs, and calls their handlers each time.
XLA_FFI_DEFINE_HANDLER(kRoom, room, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
JAX_EP_DEFINE_HANDLER(kDispatchStart, with_order_token(dispatch_start, "dispatch_start"),
                      (with_buffers<17, 1>(bind_call<DispatchAttrs>())));
JAX_EP_DEFINE_HANDLER(kDispatchDone, with_order_token(dispatch_done, "dispatch_done"), bind_done());
JAX_EP_DEFINE_HANDLER(kCombineStart, with_order_token(combine_start, "combine_start"),
                      (with_buffers<7, 1>(bind_call<CombineAttrs>())));
JAX_EP_DEFINE_HANDLER(kCombineDone, with_order_token(combine_done, "combine_done"), bind_done());
JAX_EP_DEFINE_HANDLER(kDispatchBackStart, with_order_token(dispatch_back_start, "dispatch_back_start"),
                      (with_buffers<8, 1>(bind_call<DispatchBackAttrs>())));
JAX_EP_DEFINE_HANDLER(kDispatchBackDone, with_order_token(dispatch_back_done, "dispatch_back_done"), bind_done());
JAX_EP_DEFINE_HANDLER(kCombineBackStart, with_order_token(combine_back_start, "combine_back_start"),
                      (with_buffers<11, 1>(bind_call<CombineBackAttrs>())));
JAX_EP_DEFINE_HANDLER(kCombineBackDone, with_order_token(combine_back_done, "combine_back_done"), bind_done());

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
      {"jax_ep_dispatch_back_start", kDispatchBackStart},
      {"jax_ep_dispatch_back_done", kDispatchBackDone},
      {"jax_ep_combine_back_start", kCombineBackStart},
      {"jax_ep_combine_back_done", kCombineBackDone},
      {"jax_ep_all_to_all", kAllToAll},
      {"jax_ep_all_to_all_back", kAllToAllBack},
  };
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::DispatchAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("layout"),
                                      StructMember<int64_t>("capacity"), StructMember<int64_t>("alignment"),
                                      StructMember<int64_t>("cast"), StructMember<bool>("dequantize"),
                                      StructMember<bool>("zero_pad"), StructMember<int64_t>("scales_format"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::RouteAttrs, StructMember<int64_t>("group"), StructMember<int64_t>("hash"),
                                      StructMember<int64_t>("layout"), StructMember<int64_t>("capacity"),
                                      StructMember<int64_t>("alignment"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::CombineBackAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("layout"),
                                      StructMember<int64_t>("capacity"), StructMember<int64_t>("alignment"),
                                      StructMember<int64_t>("cast"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::DispatchBackAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("layout"),
                                      StructMember<int64_t>("cast"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::CombineAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("cast"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::AllToAllAttrs, StructMember<int64_t>("group"),
                                      StructMember<int64_t>("hash"), StructMember<int64_t>("cast"),
                                      StructMember<bool>("dequantize"), StructMember<bool>("zero_pad"));
