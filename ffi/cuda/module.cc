// The extension module jax_ep._cuda: XLA FFI targets for the CUDA platform.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "ffi/cuda/dispatch_layout.h"
#include "ffi/cuda/floor.h"
#include "ffi/cuda/group.h"
#include "ffi/cuda/handlers.h"
#include "ffi/dispatch_layout_handler.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;
namespace ffi = xla::ffi;

ffi::Error dispatch_layout(cudaStream_t stream, TopkIdx topk_idx, DispatchLayoutAttrs attrs,
                           ffi::Result<Counts> num_tokens_per_rank, ffi::Result<Counts> num_tokens_per_node,
                           ffi::Result<Counts> num_tokens_per_expert, ffi::Result<Membership> is_token_in_rank) {
  const auto args = checked_dispatch_layout(topk_idx, attrs, num_tokens_per_rank, num_tokens_per_node,
                                            num_tokens_per_expert, is_token_in_rank);
  if (args.has_error()) return args.error();
  const int32_t experts_per_rank = attrs.num_experts / attrs.num_ranks;
  if (experts_per_rank > kMaxExpertsPerRank) {
    return invalid_dispatch_layout("num_experts / num_ranks = " + std::to_string(experts_per_rank) +
                                   " must be at most " + std::to_string(kMaxExpertsPerRank) + " on CUDA");
  }
  const cudaError_t status = dispatch_layout_on_device(args.value(), stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("dispatch_layout: the kernel was not launched: ") +
                              cudaGetErrorString(status));
}

XLA_FFI_DEFINE_HANDLER(kDispatchLayout, dispatch_layout,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<TopkIdx>()
                           .Attrs<DispatchLayoutAttrs>()
                           .Ret<Counts>()
                           .Ret<Counts>()
                           .Ret<Counts>()
                           .Ret<Membership>(),
                       {ffi::Traits::kCmdBufferCompatible});

// (reason, op, waiting rank, missing rank, expected, seen) of the group's first failure, or None.
nb::object group_failure(int64_t id) {
  const std::optional<FailureRecord> failure = find_group(id).failure();
  if (!failure) return nb::none();
  static constexpr const char* kReasons[] = {"timeout", "other op", "wrong rank", "slot taken",
                                             "not started"};  // enum FailureReason
  return nb::make_tuple(kReasons[failure->reason], failure->op, failure->rank, failure->peer, failure->expected,
                        failure->seen);
}

NB_MODULE(_cuda, m) {
  m.def("targets", [] {
    nb::dict targets;
    targets["jax_ep_dispatch_layout"] = nb::capsule(reinterpret_cast<void*>(kDispatchLayout));
    for (const auto& [name, handler] : backend_targets()) targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
    return targets;
  });
  m.def(
      "open_group",
      [](int32_t num_experts, int32_t top_k, int32_t max_tokens, int64_t max_payload, int32_t num_sms,
         double timeout_seconds, std::vector<std::vector<int32_t>> devices) {
        return open_group({num_experts, top_k, max_tokens, max_payload, num_sms, timeout_seconds, std::move(devices)});
      },
      nb::arg("num_experts"), nb::arg("top_k"), nb::arg("max_tokens"), nb::arg("max_payload"), nb::arg("num_sms"),
      nb::arg("timeout_seconds"), nb::arg("devices"), nb::call_guard<nb::gil_scoped_release>());
  m.def("close_group", [](int64_t id) { find_group(id).close(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("group_bytes", [](int64_t id) { return find_group(id).bytes_per_device(); });
  m.def("group_failure", group_failure);
  m.def("link_floor", link_floor, nb::arg("devices"), nb::arg("rows"), nb::arg("row_bytes"),
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace
}  // namespace jax_ep
