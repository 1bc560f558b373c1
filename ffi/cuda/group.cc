#include "ffi/cuda/group.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "ffi/cuda/call_order.h"
#include "ffi/cuda/device.h"
#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/dispatch_layout.h"
#include "ffi/cuda/expand.h"
#include "ffi/cuda/reduce.h"
#include "ffi/cuda/runtime.h"
#include "ffi/plan_balance.h"

namespace jax_ep {
namespace {

template <typename T>
void upload(void* device, const T& value) {
  check(cudaMemcpy(device, &value, sizeof(value), cudaMemcpyHostToDevice), "cudaMemcpy");
}

template <typename T>
T download(const T* device) {
  T value;
  check(cudaMemcpy(&value, device, sizeof(value), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return value;
}

RowCounters sum(const RowCounters& a, const RowCounters& b) { return {a.rows + b.rows, a.bytes + b.bytes}; }

constexpr double kLongestTimeoutSeconds = 1e6;  // kernels count milliseconds in 32 bits

Control* control_at(uint8_t* data) { return reinterpret_cast<Control*>(data); }

}  // namespace

Group::Group(GroupConfig config) : config_(std::move(config)) {
  const int32_t num_ranks = this->num_ranks();
  const int32_t most_ranks = config_.network ? kMaxRanks : kMaxLocalRanks;
  if (num_ranks > most_ranks) {
    const std::string fix = config_.network ? "" : "; set JAX_EP_NODE_SIZE below the number of ranks to use a network";
    throw std::runtime_error(std::string("a group ") + (config_.network ? "over" : "without") +
                             " a network has at most " + std::to_string(most_ranks) + " ranks, not " +
                             std::to_string(num_ranks) + fix);
  }
  // Kernels divide numbers of rows from all ranks by the number of ranks (Divisor).
  const uint64_t most_tokens = ((uint64_t{1} << 32) - 1) / num_ranks / num_ranks;
  if (static_cast<uint64_t>(config_.max_tokens) > most_tokens) {
    throw std::runtime_error("max_tokens_per_rank is " + std::to_string(config_.max_tokens) + "; with " +
                             std::to_string(num_ranks) + " ranks, it must be at most " + std::to_string(most_tokens));
  }
  const int64_t most_scratch = max_dispatch_scratch(config_.network != nullptr);
  if (dispatch_scratch_bytes(num_ranks, config_.num_experts / num_ranks) > most_scratch) {
    throw std::runtime_error(std::to_string(config_.num_experts) + " experts on " + std::to_string(num_ranks) +
                             " ranks do not fit in a thread block's " + std::to_string(most_scratch) +
                             " bytes of shared memory; spread them over more ranks");
  }
  const int32_t num_home_experts = config_.num_experts - num_ranks * config_.replicas;
  if (config_.replicas > 0 && num_home_experts > kMaxBalancedExperts) {
    throw std::runtime_error("a group with replicas has at most " + std::to_string(kMaxBalancedExperts) +
                             " experts, not " + std::to_string(num_home_experts));
  }
  const int64_t max_bytes = config_.max_arena_bytes;
  const ArenaBounds bounds = max_bytes > 0 ? ArenaBounds{max_bytes, max_bytes} : kDefaultArenaBounds;
  layout_ = choose_arena(arena_needs(), bounds, [this](const ArenaLayout& layout) { return bytes_of(layout); });
  if (max_bytes > 0 && bytes_of(layout_) > max_bytes) {
    throw std::invalid_argument("max_arena_bytes is " + std::to_string(max_bytes) + "; it must be at least " +
                                std::to_string(arena_bytes_for(1)) + ", which is room for one token of each rank");
  }
  try {
    open();
  } catch (...) {
    close();
    throw;
  }
}

void Group::open() {
  const Span span("jax_ep.Group: open");
  for (size_t ep_group = 0; ep_group < config_.devices.size(); ++ep_group) {
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      const int32_t ordinal = config_.devices[ep_group][rank];
      if (ordinal == kElsewhere) continue;
      Member& member = members_.emplace_back();
      member.ordinal = ordinal;
      member.ep_group = static_cast<int32_t>(ep_group);
      member.peers.rank = rank;
      member.nonce = std::random_device()();
    }
  }
  check_supported_pairs();
  records_.push_back({HostMemory::allocate(Records::bytes(members_.size())), members_.size()});
  if (config_.network) check_room();
  for (Member& member : members_) open_member(member);

  std::vector<ProcessHandle> others;
  if (config_.sharing != Sharing::kNone) {
    const Span exchange("jax_ep.Group: exchange with other processes");
    others = config_.exchange(handle());
  }
  for (const ProcessHandle& other : others) {
    if (other.descriptors.empty()) {  // the process is on another host
      has_hidden_records_ = true;
      continue;
    }
    const size_t num_ranks = other.ranks.size();
    records_.push_back({HostMemory::map(other.descriptors.at(0), Records::bytes(num_ranks)), num_ranks});
  }
  for (Member& member : members_) {
    const OnDevice device(member.ordinal);
    if (config_.network) {
      member.table = find_peers(member);
    } else {
      // The kernels of other groups write to the memory of peers, also after the peer's process has ended.
      if (outlives_owner(config_.sharing))
        member.entry = reserve_device_group(member.ordinal, static_cast<uint32_t>(member.num_sms));
      member.table = {{map_peers(member, others), member.entry.list, member.entry.index}, {}, {}};
    }
    upload(const_cast<PeerTable*>(member.peers.table), member.table);
    check(cudaDeviceSynchronize(), "setting up the group's memory");
    const Peers& peers = member.peers;
    show_device_group(member.entry,
                      {peers.control, peers.table, peers.rank, peers.num_ranks, device_group_id(member, others)});
  }
}

// Looks at this process's devices. jax_ep/_backends/__init__.py looks at the devices of other processes, too, if this
// process sees them. No process sees the link to a device that CUDA_VISIBLE_DEVICES or a container hides from it: CUDA
// then says nothing about that link.
void Group::check_supported_pairs() const {
  for (const std::vector<int32_t>& ep_group : config_.devices) {
    std::vector<int32_t> ordinals;
    for (int32_t ordinal : ep_group) {
      if (ordinal != kElsewhere) ordinals.push_back(ordinal);
    }
    const std::string reason = unsupported_pair(ordinals);
    if (!reason.empty()) throw std::runtime_error(reason + ", or backend='reference'");
  }
}

void Group::open_member(Member& member) {
  const OnDevice device(member.ordinal);
  member.num_sms = count_sms(member.ordinal);
  member.max_tokens = config_.max_tokens;
  Peers& peers = member.peers;
  peers.num_ranks = num_ranks();
  peers.experts_per_rank = experts_per_rank();
  peers.replicas = config_.replicas;
  peers.counts_per_source = num_counts();
  peers.node_size = node_size();
  peers.by_ranks = Divisor(peers.num_ranks);
  peers.by_others = Divisor(std::max(peers.num_ranks - 1, 1));
  peers.by_experts = Divisor(peers.experts_per_rank);
  peers.by_top_k = Divisor(config_.top_k);
  peers.layout = layout_;
  peers.timeout_ns = static_cast<uint64_t>(std::min(config_.timeout_seconds, kLongestTimeoutSeconds) * 1e9);
  auto* const records = static_cast<FailureRecord*>(records_[0].memory.on_device(member.ordinal));
  peers.failure = records + records_[0].of_kernels(index_of(member));

  const int64_t table_offset =
      align_up(control_bytes(peers.num_ranks, peers.counts_per_source, peers.replicas > 0), alignof(NetworkTable));
  const int64_t lasting_bytes = table_offset + sizeof(NetworkTable);
  uint8_t *arena, *control;
  if (config_.network) {
    arena = allocate_symmetric(bytes_of(layout_), member.ordinal);
    control = allocate_symmetric(lasting_bytes, member.ordinal);
    member.symmetric_arena = arena;
  } else {
    member.arena = DeviceMemory::allocate(layout_.bytes, member.ordinal, config_.sharing);
    member.control = allocate_lasting(lasting_bytes, member.ordinal, config_.sharing);
    arena = member.arena.data();
    control = member.control.data();
  }
  check(cudaMemset(arena, kSentinelByte, layout_.bytes), "cudaMemset");
  if (config_.network) {  // with no epoch's signals
    const NetworkLayout network(layout_, num_ranks());
    check(cudaMemset(arena + network.signals_begin, 0xff, network.traffic_begin - network.signals_begin), "cudaMemset");
  }
  peers.control = control_at(control);
  peers.table = reinterpret_cast<const NetworkTable*>(control + table_offset);
  upload(peers.control, initial_control(layout_.num_slots));
  member.split_phase = std::make_unique<SplitPhaseCalls>(peers, kernels().launch_start, kernels().launch_hold);
  for (auto load : {kernels().load_dispatch, kernels().load_combine, kernels().load_balance, kernels().load_replicate,
                    kernels().load_start, load_dispatch_layout, load_expand, load_reduce}) {
    check(load(), "loading the kernels");
  }
}

// The sum of the nonces of all ranks of the EP group, in 24 bits: the same in all processes, and new each time a group
// is opened.
uint32_t Group::device_group_id(const Member& member, const std::vector<ProcessHandle>& others) const {
  uint32_t id = 0;
  for (const Member& peer : members_) {
    if (peer.ep_group == member.ep_group) id += peer.nonce;
  }
  for (const ProcessHandle& other : others) {
    for (const RankHandle& peer : other.ranks) {
      if (peer.ep_group == member.ep_group) id += peer.nonce;
    }
  }
  return id % (1u << 24);
}

// NVSHMEM allocates collectively. So a process without room says so before any process allocates.
void Group::check_room() const {
  constexpr int64_t kGranularity = int64_t{512} << 20;  // of NVSHMEM's heap, by default
  const OnDevice device(members_[0].ordinal);
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (static_cast<int64_t>(free) < align_up(bytes_per_device(), kGranularity)) {
    throw_full(bytes_per_device(), members_[0].ordinal,
               "NVSHMEM takes " + std::to_string(kGranularity >> 20) + " MiB at a time");
  }
  config_.exchange({});
}

uint8_t* Group::allocate_symmetric(int64_t bytes, int32_t ordinal) const {
  uint8_t* const memory = config_.network->allocate(bytes);
  if (memory == nullptr) throw_full(bytes, ordinal, "nvshmem_calloc");
  return memory;
}

ProcessHandle Group::handle() const {
  ProcessHandle mine;
  mine.descriptors.push_back(records_[0].memory.descriptor());
  for (const Member& member : members_) {
    const DeviceMemory& control = *member.control.allocation;
    mine.ranks.push_back({member.ep_group, member.peers.rank, member.arena.handle(), control.handle(),
                          member.control.offset, member.nonce});
    if (config_.sharing != Sharing::kFileDescriptor) continue;
    mine.descriptors.push_back(member.arena.descriptor());
    mine.descriptors.push_back(control.descriptor());
  }
  return mine;
}

// Lets the device reach the memory of all ranks of its EP group.
PeerTable Group::map_peers(Member& member, const std::vector<ProcessHandle>& others) const {
  PeerTable table = {};
  for (const Member& peer : members_) {
    if (peer.ep_group != member.ep_group) continue;
    peer.arena.let_in(member.ordinal);
    peer.control.allocation->let_in(member.ordinal);
    table.arena[peer.peers.rank] = peer.arena.data();
    table.control[peer.peers.rank] = peer.peers.control;
  }
  const FileDescriptor none;
  for (const ProcessHandle& other : others) {
    for (size_t i = 0; i < other.ranks.size(); ++i) {
      const RankHandle& peer = other.ranks[i];
      if (peer.ep_group != member.ep_group) continue;
      const auto map = [&](const MemoryHandle& handle, size_t descriptor) {
        const bool has_descriptor = handle.sharing == Sharing::kFileDescriptor;
        return DeviceMemory::map(handle, has_descriptor ? other.descriptors.at(descriptor) : none, member.ordinal);
      };
      member.peer_arenas.push_back(map(peer.arena, 1 + 2 * i));
      member.peer_controls.push_back(map(peer.control, 2 + 2 * i));
      table.arena[peer.rank] = member.peer_arenas.back().data();
      table.control[peer.rank] = control_at(member.peer_controls.back().data() + peer.control_offset);
    }
  }
  return table;
}

// The pointers to local ranks, and the PEs of remote ranks.
NetworkTable Group::find_peers(const Member& member) const {
  const Network& network = *config_.network;
  const std::vector<int32_t>& pes = config_.pes.at(member.ep_group);
  const int32_t self = member.peers.rank;
  auto* const own_control = reinterpret_cast<uint8_t*>(member.peers.control);
  NetworkTable table = {};
  table.nodes = Nodes(node_size(), num_ranks(), self);
  for (int32_t rank = 0; rank < num_ranks(); ++rank) {
    const bool is_local = table.nodes.is_in_own_node(rank);
    uint8_t* const arena = is_local ? network.pointer_to(member.symmetric_arena, pes.at(rank)) : member.symmetric_arena;
    uint8_t* const control = is_local ? network.pointer_to(own_control, pes.at(rank)) : own_control;
    if (arena == nullptr || control == nullptr) {
      throw std::runtime_error("rank " + std::to_string(self) + " cannot reach the memory of rank " +
                               std::to_string(rank) + ", which is of the same node; set JAX_EP_NODE_SIZE to how many " +
                               "ranks in a row can, and see whether every process sees all GPUs of its host");
    }
    table.pe[rank] = is_local ? kLocal : pes.at(rank);
    table.arena[rank] = arena;
    table.control[rank] = control_at(control);
  }
  return table;
}

void Group::close() {
  if (closed_.exchange(true)) return;
  const Span span("jax_ep.Group: close");
  try {
    record_failures_elsewhere();         // before the next lines replace `failed`
  } catch (const std::runtime_error&) {  // CUDA has failed; the group closes all the same
  }
  for (const Member& member : members_) {
    const OnDevice device(member.ordinal);
    if (Control* control = member.peers.control) {
      cudaMemcpy(&control->failed, &kClosed, sizeof(kClosed), cudaMemcpyHostToDevice);
    }
  }
  for (const Member& member : members_) {  // `failed` is set on every device, so kernels that wait for a peer end
    const OnDevice device(member.ordinal);
    hide_device_group(member.entry);
    cudaDeviceSynchronize();  // now no kernel uses the entry
    free_device_group(member.entry);
    if (member.split_phase) member.split_phase->close();
  }
  for (Member& member : members_) member.peer_arenas.clear();
  if (outlives_owner(config_.sharing) && config_.network == nullptr) free_arenas();
}

void Group::free_arenas() {
  for (Member& member : members_) {
    member.arena.free();
    if (member.symmetric_arena == nullptr) continue;
    const OnDevice device(member.ordinal);
    config_.network->free(std::exchange(member.symmetric_arena, nullptr));
  }
}

std::string Group::name() const {
  return "Group(num_experts=" + std::to_string(config_.num_experts) + ", top_k=" + std::to_string(config_.top_k) +
         ", max_tokens_per_rank=" + std::to_string(config_.max_tokens) + ")";
}

int64_t Group::bytes_per_device() const {
  return bytes_of(layout_) + control_bytes(num_ranks(), num_counts(), config_.replicas > 0);
}

ArenaNeeds Group::arena_needs() const {
  const int32_t num_nodes = has_levels(node_size(), num_ranks()) ? num_ranks() / node_size() : 0;
  return {num_ranks(), num_nodes, config_.top_k, config_.max_tokens, static_cast<int32_t>(config_.max_payload)};
}

int64_t Group::bytes_of(const ArenaLayout& layout) const {
  return config_.network ? NetworkLayout(layout, num_ranks()).bytes : layout.bytes;
}

int64_t Group::arena_bytes_for(int32_t num_tokens) const {
  return bytes_of(arena_needs().layout(num_tokens, kSlotsWithRounds));
}

Traffic Group::traffic() const {
  Traffic sum = {};
  for (const Member& member : members_) {
    const OnDevice device(member.ordinal);
    const int64_t offset = NetworkLayout(layout_, num_ranks()).traffic_begin;
    const auto traffic = download(reinterpret_cast<const Traffic*>(member.symmetric_arena + offset));
    sum = {sum.rows + traffic.rows, sum.bytes + traffic.bytes};
  }
  return sum;
}

std::vector<RankStats> Group::stats() const {
  std::vector<RankStats> all;
  for (const Member& member : members_) {
    const OnDevice device(member.ordinal);
    const Counters own = download(&member.peers.control->counters);
    RankStats& stats = all.emplace_back();
    stats.operations.assign(std::begin(own.operations), std::end(own.operations));
    stats.dropped = own.dropped;
    stats.placement = own.placement;
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      const PeerCounters& here = own.peer[rank];
      const bool is_local = config_.network == nullptr || member.table.pe[rank] == kLocal;
      PeerCounters there = {};  // of a remote rank, what it has counted cannot be seen
      if (is_local) there = download(&member.table.control[rank]->counters.peer[member.peers.rank]);
      stats.peers.push_back({sum(there.arrived, here.returned), sum(here.arrived, there.returned), here.waited_ns});
    }
  }
  return all;
}

const Member* Group::member_on(int32_t ordinal) const {
  for (const Member& member : members_) {
    if (member.ordinal == ordinal) return &member;
  }
  return nullptr;
}

namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::unique_ptr<Group>> groups;
  // Closed groups whose id a newer group has. They are never freed: a program may still hold a pointer to one.
  std::vector<std::unique_ptr<Group>> replaced;
};

// Never destroyed: a program may still run while the process ends.
Registry& registry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

void open_group(int64_t id, GroupConfig config) {
  auto group = std::make_unique<Group>(std::move(config));
  std::map<int32_t, std::vector<int32_t>> ep_groups;
  for (const Member& member : group->members()) ep_groups[member.ep_group].push_back(member.ordinal);
  const std::lock_guard<std::mutex> lock(registry().mutex);
  std::unique_ptr<Group>& entry = registry().groups[id];
  if (entry != nullptr && !entry->closed()) {
    throw std::runtime_error("this process already has an open group with the id " + std::to_string(id));
  }
  if (entry != nullptr) registry().replaced.push_back(std::move(entry));
  entry = std::move(group);
  for (const auto& [ep_group, devices] : ep_groups) call_order().open({id, ep_group}, devices);
}

void close_group(int64_t id) {
  call_order().close(id);
  if (Group* group = find_group(id)) group->close();
}

Group* find_group(int64_t id) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().groups.find(id);
  return found == registry().groups.end() ? nullptr : found->second.get();
}

}  // namespace jax_ep
