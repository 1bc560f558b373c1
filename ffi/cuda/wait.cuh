// Bounded waits and failures. Every wait for a peer checks the clock and the word `failed`, with which ranks report a
// failure to one another.
#pragma once

#include "ffi/arena.h"
#include "ffi/cuda/call.h"
#include "ffi/cuda/network.cuh"
#include "ffi/cuda/other_groups.cuh"
#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/ranks.cuh"
#include "ffi/cuda/warp.cuh"

namespace jax_ep {

__device__ __forceinline__ unsigned long long tagged(uint32_t epoch, uint32_t value) {
  return static_cast<unsigned long long>(epoch) << 32 | value;
}

inline constexpr int32_t kNoRole = -1;

// The state of an operation in a block's shared memory. The control warp writes it in enter(). Later, any thread may
// set `failed`, and the low-latency variant may change `role` and `roles_to_take` (roles.cuh).
struct State {
  // The members of Waiting, for operation_of().
  const Peers* peers;
  const Call* call;
  const void* result;
  int32_t num_worker_threads;  // threads of the block; an extra control warp does not count
  struct {
    uint8_t* arena[kMaxRanksOfKernels];
    Control* control[kMaxRanksOfKernels];
  } table;  // a copy of Peers::table
  uint32_t epoch;
  int32_t slot;                       // the operation's slot of the arena
  int32_t ticket;                     // the number of blocks of this launch that entered before this block
  int32_t role;                       // LaunchPlan defines the roles; role 0 notifies; kNoRole: none
  int32_t roles_to_take;              // number of receivers whose roles this block takes
  uint32_t whole_slots;               // EntryWord::whole_slots, as this launch found it
  bool slot_is_free;                  // the slot is known to be free on all ranks
  bool entered;                       // the block has entered: the epoch is its launch's. False if launches overlap
  volatile bool failed;               // the operation has failed: the results will be poisoned
  volatile uint32_t looked_at_order;  // the tick of the newest check_order_of_groups()
#ifdef JAX_EP_TIMELINE
  uint64_t start_ns;
#endif
};

// Phases of a block, for timelines. Their numbers are those in the output of benchmarks/native/timeline.cu.
enum class Stamp : int32_t {
  kBegun = 0,      // the block runs, and has not entered yet
  kEntered = 1,    // the block has its role
  kRouted = 2,     // the block knows where its rows go, or has sent the numbers of rows
  kMoved = 3,      // a sender has sent a row; a receiver has a row
  kWarpsDone = 4,  // all warps of the block are done
  kLeft = 5,
  kWrites = 6,   // a receiver begins to write a batch of a row
  kWritten = 7,  // a receiver has written it
  kLooked = 8,   // a receiver has looked for its first row
};

// Returns the operation of this block. A function that is not inlined takes the state as its argument and calls
// operation_of(). An operation as the argument would take many more registers and instructions, and the kernel would
// pay for them even where it never makes the call.
template <typename Operation>
__device__ __forceinline__ Operation operation_of(State& state) {
  return Operation{*state.peers, *state.call, state.result, state, state.num_worker_threads};
}

struct Waiting {
  const Peers& peers;
  const Call& call;
  const void* result;  // its address identifies this launch (EntryWord::tag)
  State& state;
  int32_t num_worker_threads;  // threads of the block; an extra control warp does not count

  // Records the time of a phase of this block, in a build for benchmarks/native/timeline.cu. A later call for the same
  // phase overwrites it.
  __device__ void stamp([[maybe_unused]] Stamp phase) const {
#ifdef JAX_EP_TIMELINE
    if (threadIdx.x != 0) return;
    compiler_barrier();
    const uint64_t now = globaltimer_ns();
    if (phase == Stamp::kBegun) {  // the operation is not known yet
      state.start_ns = now;
    } else if (state.role != kNoRole) {
      const uint32_t block = state.epoch % kTimelineOps * kTimelineBlocks + state.role;
      peers.timeline[block * kTimelinePhases + static_cast<int32_t>(phase)] = now;
      if (phase == Stamp::kLeft) peers.timeline[block * kTimelinePhases] = state.start_ns;
    }
    compiler_barrier();
#endif
  }

  // The control memory of this rank, and of another rank.
  __device__ Control& own_control() const { return *peers.control; }
  __device__ Control& control_of(int32_t rank) const { return *state.table.control[rank]; }
  __device__ unsigned long long* counts_at(int32_t rank, int32_t from) const {
    auto* base = reinterpret_cast<uint8_t*>(state.table.control[rank]);
    return reinterpret_cast<unsigned long long*>(
        base + counts_offset(state.slot, from, peers.num_ranks, peers.counts_per_source));
  }

