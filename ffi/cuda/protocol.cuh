// How the ranks of a group run one operation together: begin and end, bounded waits, and the words that ranks exchange.
// Kernels (scatter.cu, gather.cu) are written on top of this and know no epochs. Rows are the matter of units.cuh.
//
// An operation is one launch per rank, or two: a start, which sends what it can without waiting, and a done. All blocks
// of a launch begin() it and end() it. Blocks that send wait for no rows, and are started before those that receive: no
// block waits for one that cannot run yet, however few run at a time.
#pragma once

#include "ffi/arena.h"
#include "ffi/cuda/call.h"
#include "ffi/cuda/memory.cuh"

namespace jax_ep {

// Asks for a kernel's arguments all at once, each warp for a line of them: asked for one after the other, as they are
// used, they would take microseconds.
template <typename Args>
__device__ __forceinline__ void fetch_arguments(const Args& args) {
  constexpr int32_t kLineWords = 16;
  const int32_t word = threadIdx.x / 32 * kLineWords;
  if (word * 4 >= sizeof(Args)) return;
  asm volatile("" ::"r"(reinterpret_cast<const uint32_t*>(&args)[word]));
}

__device__ __forceinline__ unsigned long long tagged(uint32_t epoch, uint32_t value) {
  return static_cast<unsigned long long>(epoch) << 32 | value;
}

// What a block knows of the operation; in shared memory. Valid after the first barrier behind begin().
struct State {
  PeerTable table;
  uint32_t epoch;
  int32_t slot;
  bool sends;            // this block may write to the peers' slots
  bool entered;          // it takes part in the launch
  volatile bool failed;  // give up: the results will be poisoned
};

struct Operation {
  const Peers& peers;
  const Call& call;
  const void* result;  // tells launches apart that can be on the device together
  State& state;

  // Notes when this block got somewhere, in a build that looks at it (benchmarks/native).
  __device__ void stamp([[maybe_unused]] int32_t phase) const {
#ifdef JAX_EP_TIMELINE
    if (threadIdx.x != 0) return;
    asm volatile("" ::: "memory");
    peers.timeline[blockIdx.x * kTimelinePhases + phase] = globaltimer_ns();
    asm volatile("" ::: "memory");
#endif
  }

  __device__ Control& own() const { return *peers.control; }
  __device__ Control& control_of(int32_t rank) const { return *state.table.control[rank]; }
  __device__ unsigned long long* counts_at(int32_t rank, int32_t from) const {
    auto* base = reinterpret_cast<uint8_t*>(state.table.control[rank]);
    return reinterpret_cast<unsigned long long*>(
        base + counts_offset(state.slot, from, peers.num_ranks, peers.experts_per_rank));
  }

  // --- waiting and failing ------------------------------------------------------------------------------------------

  // Polls until probe() gives `expected`. False, and the operation has failed, when another rank has, or when the time
  // is up, for which `peer` is to blame.
  template <typename Probe>
  __device__ __forceinline__ bool wait_for(int32_t peer, uint32_t expected, Probe probe,
                                           FailureReason reason = FailureReason::kTimeout) const {
    uint64_t begun = 0;
    for (uint32_t polls = 1;; ++polls) {
      const uint32_t seen = probe();
      if (seen == expected) return true;
      if (state.failed) return false;
      if (polls % 64 == 0) begun = lose_patience(*this, begun, reason, peer, expected, seen);
    }
  }

  // Called now and then while waiting since `begun` (0: the first time); gives it back.
  __device__ __noinline__ static uint64_t lose_patience(Operation op, uint64_t begun, FailureReason reason,
                                                        int32_t peer, uint32_t expected, uint32_t seen) {
    const uint64_t now = globaltimer_ns();
    if (load_relaxed(&op.own().failed) != 0) op.state.failed = true;
    if (begun != 0 && now - begun > op.peers.timeout_ns) fail(op, reason, peer, expected, seen);
    return begun != 0 ? begun : now;
  }

  // Records the first failure of this rank and makes every rank of the group give up.
  __device__ __noinline__ static void fail(Operation op, FailureReason reason, int32_t peer, uint32_t expected,
                                           uint32_t seen) {
    const int32_t self = op.peers.rank;
    op.state.failed = true;
    if (atomicCAS(&op.own().failed, 0u, 1u + self) != 0) return;
    FailureRecord& record = *op.peers.failure;
    record.reason = static_cast<uint32_t>(reason);
    record.op = static_cast<uint32_t>(op.call.op);
    record.epoch = op.state.epoch;
    record.rank = self;
    record.peer = peer;
    record.expected = expected;
    record.seen = seen;
    __threadfence_system();
    *const_cast<volatile uint32_t*>(&record.valid) = 1;
#pragma unroll 1
    for (int32_t rank = 0; rank < op.peers.num_ranks; ++rank) {
      if (rank != self) store_relaxed(&op.peers.table->control[rank]->failed, 1u + self);
    }
  }

