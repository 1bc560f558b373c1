// The extension module jax_ep._cpu: XLA FFI targets for the CPU platform, and the layout arithmetic for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/arena_size.h"
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
  return without_exceptions("dispatch_layout", [&]() -> ffi::Error {
    const auto args = checked_dispatch_layout(topk_idx, attrs, num_tokens_per_rank, num_tokens_per_node,
                                              num_tokens_per_expert, is_token_in_rank);
    if (args.has_error()) return args.error();
    dispatch_layout_on_host(args.value());
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER(kDispatchLayout, dispatch_layout);

Layout parse_layout(const std::string& name) {
  const auto* const found = std::find(std::begin(kLayoutNames), std::end(kLayoutNames), name);
  if (found != std::end(kLayoutNames)) return static_cast<Layout>(found - std::begin(kLayoutNames));
  std::string names;
  for (const char* each : kLayoutNames) names += (names.empty() ? "'" : " or '") + std::string(each) + "'";
  throw std::invalid_argument("layout is '" + name + "', but must be " + names);
}

void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value >= least) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", but must be at least " +
                              std::to_string(least));
}

// Counts of rows, whose sum must be an int32.
void check_need(const std::vector<int32_t>& need) {
  int64_t sum = 0;
  for (int32_t rows : need) {
    check_at_least("need", rows, 0);
    sum += rows;
  }
  if (sum > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("need has the sum " + std::to_string(sum) + ", but must fit in an int32");
  }
}

int64_t default_capacity_of(const std::string& layout, int64_t num_ranks, int64_t num_tokens, int64_t top_k,
                            int64_t experts_per_rank, int64_t alignment) {
  check_at_least("num_ranks", num_ranks, 1);
  check_at_least("num_tokens", num_tokens, 0);
  check_at_least("top_k", top_k, 1);
  check_at_least("experts_per_rank", experts_per_rank, 1);
  check_at_least("alignment", alignment, 1);
  return default_capacity(parse_layout(layout), num_ranks, num_tokens, top_k, experts_per_rank, alignment);
}

// (first_row, group_size, fits) of every local expert, which needs so many rows.
std::vector<std::tuple<int64_t, int32_t, bool>> place_groups(const std::vector<int32_t>& need,
                                                             const std::string& layout_name, int64_t capacity,
                                                             int64_t alignment) {
  const Layout layout = parse_layout(layout_name);
  check_need(need);
  check_at_least("capacity", capacity, 0);
  check_at_least("alignment", alignment, 1);
  std::vector<std::tuple<int64_t, int32_t, bool>> groups;
  int64_t rows_before = 0;
  for (size_t expert = 0; expert < need.size(); ++expert) {
    const ExpertGroup group = place_group(layout, expert, rows_before, need[expert], capacity, alignment);
    groups.emplace_back(group.first_row, group.group_size, group.fits);
    rows_before += align_up(need[expert], alignment);
  }
  return groups;
}

// The rows that are kept of each source rank, if there is room for so many.
std::vector<int32_t> share_rows_of(const std::vector<int32_t>& need, int32_t room, int32_t start) {
  const auto num_ranks = static_cast<int32_t>(need.size());
  check_need(need);
  check_at_least("room", room, 0);
  check_at_least("start", start, 0);
  if (start >= num_ranks) {
    throw std::invalid_argument("start is " + std::to_string(start) + ", but must be below the " +
                                std::to_string(num_ranks) + " ranks of need");
  }
  std::vector<int32_t> first(num_ranks + 1), kept(num_ranks);
  for (int32_t source = 0; source < num_ranks; ++source) first[source + 1] = first[source] + need[source];
  share_rows(first.data(), 1, num_ranks, room, start);
  for (int32_t source = 0; source < num_ranks; ++source) kept[source] = first[source + 1] - first[source];
  return kept;
}

// What Group::bytes_per_device tells of a group, without making it.
int64_t group_bytes(int32_t num_ranks, int32_t num_experts, int32_t top_k, int32_t max_tokens, int32_t max_payload) {
  check_at_least("num_ranks", num_ranks, 1);
  check_at_least("num_experts", num_experts, num_ranks);
  check_at_least("top_k", top_k, 1);
  check_at_least("max_tokens", max_tokens, 0);
  check_at_least("max_payload", max_payload, 0);
  const ArenaNeeds needs = {num_ranks, 0, top_k, max_tokens, max_payload};
  return choose_arena(needs, kDefaultArenaBounds, [](const ArenaLayout& layout) { return layout.bytes; }).bytes +
         control_bytes(num_ranks, num_experts / num_ranks, false);
}

NB_MODULE(_cpu, m) {
  m.def("targets", [] {
    nb::dict targets;
    targets["jax_ep_dispatch_layout"] = nb::capsule(reinterpret_cast<void*>(kDispatchLayout));
    return targets;
  });
  m.attr("cuda_absence") = JAX_EP_CUDA_ABSENCE;
  m.def("default_capacity", default_capacity_of, nb::arg("layout"), nb::kw_only(), nb::arg("num_ranks"),
        nb::arg("num_tokens"), nb::arg("top_k"), nb::arg("experts_per_rank"), nb::arg("alignment"));
  m.def("place_groups", place_groups, nb::arg("need"), nb::kw_only(), nb::arg("layout"), nb::arg("capacity"),
        nb::arg("alignment"));
  m.def("share_rows", share_rows_of, nb::arg("need"), nb::arg("room"), nb::arg("start"));
  m.def("group_bytes", group_bytes, nb::kw_only(), nb::arg("num_ranks"), nb::arg("num_experts"), nb::arg("top_k"),
        nb::arg("max_tokens"), nb::arg("max_payload"));
}

}  // namespace
}  // namespace jax_ep
