// The groups of this process: their memory on every local device, and the peer tables of their kernels.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "ffi/arena_size.h"
#include "ffi/constants.h"
#include "ffi/cuda/device_groups.h"
#include "ffi/cuda/network.h"
#include "ffi/cuda/sharing.h"
#include "ffi/cuda/split_phase.h"

namespace jax_ep {

// What another process must know about a rank of this process. It is sent as bytes.
struct RankHandle {
  int32_t ep_group, rank;
  MemoryHandle arena, control;
  int64_t control_offset;
  uint32_t nonce;
};
static_assert(std::is_trivially_copyable_v<RankHandle>);

// What a process sends to the other processes of a group.
struct ProcessHandle {
  std::vector<RankHandle> ranks;
  // The first descriptor is that of the failure records of `ranks`. With Sharing::kFileDescriptor, the descriptors of
  // each rank's arena and control memory follow. There are none from a process of another host.
  std::vector<FileDescriptor> descriptors;
};
// Sends this process's handle to all others, and returns theirs.
using Exchange = std::function<std::vector<ProcessHandle>(const ProcessHandle&)>;

struct GroupConfig {
  int32_t num_experts, top_k, max_tokens;  // num_experts includes the replica slots
  int64_t max_payload;                     // bytes of a row
  int32_t num_sms;                         // 0: the launch plan chooses
  double timeout_seconds;
  // CUDA ordinals: one list (an EP group) per expert-parallel group of the mesh, in the order of ranks. A device of
  // another process is kElsewhere.
  std::vector<std::vector<int32_t>> devices;
  // With kNone, this process has all devices, and exchanges nothing.
  Sharing sharing = Sharing::kNone;
  Exchange exchange = nullptr;
  // For groups over a network. Then the processes exchange no handles. `pes` is indexed like `devices`.
  const Network* network = nullptr;
  std::vector<std::vector<int32_t>> pes = {};
  int32_t node_size = 0;        // consecutive ranks that map each other's memory
  int32_t replicas = 0;         // the replica slots of a rank
  int64_t max_arena_bytes = 0;  // of a rank; 0: kDefaultArenaBounds
};

// The counters of a rank since the group was opened.
struct PeerStats {
  RowCounters sent, received;
  uint64_t waited_ns;
};
struct RankStats {
  std::vector<uint64_t> operations;  // by OpKind
  uint64_t dropped;
  PlacementCounters placement;
  std::vector<PeerStats> peers;  // by rank, including the rank itself
};

// Describes the failure in one line: the Python class that Group.check raises, and the beginning of its message.
std::string summary(const FailureRecord& failure);
const char* op_name(const FailureRecord& failure);

// What a launch needs to know about its device.
struct Member {
  int32_t ordinal, ep_group;
  int32_t num_sms;     // of the device
  int32_t max_tokens;  // per rank, of an operation
  Peers peers;
  DeviceMemory arena;                       // empty over a network
  uint8_t* symmetric_arena = nullptr;       // the arena over a network, in symmetric memory
  LastingMemory control;                    // the table of pointers follows it
  std::vector<DeviceMemory> peer_arenas;    // of other processes, mapped for this device
  std::vector<DeviceMemory> peer_controls;  // the same
  NetworkTable table = {};                  // the host's copy
  uint32_t nonce = 0;                       // random
  DeviceGroupsEntry entry = {};             // empty over a network, and without outlives_owner(sharing)
  std::unique_ptr<SplitPhaseCalls> split_phase;

  bool is_over_network() const { return symmetric_arena != nullptr; }
};

class Group {
 public:
  // Allocates and maps the memory, and loads every kernel on every device. Throws std::runtime_error, or what the
  // exchange throws.
  explicit Group(GroupConfig config);
  ~Group() { close(); }

  // Ends the operations that still run on this process's devices, unmaps the peers' arenas and frees the own arenas.
  // Control memory stays mapped, also the peers', because compiled programs may still read it. Over a network, and
  // without outlives_owner(sharing), the caller must call free_arenas() after all processes have closed.
  void close();
  void free_arenas();

