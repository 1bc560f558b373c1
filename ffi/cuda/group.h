// The groups of this process: their memory on every local device, and the peer tables that kernels are given.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/arena.h"

namespace jax_ep {

struct GroupConfig {
  int32_t num_experts, top_k, max_tokens;
  int64_t max_payload;  // bytes of a row
  int32_t num_sms;      // 0: as the plan sees fit
  double timeout_seconds;
  // CUDA ordinals: one list per expert-parallel group of the mesh, in the order of ranks.
  std::vector<std::vector<int32_t>> devices;
};

// What a launch needs to know of the device it runs on.
struct Member {
  int32_t ordinal;
  Peers peers;
  uint8_t* arena;
};

class Group {
 public:
  // Allocates and maps the memory, and loads every kernel on every device. Throws std::runtime_error.
  explicit Group(GroupConfig config);
  ~Group() { close(); }

  // Ends what still runs, frees the arenas. Control memory stays: executables that XLA keeps may still look at it.
  void close();

  bool closed() const { return closed_; }
  int32_t num_sms() const { return config_.num_sms; }
  int64_t bytes_per_device() const;
  std::optional<FailureRecord> failure() const;
  const std::vector<Member>& members() const { return members_; }
  const Member* member_on(int32_t ordinal) const;

 private:
  void open();
  void open_ranks(const std::vector<int32_t>& ordinals);
  void map_peers() const;

  GroupConfig config_;
  ArenaLayout layout_;
  std::vector<Member> members_;
  bool closed_ = false;
};

// Groups by the number that stands in compiled programs. A closed group keeps its number.
int64_t open_group(GroupConfig config);
Group& find_group(int64_t id);  // throws std::out_of_range

}  // namespace jax_ep
