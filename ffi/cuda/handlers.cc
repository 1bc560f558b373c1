// XLA FFI handlers of the CUDA backend: look up the group's memory on this device, check what the kernel relies on,
// launch. No device memory is allocated, nothing is waited for. XLA may replay the launch of a whole operation from a
// CUDA graph without asking, so two things only keep host state that changes from call to call: split-phase calls,
// which are no commands of CUDA graphs, and the order of calls, which leaves out groups with calls in CUDA graphs. An
// operand or result with no elements stands for "none".
#include "ffi/cuda/handlers.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "ffi/cuda/call_order.h"
#include "ffi/cuda/gather.h"
#include "ffi/cuda/group.h"
#include "ffi/cuda/halves.h"
#include "ffi/cuda/runtime.h"
#include "ffi/cuda/scatter.h"
#include "ffi/cuda/xla.h"

namespace jax_ep {

namespace ffi = xla::ffi;

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
  bool zero_pad;
};

namespace {

using Operand = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

template <typename T>
T* data(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}
template <typename T>
T* data(Result buffer) {
  return data<T>(*buffer);
}

// Only the kernels that calculate look at the type; the others move bytes.
ElementType element_type(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return ElementType::kFloat32;
    case ffi::F16:
      return ElementType::kFloat16;
    default:
      return ElementType::kBFloat16;
  }
}

int64_t row_bytes(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().back() * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
}

int64_t num_rows(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().back() == 0 ? 0
                                         : static_cast<int64_t>(buffer.element_count()) / buffer.dimensions().back();
}

// Why the group takes no calls, or "".
std::string refusal(const Group* group) {
  if (group == nullptr) return "this process has not made the group that the program was compiled for";
  if (group->closed()) return "its group is closed; make a new Group and trace the function again";
  if (const std::optional<FailureRecord> failure = group->failure()) {
    return "its group has failed before (" + summary(*failure) + "); close it, make a new Group and trace the " +
           "function again";
  }
  return "";
}

// This device's part in the group, if the group takes calls.
ffi::ErrorOr<const Member*> member_for(const char* op, int64_t group_id, int32_t ordinal) {
  const Group* group = find_group(group_id);
  const std::string where = std::string(op) + ": ", reason = refusal(group);
  if (!reason.empty()) return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, where + reason));
  const Member* member = group->member_on(ordinal);
  if (member == nullptr) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kInvalidArgument,
                   where + "CUDA device " + std::to_string(ordinal) + " is not in the group's mesh"));
  }
  return member;
}

// The same, if also the call fits in the group's arena.
ffi::ErrorOr<const Member*> member_for(const char* op, int64_t group_id, int32_t ordinal, const Call& call,
                                       int64_t payload) {
  const auto member = member_for(op, group_id, ordinal);
  if (member.has_error()) return member;
  const ArenaLayout& layout = (*member)->peers.layout;
  const bool is_all_to_all = call.op == OpKind::kAllToAll || call.op == OpKind::kAllToAllBack;
  const int32_t top_k = is_all_to_all ? 1 : layout.top_k;  // Peers::by_top_k and the rows' headers rely on it
  std::string misfit;
  if (call.top_k != top_k) {
    misfit = "top_k is " + std::to_string(call.top_k) + "; it must be the group's " + std::to_string(top_k);
  } else if (call.num_tokens > layout.max_tokens || payload > layout.max_payload || payload % 16 != 0) {
    misfit = std::to_string(call.num_tokens) + " rows of " + std::to_string(payload) +
             " bytes do not fit in the group's " + std::to_string(layout.max_tokens) + " rows of " +
             std::to_string(layout.max_payload) + " bytes";
  }
  if (misfit.empty()) return member;
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(op) + ": " + misfit));
}

// The call would wait until the time-out.
struct OrderError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The rank of `member` has found that it runs `op` in another order than `other_device` does.
void fail_for_order(const Group& group, const Member& member, uint32_t op, int32_t other_device, uint64_t expected,
                    uint64_t seen) {
  FailureRecord why = {};
  why.reason = static_cast<uint32_t>(FailureReason::kOtherOrder);
  why.op = op;
  why.rank = member.peers.rank;
  why.peer = group.member_on(other_device)->peers.rank;
  why.expected = static_cast<uint32_t>(expected);
  why.seen = static_cast<uint32_t>(seen);
  group.fail(member, why);
}

struct OrderedCall {
  int64_t group;
  OpKind op;
  int32_t num_sms;  // at most
};