  // Makes all ranks of the member's EP group give up, as a failing kernel does (Waiting::fail in wait.cuh). Records
  // `why`, unless the rank has failed before. Waits for no kernel.
  void fail(const Member& member, const FailureRecord& why) const;
  // Without a network, kernels record only failures of their own rank, because processes of one host see each other's
  // records. So if a process of the group is on another host, this function looks at the word `failed` of each member
  // A. If the word names another rank B, it writes a record of A: B gave up, and A with it. (failure() prefers B's own
  // record, if this host has it.) It waits for no kernel. Throws std::runtime_error if CUDA cannot read the word.
  void record_failures_elsewhere() const;

  bool closed() const { return closed_; }
  int32_t num_sms() const { return config_.num_sms; }  // the user's choice
  std::string name() const;                            // some of the user's settings, for messages
  int64_t bytes_per_device() const;
  int32_t round_tokens() const { return layout_.round_tokens; }  // the tokens per rank of a round (Round in call.h)
  // The bytes of an arena whose slots have room for `num_tokens` tokens.
  int64_t arena_bytes_for(int32_t num_tokens) const;
  std::optional<FailureRecord> failure() const;
  // The counters of this process's ranks, in the order of members(). Waits for no kernel, and works after close().
  std::vector<RankStats> stats() const;
  const std::vector<Member>& members() const { return members_; }
  const Member* member_on(int32_t ordinal) const;
  Kernels kernels() const { return config_.network ? config_.network->kernels : kernels_of_this_module(); }
  Traffic traffic() const;  // the sum over this process's ranks; only over a network

 private:
  // The failure records of a process's ranks. Each rank has one that its kernels write and one that its host writes.
  // The host and a kernel cannot claim a record from each other, because a GPU's atomics on host memory are atomic only
  // among GPUs.
  struct Records {
    HostMemory memory;
    size_t num_ranks;

    static size_t bytes(size_t num_ranks) { return 2 * num_ranks * sizeof(FailureRecord); }
    // The host's records come first, so that failure() finds them first. No host record appears once a kernel's record
    // is seen (fail()), but the reverse can happen.
    static size_t of_host(size_t index) { return index; }
    size_t of_kernels(size_t index) const { return num_ranks + index; }
  };

  size_t index_of(const Member& member) const { return &member - members_.data(); }
  // Writes the host's record of the member. Returns false if the member has a record already.
  bool record(const Member& member, const FailureRecord& why) const;
  void open();
  void check_supported_pairs() const;
  void open_member(Member& member);
  uint32_t device_group_id(const Member& member, const std::vector<ProcessHandle>& others) const;
  void check_room() const;
  uint8_t* allocate_symmetric(int64_t bytes, int32_t ordinal) const;
  ProcessHandle handle() const;
  PeerTable map_peers(Member& member, const std::vector<ProcessHandle>& others) const;
  NetworkTable find_peers(const Member& member) const;
  int32_t num_ranks() const { return static_cast<int32_t>(config_.devices.at(0).size()); }
  int32_t experts_per_rank() const { return config_.num_experts / num_ranks(); }
  int32_t num_counts() const { return counts_per_source(num_ranks(), experts_per_rank(), config_.replicas); }
  ArenaNeeds arena_needs() const;
  int64_t bytes_of(const ArenaLayout& layout) const;  // of the arena and, over a network, of the memory behind it
  int32_t node_size() const { return config_.network ? config_.node_size : num_ranks(); }

  GroupConfig config_;
  ArenaLayout layout_;
  std::vector<Member> members_;
  std::vector<Records> records_;     // of this process, then of the others of this host
  bool has_hidden_records_ = false;  // the records of another host's processes
  mutable std::mutex host_records_mutex_;
  std::atomic<bool> closed_ = false;
};

// Groups have ids, which compiled programs contain. A group's id is the same in all processes. A closed group keeps its
// id until an equal group is opened: programs of the closed group then call the new group. The exception is a program
// that XLA replays from a CUDA graph: the graph contains the closed group's pointers, so the program returns poison.
// jax_ep/_backends/native_group.py waits for programs that still run before it opens an equal group.
void open_group(int64_t id, GroupConfig config);
void close_group(int64_t id);   // does nothing if there is no such group, because opening it has failed
Group* find_group(int64_t id);  // null if this process has made no such group

}  // namespace jax_ep
