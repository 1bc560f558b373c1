// Finds two ranks that run the operations of two groups in different order. An operation keeps its stream and its SMs
// until all ranks have entered it. Assume that one rank is in an operation of group A, that another rank is in an
// operation of group B, and that each needs the other rank in its operation. Then both wait until the time-out.
//
// A rank that waits for long in an operation of group A tells the ranks of each other group B that it cannot enter B's
// next operation before this one ends (Control::blocked). If a rank of A has told it the same about this operation of A
// and that operation of B, the two ranks wait for each other. A circle of three groups is not found.
#pragma once

#include "ffi/cuda/device_groups.h"
#include "ffi/cuda/ptx.cuh"

namespace jax_ep {

// A word of Control::blocked: a rank cannot enter the operation with this epoch, because it is in an operation of the
// other group. All ranks have the same hash for that operation.
__device__ __forceinline__ unsigned long long blocked_word(uint32_t epoch, uint32_t other_group, uint32_t other_epoch) {
  const uint32_t operation_hash = (other_group * 0x9e3779b1u) ^ (other_epoch * 0x85ebca6bu);
  return static_cast<unsigned long long>(epoch) << 32 | operation_hash;
}

// True if operations of two groups can run at the same time on their device.
__device__ __forceinline__ bool can_run_together(const DeviceGroups& list, const DeviceGroup& a, const DeviceGroup& b) {
  if (load_relaxed(&a.is_in_graph) || load_relaxed(&b.is_in_graph)) return false;
  // A group without a call yet is expected on the stream of the other one: XLA has one for all programs.
  if (!load_relaxed(&a.has_call) || !load_relaxed(&b.has_call)) return false;
  if (load_relaxed(&a.stream) == load_relaxed(&b.stream)) return false;
  return load_relaxed(&a.most_sms) + load_relaxed(&b.most_sms) <= load_relaxed(&list.device_sms);
}

// A rank that waits for this rank in an operation of another group.
struct RankInOtherOrder {
  int32_t rank;    // of this group; -1: none has been found
  uint32_t epoch;  // of the other group's operation
};

// A thread that has waited for long in the operation with this epoch calls it from time to time.
__device__ __noinline__ static RankInOtherOrder find_rank_in_other_order(const Peers& peers, uint32_t epoch) {
  const auto& own = static_cast<const RankTable&>(*peers.table);
  if (own.device_groups == nullptr) return {-1, 0};
  const DeviceGroups& list = *own.device_groups;
  const DeviceGroup& own_group = list.groups[own.index_in_device];
  const uint32_t num_entries = load_relaxed(&list.num_entries);
#pragma unroll 1
  for (uint32_t index = 0; index < num_entries; ++index) {
    const DeviceGroup& other = list.groups[index];
    if (!load_acquire(&other.is_open) || other.id == own_group.id) continue;
    if (can_run_together(list, own_group, other)) continue;
    if (load_relaxed(&other.control->failed) != 0) continue;  // its operations end
    const uint32_t next = EntryWord::unpack(load_relaxed(&other.control->entry)).newest_epoch + 1;
    const unsigned long long next_is_blocked = blocked_word(next, own_group.id, epoch);
#pragma unroll 1
    for (int32_t rank = 0; rank < other.num_ranks; ++rank) {
      unsigned long long* const word = &other.table->control[rank]->blocked[other.rank];
      if (load_relaxed(word) != next_is_blocked) store_relaxed(word, next_is_blocked);
    }
    const unsigned long long this_is_blocked = blocked_word(epoch, other.id, next);
#pragma unroll 1
    for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
      if (load_relaxed(&peers.control->blocked[rank]) == this_is_blocked) return {rank, next};
    }
  }
  return {-1, 0};
}

}  // namespace jax_ep
