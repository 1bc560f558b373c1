// The extension module jax_ep._cpu: XLA FFI targets for the CPU platform, and the layout arithmetic for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/arena.h"
#include "ffi/cpu/dispatch_layout.h"
#include "ffi/dispatch_layout_handler.h"
#include "ffi/layout.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;
namespace ffi = xla::ffi;

ffi::Error dispatch_layout(TopkIdx topk_idx, DispatchLayoutAttrs attrs, ffi::Result<Counts> num_tokens_per_rank,
                           ffi::Result<Counts> num_tokens_per_node, ffi::Result<Counts> num_tokens_per_expert,
                           ffi::Result<Membership> is_token_in_rank) {
  const auto args = checked_dispatch_layout(topk_idx, attrs, num_tokens_per_rank, num_tokens_per_node,
                                            num_tokens_per_expert, is_token_in_rank);
  if (args.has_error()) return args.error();
  dispatch_layout_on_host(args.value());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kDispatchLayout, dispatch_layout);

Layout parse_layout(const std::string& name) {
  if (name == "expert") return Layout::kExpert;
  if (name == "ragged") return Layout::kRagged;
  throw std::invalid_argument("layout is '" + name + "', but must be 'expert' or 'ragged'");
}

// (first_row, group_size, fits) of every local expert, which needs so many rows.
std::vector<std::tuple<int64_t, int32_t, bool>> place_groups(const std::vector<int32_t>& need,
                                                             const std::string& layout_name, int64_t capacity,
                                                             int64_t alignment) {
  const Layout layout = parse_layout(layout_name);
  std::vector<std::tuple<int64_t, int32_t, bool>> groups;
  int64_t rows_before = 0;
  for (size_t expert = 0; expert < need.size(); ++expert) {
    const Placement group = place_group(layout, expert, rows_before, need[expert], capacity, alignment);
    groups.emplace_back(group.first_row, group.group_size, group.fits);
    rows_before += align_up(need[expert], alignment);
  }
  return groups;
}

// The rows that are kept of each source rank, if there is room for so many.
std::vector<int32_t> share_rows_of(const std::vector<int32_t>& need, int32_t room, int32_t start) {
  const auto num_ranks = static_cast<int32_t>(need.size());
  std::vector<int32_t> first(num_ranks + 1), kept(num_ranks);
  for (int32_t source = 0; source < num_ranks; ++source) first[source + 1] = first[source] + need[source];
  share_rows(first.data(), 1, num_ranks, room, start);
  for (int32_t source = 0; source < num_ranks; ++source) kept[source] = first[source + 1] - first[source];
  return kept;
}

// What Group::bytes_per_device tells of a group, without making it.
int64_t group_bytes(int32_t num_ranks, int32_t num_experts, int32_t top_k, int32_t max_tokens, int32_t max_payload) {
  return ArenaLayout::fitting(num_ranks, top_k, max_tokens, max_payload).bytes +
         control_bytes(num_ranks, num_experts / num_ranks);
}

NB_MODULE(_cpu, m) {
  m.def("targets", [] {
    nb::dict targets;
    targets["jax_ep_dispatch_layout"] = nb::capsule(reinterpret_cast<void*>(kDispatchLayout));
    return targets;
  });
  m.attr("cuda_absence") = JAX_EP_CUDA_ABSENCE;
  m.def(
      "default_capacity",
      [](const std::string& layout, int64_t num_ranks, int64_t num_tokens, int64_t top_k, int64_t experts_per_rank,
         int64_t alignment) {
        return default_capacity(parse_layout(layout), num_ranks, num_tokens, top_k, experts_per_rank, alignment);
      },
      nb::arg("layout"), nb::kw_only(), nb::arg("num_ranks"), nb::arg("num_tokens"), nb::arg("top_k"),
      nb::arg("experts_per_rank"), nb::arg("alignment"));
  m.def("place_groups", place_groups, nb::arg("need"), nb::kw_only(), nb::arg("layout"), nb::arg("capacity"),
        nb::arg("alignment"));
  m.def("share_rows", share_rows_of, nb::arg("need"), nb::arg("room"), nb::arg("start"));
  m.def("group_bytes", group_bytes, nb::kw_only(), nb::arg("num_ranks"), nb::arg("num_experts"), nb::arg("top_k"),
        nb::arg("max_tokens"), nb::arg("max_payload"));
}

}  // namespace
}  // namespace jax_ep
