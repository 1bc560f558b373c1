// Finds two ranks that run the operations of two groups in different order. An operation keeps its stream and its SMs
// until all ranks have entered it. Assume that one rank is in an operation of group A, that another rank is in an
// operation of group B, and that each needs the other rank in its operation. Then both wait until the time-out.
//
// A rank that waits for long in operation a of group A writes to all ranks of each other group B (Control::blocked):
// it is in a, so it cannot enter b, B's next operation. If a rank of A has written the reverse to it (it is in b, so it
// cannot enter a), the two ranks wait for each other.
//
// A cycle of three or more groups is found only if two of these groups form a cycle by themselves. Kernels look at no
// more than DeviceGroups::kMaxGroups groups of a device. A rank in a split-phase call does not look
// (check_order_of_groups in wait.cuh), so a cycle with it is not found.
//
// A word may be old: its writer has left the operation, because the group has failed or was closed. So a rank that
// finds such a word erases it, and fails only if the writer writes the same word again.
#pragma once

#include "ffi/cuda/device_groups.h"
#include "ffi/cuda/ptx.cuh"

namespace jax_ep {

// A word of Control::blocked. The writer cannot enter operation `epoch` of the group that owns the word, nor a later
// one, because it is in operation `other_epoch` of the group `other_id`. All members are truncated.
struct BlockedWord {
  static constexpr int kEpochBits = 20;
  static constexpr uint32_t kEpochMask = (1u << kEpochBits) - 1;

  uint32_t other_id, epoch, other_epoch;

  __device__ __forceinline__ static BlockedWord unpack(unsigned long long word) {
    return {static_cast<uint32_t>(word >> 2 * kEpochBits), static_cast<uint32_t>(word >> kEpochBits) & kEpochMask,
            static_cast<uint32_t>(word) & kEpochMask};
  }
  __device__ __forceinline__ static unsigned long long pack(uint32_t other_id, uint32_t epoch, uint32_t other_epoch) {
    return static_cast<unsigned long long>(other_id) << 2 * kEpochBits |
           static_cast<unsigned long long>(epoch & kEpochMask) << kEpochBits | (other_epoch & kEpochMask);
  }
  // True if operation `a` is not later than `b`. Both are truncated, or one of them.
  __device__ __forceinline__ static bool is_not_later(uint32_t a, uint32_t b) {
    return ((b - a) & (1u << (kEpochBits - 1))) == 0;
  }
};

// True if operations of two groups can run at the same time on their device.
__device__ __forceinline__ bool can_run_together(const DeviceGroups& list, const DeviceGroup& a, const DeviceGroup& b) {
  // Assumes that replays of a graph use the stream of all other work, because XLA has one stream for all programs.
  // Assumes the same for a group without a call.
  if (!load_acquire(&a.has_call) || !load_acquire(&b.has_call)) return false;
  if (load_relaxed(&a.is_in_graph) || load_relaxed(&b.is_in_graph)) return false;
  if (load_relaxed(&a.stream) == load_relaxed(&b.stream)) return false;
  return load_relaxed(&a.most_blocks) + load_relaxed(&b.most_blocks) <= load_relaxed(&list.device_sms);
}

// A rank that waits for this rank in an operation of another group.
struct DeadlockedPeer {
  int32_t rank;    // of this group; -1: none has been found
  uint32_t epoch;  // of the other group's operation
};

// Tells the ranks of another group that this rank cannot enter operation `next` of it.
__device__ __forceinline__ void tell_blocked(const DeviceGroup& other, uint32_t next, uint32_t id, uint32_t epoch) {
  const unsigned long long word = BlockedWord::pack(id, next, epoch);
#pragma unroll 1
  for (int32_t rank = 0; rank < other.num_ranks; ++rank) {
    unsigned long long* const there = &other.table->control[rank]->blocked[other.rank];
    if (rank != other.rank && load_relaxed(there) != word) store_relaxed(there, word);
  }
}

// A thread that has waited for long in the operation with this epoch calls it from time to time.
__device__ __noinline__ static DeadlockedPeer find_deadlocked_peer(const Peers& peers, uint32_t epoch) {
  const auto& table = static_cast<const RankTable&>(*peers.table);
  if (table.device_groups == nullptr) return {-1, 0};
  const DeviceGroups& list = *table.device_groups;
  const DeviceGroup& own_group = list.groups[table.index_in_device];
  const uint32_t num_entries = load_relaxed(&list.num_entries);
#pragma unroll 1
  for (uint32_t index = 0; index < num_entries; ++index) {
    const DeviceGroup& other = list.groups[index];
    if (!load_acquire(&other.is_open) || other.id == own_group.id) continue;
    if (can_run_together(list, own_group, other)) continue;
    const EntryWord entry = EntryWord::unpack(load_relaxed(&other.control->entry));
    if (entry.num_entered > 0) continue;  // this rank is in an operation of the other group, too
    const uint32_t next = entry.newest_epoch + 1;
    tell_blocked(other, next, own_group.id, epoch);
#pragma unroll 1
    for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
      unsigned long long* const word = &peers.control->blocked[rank];
      const unsigned long long found = load_relaxed(word);
      const BlockedWord blocked = BlockedWord::unpack(found);
      const bool waits_for_this_rank = BlockedWord::is_not_later(next, blocked.other_epoch);
      const bool cannot_come = BlockedWord::is_not_later(blocked.epoch, epoch);
      if (found == 0 || blocked.other_id != other.id || !waits_for_this_rank || !cannot_come) continue;
      if (atomic_cas_relaxed_sys(word, found, 0ull) != found) continue;  // another block has erased it
      unsigned long long* const erased = &peers.control->erased_blocked[rank];
      if (load_relaxed(erased) == found) return {rank, next};
      store_relaxed(erased, found);
    }
  }
  return {-1, 0};
}

}  // namespace jax_ep
