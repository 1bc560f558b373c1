// The groups of this process: their memory on every local device, and the peer tables that kernels are given.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "ffi/arena.h"
#include "ffi/constants.h"
#include "ffi/cuda/network.h"
#include "ffi/cuda/sharing.h"
#include "ffi/cuda/split_phase.h"

namespace jax_ep {

// What another process must know of a rank here: plain bytes.
struct RankHandle {
  int32_t line, rank;
  MemoryHandle arena, control;
  int64_t control_offset;
};
static_assert(std::is_trivially_copyable_v<RankHandle>);

// What a process gives to the others of a group.
struct ProcessHandle {
  std::vector<RankHandle> ranks;
  // Of its failure records, one for each of `ranks`; then, with Sharing::kFileDescriptor, of each rank's arena and
  // control memory.
  std::vector<FileDescriptor> descriptors;
};
// Gives this process's to all others, and theirs to this one.
using Exchange = std::function<std::vector<ProcessHandle>(const ProcessHandle&)>;

struct GroupConfig {
  int32_t num_experts, top_k, max_tokens;
  int64_t max_payload;  // bytes of a row
  int32_t num_sms;      // 0: as the plan sees fit
  double timeout_seconds;
  // CUDA ordinals: one list (a line) per expert-parallel group of the mesh, in the order of ranks; kElsewhere for those
  // of other processes.
  std::vector<std::vector<int32_t>> devices;
  // With kNone, all devices are here, and nothing is exchanged.
  Sharing sharing = Sharing::kNone;
  Exchange exchange = nullptr;
  // Where ranks may be far: the exchange is of nothing then. `pes` is like `devices`.
  const Network* network = nullptr;
  std::vector<std::vector<int32_t>> pes = {};
  int32_t node_size = 0;  // so many ranks in a row can map each other's memory
};

// What a rank has done since the group was opened.
struct PeerStats {
  RowCounters sent, received;
  uint64_t waited_ns;
};
struct RankStats {
  std::vector<uint64_t> operations;  // by OpKind
  uint64_t dropped;
  std::vector<PeerStats> peers;  // by rank, itself among them
};

// The failure in a line: the Python class that Group.check raises, and the beginning of its message.
std::string summary(const FailureRecord& failure);

// What a launch needs to know of the device it runs on.
struct Member {
  int32_t ordinal, line;
  int32_t num_sms;  // of the device
  Peers peers;
  DeviceMemory arena;                       // none over a network, which has memory of its own
  uint8_t* symmetric_arena = nullptr;       // that one
  LastingMemory control;                    // the table of pointers follows it
  std::vector<DeviceMemory> peer_arenas;    // of other processes, mapped for this device
  std::vector<DeviceMemory> peer_controls;  // the same
  NetworkTable table = {};                  // the host's copy
  std::unique_ptr<SplitPhaseCalls> split_phase;
};

class Group {
 public:
  // Allocates and maps the memory, and loads every kernel on every device. Throws std::runtime_error, or what the
  // exchange throws.
  explicit Group(GroupConfig config);
  ~Group() { close(); }

  // Ends what still runs here, unmaps the peers' arenas and frees the own ones. Control memory stays, also the peers':
  // executables that XLA keeps may still look at it. With Sharing::kIpc, or over a network, free_arenas() has to
  // follow, when all processes have closed.
  void close();
  void free_arenas();

  // Has all ranks of the member's line give up, as a kernel does that fails (Waiting::fail in wait.cuh). Waits
  // for no kernel.
  void fail(const Member& member, const FailureRecord& why) const;

  bool closed() const { return closed_; }
  int32_t num_sms() const { return config_.num_sms; }  // the user's choice
  std::string name() const;                            // some of the user's settings, for messages
  int64_t bytes_per_device() const;
  std::optional<FailureRecord> failure() const;
  // Of this process's ranks, in the order of members(). Waits for no kernel, and works after close().
  std::vector<RankStats> stats() const;
  const std::vector<Member>& members() const { return members_; }
  const Member* member_on(int32_t ordinal) const;
  Kernels kernels() const { return config_.network ? config_.network->kernels : kernels_of_this_module(); }
  Traffic traffic() const;  // of the ranks here; over a network

 private:
  // The failure records of a process's ranks.
  struct Records {
    HostMemory memory;
    size_t count;
  };

  void open();
  void expect_supported_pairs() const;
  void open_member(Member& member);
  void expect_room() const;
  uint8_t* allocate_symmetric(int64_t bytes, int32_t ordinal) const;
  ProcessHandle handle() const;
  PeerTable map_peers(Member& member, const std::vector<ProcessHandle>& others) const;
  NetworkTable find_peers(const Member& member) const;
  int32_t num_ranks() const { return static_cast<int32_t>(config_.devices.at(0).size()); }
  int32_t experts_per_rank() const { return config_.num_experts / num_ranks(); }
  int32_t node_size() const { return config_.network ? config_.node_size : num_ranks(); }

  GroupConfig config_;
  ArenaLayout layout_;
  std::vector<Member> members_;
  std::vector<Records> records_;  // this process's, then the others'
  std::atomic<bool> closed_ = false;
};

// Groups by the number that stands in compiled programs, which is the same in all processes. A closed group keeps it
// until an equal group is opened: programs of the closed group then call the new one.
void open_group(int64_t id, GroupConfig config);
void close_group(int64_t id);   // does nothing if there is none, as its opening has failed
Group* find_group(int64_t id);  // null if this process has made no such group

}  // namespace jax_ep
