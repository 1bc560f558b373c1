#include "ffi/cuda/group.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "ffi/cuda/dispatch_layout.h"
#include "ffi/cuda/gather.h"
#include "ffi/cuda/scatter.h"

namespace jax_ep {
namespace {

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error would stay and be reported to whoever asks next
  throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// Makes a device current, and the former one again afterwards: the thread belongs to somebody else.
class OnDevice {
 public:
  explicit OnDevice(int32_t ordinal) {
    check(cudaGetDevice(&former_), "cudaGetDevice");
    check(cudaSetDevice(ordinal), "cudaSetDevice(" + std::to_string(ordinal) + ")");
  }
  ~OnDevice() { cudaSetDevice(former_); }

 private:
  int former_ = 0;
};

std::string mebibytes(int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

// Every byte is `fill`.
uint8_t* allocate(int64_t bytes, uint8_t fill, int32_t ordinal) {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error("the group needs " + std::to_string(bytes) + " bytes (" + mebibytes(bytes) +
                             ") on CUDA device " + std::to_string(ordinal) + ", where " + mebibytes(free) +
                             " are free; XLA takes most of a device's memory when it starts: set "
                             "XLA_PYTHON_CLIENT_MEM_FRACTION lower, or make the group with fewer max_tokens_per_rank");
  }
  check(cudaMemset(memory, fill, bytes), "cudaMemset");
  return static_cast<uint8_t*>(memory);
}

Control* allocate_control(int64_t bytes, int32_t num_slots, int32_t ordinal) {
  auto* control = reinterpret_cast<Control*>(allocate(bytes, 0, ordinal));
  // Operation n may begin when all have finished n - num_slots; the first ones find 1 - num_slots, 2 - num_slots, ...
  Control initial = {};
  for (int32_t epoch = 1; epoch <= num_slots; ++epoch) {
    for (uint32_t& finished : initial.finished[epoch % num_slots]) finished = static_cast<uint32_t>(epoch - num_slots);
  }
  check(cudaMemcpy(control, &initial, sizeof(initial), cudaMemcpyHostToDevice), "cudaMemcpy");
  return control;
}

FailureRecord* allocate_failure() {
  void* record = nullptr;
  check(cudaHostAlloc(&record, sizeof(FailureRecord), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  std::memset(record, 0, sizeof(FailureRecord));
  return static_cast<FailureRecord*>(record);
}

}  // namespace

Group::Group(GroupConfig config) : config_(std::move(config)) {
  const int32_t num_ranks = static_cast<int32_t>(config_.devices.at(0).size());
  if (num_ranks > kMaxRanks) {
    throw std::runtime_error("a group has at most " + std::to_string(kMaxRanks) + " ranks, not " +
                             std::to_string(num_ranks));
  }
  layout_ =
      ArenaLayout::fitting(num_ranks, config_.top_k, config_.max_tokens, static_cast<int32_t>(config_.max_payload));
  try {
    open();
  } catch (...) {
    close();
    throw;
  }
}

void Group::open() {
  map_peers();
  for (const std::vector<int32_t>& ordinals : config_.devices) open_ranks(ordinals);
  for (const Member& member : members_) {
    const OnDevice device(member.ordinal);
    check(cudaDeviceSynchronize(), "setting up the group's memory");
  }
}

void Group::open_ranks(const std::vector<int32_t>& ordinals) {
  const int32_t num_ranks = layout_.num_ranks, experts_per_rank = config_.num_experts / num_ranks;
  const size_t first = members_.size();
  PeerTable table = {};
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const OnDevice device(ordinals[rank]);
    members_.push_back({ordinals[rank], {}, allocate(layout_.bytes, kEmptyByte, ordinals[rank])});
    Peers& peers = members_.back().peers;
    peers.rank = rank;
    peers.num_ranks = num_ranks;
    peers.experts_per_rank = experts_per_rank;
    peers.by_ranks = Divisor(num_ranks);
    peers.by_experts = Divisor(experts_per_rank);
    peers.by_top_k = Divisor(config_.top_k);
    peers.layout = layout_;
    peers.timeout_ns = static_cast<uint64_t>(config_.timeout_seconds * 1e9);
    peers.failure = allocate_failure();
    peers.control = allocate_control(control_bytes(num_ranks, experts_per_rank), layout_.num_slots, ordinals[rank]);
    table.arena[rank] = members_.back().arena;
    table.control[rank] = peers.control;
    for (auto load : {load_scatter, load_gather, load_dispatch_layout}) check(load(), "loading the kernels");
  }
  for (size_t i = first; i < members_.size(); ++i) {
    const OnDevice device(members_[i].ordinal);
    auto* copy = reinterpret_cast<PeerTable*>(allocate(sizeof(table), 0, members_[i].ordinal));
    check(cudaMemcpy(copy, &table, sizeof(table), cudaMemcpyHostToDevice), "cudaMemcpy");
    members_[i].peers.table = copy;
  }
}

// In one process every device is local, and peer access is all it takes to reach its memory.
void Group::map_peers() const {
  for (const std::vector<int32_t>& ordinals : config_.devices) {
    for (int32_t from : ordinals) {
      const OnDevice device(from);
      for (int32_t to : ordinals) {
        if (from == to) continue;
        const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
        if (status == cudaErrorPeerAccessAlreadyEnabled) {
          cudaGetLastError();
        } else {
          check(status, "CUDA device " + std::to_string(from) + " cannot reach the memory of device " +
                            std::to_string(to) + ", which expert parallelism over them needs");
        }
      }
    }
  }
}

void Group::close() {
  if (closed_) return;
  closed_ = true;
  for (const Member& member : members_) {
    const OnDevice device(member.ordinal);
    if (Control* control = member.peers.control) {
      cudaMemcpy(&control->failed, &kClosed, sizeof(kClosed), cudaMemcpyHostToDevice);
    }
  }
  for (const Member& member : members_) {  // what waits for a peer has seen `failed` on every device by now
    const OnDevice device(member.ordinal);
    cudaDeviceSynchronize();
  }
  for (Member& member : members_) {
    const OnDevice device(member.ordinal);
    cudaFree(member.arena);
  }
}

int64_t Group::bytes_per_device() const {
  const int32_t experts_per_rank = config_.num_experts / layout_.num_ranks;
  return layout_.bytes + control_bytes(layout_.num_ranks, experts_per_rank);
}

std::optional<FailureRecord> Group::failure() const {
  for (const Member& member : members_) {
    const volatile FailureRecord* record = member.peers.failure;
    if (record && record->valid) return *member.peers.failure;
  }
  return std::nullopt;
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
  std::vector<std::unique_ptr<Group>> groups;
};

// Never destroyed: a program may still run while the process ends.
Registry& registry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

int64_t open_group(GroupConfig config) {
  auto group = std::make_unique<Group>(std::move(config));
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().groups.push_back(std::move(group));
  return static_cast<int64_t>(registry().groups.size()) - 1;
}

Group& find_group(int64_t id) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return *registry().groups.at(id);
}

}  // namespace jax_ep
