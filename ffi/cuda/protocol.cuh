// How the ranks of a group run one operation together: begin and end, claims of work, bounded waits, and the words that
// ranks exchange. Kernels (scatter.cu, gather.cu) are written on top of this and know no epochs.
//
// An operation is one launch per rank, or two: a start, which sends what it can without waiting, and a done. The blocks
// of a launch begin() together, claim work items in order, and end() it; the last block out tells all peers that this
// rank has read its slot. Items to send never wait for a peer's rows, and are all claimed before the first item to
// receive: no block waits for one that is not running yet, however few run at a time.
#pragma once

#include "ffi/arena.h"
#include "ffi/cuda/memory.cuh"

namespace jax_ep {

// What is static in a call and what identifies it.
struct CallId {
  OpKind op;
  Half half;
  uint32_t hash;              // of all that must be equal on all ranks
  unsigned long long launch;  // differs between launches that can be on the device together: a result's address
  const int32_t* axis_index;  // where XLA runs this rank
  int32_t* ticket;            // written by a start, read by its done
};

// One block's view of the operation; in shared memory.
struct Operation {
  uint32_t epoch;
  int32_t slot;
  bool sends;            // this launch sends rows, or has sent none that it could
  bool owned;            // the block takes part in the launch
  volatile bool failed;  // give up: the results will be poisoned
};

// A part of a block that works on a row together.
struct Team {
  int32_t index, lane, size;

  __device__ static Team of_size(int32_t size) {
    return {static_cast<int32_t>(threadIdx.x) / size, static_cast<int32_t>(threadIdx.x) % size, size};
  }
  __device__ void sync() const { named_barrier(index + 1, size); }
};

__device__ inline Control& own_control(const Peers& peers) { return *peers.control[peers.rank]; }

__device__ inline unsigned long long* counts_of(const Peers& peers, int32_t at_rank, int32_t slot, int32_t from) {
  auto* base = reinterpret_cast<uint8_t*>(peers.control[at_rank]);
  return reinterpret_cast<unsigned long long*>(base +
                                               counts_offset(slot, from, peers.num_ranks, peers.experts_per_rank));
}

__device__ inline unsigned long long tagged(uint32_t epoch, uint32_t value) {
  return static_cast<unsigned long long>(epoch) << 32 | value;
}

// Records the first failure of this rank and makes every rank of the group give up.
__device__ inline void fail(const Peers& peers, const CallId& call, Operation& operation, FailureReason reason,
                            int32_t peer, uint32_t expected, uint32_t seen) {
  operation.failed = true;
  if (atomicCAS(&own_control(peers).failed, 0u, 1u + peers.rank) != 0) return;
  FailureRecord& record = *peers.failure;
  record.reason = static_cast<uint32_t>(reason);
  record.op = static_cast<uint32_t>(call.op);
  record.epoch = operation.epoch;
  record.rank = peers.rank;
  record.peer = peer;
  record.expected = expected;
  record.seen = seen;
  __threadfence_system();
  *const_cast<volatile uint32_t*>(&record.valid) = 1;
  for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
    if (rank != peers.rank) store_relaxed(&peers.control[rank]->failed, 1u + peers.rank);
  }
}

// Waits until probe() returns `expected`; false if the operation failed meanwhile or the time is up.
template <typename Probe>
__device__ bool wait_for(const Peers& peers, const CallId& call, Operation& operation, int32_t peer, uint32_t expected,
                         Probe probe) {
  uint32_t seen = probe();
  if (seen == expected) return true;
  const uint64_t begun = globaltimer_ns();
  for (uint32_t polls = 1;; ++polls) {
    seen = probe();
    if (seen == expected) return true;
    if (polls % 64 != 0) continue;
    if (load_relaxed(&own_control(peers).failed) != 0) {
      operation.failed = true;
      return false;
    }
    if (globaltimer_ns() - begun > peers.timeout_ns) {
      fail(peers, call, operation, FailureReason::kTimeout, peer, expected, seen);
      return false;
    }
  }
}

