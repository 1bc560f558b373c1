// Rows for remote ranks. A sender stages a row in its own memory, puts it to the remote rank in one transfer, and sets
// the row's signal there. The receiver waits for the signal; then all units of the row have arrived. The receiver then
// takes the units by the in-band protocol (ll_units.cuh), which restores the sentinels.
#pragma once

#include "ffi/cuda/control_words.cuh"

namespace jax_ep {

// The staging memory of a row for a remote rank, from which put_row sends it. It is free when the operation's slot of
// the arena at that rank is free.
__device__ __forceinline__ uint8_t* staged_row(const Operation& op, int32_t peer, int32_t place) {
  const NetworkLayout network(op.peers.layout, op.peers.num_ranks);
  return op.state.table.arena[op.peers.rank] + network.staged_row(op.state.slot, peer, place);
}

// The signal of a row that the source does not send. (The signal of a row that has arrived is the operation's epoch.)
__device__ __forceinline__ unsigned long long no_row_signal(uint32_t epoch) { return tagged(1, epoch); }

// The signal of the row at `place` from a source, in the memory of the rank that waits for it (a symmetric address).
__device__ __forceinline__ unsigned long long* signal_of(const Operation& op, int32_t from, int32_t place) {
  const ArenaLayout& layout = op.peers.layout;
  uint8_t* signals = op.state.table.arena[op.peers.rank] + NetworkLayout(layout, op.peers.num_ranks).signals_begin;
  return reinterpret_cast<unsigned long long*>(signals) + layout.row_number(op.state.slot, from, place);
}

// Puts `bytes` of a staged row, from offset `begin` on, to a remote rank, as the row at `place` of source `from`. Also
// sets the row's signal there. One warp calls it, when the whole row is staged.
__device__ __forceinline__ void put_row(const Operation& op, int32_t peer, int32_t from, int32_t place, int32_t begin,
                                        int32_t bytes) {
  const ArenaLayout& layout = op.peers.layout;
  uint8_t* const arena = op.state.table.arena[op.peers.rank];
  const int64_t offset = layout.row_offset(layout.row_number(op.state.slot, from, place)) + begin;
  put_with_signal(arena + offset, staged_row(op, peer, place) + begin, bytes, signal_of(op, from, place),
                  op.state.epoch, pe_of(op.peers, peer));
  if (lane_id() != 0) return;
  auto* traffic = reinterpret_cast<Traffic*>(arena + NetworkLayout(layout, op.peers.num_ranks).traffic_begin);
  red_add_relaxed_gpu(&traffic->rows, 1);
  red_add_relaxed_gpu(&traffic->bytes, bytes);
}

// Sets the signal at `place` without a row: source `from` sends no row there.
__device__ __forceinline__ void put_no_row(const Operation& op, int32_t peer, int32_t from, int32_t place) {
  put_word(signal_of(op, from, place), no_row_signal(op.state.epoch), pe_of(op.peers, peer));
}

// Waits for the signal of the row at `place` of source `from`, which `peer` sends. Returns false if the source sends no
// such row, or if the operation fails. Returns true at once for a local peer: its units show by themselves that they
// have arrived.
__device__ __forceinline__ bool await_signal(const Operation& op, int32_t peer, int32_t from, int32_t place) {
  if (!is_remote(op.peers, peer)) return true;
  unsigned long long* const signal = signal_of(op, from, place);
  bool is_there = false;
  op.wait_until(peer, [&] {
    is_there = signal_arrived(signal, op.state.epoch);
    return is_there || signal_arrived(signal, no_row_signal(op.state.epoch));
  });
  return is_there;
}

}  // namespace jax_ep
