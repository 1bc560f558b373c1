// Groups with ranks that have no pointer to each other's memory ("far" ones; the others, of one node, are "near"):
// where things lie in their memory, and what the module _nvshmem does for them. docs/network.md tells how.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arena.h"
#include "ffi/cuda/combine.h"
#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/start.h"

namespace jax_ep {

inline constexpr int32_t kLocal = -1;

// Memory of remote ranks is named by that of this rank, at the same offset, and by their processing element (PE): the
// pointers here are this rank's own for them.
struct NetworkTable : PeerTable {
  int32_t pe[kMaxRanks];  // kLocal for local ranks
  Nodes nodes;            // a rank is near those of its node
};

// What this rank has sent to remote ranks since the group was made.
struct Traffic {
  unsigned long long rows, bytes;
};

// Behind the arena, in one piece of memory with it.
struct NetworkLayout {
  int32_t num_ranks, max_tokens;
  int64_t row_stride;
  int64_t staging_begin;  // rows to send, as (slot, peer, index)
  int64_t signals_begin;  // a word per row of the arena: the epoch of the row that has arrived
  int64_t traffic_begin;
  int64_t bytes;

  constexpr NetworkLayout(const ArenaLayout& arena, int32_t num_ranks)
      : num_ranks(num_ranks),
        max_tokens(arena.max_tokens),
        row_stride(arena.row_stride),
        staging_begin(arena.bytes),
        signals_begin(staged_row(arena.num_slots, 0, 0)),
        traffic_begin(signals_begin + arena.num_rows() * 8),
        bytes(align_up(traffic_begin + static_cast<int64_t>(sizeof(Traffic)), 256)) {}

  // Of row `index` for a peer, in the operations of a slot.
  constexpr int64_t staged_row(int32_t slot, int32_t peer, int32_t index) const {
    return staging_begin + ((int64_t{slot} * num_ranks + peer) * max_tokens + index) * row_stride;
  }
};

// The kernels of a module, which is compiled for remote ranks or not.
struct Kernels {
  decltype(&jax_ep::launch_dispatch) launch_dispatch;
  decltype(&jax_ep::launch_combine) launch_combine;
  decltype(&jax_ep::launch_start) launch_start;
  decltype(&jax_ep::launch_hold) launch_hold;
  decltype(&jax_ep::load_dispatch) load_dispatch;
  decltype(&jax_ep::load_combine) load_combine;
  decltype(&jax_ep::load_start) load_start;
};
inline Kernels kernels_of_this_module() {
  return {launch_dispatch, launch_combine, launch_start, launch_hold, load_dispatch, load_combine, load_start};
}

// What _nvshmem gives to _cuda. Each process has a GPU of its own; emulated ones are all in one.
struct Network {
  Kernels kernels;
  // Zeros on the current device, at the same offset in all processes, which allocate and free together; null if there
  // is no room.
  uint8_t* (*allocate)(int64_t bytes);
  void (*free)(uint8_t* memory);
  // A PE's memory, or null where it is far; `memory` is the current device's.
  uint8_t* (*pointer_to)(uint8_t* memory, int32_t pe);
};

}  // namespace jax_ep

// NVSHMEM's `Network`. In no namespace: the emulator compiles these sources twice, the second time in another one.
const void* jax_ep_network_table();