// Settles, as the first thread of a launch, which epoch it is, and whether it sends.
//
// A start never waits: where a peer has yet to read what the slot held before, it leaves the sending to its done. A
// slot's operations are done in the order of their epochs; whoever comes out of turn is told so at once, as nobody else
// would.
__device__ inline void set_up(const Peers& peers, const CallId& call, Operation& operation) {
  Control& control = own_control(peers);
  const uint32_t epoch = call.half == Half::kDone ? call.ticket[0] : control.newest_epoch + 1;
  const uint32_t (&finished)[kMaxRanks] = control.finished[epoch % peers.layout.num_slots];
  const uint32_t before = epoch - peers.layout.num_slots;
  bool sends = true;
  operation.epoch = epoch;
  if (call.half == Half::kDone) {
    sends = call.ticket[1] == 0;
  } else {
    control.newest_epoch = epoch;
  }
  if (call.half == Half::kStart) {
    for (int32_t peer = 0; peer < peers.num_ranks; ++peer) sends = sends && load_acquire(&finished[peer]) == before;
    call.ticket[0] = static_cast<int32_t>(epoch);
    call.ticket[1] = sends;
  } else if (finished[peers.rank] != before) {
    const bool is_done = call.half == Half::kDone;
    fail(peers, call, operation, is_done ? FailureReason::kNotStarted : FailureReason::kSlotTaken, peers.rank, before,
         finished[peers.rank]);
  }
  control.epoch = epoch;
  control.sends = sends;
  control.next_item[0] = control.next_item[1] = control.exited = 0;
}

// Enters the launch; the first block to come sets it up. Launches of one group that XLA lets run at once take turns
// here. Call it with all threads.
__device__ inline void begin(const Peers& peers, const CallId& call, Operation& operation) {
  constexpr unsigned long long kBeingSetUp = 1;  // no address
  Control& control = own_control(peers);
  if (threadIdx.x == 0) {
    operation.failed = false;
    operation.owned = wait_for(peers, call, operation, peers.rank, 1, [&] {
      const unsigned long long owner = atomicCAS(&control.owner, 0ull, kBeingSetUp);
      if (owner == 0) {
        __threadfence();  // what the last launch left comes before what this one reads
        set_up(peers, call, operation);
        store_release(&control.owner, call.launch);
        return 1;
      }
      return load_acquire(&control.owner) == call.launch ? 1 : 0;
    });
    operation.epoch = *const_cast<volatile uint32_t*>(&control.epoch);
    operation.sends = *const_cast<volatile uint32_t*>(&control.sends);
    operation.slot = operation.epoch % peers.layout.num_slots;
    if (load_relaxed(&control.failed) != 0) operation.failed = true;
    if (!operation.failed && *call.axis_index != peers.rank) {
      fail(peers, call, operation, FailureReason::kWrongRank, peers.rank, peers.rank, *call.axis_index);
    }
  }
  __syncthreads();
  // Nobody writes to a peer's slot before the peer has read what it held last.
  if (!operation.failed && operation.sends && call.half != Half::kStart && threadIdx.x < peers.num_ranks) {
    wait_for(peers, call, operation, threadIdx.x, operation.epoch - peers.layout.num_slots,
             [&] { return load_acquire(&control.finished[operation.slot][threadIdx.x]); });
  }
  __syncthreads();
}

// Leaves the launch. The last block poisons the results of a failed operation, by poison(), and frees the slot, if it
// has been read, and the group. Call it with all threads.
template <typename Poison>
__device__ void end(const Peers& peers, const CallId& call, Operation& operation, Poison poison) {
  Control& control = own_control(peers);
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // this block's reads and writes come before the count
    is_last = !operation.owned || atomicAdd(&control.exited, 1u) + 1 == gridDim.x;
    __threadfence();  // the other blocks' come before what follows
    if (load_relaxed(&control.failed) != 0) operation.failed = true;
  }
  __syncthreads();
  if (!is_last) return;
  if (operation.failed) poison();
  __syncthreads();
  if (!operation.owned) return;
  if (call.half != Half::kStart && threadIdx.x < peers.num_ranks) {
    store_release(&peers.control[threadIdx.x]->finished[operation.slot][peers.rank], operation.epoch);
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release(&control.owner, 0ull);
}