  // The credit of `from` for a track, in the memory of `rank`.
  __device__ unsigned long long* credit_at(int32_t rank, int32_t from, int32_t track) const {
    auto* base = reinterpret_cast<uint8_t*>(state.table.control[rank]);
    return reinterpret_cast<unsigned long long*>(base +
                                                 credits_offset(from, track, peers.num_ranks, peers.counts_per_source));
  }

  // Polls until probe() returns `expected`. Returns false if the operation has failed: another rank has failed, or the
  // time is up. The record of a time-out names `peer`, which is a rank or a function that returns one.
  template <typename Peer, typename Probe>
  __device__ __forceinline__ bool wait_for(Peer peer, uint32_t expected, Probe probe,
                                           FailureReason reason = FailureReason::kTimeout) const {
    uint64_t deadline_ns = 0;
    for (uint32_t polls = 1;; ++polls) {
      const uint32_t seen = probe();
      if (seen == expected) return true;
      poll_pause();
      if (polls % 64 > 1) continue;  // few instructions between two polls
      if (state.failed) return false;
      if (polls % 64 == 0) deadline_ns = check_deadline(state, deadline_ns, reason, blamed(peer), expected, seen);
    }
  }

  // Polls until probe() returns true. The record of a time-out shows the former epoch as the value seen.
  template <typename Peer, typename Probe>
  __device__ __forceinline__ bool wait_until(Peer peer, Probe probe) const {
    const uint32_t epoch = state.epoch;
    return wait_for(peer, epoch, [&] { return probe() ? epoch : epoch - 1; });
  }

  __device__ static int32_t blamed(int32_t peer) { return peer; }
  template <typename Peer>
  __device__ static int32_t blamed(const Peer& peer) {
    return peer();
  }

  // A waiting thread calls this from time to time, with the value that its former call returned. Fails the operation
  // once its deadline has passed. `deadline_ns` has one of three states:
  //   0            this is the first call of the wait;
  //   even number  the end of a short wait: most waits are short, and do not touch the word that the blocks share;
  //   odd number   the deadline that all blocks of the operation share.
  __device__ __noinline__ static uint64_t check_deadline(State& state, uint64_t deadline_ns, FailureReason reason,
                                                         int32_t peer, uint32_t expected, uint32_t seen) {
    const auto op = operation_of<Waiting>(state);
    constexpr uint64_t kShortWaitNs = 1'000'000;
    const uint64_t now = globaltimer_ns();
    if (load_relaxed(&op.own_control().failed) != 0) state.failed = true;
    if (deadline_ns == 0) return (now + min(op.peers.timeout_ns, kShortWaitNs)) & ~uint64_t{1};
    if (now < deadline_ns) {
      const bool waits_for_rank = reason == FailureReason::kTimeout && state.entered && !state.failed;
      if (deadline_ns % 2 == 1 && waits_for_rank) op.check_order_of_groups(now, deadline_ns);
      return deadline_ns;
    }
    if (deadline_ns % 2 == 0) return deadline(state, now) | 1;
    if (reason == FailureReason::kTimeout && state.entered) {
      op.check_no_other_call();
      if constexpr (kHasNetwork) peer = op.silent_rank(peer);
    }
    fail(state, reason, peer, expected, seen);
    return deadline_ns;
  }

  static constexpr int32_t kLogTickNs = 20;  // log2 of a tick in nanoseconds: a tick is about 1 ms

  // The deadline that all blocks of the operation share: the time of its first long wait, plus the time-out. So a peer
  // that is late several times cannot extend it. A block that has not entered yet has a deadline of its own.
  __device__ __noinline__ static uint64_t deadline(State& state, uint64_t now) {
    const auto op = operation_of<Waiting>(state);
    const uint64_t timeout_ns = op.peers.timeout_ns;
    if (!state.entered) return now + timeout_ns;
    unsigned long long* const word = &op.own_control().first_wait[op.call.phase == Phase::kDone][state.slot];
    const uint32_t tick = static_cast<uint32_t>(now >> kLogTickNs) | 1;  // never 0: a word of 0 means no wait
    unsigned long long first = load_relaxed(word);
    if (first >> 32 != state.epoch || first == 0) {
      const unsigned long long before = atomic_cas_relaxed_gpu(word, first, tagged(state.epoch, tick));
      first = before == first ? tagged(state.epoch, tick) : before;
    }
    // Another block may have read its clock later than this one, and have written first.
    const auto waited_ticks = max(static_cast<int32_t>(tick - static_cast<uint32_t>(first)), 0);
    const uint64_t waited_ns = uint64_t{static_cast<uint32_t>(waited_ticks)} << kLogTickNs;
    return now + timeout_ns - min(waited_ns, timeout_ns);
  }

