// Which experts travel between which ranks, from the replica slots of all ranks. In this file, a slot is a replica
// slot. A rank takes copies from one other rank only, its source.
//
// A home rank exports the experts that any rank copies from it. It numbers its exported experts in the order of
// experts. The rows of the exported experts, one expert after the other, are the rows of the home rank. Every rank
// knows the numbers of the experts that it exports, and of those that its source exports.
#pragma once

#include "ffi/cuda/control_words.cuh"
#include "ffi/cuda/replicate.h"

namespace jax_ep {

// The sizes of the lists, in shared memory.
struct CopyCounts {
  int32_t num_exported;            // experts of this rank that any rank copies
  int32_t num_exported_by_source;  // experts of the source that any rank copies
  int32_t source;                  // -1 for none
  uint32_t all_receivers;          // bits of the ranks that copy from this rank
};

struct CopyLists {
  static constexpr int32_t kNotCopied = -2, kCopiedElsewhere = -1;

  const Operation& op;
  const ReplicateArgs& args;
  CopyCounts& counts;
  // After build(), `exported` and `receivers` have an element per exported expert of this rank, and `slot_here` has one
  // per exported expert of the source. Until the compact_ steps of build(), `receivers` has an element per home expert
  // of this rank, and `slot_here` has one per home expert of the source.
  int32_t* const exported;    // the expert's number among the home experts
  uint32_t* const receivers;  // bits of the ranks that copy it
  int32_t* const slot_here;   // this rank's slot with the copy, or kCopiedElsewhere
  int32_t* const slots_of;    // [expert, R]: the slot of each home expert on each rank that copies it

  static constexpr int32_t words(int32_t num_home_experts, int32_t num_ranks) {
    return num_home_experts * (3 + num_ranks);
  }
  __device__ CopyLists(const Operation& op, const ReplicateArgs& args, CopyCounts& counts, int32_t* words)
      : op(op),
        args(args),
        counts(counts),
        exported(words),
        receivers(reinterpret_cast<uint32_t*>(words) + op.peers.num_home_experts()),
        slot_here(words + 2 * op.peers.num_home_experts()),
        slots_of(words + 3 * op.peers.num_home_experts()) {}

  // Makes the lists. The whole block calls it.
  __device__ void build() const {
    const Peers& peers = op.peers;
    const int32_t experts = peers.num_home_experts(), replicas = peers.replicas;
    const int32_t first = args.slots[peers.rank * replicas];
    const int32_t source = first >= 0 ? home_of(first) : -1;
    for (int32_t i = threadIdx.x; i < experts; i += blockDim.x) {
      receivers[i] = 0;
      slot_here[i] = kNotCopied;
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < peers.num_ranks * replicas; i += blockDim.x) {
      const int32_t expert = args.slots[i], rank = i / replicas, slot = i % replicas;
      if (expert < 0) continue;
      const int32_t home = home_of(expert), local = expert - home * experts;
      if (home == peers.rank) {
        atomicAdd(receivers + local, 1u << rank);  // a rank has one copy of an expert at most
        slots_of[local * peers.num_ranks + rank] = slot;
      }
      if (home == source) slot_here[local] = kCopiedElsewhere;
    }
    __syncthreads();
    for (int32_t slot = threadIdx.x; slot < replicas; slot += blockDim.x) {
      const int32_t expert = args.slots[peers.rank * replicas + slot];
      if (expert >= 0) slot_here[expert - source * experts] = slot;
    }
    __syncthreads();
    if (warp_id() == 0) compact_exported();
    if (warp_id() == blockDim.x / 32 - 1) compact_slots_here(source);
    __syncthreads();
  }

  __device__ int32_t slot_of(int32_t exported_number, int32_t rank) const {
    return slots_of[exported[exported_number] * op.peers.num_ranks + rank];
  }

 private:
  __device__ int32_t home_of(int32_t expert) const { return args.by_home_experts.quotient(expert); }

  // Moves the exported experts to the front, in order. A warp calls it.
  __device__ void compact_exported() const {
    const int32_t experts = op.peers.num_home_experts();
    int32_t count = 0;
    uint32_t all = 0;
    for (int32_t first = 0; first < experts; first += 32) {
      const int32_t expert = first + lane_id();
      const uint32_t ranks = expert < experts ? receivers[expert] : 0, copied = __ballot_sync(kAllLanes, ranks != 0);
      const int32_t position = count + __popc(copied & ((1u << lane_id()) - 1));
      __syncwarp();
      if (ranks != 0) {
        exported[position] = expert;
        receivers[position] = ranks;
      }
      count += __popc(copied);
      all |= ranks;
    }
    all = __reduce_or_sync(kAllLanes, all);
    if (lane_id() == 0) {
      counts.num_exported = count;
      counts.all_receivers = all;
    }
  }

  // Moves the slots of the experts that the source exports to the front, in the order of experts. A warp calls it.
  __device__ void compact_slots_here(int32_t source) const {
    const int32_t experts = op.peers.num_home_experts();
    int32_t count = 0;
    for (int32_t first = 0; first < experts; first += 32) {
      const int32_t expert = first + lane_id(), slot = expert < experts ? slot_here[expert] : kNotCopied;
      const uint32_t copied = __ballot_sync(kAllLanes, slot != kNotCopied);
      const int32_t position = count + __popc(copied & ((1u << lane_id()) - 1));
      __syncwarp();
      if (slot != kNotCopied) slot_here[position] = slot;
      count += __popc(copied);
    }
    if (lane_id() == 0) {
      counts.num_exported_by_source = count;
      counts.source = source;
    }
  }
};

}  // namespace jax_ep
