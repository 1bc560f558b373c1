// What all handlers of the CUDA backend share: they read FFI buffers, check a call against its group, note the order of
// calls, and enqueue the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "ffi/buffers.h"
#include "ffi/cuda/balance.h"
#include "ffi/cuda/call_order.h"
#include "ffi/cuda/combine.h"
#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/group.h"
#include "ffi/cuda/replicate.h"
#include "ffi/cuda/runtime.h"
#include "ffi/cuda/split_phase.h"
#include "ffi/cuda/xla.h"
#include "ffi/handler_error.h"
#include "ffi/plan_balance.h"

namespace jax_ep {

using Operand = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Kernels that only move bytes ignore the type.
inline ElementType element_type(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return ElementType::kFloat32;
    case ffi::F16:
      return ElementType::kFloat16;
    default:
      return ElementType::kBFloat16;
  }
}

// Why the group takes no calls, or "".
inline std::string refusal(const Group* group) {
  if (group == nullptr) {
    return "this process has not made the group that the program was compiled for; make an equal Group first";
  }
  if (group->closed()) return "its group is closed; make a new Group and trace the function again";
  if (const std::optional<FailureRecord> failure = group->failure()) {
    return "its group has failed before (" + summary(*failure) + "); close it, make a new Group and trace the " +
           "function again";
  }
  return "";
}

