// Groups with ranks that have no pointer to each other's memory ("far" ones; the others, of one node, are "near"):
// where things lie in their memory, and what the module _nvshmem does for them. docs/network.md tells how.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arena.h"
#include "ffi/cuda/gather.h"
#include "ffi/cuda/scatter.h"
#include "ffi/cuda/start.h"

namespace jax_ep {

inline constexpr int32_t kNear = -1;

// Memory of far ranks is named by that of this rank, at the same offset, and by their processing element (PE): the
// pointers here are this rank's own for them.
struct NetworkTable : PeerTable {
  int32_t pe[kMaxRanks];  // kNear for near ranks
  Nodes nodes;            // a rank is near those of its node
};

// What this rank has sent to far ranks since the group was made.
struct Traffic {
  unsigned long long rows, bytes;
};

// Behind the arena, in one piece of memory with it.
struct NetworkLayout {
  int64_t staging_begin;  // rows to send, as (slot, peer, index): as many as the arena has
  int64_t signals_begin;  // a word per row of the arena: the epoch of the row that has arrived
  int64_t traffic_begin;
  int64_t bytes;

  explicit constexpr NetworkLayout(const ArenaLayout& arena)
      : staging_begin(arena.bytes),
        signals_begin(staging_begin + arena.row_offset(1) * arena.num_rows()),
        traffic_begin(signals_begin + arena.num_rows() * 8),
        bytes(align_up(traffic_begin + static_cast<int64_t>(sizeof(Traffic)), 256)) {}
};

// The kernels of a module, which is compiled for far ranks or not.
struct Kernels {
  decltype(&jax_ep::launch_scatter) launch_scatter;
  decltype(&jax_ep::launch_gather) launch_gather;
  decltype(&jax_ep::launch_start) launch_start;
  decltype(&jax_ep::launch_hold) launch_hold;
  decltype(&jax_ep::load_scatter) load_scatter;
  decltype(&jax_ep::load_gather) load_gather;
  decltype(&jax_ep::load_start) load_start;
};
inline Kernels kernels_of_this_module() {
  return {launch_scatter, launch_gather, launch_start, launch_hold, load_scatter, load_gather, load_start};
}

// What _nvshmem gives to _cuda.
struct Network {
  Kernels kernels;
  // Zeros on the current device, at the same offset in all processes, which allocate and free together; null if there
  // is no room.
  uint8_t* (*allocate)(int64_t bytes);
  void (*free)(uint8_t* memory);
  // A PE's memory, or null where it is far.
  uint8_t* (*pointer_to)(uint8_t* memory, int32_t pe);
};

}  // namespace jax_ep