// Notes the call. If devices run it and another group's operations in different order, both groups fail, so that
// kernels that wait already end at once, and it throws OrderError.
void expect_order(const OrderedCall& call, const Member& member, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  const auto op = static_cast<uint32_t>(call.op);
  const auto conflicts = call_order().note(
      {call.group, member.line},
      {member.ordinal, stream, call.num_sms, member.num_sms, op, capture != cudaStreamCaptureStatusNone});
  for (const OrderConflict& conflict : conflicts) {
    const Group &group = *find_group(call.group), &other = *find_group(conflict.other.first);
    if (!refusal(&other).empty()) continue;  // it makes no more calls, and its kernels end
    const uint64_t here = conflict.others_before, there = conflict.others_before_there;
    fail_for_order(group, member, op, conflict.other_device, there, here);
    fail_for_order(other, *other.member_on(member.ordinal), conflict.other_op, conflict.other_device, there, here);
    const auto after = [&](uint64_t count, int32_t device) {
      return "after " + std::to_string(count) + " operations of the other group on device " + std::to_string(device);
    };
    throw OrderError(
        "devices run operations of two groups in different order, so that each waits for the other: operation " +
        std::to_string(conflict.number) + " of " + group.name() + " comes " + after(there, conflict.other_device) +
        ", and " + after(here, member.ordinal) + "; the other group is " + other.name() +
        ". Run the operations of both groups in the same order on all devices: in one program, or in programs that " +
        "one host thread calls" +
        (conflict.is_one_stream ? "" : "; or give both groups fewer SMs with num_sms, so that both fit on a device"));
  }
}

// Turns what is thrown into XLA's errors. One call at a time is noted and enqueued on a device.
template <typename Enqueue>
ffi::Error enqueued(const char* op, const Member& member, Enqueue enqueue) {
  const auto what = [=](const std::exception& error) { return std::string(op) + ": " + error.what(); };
  try {
    const auto lock = call_order().lock(member.ordinal);
    enqueue();
  } catch (const OrderError& error) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, what(error));
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(what(error));
  } catch (const std::runtime_error& error) {
    return ffi::Error::Internal(what(error));
  }
  return ffi::Error::Success();
}

// Launches a whole operation, or starts one in halves, which needs `buffers`.
ffi::Error begin(const char* op, int64_t group, const Member& member, const Call& call, const Buffers& buffers,
                 cudaStream_t stream, const Halves::Body& body) {
  return enqueued(op, member, [&] {
    if (call.half == Half::kWhole) {
      expect_order({group, call.op, body.num_blocks}, member, stream);
      check(body.launch(stream), "the kernel was not launched");
    } else {
      member.halves->start(call, buffers, body, stream);
    }
  });
}

// SMs for an operation of the group, as plans take them; 0: as the plan sees fit.
int32_t num_sms(int64_t group, Half half, int32_t device_sms) {
  const int32_t chosen = find_group(group)->num_sms();
  return half == Half::kWhole ? chosen : usable_sms_beside_others(chosen, device_sms);
}

ffi::Error scatter(const char* op, cudaStream_t stream, int32_t ordinal, int64_t group, ElementType type,
                   const ScatterArgs& args, const Buffers& buffers = {}) {
  // An fp8 row and its scales take less than the same channels in 16 bits.
  const int64_t payload = args.num_scales > 0 ? args.num_scales * kChannelsPerScale : args.row_bytes;
  const auto member = member_for(op, group, ordinal, args, payload);
  if (member.has_error()) return member.error();
  const Peers& peers = (*member)->peers;
  const int32_t device_sms = (*member)->num_sms;
  const LaunchPlan plan =
      plan_scatter(args.num_tokens, peers.num_ranks, args.top_k, num_chunks(static_cast<int32_t>(payload)),
                   num_sms(group, args.half, device_sms), device_sms, args.arrival == Arrival::kCombineBack);
  const auto launch = [&peers, args, type, plan, kernels = find_group(group)->kernels()](cudaStream_t on) {
    return kernels.launch_scatter(peers, args, type, plan, on);
  };
  return begin(op, group, **member, args, buffers, stream, {launch, plan.num_blocks});
}

ffi::Error gather(const char* op, cudaStream_t stream, int32_t ordinal, int64_t group, ElementType type,
                  const GatherArgs& args, const Buffers& buffers = {}) {
  const auto member = member_for(op, group, ordinal, args, args.row_bytes);
  if (member.has_error()) return member.error();
  const Peers& peers = (*member)->peers;
  const int32_t device_sms = (*member)->num_sms;
  const LaunchPlan plan =
      plan_gather(args.num_tokens, peers.num_ranks, args.rows ? args.top_k : 0,
                  num_chunks(static_cast<int32_t>(args.row_bytes)), num_sms(group, args.half, device_sms), device_sms);
  const auto launch = [&peers, args, type, plan, kernels = find_group(group)->kernels()](cudaStream_t on) {
    return kernels.launch_gather(peers, args, type, plan, on);
  };
  return begin(op, group, **member, args, buffers, stream, {launch, plan.num_blocks});
}