// Returns the group's member on this device, if the group takes calls.
inline ffi::ErrorOr<const Member*> member_for(const char* op, int64_t group_id, int32_t ordinal) {
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

// Returns an error if rows of `payload` bytes cannot travel as whole units. Kernels need at least one unit: a lane
// without a unit of its own loads the row's last unit (load_chunk).
inline ffi::Error check_units(const char* op, int64_t payload) {
  if (payload > 0 && payload % kUnitBytes == 0) return ffi::Error::Success();
  const std::string unit = std::to_string(kUnitBytes);
  return ffi::Error::InvalidArgument(std::string(op) + ": a row has " + std::to_string(payload) +
                                     " bytes in transit; it must have " + unit + " or a multiple of " + unit);
}

// Returns an error if the call does not fit in the group's arena.
inline ffi::Error check_fits(const char* op, const Member& member, const Call& call, int64_t payload) {
  const ArenaLayout& layout = member.peers.layout;
  if (call.num_tokens <= member.max_tokens && payload <= layout.max_payload) {
    if (call.phase == Phase::kWhole || call.num_tokens <= layout.round_tokens) return ffi::Error::Success();
    return ffi::Error::InvalidArgument(
        std::string(op) + ": a rank has " + std::to_string(call.num_tokens) +
        " tokens, but a round of this group has " + std::to_string(layout.round_tokens) +
        ", and split-phase calls do not run in rounds: make the group with a larger max_arena_bytes, or call the " +
        "whole operation");
  }
  return ffi::Error::InvalidArgument(std::string(op) + ": " + std::to_string(call.num_tokens) + " rows of " +
                                     std::to_string(payload) + " bytes do not fit in the group's " +
                                     std::to_string(member.max_tokens) + " rows of " +
                                     std::to_string(layout.max_payload) + " bytes");
}

// Fails the group: the rank of `member` runs `op` in another order than `other_device` does. `expected` and `seen` are
// the numbers of calls that conflict.
inline void fail_for_order(const Group& group, const Member& member, FailureReason reason, uint32_t op,
                           int32_t other_device, uint64_t expected, uint64_t seen) {
  FailureRecord why = {};
  why.reason = static_cast<uint32_t>(reason);
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

// Fails the group, and throws PreconditionError: devices run operations of the group in two different runs.
inline void reject_run(const Group& group, const Member& member, uint32_t op, const RunConflict& conflict) {
  fail_for_order(group, member, FailureReason::kOtherRun, op, conflict.other_device, conflict.number, conflict.number);
  throw PreconditionError("devices run programs with operations of one group in different order: operation " +
                          std::to_string(conflict.number) + " of " + group.name() +
                          " belongs to one run of a program on device " + std::to_string(conflict.other_device) +
                          ", and to another run on device " + std::to_string(member.ordinal) +
                          ". Call the programs from one host thread, or hold a lock around each call");
}

// Notes the call. Throws PreconditionError if devices run the call in different order: the calls of two runs, or the
// calls of this group and of another group. First it fails the group, or both groups, so that waiting kernels end.
inline void check_order(const OrderedCall& call, const Member& member, CallStream stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  note_device_call(member.entry, stream, call.num_sms, capture != cudaStreamCaptureStatusNone);
  const auto op = static_cast<uint32_t>(call.op);
  const auto conflicts =
      call_order().note({call.group, member.ep_group}, {member.ordinal, stream, call.num_sms, member.num_sms, op,
                                                        capture != cudaStreamCaptureStatusNone, stream.run_id});
  const Group& group = *find_group(call.group);
  if (conflicts.run) reject_run(group, member, op, *conflicts.run);
  for (const OrderConflict& conflict : conflicts.orders) {
    const Group& other = *find_group(conflict.other.first);
    if (!refusal(&other).empty()) continue;  // it makes no more calls, and its kernels end
    const uint64_t here = conflict.others_before, there = conflict.others_before_there;
    fail_for_order(group, member, FailureReason::kOtherOrder, op, conflict.other_device, there, here);
    fail_for_order(other, *other.member_on(member.ordinal), FailureReason::kOtherOrder, conflict.other_op,
                   conflict.other_device, there, here);
    const auto after = [&](uint64_t count, int32_t device) {
      return "after " + std::to_string(count) + " operations of the other group on device " + std::to_string(device);
    };
    throw PreconditionError(
        "devices run operations of two groups in different order, so that each waits for the other: operation " +
        std::to_string(conflict.number) + " of " + group.name() + " comes " + after(there, conflict.other_device) +
        ", and " + after(here, member.ordinal) + "; the other group is " + other.name() +
        ". Run the operations of both groups in the same order on all devices: in one program, or in programs that " +
        "one host thread calls" +
        (conflict.is_one_stream ? "" : "; or give both groups fewer SMs with num_sms, so that both fit on a device"));
  }
}

// Notes and enqueues one call at a time on each device.
template <typename Enqueue>
ffi::Error enqueued(const Member& member, Enqueue enqueue) {
  const auto lock = call_order().lock(member.ordinal);
  enqueue();
  return ffi::Error::Success();
}

// Launches a whole operation, or starts a split-phase call, which needs `buffers`.
inline ffi::Error begin(int64_t group, const Member& member, const Call& call, const Buffers& buffers,
                        CallStream stream, const SplitPhaseCalls::Body& body) {
  return enqueued(member, [&] {
    if (call.phase == Phase::kWhole) {
      check_order({group, call.op, body.num_blocks}, member, stream);
      check(body.launch(stream), "the kernel was not launched");
    } else {
      member.split_phase->start(call, buffers, body, stream);
    }
  });
}

// The `num_sms` of launch plans for an operation of the group. 0: the plan chooses.
inline int32_t num_sms(int64_t group, Phase phase, int32_t device_sms) {
  const int32_t chosen = find_group(group)->num_sms();
  return phase == Phase::kWhole ? chosen : usable_sms_beside_others(chosen, device_sms);
}

// Only some kernels can run rounds (has_rounds); planned_tokens() makes the plans choose them.
inline ffi::Error check_rounds(const char* op, const Call& call, int32_t round_tokens, const LaunchPlan& plan) {
  if (call.num_tokens <= round_tokens || has_rounds(plan.variant)) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(op) + ": the plan chose a kernel without rounds; please report this");
}

inline ffi::Error enqueue_dispatch(const char* op, CallStream stream, const Member& member, int64_t group,
                                   ElementType type, const DispatchArgs& args, const Buffers& buffers = {}) {
  // An fp8 row and its scales take no more room than the same channels in 16 bits. So check_fits() need not
  // count the scales.
  const int64_t payload = args.payload_bytes(args.cast != 0);
  ffi::Error error = check_units(op, payload);
  if (error.success()) error = check_fits(op, member, args, payload);
  if (error.failure()) return error;
  const Peers& peers = member.peers;
  const int32_t round_tokens = peers.layout.round_tokens;
  const Kernels kernels = find_group(group)->kernels();
  const LaunchPlan plan = kernels.adapt_dispatch_plan(
      peers, args,
      plan_dispatch(planned_tokens(args.num_tokens, round_tokens), peers.num_ranks, args.top_k,
                    num_chunks(static_cast<int32_t>(payload)), num_sms(group, args.phase, member.num_sms),
                    member.num_sms, args.delivery == Delivery::kCombineBack, args.casts_new_rows()));
  error = check_rounds(op, args, round_tokens, plan);
  if (error.failure()) return error;
  const auto launch = [&peers, args, type, plan, kernels, round_tokens](cudaStream_t on) {
    return launch_rounds(args, round_tokens, [&](const DispatchArgs& round) {
      return kernels.launch_dispatch(peers, round, type, plan, on);
    });
  };
  return begin(group, member, args, buffers, stream, {launch, plan.num_blocks});
}

inline ffi::Error enqueue_combine(const char* op, CallStream stream, const Member& member, int64_t group,
                                  ElementType type, const CombineArgs& args, const Buffers& buffers = {}) {
  // Without y, only cotangents of weights travel, and rows have 0 bytes.
  const bool has_rows = args.y != nullptr || args.row_bytes > 0;
  ffi::Error error = has_rows ? check_units(op, args.row_bytes) : ffi::Error::Success();
  if (error.success()) error = check_fits(op, member, args, args.row_bytes);
  if (error.failure()) return error;
  const Peers& peers = member.peers;
  const int32_t round_tokens = peers.layout.round_tokens;
  const Kernels kernels = find_group(group)->kernels();
  const LaunchPlan plan = kernels.adapt_combine_plan(
      peers, args,
      plan_combine(planned_tokens(args.num_tokens, round_tokens), peers.num_ranks, args.recv_row ? args.top_k : 0,
                   num_chunks(static_cast<int32_t>(args.row_bytes)), args.units_read(size_of(type)),
                   num_sms(group, args.phase, member.num_sms), member.num_sms, args.holds_token_once()));
  error = check_rounds(op, args, round_tokens, plan);
  if (error.failure()) return error;
  const auto launch = [&peers, args, type, plan, kernels, round_tokens](cudaStream_t on) {
    return launch_rounds(args, round_tokens, [&](const CombineArgs& round) {
      return kernels.launch_combine(peers, round, type, plan, on);
    });
  };
  return begin(group, member, args, buffers, stream, {launch, plan.num_blocks});
}

inline ffi::Error enqueue_balance(const char* op, CallStream stream, const Member& member, int64_t group,
                                  const BalanceArgs& args) {
  ffi::Error error = check_fits(op, member, args, 0);
  if (error.failure()) return error;
  const Peers& peers = member.peers;
  const Kernels kernels = find_group(group)->kernels();
  const BalancePlan plan =
      plan_balance(int64_t{args.num_tokens} * args.top_k, peers.num_ranks * peers.num_home_experts(),
                   num_sms(group, args.phase, member.num_sms), member.num_sms);
  const auto launch = [&peers, args, plan, kernels](cudaStream_t on) {
    return kernels.launch_balance(peers, args, plan, on);
  };
  return begin(group, member, args, {}, stream, {launch, 1});
}

inline ffi::Error enqueue_replicate(const char* op, CallStream stream, const Member& member, int64_t group,
                                    ElementType type, const ReplicateArgs& args) {
  ffi::Error error = check_fits(op, member, args, 0);
  if (error.failure()) return error;
  const Peers& peers = member.peers;
  const Kernels kernels = find_group(group)->kernels();
  const CopyPlan plan = plan_replicate(peers.layout.round_tokens, args.clears_slots,
                                       num_sms(group, args.phase, member.num_sms), member.num_sms);
  const auto launch = [&peers, args, type, plan, kernels](cudaStream_t on) {
    return kernels.launch_replicate(peers, args, type, plan, on);
  };
  return begin(group, member, args, {}, stream, {launch, plan.num_blocks});
}

// The handler of jax_ep_room. XLA has allocated the results, which a start will need; there is nothing to do.
inline ffi::Error room(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

template <typename... Buffer>
Buffers addresses(const Buffer&... buffers) {
  return {data<const void>(buffers)...};
}

// The operands are the operands of the start without axis_index, then `pending`. The results alias some of them.
inline ffi::Error done(const char* op, OpKind kind, CallStream stream, int32_t ordinal, int64_t group,
                       ffi::RemainingArgs operands) {
  const auto member = member_for(op, group, ordinal);
  if (member.has_error()) return member.error();
  Buffers buffers;
  for (size_t i = 0; i < operands.size(); ++i) buffers.push_back(data<const void>(*operands.get<ffi::AnyBuffer>(i)));
  // The call counts here and not at its start: a start waits for no peer, and from the done on, the stream waits for
  // the operation.
  const int32_t most_sms = num_sms(group, Phase::kDone, (*member)->num_sms);
  return enqueued(**member, [&] {
    check_order({group, kind, most_sms}, **member, stream);
    (*member)->split_phase->done(buffers, stream);
  });
}

}  // namespace jax_ep