  // --- begin and end ------------------------------------------------------------------------------------------------

  // Enters the launch, with all threads; a barrier has to come before `state` is used. Only the last warp waits here, so
  // that the others may go on with what needs no epoch. With `to_send`, it is known behind the barrier that the peers
  // have read what their slots held.
  __device__ __forceinline__ void begin(bool to_send) const {
#pragma unroll 1
    for (int32_t rank = threadIdx.x; rank < peers.num_ranks; rank += blockDim.x) {
      state.table.arena[rank] = peers.table->arena[rank];
      state.table.control[rank] = peers.table->control[rank];
    }
    if (threadIdx.x < blockDim.x - 32) return;
    const bool is_done = call.half == Half::kDone;
    bool sends = to_send;
    uint32_t epoch = 0, failed = 0, is_free = 0;
    if (threadIdx.x == blockDim.x - 32) {
      is_free = is_done ? 0 : load_relaxed(&own().next_is_free);
      const uint4 head = is_done ? load_unit(&own()) : take_turn();
      failed = head.y;
      epoch = is_done ? call.ticket[0] : head.x + 1;
      if (is_done && sends) sends = call.ticket[1 + blockIdx.x] == 0;
      state.entered = true;
      state.failed = failed != 0;
      state.epoch = epoch;
      state.slot = epoch & (peers.layout.num_slots - 1);
      if (blockIdx.x == 0 && !failed) expect_rank(*call.axis_index);
      if (is_done && !failed) expect_not_done();
    }
    epoch = __shfl_sync(0xffffffffu, epoch, 0);
    failed = __shfl_sync(0xffffffffu, failed, 0);
    sends = __shfl_sync(0xffffffffu, sends, 0);
    is_free = __shfl_sync(0xffffffffu, is_free, 0);
    if (sends && !failed && !is_free) sends = claim_slots(epoch);
    if (threadIdx.x != blockDim.x - 32) return;
    state.sends = sends;
    if (call.half != Half::kStart) return;
    if (blockIdx.x == 0) call.ticket[0] = static_cast<int32_t>(epoch);
    call.ticket[1 + blockIdx.x] = sends;
  }

  // Launches that take a new epoch take turns, should XLA let them run at once. Gives the first unit of the control
  // memory as it was when no other launch was in: the newest epoch, and whether the group has failed.
  //
  // Both are asked for at once, for time; an answer from before the turn is seen by the owner in it.
  __device__ __forceinline__ uint4 take_turn() const {
    const auto self = reinterpret_cast<unsigned long long>(result);
    uint4 head = {};
    const auto is_own = [&](unsigned long long owner) { return owner == 0 || owner == self; };
    wait_for(peers.rank, 1, [&] {
      head = load_unit(&own());
      const unsigned long long before = take_over(&own().owner, self);
      return is_own(before) && is_own(static_cast<unsigned long long>(head.w) << 32 | head.z) ? 1 : 0;
    });
    return head;
  }

  __device__ __forceinline__ void expect_rank(int32_t axis_index) const {
    if (axis_index != peers.rank) fail(*this, FailureReason::kWrongRank, peers.rank, peers.rank, axis_index);
  }

  // A done whose epoch, or a later one, is through.
  __device__ __forceinline__ void expect_not_done() const {
    const uint32_t finished = load_relaxed(&own().finished[state.slot][peers.rank]);
    if (static_cast<int32_t>(finished - state.epoch) >= 0) {
      fail(*this, FailureReason::kNotStarted, peers.rank, state.epoch, finished);
    }
  }

  // Nobody writes to a peer's slot before the peer has read what it held last. A start never waits: where a peer has yet
  // to read, it leaves the sending to its done. With one warp.
  __device__ __forceinline__ bool claim_slots(uint32_t epoch) const {
    const uint32_t before = epoch - peers.layout.num_slots;
    const uint32_t* finished = own().finished[epoch & (peers.layout.num_slots - 1)];
    bool all = true;
#pragma unroll 1
    for (int32_t peer = threadIdx.x % 32; peer < peers.num_ranks; peer += 32) {
      const auto probe = [&] { return load_acquire(finished + peer); };
      if (call.half == Half::kStart) {
        all = all && probe() == before;
      } else {
        wait_for(peer, before, probe, peer == peers.rank ? FailureReason::kSlotTaken : FailureReason::kTimeout);
      }
    }
    return __all_sync(0xffffffffu, all);
  }

