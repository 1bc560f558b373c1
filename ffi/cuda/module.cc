// The extension module jax_ep._cuda: XLA FFI targets for the CUDA platform.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "ffi/constants.h"
#include "ffi/cuda/device.h"
#include "ffi/cuda/dispatch_layout.h"
#include "ffi/cuda/group.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/runtime.h"
#include "ffi/cuda/xla.h"
#include "ffi/dispatch_layout_handler.h"
#ifdef JAX_EP_EMULATOR
#include "ffi/emulator/module.h"
#else
#include "ffi/cuda/floor.h"
#endif

namespace jax_ep {
namespace {

namespace nb = nanobind;
namespace ffi = xla::ffi;

ffi::Error dispatch_layout(cudaStream_t stream, TopkIdx topk_idx, DispatchLayoutAttrs attrs,
                           ffi::Result<Counts> num_tokens_per_rank, ffi::Result<Counts> num_tokens_per_node,
                           ffi::Result<Counts> num_tokens_per_expert, ffi::Result<Membership> is_token_in_rank) {
  return without_exceptions("dispatch_layout", [&]() -> ffi::Error {
    const auto args = checked_dispatch_layout(topk_idx, attrs, num_tokens_per_rank, num_tokens_per_node,
                                              num_tokens_per_expert, is_token_in_rank);
    if (args.has_error()) return args.error();
    const int32_t experts_per_rank = attrs.num_experts / attrs.num_ranks;
    if (experts_per_rank > kMaxExpertsPerRank) {
      return invalid_dispatch_layout("num_experts / num_ranks = " + std::to_string(experts_per_rank) +
                                     " must be at most " + std::to_string(kMaxExpertsPerRank) + " on CUDA");
    }
    check(dispatch_layout_on_device(args.value(), stream), "the kernel was not launched");
    return ffi::Error::Success();
  });
}

JAX_EP_DEFINE_HANDLER(kDispatchLayout, dispatch_layout,
                      ffi::Ffi::Bind()
                          .Ctx<DeviceStream>()
                          .Arg<TopkIdx>()
                          .Attrs<DispatchLayoutAttrs>()
                          .Ret<Counts>()
                          .Ret<Counts>()
                          .Ret<Counts>()
                          .Ret<Membership>(),
                      {ffi::Traits::kCmdBufferCompatible});

// (reason, op, waiting rank, missing rank, expected, seen) of the group's first failure, or None.
nb::object group_failure(int64_t id) {
  const Group& group = *find_group(id);
  {
    const nb::gil_scoped_release no_gil;
    group.record_failures_elsewhere();
  }
  const std::optional<FailureRecord> failure = group.failure();
  if (!failure) return nb::none();
  return nb::make_tuple(kFailureReasonNames[failure->reason], op_name(*failure), failure->rank, failure->peer,
                        failure->expected, failure->seen);
}

// Of each of this process's ranks: ({name: number} of operations, dropped rows, (rows at home, planned rows, copies),
// of each rank: (rows sent, bytes sent, rows received, bytes received, nanoseconds waited)).
nb::list group_stats(int64_t id) {
  std::vector<RankStats> all;
  {
    const nb::gil_scoped_release no_gil;
    all = find_group(id)->stats();
  }
  nb::list ranks;
  for (const RankStats& rank : all) {
    nb::dict operations;
    for (int i = 0; i < kNumOpKinds; ++i) operations[kOpNames[i]] = rank.operations[i];
    nb::list peers;
    for (const auto& [sent, received, waited_ns] : rank.peers) {
      peers.append(nb::make_tuple(sent.rows, sent.bytes, received.rows, received.bytes, waited_ns));
    }
    const auto& [home_rows, planned_rows, copies] = rank.placement;
    ranks.append(nb::make_tuple(operations, rank.dropped, nb::make_tuple(home_rows, planned_rows, copies), peers));
  }
  return ranks;
}

// What Python passes between processes: plain bytes for the key-value store, and file descriptors.
using Parcel = std::pair<nb::bytes, std::vector<int>>;

Parcel pack(const ProcessHandle& handle) {
  Parcel parcel(nb::bytes(handle.ranks.data(), handle.ranks.size() * sizeof(RankHandle)), {});
  for (const FileDescriptor& descriptor : handle.descriptors) parcel.second.push_back(descriptor.number());
  return parcel;
}

// Takes the descriptors over.
ProcessHandle unpack(const Parcel& parcel) {
  const auto& [ranks, descriptors] = parcel;
  ProcessHandle handle;
  for (int descriptor : descriptors) handle.descriptors.emplace_back(descriptor);
  if (ranks.size() % sizeof(RankHandle) != 0) throw std::runtime_error("another process has another build of jax_ep");
  handle.ranks.resize(ranks.size() / sizeof(RankHandle));
  std::memcpy(handle.ranks.data(), ranks.data(), ranks.size());
  return handle;
}

Sharing sharing_of(const std::string& name) {
  const auto found = std::find(std::begin(kSharingNames), std::end(kSharingNames), name);
  if (found == std::end(kSharingNames)) throw std::invalid_argument("memory is not shared by " + name);
  return static_cast<Sharing>(found - std::begin(kSharingNames));
}

// Memory that this process offers to others, so that they try to map it. It is freed with the object.
struct FabricOffer {
  FabricOffer() = default;
  FabricOffer(FabricOffer&&) = default;
  FabricOffer(const FabricOffer&) = delete;