  // Fails with kOtherOrder if a peer is in another group's operation, and waits there for this rank. Looks only after
  // kOrderPatienceNs or half the time-out, whichever is shorter; then about one thread per block looks in each tick.
  // A split-phase operation does not look: while it is in flight, this rank enters operations of other groups.
  static constexpr uint64_t kOrderPatienceNs = 1'000'000'000;
  __device__ void check_order_of_groups(uint64_t now, uint64_t deadline_ns) const {
    if (call.phase != Phase::kWhole) return;
    // The operation has waited for timeout_ns - (deadline_ns - now). Returns before the shorter of kOrderPatienceNs and
    // half the time-out is over.
    if (deadline_ns - now + min(kOrderPatienceNs, peers.timeout_ns / 2) >= peers.timeout_ns) return;
    const auto tick = static_cast<uint32_t>(now >> kLogTickNs);
    if (state.looked_at_order == tick) return;
    state.looked_at_order = tick;
    const DeadlockedPeer other = find_deadlocked_peer(peers, state.epoch);
    if (other.rank >= 0) fail(state, FailureReason::kOtherOrder, other.rank, state.epoch, other.epoch);
  }

  // Fails with kOtherOp if a rank is in another operation: then the awaited data never comes.
  __device__ void check_no_other_call() const {
#pragma unroll 1
    for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
      const unsigned long long word = load_relaxed(&own_control().notified[state.slot][rank]);
      const uint32_t hash = static_cast<uint32_t>(word);
      if (word >> 32 == state.epoch && hash != call.hash) {
        fail(state, FailureReason::kOtherOp, rank, call.hash, hash);
      }
    }
  }

  // Returns the rank to blame for data that does not come from `peer`: the first rank, from `peer` on, that has not
  // notified this operation. The data of `peer` may have to pass through that rank.
  __device__ int32_t silent_rank(int32_t peer) const {
#pragma unroll 1
    for (int32_t i = 0, rank = peer; i < peers.num_ranks; ++i, rank = rank + 1 == peers.num_ranks ? 0 : rank + 1) {
      if (load_relaxed(&own_control().notified[state.slot][rank]) >> 32 != state.epoch) return rank;
    }
    return peer;
  }

  // Records the first failure of this rank and makes every rank of the group give up.
  __device__ __noinline__ static void fail(State& state, FailureReason reason, int32_t peer, uint32_t expected,
                                           uint32_t seen) {
    const auto op = operation_of<Waiting>(state);
    const int32_t self = op.peers.rank;
    state.failed = true;
    if (atomic_cas_relaxed_sys(&op.own_control().failed, 0u, 1u + self) != 0) return;
    op.record_failure(reason, self, peer, expected, seen);
#pragma unroll 1
    for (int32_t rank = 0; rank < op.peers.num_ranks; ++rank) {
      if (rank != self) store_word(op.peers, rank, &op.peers.table->control[rank]->failed, 1u + self);
    }
  }

  __device__ __forceinline__ void record_failure(FailureReason reason, int32_t rank, int32_t peer, uint32_t expected,
                                                 uint32_t seen) const {
    FailureRecord& record = *peers.failure;
    store_relaxed(&record.reason, static_cast<uint32_t>(reason));
    store_relaxed(&record.op, static_cast<uint32_t>(call.op));
    store_relaxed(&record.epoch, state.epoch);
    store_relaxed(&record.rank, static_cast<uint32_t>(rank));
    store_relaxed(&record.peer, static_cast<uint32_t>(peer));
    store_relaxed(&record.expected, expected);
    store_relaxed(&record.seen, seen);
    store_release(&record.valid, 1);
  }

  // Records the failure of a rank whose own record this process does not see, because the rank may be on another host.
  __device__ __forceinline__ void record_failure_elsewhere() const {
    const uint32_t failed = load_relaxed(&own_control().failed);
    const bool is_known = load_relaxed(&peers.failure->valid) != 0;
    if (failed == 0 || failed == kClosed || failed == 1u + peers.rank || is_known) return;
    record_failure(FailureReason::kElsewhere, peers.rank, static_cast<int32_t>(failed - 1), 0, 0);
  }

  // True if any lane of the warp has seen that the operation has failed. All lanes get the same answer, although each
  // lane may see the failure at another time.
  __device__ __forceinline__ bool warp_has_failed() const { return __any_sync(kAllLanes, state.failed); }
};

}  // namespace jax_ep