  // Leaves the launch, with all threads. The last block poisons the results of a failed operation, by poison(), and lets
  // the next operation in.
  template <typename Poison>
  __device__ __forceinline__ void end(Poison poison) const {
    __shared__ bool is_last, poisons;
    uint32_t* exited = &own().exited[call.half == Half::kDone ? 1 + state.slot : 0];
    __syncthreads();
    stamp(4);
    if (threadIdx.x == 0) {
      is_last = !state.entered || count_in_order(exited) + 1 == gridDim.x;
      if (is_last && load_relaxed(&own().failed) != 0) state.failed = true;
      poisons = is_last && state.failed;
      if (is_last && !poisons) leave(exited);
    }
    stamp(5);
    __syncthreads();
    if (!is_last) return;
    if (poisons) {
      poison();
      __syncthreads();
      if (threadIdx.x == 0 && state.entered) leave(exited);
    }
    // What waits for a done may be a start, which does not wait long. Else the next operation tells it soon enough.
    if (call.half == Half::kDone) tell_finished();
  }

  // What this launch and, through the count of those that left, all its blocks have done, comes before what it lets in.
  __device__ __forceinline__ void leave(uint32_t* exited) const {
    __threadfence();
    store_relaxed(exited, 0);
    if (call.half != Half::kStart) store_relaxed(&own().finished[state.slot][peers.rank], state.epoch);
    if (call.half == Half::kDone) return;
    store_relaxed(&own().newest_epoch, state.epoch);
    note_whether_next_is_free();
    store_release_here(&own().owner, 0);
  }

  // All peers have announced a whole operation that is done, so that they are through with the whole ones before it. Then
  // nobody has to ask.
  __device__ __forceinline__ void note_whether_next_is_free() const {
    const uint32_t slot = 1u << state.slot, next_slot = 1u << (state.epoch + 1 & (peers.layout.num_slots - 1));
    const bool is_whole = call.half == Half::kWhole;
    const uint32_t halves = load_relaxed(&own().halves);
    const uint32_t halves_now = is_whole ? halves & ~slot : halves | slot;
    store_relaxed(&own().next_is_free, is_whole && !(halves_now & next_slot));
    if (halves_now != halves) store_relaxed(&own().halves, halves_now);
  }

  // Tells the peers which slots this rank has read. With all threads, or the first ones.
  __device__ __forceinline__ void tell_finished() const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < peers.layout.num_slots * peers.num_ranks; i += blockDim.x) {
      const int32_t slot = i % peers.layout.num_slots, peer = i / peers.layout.num_slots;
      if (peer == peers.rank) continue;
      store_release(&control_of(peer).finished[slot][peers.rank], load_acquire(&own().finished[slot][peers.rank]));
    }
  }

  // --- words between ranks ------------------------------------------------------------------------------------------

  // Tells a peer which operation this rank is in.
  __device__ __forceinline__ void announce(int32_t peer) const {
    store_relaxed(&control_of(peer).op[state.slot][peers.rank], tagged(state.epoch, call.hash));
  }

  __device__ __forceinline__ void send_number(unsigned long long* word, int32_t number) const {
    store_relaxed(word, tagged(state.epoch, static_cast<uint32_t>(number)));
  }

  // Waits for a tagged word of a peer. 0 if the operation fails.
  __device__ __forceinline__ uint32_t expect_word(int32_t peer, const unsigned long long* word) const {
    const unsigned long long seen = load_relaxed(word);
    if (static_cast<uint32_t>(seen >> 32) == state.epoch) return static_cast<uint32_t>(seen);
    return await_word(*this, peer, word);
  }
  __device__ __noinline__ static uint32_t await_word(Operation op, int32_t peer, const unsigned long long* word) {
    unsigned long long seen = 0;
    const bool came = op.wait_for(peer, op.state.epoch, [&] {
      seen = load_relaxed(word);
      return static_cast<uint32_t>(seen >> 32);
    });
    return came ? static_cast<uint32_t>(seen) : 0;
  }
  __device__ __forceinline__ int32_t expect_number(int32_t peer, const unsigned long long* word) const {
    return static_cast<int32_t>(expect_word(peer, word));
  }

  // Waits for the peer's announcement; a peer in another operation is an error.
  __device__ __forceinline__ void expect_same_call(int32_t peer) const {
    const uint32_t seen = expect_word(peer, &own().op[state.slot][peer]);
    if (!state.failed && seen != call.hash) fail(*this, FailureReason::kOtherOp, peer, call.hash, seen);
  }
};

}  // namespace jax_ep
