// Finds ranks that run the operations of two groups in different order. An operation keeps its stream and its SMs until
// all ranks have entered it. So if one rank is in an operation of group A, and another rank is in one of group B, and
// each needs the other's operation, both wait until the time-out.
//
// A rank that waits for long in an operation of group A writes to the ranks of each other group B that it cannot enter
// B's next operation before this one ends (Control::blocked). If a rank of A has written to it that A is blocked by
// that operation of B, then the two ranks wait for each other.
#pragma once

#include "ffi/cuda/device_groups.h"
#include "ffi/cuda/ptx.cuh"

namespace jax_ep {

// An operation has the same hash on all ranks.
__device__ __forceinline__ uint32_t hash_of(uint32_t group, uint32_t epoch) {
  return (group * 0x9e3779b1u) ^ (epoch * 0x85ebca6bu);
}

// A word of Control::blocked.
__device__ __forceinline__ unsigned long long word_of(uint32_t epoch, uint32_t hash) {
  return static_cast<unsigned long long>(epoch) << 32 | hash;
}

// True if operations of two groups can run at the same time on their device.
__device__ __forceinline__ bool can_run_together(const DeviceGroups& list, const DeviceGroup& a, const DeviceGroup& b) {
  if (load_relaxed(&a.is_in_graph) || load_relaxed(&b.is_in_graph)) return false;
  const unsigned long long stream_a = load_relaxed(&a.stream), stream_b = load_relaxed(&b.stream);
  // A group without a call yet is expected on the stream of the other one: XLA has one for all programs.
  if (stream_a == stream_b || stream_a == 0 || stream_b == 0) return false;
  return load_relaxed(&a.most_sms) + load_relaxed(&b.most_sms) <= static_cast<uint32_t>(list.device_sms);
}

// A rank of this group that waits for this rank in an operation of another group.
struct OtherOrder {
  int32_t rank;    // -1: none has been found
  uint32_t epoch;  // of the other group's operation
};

// A thread that has waited for long in the operation of this epoch calls it from time to time.
__device__ __noinline__ static OtherOrder find_other_order(const Peers& peers, uint32_t epoch) {
  const auto& own = static_cast<const RankTable&>(*peers.table);
  if (own.device_groups == nullptr) return {-1, 0};
  const DeviceGroups& list = *own.device_groups;
  const DeviceGroup& here = list.groups[own.index_in_device];
#pragma unroll 1
  for (const DeviceGroup& other : list.groups) {
    auto* const control =
        reinterpret_cast<Control*>(load_relaxed(reinterpret_cast<const unsigned long long*>(&other.control)));
    if (control == nullptr || other.id == here.id || can_run_together(list, here, other)) continue;
    const EntryWord entry = EntryWord::unpack(load_relaxed(&control->entry));
    if (entry.num_entered > 0) continue;  // this rank is in an operation of the other group, too
    const uint32_t next = entry.newest_epoch + 1;
    const unsigned long long in_this = word_of(next, hash_of(here.id, epoch));
#pragma unroll 1
    for (int32_t rank = 0; rank < other.num_ranks; ++rank) {
      unsigned long long* const blocked = &other.table->control[rank]->blocked[other.rank];
      if (load_relaxed(blocked) != in_this) store_relaxed(blocked, in_this);
    }
    const unsigned long long in_next = word_of(epoch, hash_of(other.id, next));
#pragma unroll 1
    for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
      if (load_relaxed(&peers.control->blocked[rank]) == in_next) return {rank, next};
    }
  }
  return {-1, 0};
}

}  // namespace jax_ep