// What the leader of a team finds out, known to the whole team. `shared` holds one word per team.
template <typename Find>
__device__ inline uint32_t ask_leader(const Team& team, uint32_t* shared, Find find) {
  team.sync();  // the last answer has been read
  if (team.lane == 0) shared[team.index] = find();
  team.sync();
  return shared[team.index];
}

// The next work item for a team; beyond every item once the operation has failed.
inline constexpr uint32_t kNoItem = 0xffffffffu;
__device__ inline uint32_t claim(const Peers& peers, const Operation& operation, const Team& team, uint32_t* shared,
                                 int32_t phase) {
  return ask_leader(team, shared,
                    [&] { return operation.failed ? kNoItem : atomicAdd(&own_control(peers).next_item[phase], 1u); });
}

// Tells a peer which operation this rank is in.
__device__ inline void announce(const Peers& peers, const CallId& call, const Operation& operation, int32_t peer) {
  store_relaxed(&peers.control[peer]->op[operation.slot][peers.rank], tagged(operation.epoch, call.hash));
}

// Waits for the peer's announcement; a peer in another operation is an error.
__device__ inline void expect_same_call(const Peers& peers, const CallId& call, Operation& operation, int32_t peer) {
  const unsigned long long* word = &own_control(peers).op[operation.slot][peer];
  unsigned long long seen = 0;
  const bool came = wait_for(peers, call, operation, peer, operation.epoch, [&] {
    seen = load_relaxed(word);
    return static_cast<uint32_t>(seen >> 32);
  });
  if (came && static_cast<uint32_t>(seen) != call.hash) {
    fail(peers, call, operation, FailureReason::kOtherOp, peer, call.hash, static_cast<uint32_t>(seen));
  }
}

// Waits for a number that a peer sends in a tagged word.
__device__ inline int32_t expect_number(const Peers& peers, const CallId& call, Operation& operation, int32_t peer,
                                        const unsigned long long* word) {
  unsigned long long seen = 0;
  const bool came = wait_for(peers, call, operation, peer, operation.epoch, [&] {
    seen = load_relaxed(word);
    return static_cast<uint32_t>(seen >> 32);
  });
  return came ? static_cast<int32_t>(static_cast<uint32_t>(seen)) : 0;
}

// A row in the memory of rank `at`, sent by rank `from`.
struct RowPlace {
  RowHeader* header;
  uint8_t* payload;
  uint32_t* flag;
};
__device__ inline RowPlace row_place(const Peers& peers, const Operation& operation, int32_t at, int32_t from,
                                     int32_t index) {
  const int64_t number = peers.layout.row_number(operation.slot, from, index);
  uint8_t* row = peers.arena[at] + peers.layout.row_offset(number);
  return {reinterpret_cast<RowHeader*>(row), row + peers.layout.header_bytes(),
          reinterpret_cast<uint32_t*>(peers.arena[at] + peers.layout.flag_offset(number))};
}

// Shows the receiver that a row is complete. Call it with the whole team after its last write: the barrier hands every
// thread's writes to the leader, whose release makes them visible before the flag.
__device__ inline void publish_row(const Operation& operation, const Team& team, uint32_t* flag) {
  team.sync();
  if (team.lane == 0) store_release(flag, operation.epoch);
}

// Waits, as one thread, for a row. Its reader must pass a barrier of the team, and read past L1 (load_arrived), which
// may hold what the slot held before.
__device__ inline bool wait_row(const Peers& peers, const CallId& call, Operation& operation, int32_t peer,
                                const uint32_t* flag) {
  return wait_for(peers, call, operation, peer, operation.epoch, [&] { return load_acquire(flag); });
}

template <typename T>
__device__ __forceinline__ T load_arrived(const T* p) {
  return __ldcg(p);
}

}  // namespace jax_ep
