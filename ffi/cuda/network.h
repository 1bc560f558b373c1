// Groups over a network. A local rank is in the same node, and maps this rank's memory. A remote rank is in another
// node. This file has the layout of the memory for remote ranks, and the functions of the module _nvshmem.
// docs/network.md explains the transport.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arena.h"
#include "ffi/cuda/balance.h"
#include "ffi/cuda/combine.h"
#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/replicate.h"
#include "ffi/cuda/start.h"

namespace jax_ep {

inline constexpr int32_t kLocal = -1;

// Memory is symmetric. So a word of a remote rank is named by the address of the same word in this rank's memory, and
// by the remote rank's processing element (PE). For remote ranks, the pointers of PeerTable are this rank's own
// pointers.
struct NetworkTable : RankTable {
  int32_t pe[kMaxRanks];  // kLocal for local ranks
  Nodes nodes;            // the ranks of a node are local to one another
};

// The rows and bytes that this rank has sent to remote ranks since the group was opened.
struct Traffic {
  unsigned long long rows, bytes;
};

// The layout of the memory behind the arena. Both are one allocation.
struct NetworkLayout {
  int32_t num_ranks, round_tokens;
  int64_t row_stride;
  int64_t staging_begin;  // rows to send, indexed by (slot, peer, place)
  // A word per row of the arena: the epoch of the newest row that has arrived there, or no_row_signal() in place of a
  // row (network_rows.cuh).
  int64_t signals_begin;
  int64_t traffic_begin;
  int64_t bytes;

  constexpr NetworkLayout(const ArenaLayout& arena, int32_t num_ranks)
      : num_ranks(num_ranks),
        round_tokens(arena.round_tokens),
        row_stride(arena.row_stride),
        staging_begin(arena.bytes),
        signals_begin(staged_row(arena.num_slots, 0, 0)),
        traffic_begin(signals_begin + arena.num_rows() * 8),
        bytes(align_up(traffic_begin + static_cast<int64_t>(sizeof(Traffic)), 256)) {}

  // The offset of the row at `place` for a peer, in the operations of a slot.
  constexpr int64_t staged_row(int32_t slot, int32_t peer, int32_t place) const {
    return staging_begin + ((int64_t{slot} * num_ranks + peer) * round_tokens + place) * row_stride;
  }
};

// The kernels of a module. _nvshmem has kernels for remote ranks; _cuda has kernels without them.
struct Kernels {
  decltype(&jax_ep::adapt_dispatch_plan) adapt_dispatch_plan;
  decltype(&jax_ep::adapt_combine_plan) adapt_combine_plan;
  decltype(&jax_ep::launch_dispatch) launch_dispatch;
  decltype(&jax_ep::launch_combine) launch_combine;
  decltype(&jax_ep::launch_balance) launch_balance;
  decltype(&jax_ep::launch_replicate) launch_replicate;
  decltype(&jax_ep::launch_start) launch_start;
  decltype(&jax_ep::launch_hold) launch_hold;
  decltype(&jax_ep::load_dispatch) load_dispatch;
  decltype(&jax_ep::load_combine) load_combine;
  decltype(&jax_ep::load_balance) load_balance;
  decltype(&jax_ep::load_replicate) load_replicate;
  decltype(&jax_ep::load_start) load_start;
};
inline Kernels kernels_of_this_module() {
  return {adapt_dispatch_plan, adapt_combine_plan, launch_dispatch, launch_combine, launch_balance,
          launch_replicate,    launch_start,       launch_hold,     load_dispatch,  load_combine,
          load_balance,        load_replicate,     load_start};
}

// The functions that _nvshmem gives to _cuda. Each process has one GPU; emulated GPUs are all in one process.
struct Network {
  Kernels kernels;
  // Allocates zeros on the current device. All processes allocate and free together, and get memory at the same offset.
  // Returns null if there is no room.
  uint8_t* (*allocate)(int64_t bytes);
  void (*free)(uint8_t* memory);
  // Returns the address of a PE's copy of `memory`, which is on the current device; null if the PE is remote.
  uint8_t* (*pointer_to)(uint8_t* memory, int32_t pe);
};

}  // namespace jax_ep

// Returns NVSHMEM's `Network`. It is in no namespace, because the emulator compiles these sources a second time, in
// another namespace.
const void* jax_ep_network_table();