// Memory that a start will need: XLA has allocated it, which is all.
ffi::Error room(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

template <typename... Buffer>
Buffers addresses(const Buffer&... buffers) {
  return {data<const void>(buffers)...};
}

// The operands are the start's, but for its axis_index, and the ticket; the results are in the place of some of them.
ffi::Error done(const char* op, OpKind kind, cudaStream_t stream, int32_t ordinal, int64_t group,
                ffi::RemainingArgs operands) {
  const auto member = member_for(op, group, ordinal);
  if (member.has_error()) return member.error();
  Buffers buffers;
  for (size_t i = 0; i < operands.size(); ++i) buffers.push_back(data<const void>(*operands.get<ffi::AnyBuffer>(i)));
  // A start waits for no peer. The stream waits for the operation from the done on, so that is where the call counts.
  const int32_t most_sms = num_sms(group, Half::kDone, (*member)->num_sms);
  return enqueued(op, **member, [&] {
    expect_order({group, kind, most_sms}, **member, stream);
    (*member)->halves->done(buffers, stream);
  });
}

void set_route(ScatterArgs& args, int64_t layout, int64_t capacity, int64_t alignment) {
  args.layout = static_cast<Layout>(layout);
  args.capacity = capacity;
  args.alignment = alignment;
}

void set_out(ScatterArgs& args, const ffi::AnyBuffer& out) {
  args.out = out.untyped_data();
  args.num_rows = num_rows(out);
  args.out_row_bytes = row_bytes(out);
}

ScatterArgs new_route(const DispatchAttrs& attrs, Operand axis_index, Operand x, Operand x_scales, Operand topk_idx,
                      Operand topk_weights) {
  ScatterArgs args = {};
  args.op = OpKind::kDispatch;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(topk_idx.dimensions()[0]);
  args.top_k = static_cast<int32_t>(topk_idx.dimensions()[1]);
  args.x = x.untyped_data();
  args.row_bytes = row_bytes(x);
  args.x_scales = data<float>(x_scales);
  args.cast = static_cast<int32_t>(attrs.cast);
  const bool is_fp8 = args.x_scales != nullptr || args.cast != 0;
  args.num_scales = is_fp8 ? static_cast<int32_t>(x.dimensions()[1] / kChannelsPerScale) : 0;
  args.topk_idx = data<int32_t>(topk_idx);
  args.topk_weights = data<float>(topk_weights);
  set_route(args, attrs.layout, attrs.capacity, attrs.alignment);
  return args;
}

void set_results(ScatterArgs& args, const DispatchAttrs& attrs, Operand out, Operand out_scales, Operand weights,
                 Operand counts, Operand group_sizes, Operand num_dropped, Operand place, Operand rows,
                 Operand num_arrived) {
  args.place = data<int32_t>(place);
  args.arrival = attrs.dequantize ? Arrival::kDequantize : Arrival::kCopy;
  args.zero_pad = attrs.zero_pad;
  set_out(args, out);
  args.out_scales = data<float>(out_scales);
  args.weights = data<float>(weights);
  args.counts = data<int32_t>(counts);
  args.group_sizes = data<int32_t>(group_sizes);
  args.num_dropped = data<int32_t>(num_dropped);
  args.rows = data<int32_t>(rows);
  args.num_arrived = data<int32_t>(num_arrived);
}

ffi::Error dispatch(cudaStream_t stream, int32_t ordinal, DispatchAttrs attrs, Operand axis_index, Operand x,
                    Operand x_scales, Operand topk_idx, Operand topk_weights, Result out, Result out_scales,
                    Result weights, Result counts, Result group_sizes, Result num_dropped, Result place, Result rows,
                    Result num_arrived) {
  ScatterArgs args = new_route(attrs, axis_index, x, x_scales, topk_idx, topk_weights);
  set_results(args, attrs, *out, *out_scales, *weights, *counts, *group_sizes, *num_dropped, *place, *rows,
              *num_arrived);
  return scatter("dispatch", stream, ordinal, attrs.group, element_type(args.x_scales ? *out : x), args);
}

ffi::Error dispatch_start(cudaStream_t stream, int32_t ordinal, DispatchAttrs attrs, Operand axis_index, Operand x,
                          Operand x_scales, Operand topk_idx, Operand topk_weights, Operand out, Operand out_scales,
                          Operand weights, Operand counts, Operand group_sizes, Operand num_dropped, Operand place,
                          Operand rows, Operand num_arrived, Result ticket) {
  ScatterArgs args = new_route(attrs, axis_index, x, x_scales, topk_idx, topk_weights);
  set_results(args, attrs, out, out_scales, weights, counts, group_sizes, num_dropped, place, rows, num_arrived);
  args.half = Half::kDone;
  args.ticket = data<Ticket>(ticket);
  return scatter("dispatch_start", stream, ordinal, attrs.group, element_type(args.x_scales ? out : x), args,
                 addresses(x, x_scales, topk_idx, topk_weights, out, out_scales, weights, counts, group_sizes,
                           num_dropped, place, rows, num_arrived, ticket));
}

ffi::Error dispatch_done(cudaStream_t stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                         ffi::RemainingRets) {
  return done("dispatch_done", OpKind::kDispatch, stream, ordinal, group, operands);
}

ScatterArgs along_route(OpKind op, const RouteAttrs& attrs, const Operand& axis_index, const Operand& x,
                        const Operand& place, const Operand& rows, const Operand& num_arrived, const Operand& counts,
                        const Operand& group_sizes, Result out) {
  ScatterArgs args = {};
  args.op = op;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(rows.dimensions()[1]);
  args.top_k = static_cast<int32_t>(rows.dimensions()[2]);
  args.x = x.untyped_data();
  args.row_bytes = row_bytes(x);
  args.known_place = data<int32_t>(place);
  args.known_rows = data<int32_t>(rows);
  args.known_num_arrived = data<int32_t>(num_arrived);
  args.known_counts = data<int32_t>(counts);
  args.known_group_sizes = data<int32_t>(group_sizes);
  args.zero_pad = true;
  set_route(args, attrs.layout, attrs.capacity, attrs.alignment);
  set_out(args, *out);
  return args;
}

ffi::Error dispatch_like(cudaStream_t stream, int32_t ordinal, RouteAttrs attrs, Operand axis_index, Operand x,
                         Operand place, Operand rows, Operand num_arrived, Operand counts, Operand group_sizes,
                         Result out) {
  ScatterArgs args =
      along_route(OpKind::kDispatchLike, attrs, axis_index, x, place, rows, num_arrived, counts, group_sizes, out);
  args.arrival = Arrival::kCopy;
  return scatter("dispatch_like", stream, ordinal, attrs.group, element_type(x), args);
}

ffi::Error combine_back(cudaStream_t stream, int32_t ordinal, RouteAttrs attrs, Operand axis_index, Operand g,
                        Operand place, Operand rows, Operand num_arrived, Operand counts, Operand group_sizes,
                        Operand y, Operand row_weights, Result y_cotangent, Result weights_cotangent) {
  ScatterArgs args = along_route(OpKind::kCombineBack, attrs, axis_index, g, place, rows, num_arrived, counts,
                                 group_sizes, y_cotangent);
  args.arrival = Arrival::kCombineBack;
  args.row_weights = data<float>(row_weights);
  args.y = data<void>(y);
  args.weights_cotangent = data<float>(weights_cotangent);
  return scatter("combine (backward)", stream, ordinal, attrs.group, element_type(g), args);
}

ffi::Error all_to_all(cudaStream_t stream, int32_t ordinal, AllToAllAttrs attrs, Operand axis_index, Operand x,
                      Operand splits, Operand place, Result out, Result out_scales, Result out_splits) {
  ScatterArgs args = {};
  args.op = OpKind::kAllToAll;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(x.dimensions()[0]);
  args.top_k = 1;
  args.x = x.untyped_data();
  args.row_bytes = row_bytes(x);
  args.cast = static_cast<int32_t>(attrs.cast);
  args.num_scales = args.cast != 0 ? static_cast<int32_t>(x.dimensions()[1] / kChannelsPerScale) : 0;
  args.splits = data<int32_t>(splits);
  args.known_place = data<int32_t>(place);
  args.arrival = Arrival::kCopy;
  args.blocks = true;
  args.zero_pad = attrs.zero_pad;
  set_out(args, *out);
  args.out_scales = data<float>(out_scales);
  args.counts = data<int32_t>(out_splits);
  return scatter("all_to_all", stream, ordinal, attrs.group, element_type(x), args);
}

GatherArgs weighted_sum(const CallAttrs& attrs, Operand axis_index, Operand y, Operand row_weights, Operand place,
                        Operand rows, Operand num_arrived, Operand out) {
  GatherArgs args = {};
  args.op = OpKind::kCombine;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(rows.dimensions()[1]);
  args.top_k = static_cast<int32_t>(rows.dimensions()[2]);
  args.y = y.untyped_data();
  args.row_bytes = row_bytes(y);
  args.row_weights = data<float>(row_weights);
  args.rows = data<int32_t>(rows);
  args.num_arrived = data<int32_t>(num_arrived);
  args.place = data<int32_t>(place);
  args.out = data<void>(out);
  args.out_type = element_type(out);
  return args;
}

ffi::Error combine(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                   Operand row_weights, Operand place, Operand rows, Operand num_arrived, Result out) {
  const GatherArgs args = weighted_sum(attrs, axis_index, y, row_weights, place, rows, num_arrived, *out);
  return gather("combine", stream, ordinal, attrs.group, element_type(y), args);
}

ffi::Error combine_start(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                         Operand row_weights, Operand place, Operand rows, Operand num_arrived, Operand out,
                         Result ticket) {
  GatherArgs args = weighted_sum(attrs, axis_index, y, row_weights, place, rows, num_arrived, out);
  args.half = Half::kDone;
  args.ticket = data<Ticket>(ticket);
  return gather("combine_start", stream, ordinal, attrs.group, element_type(y), args,
                addresses(y, row_weights, place, rows, num_arrived, out, ticket));
}

ffi::Error combine_done(cudaStream_t stream, int32_t ordinal, int64_t group, ffi::RemainingArgs operands,
                        ffi::RemainingRets) {
  return done("combine_done", OpKind::kCombine, stream, ordinal, group, operands);
}

ffi::Error dispatch_back(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                         Operand weights, Operand place, Operand rows, Operand num_arrived, Result out,
                         Result topk_weights) {
  GatherArgs args = {};
  args.op = OpKind::kDispatchBack;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(rows.dimensions()[1]);
  args.top_k = static_cast<int32_t>(rows.dimensions()[2]);
  args.y = data<void>(y);
  args.row_bytes = args.y ? row_bytes(y) : 0;
  args.weights_to_send = data<float>(weights);
  args.rows = data<int32_t>(rows);
  args.num_arrived = data<int32_t>(num_arrived);
  args.place = data<int32_t>(place);
  args.out = data<void>(out);
  args.out_type = element_type(*out);
  args.topk_weights = data<float>(topk_weights);
  return gather("dispatch (backward)", stream, ordinal, attrs.group, element_type(y), args);
}

ffi::Error all_to_all_back(cudaStream_t stream, int32_t ordinal, CallAttrs attrs, Operand axis_index, Operand y,
                           Operand num_sent, Operand place, Result out) {
  GatherArgs args = {};
  args.op = OpKind::kAllToAllBack;
  args.hash = static_cast<uint32_t>(attrs.hash);
  args.axis_index = data<int32_t>(axis_index);
  args.num_tokens = static_cast<int32_t>(y.dimensions()[1]);
  args.top_k = 1;
  args.y = y.untyped_data();
  args.row_bytes = row_bytes(y);
  args.num_sent = data<int32_t>(num_sent);
  args.place = data<int32_t>(place);
  args.out = data<void>(out);
  args.out_type = element_type(*out);
  return gather("all_to_all_back", stream, ordinal, attrs.group, element_type(y), args);
}

// Wraps a handler. XLA passes it one more operand and one more result, the order token (jax_ep/_ordered_calls.py),
// which nobody reads or writes.
template <typename Attrs, typename... Buffers>
auto with_order_token(ffi::Error (*handler)(cudaStream_t, int32_t, Attrs, Buffers...)) {
  return [handler](cudaStream_t stream, int32_t ordinal, Attrs attrs, Operand, Result, Buffers... buffers) {
    return handler(stream, ordinal, attrs, buffers...);
  };
}

// A binding of `operands` buffers in and `results` out, behind what every handler takes.
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
JAX_EP_DEFINE_HANDLER(kAllToAll, with_order_token(all_to_all), (with_buffers<4, 3>(bind_call<AllToAllAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kCombine, with_order_token(combine), (with_buffers<6, 1>(bind_call<CallAttrs>())), kTraits);
JAX_EP_DEFINE_HANDLER(kDispatchBack, with_order_token(dispatch_back), (with_buffers<6, 2>(bind_call<CallAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kAllToAllBack, with_order_token(all_to_all_back), (with_buffers<4, 1>(bind_call<CallAttrs>())),
                      kTraits);

// Halves are not for CUDA graphs: their handlers are asked each time.
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
                                      StructMember<bool>("zero_pad"));