  std::vector<DeviceMemory> memory;  // on each device
};

// Allocates a granule of memory with a fabric handle on each of the devices. Throws if that does not work.
FabricOffer offer_fabric(const std::vector<int32_t>& ordinals) {
  FabricOffer offer;
  for (int32_t ordinal : ordinals) offer.memory.push_back(DeviceMemory::allocate(1, ordinal, Sharing::kFabric));
  return offer;
}

nb::bytes fabric_handles(const FabricOffer& offer) {
  std::vector<MemoryHandle> handles;
  for (const DeviceMemory& memory : offer.memory) handles.push_back(memory.handle());
  return nb::bytes(handles.data(), handles.size() * sizeof(MemoryHandle));
}

// Maps each memory of another process's `handles` for each of the devices, and unmaps it. Throws if that does not work.
void try_fabric(const std::vector<int32_t>& ordinals, const nb::bytes& handles) {
  std::vector<MemoryHandle> offered(handles.size() / sizeof(MemoryHandle));
  std::memcpy(offered.data(), handles.data(), offered.size() * sizeof(MemoryHandle));
  const nb::gil_scoped_release no_gil;
  for (int32_t ordinal : ordinals) {
    for (const MemoryHandle& handle : offered) DeviceMemory::map(handle, FileDescriptor(), ordinal);
  }
}

// `exchange` is given a parcel and the list of those of the other processes is what it returns. `network` is what
// _nvshmem.network() gives, or None, without which there are no `pes`.
void open_group_from_python(int64_t id, int32_t num_experts, int32_t top_k, int32_t max_tokens, int64_t max_payload,
                            int32_t num_sms, double timeout_seconds, std::vector<std::vector<int32_t>> devices,
                            const std::string& sharing, const nb::callable& exchange, const nb::object& network,
                            std::vector<std::vector<int32_t>> pes, int32_t node_size, int32_t replicas,
                            int64_t max_arena_bytes) {
  GroupConfig config = {num_experts, top_k, max_tokens, max_payload, num_sms, timeout_seconds, std::move(devices)};
  if (!network.is_none()) config.network = static_cast<const Network*>(nb::cast<nb::capsule>(network).data());
  config.pes = std::move(pes);
  config.node_size = node_size;
  config.replicas = replicas;
  config.max_arena_bytes = max_arena_bytes;
  config.sharing = sharing_of(sharing);
  config.exchange = [&exchange](const ProcessHandle& mine) {
    const nb::gil_scoped_acquire gil;
    std::vector<ProcessHandle> others;
    for (const Parcel& parcel : nb::cast<std::vector<Parcel>>(exchange(pack(mine)))) others.push_back(unpack(parcel));
    return others;
  };
  const nb::gil_scoped_release no_gil;
  open_group(id, std::move(config));
}

// Identifies a GPU also where processes number theirs differently.
nb::bytes device_uuid(int32_t ordinal) {
  const cudaUUID_t uuid = device_properties(ordinal).uuid;
  return nb::bytes(uuid.bytes, sizeof(uuid.bytes));
}

// The reason that `find` returns, or the error that keeps it from finding one.
template <typename Find>
std::string reason_of(Find find) {
  try {
    return find();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

#ifdef JAX_EP_EMULATOR
NB_MODULE(_emulated, m) {
  emulator::bind(m);
#else
NB_MODULE(_cuda, m) {
  m.def("link_floor", link_floor, nb::arg("devices"), nb::arg("rows"), nb::arg("row_bytes"),
        nb::call_guard<nb::gil_scoped_release>());
#endif
  m.def("targets", [] {
    nb::dict targets;
    targets["jax_ep_dispatch_layout"] = nb::capsule(reinterpret_cast<void*>(kDispatchLayout));
    for (const auto& some : {backend_targets(), balance_targets(), expand_targets()}) {
      for (const auto& [name, handler] : some) targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
    }
    return targets;
  });
  m.def("open_group", open_group_from_python, nb::arg("id"), nb::kw_only(), nb::arg("num_experts"), nb::arg("top_k"),
        nb::arg("max_tokens"), nb::arg("max_payload"), nb::arg("num_sms"), nb::arg("timeout_seconds"),
        nb::arg("devices"), nb::arg("sharing"), nb::arg("exchange"), nb::arg("network").none(), nb::arg("pes"),
        nb::arg("node_size"), nb::arg("replicas"), nb::arg("max_arena_bytes"));
  m.def("close_group", close_group, nb::call_guard<nb::gil_scoped_release>());
  m.def("free_arenas", [](int64_t id) { find_group(id)->free_arenas(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("best_sharing",
        [](const std::vector<int32_t>& ordinals) { return kSharingNames[static_cast<int>(best_sharing(ordinals))]; });
  m.def("outlives_owner", [](const std::string& sharing) { return outlives_owner(sharing_of(sharing)); });
  nb::class_<FabricOffer>(m, "FabricOffer").def("handles", fabric_handles);
  m.def("offer_fabric", offer_fabric, nb::call_guard<nb::gil_scoped_release>());
  m.def("try_fabric", try_fabric);
  m.def("device_uuid", device_uuid);
  m.def("find_device", [](const nb::bytes& uuid) { return find_device({uuid.c_str(), uuid.size()}); });
  m.def("unsupported_device", [](int32_t ordinal) { return reason_of([=] { return unsupported_device(ordinal); }); });
  m.def("unsupported_pair",
        [](const std::vector<int32_t>& ordinals) { return reason_of([&] { return unsupported_pair(ordinals); }); });
  m.def("group_bytes", [](int64_t id) { return find_group(id)->bytes_per_device(); });
  m.def("group_round_tokens", [](int64_t id) { return find_group(id)->round_tokens(); });
  m.def(
      "arena_bytes_for", [](int64_t id, int32_t num_tokens) { return find_group(id)->arena_bytes_for(num_tokens); },
      nb::arg("id"), nb::arg("num_tokens"));
  m.def("group_failure", group_failure);
  m.def("group_stats", group_stats);
  m.def("group_traffic", [](int64_t id) {
    const Traffic traffic = find_group(id)->traffic();
    return nb::make_tuple(traffic.rows, traffic.bytes);
  });
}

}  // namespace
}  // namespace jax_ep
