// How the blocks of a launch enter an operation and leave it: epochs, tickets, slots. Kernels are written on top of
// this and know no epochs.
//
// An operation is one launch per rank, or two (split_phase.h): a start, which takes an epoch, and a done, which does
// the rest. All blocks of a launch enter() it and end() it. A block's last warp, the control warp, enters for the
// block.
//
// Blocks get their roles in the order in which they enter, whatever the order in which CUDA starts them. Senders come
// first, and wait for no rows. So when a receiver has entered, all senders of its launch have entered, too: no block
// waits for one that cannot run yet, however few blocks run at a time. A sender that has sent its rows may receive, but
// only once all_have_begun().
#pragma once

#include "ffi/cuda/wait.cuh"

namespace jax_ep {

// Loads a kernel's arguments into the constant cache all at once, each warp some lines of them: loaded one after the
// other, as they are used, they would take microseconds. For all warps but the control warp, which enters meanwhile.
template <typename Args>
__device__ __forceinline__ void fetch_arguments(const Args& args) {
  constexpr int32_t kLineWords = 16;
  const int32_t num_warps = static_cast<int32_t>(blockDim.x / 32) - 1;
#pragma unroll 2
  for (int32_t word = warp_id() * kLineWords; word * 4 < sizeof(Args); word += num_warps * kLineWords) {
    keep_alive(reinterpret_cast<const uint32_t*>(&args)[word]);
  }
}

// The barriers of a block; __syncthreads() is 0. A kernel may use those from kFirstBarrier on.
inline constexpr int32_t kWorkersBarrier = 1, kFirstBarrier = 2;

struct Epoch : Waiting {
  __device__ bool is_worker() const { return static_cast<int32_t>(threadIdx.x) < num_workers; }
  __device__ static bool is_control_warp() { return threadIdx.x >= blockDim.x - 32; }

  // For workers: waits for one another.
  __device__ void sync_workers() const { named_barrier(kWorkersBarrier, num_workers); }

  // Enters the launch, with the control warp; the other warps wait for it at a barrier of the block. sends(ticket) says
  // whether the block writes to peers: then enter() waits until the peers have read what their slots held.
  template <typename Sends>
  __device__ __forceinline__ void enter(Sends sends) const {
    const int32_t peer = lane_id();
    uint8_t* const arena = peer < peers.num_ranks ? peers.table->arena[peer] : nullptr;
    Control* const control = peer < peers.num_ranks ? peers.table->control[peer] : nullptr;
    if (lane_id() == 0) {
      if (takes_epoch()) {
        enter_epoch();
      } else {
        enter_started();
      }
    }
    state.table.arena[peer] = arena;
    state.table.control[peer] = control;
    __syncwarp();
    if (!state.slot_is_free && !warp_has_failed()) {
      if (sends(state.ticket)) {
        claim_slots(*this);
      } else if (call.phase != Phase::kStart && peer == 0) {
        await_own_slot(*this);
      }
      __syncwarp();
    }
    if constexpr (kHasNetwork) {
      if (state.ticket == 0 && lane_id() == 0) order_words();
      __syncwarp();
    }
  }

  // Whether the launch is a whole operation, or a start. A done has the epoch of its start.
  __device__ bool takes_epoch() const { return call.phase != Phase::kDone; }

  // Takes the next epoch, and a ticket: both come with the answer to one atomic addition. All loads are issued before
  // the first answer is needed.
  __device__ __forceinline__ void enter_epoch() const {
    const uint32_t tag = EntryWord::tag(reinterpret_cast<unsigned long long>(result));
    const int32_t axis_index = *call.axis_index;
    const uint4 launches = load_unit(own().num_left);
    const unsigned long long word = atomic_add_relaxed_gpu(&own().entry, EntryWord::step(tag));
    const uint32_t group_failed = load_relaxed(&own().failed);
    const EntryWord entry = EntryWord::unpack(word);
    const uint32_t epoch = entry.newest_epoch + 1;
    const bool newest_is_whole = entry.whole_slots & EntryWord::kNewestIsWhole;
    state.epoch = epoch;
    state.slot = slot_of(epoch);
    state.ticket = static_cast<int32_t>(entry.num_entered);
    state.whole_slots = entry.whole_slots;
    state.slot_is_free = newest_is_whole && (entry.whole_slots >> slot_of(epoch) & 1);
    state.failed = group_failed != 0;
    state.entered = entry.is_alone(tag, gridDim.x);
    if (!state.entered) {
      state.ticket = 0;
      return fail_overlap();
    }
    if (state.ticket != 0) return;
    // The former launch has the other bit, and the next one, too.
    const bool has_former_left = epoch & 1 ? launches.x == launches.z : launches.y == launches.w;
    if (!has_former_left && !state.failed) fail_overlap();
    store_relaxed(&own().num_left[~epoch & 1], 0);
    if (newest_is_whole) store_relaxed(&own().finished[slot_of(epoch - 1)][peers.rank], epoch - 1);
    if (!state.failed) expect_rank(axis_index);
  }

  // Blocks of two launches are in operations of the group at the same time.
  __device__ void fail_overlap() const { fail(*this, FailureReason::kOverlap, peers.rank, 1, 2); }

  // For the block that has entered last: now all blocks of the launch know its epoch.
  __device__ __forceinline__ void open_next_epoch() const {
    const uint32_t slot = 1u << state.slot, others = state.whole_slots & ~(slot | EntryWord::kNewestIsWhole);
    const uint32_t whole_slots = call.phase == Phase::kWhole ? others | slot | EntryWord::kNewestIsWhole : others;
    store_relaxed(&own().num_blocks[state.epoch & 1], gridDim.x);
    store_relaxed(&own().entry, EntryWord::pack(state.epoch, whole_slots));
  }

  // A done, with the epoch of its start.
  __device__ __forceinline__ void enter_started() const {
    state.entered = true;
    state.failed = load_relaxed(&own().failed) != 0;
    state.epoch = call.pending->epoch;
    state.slot = slot_of(state.epoch);
    state.slot_is_free = false;
    state.ticket = static_cast<int32_t>(atomic_add_relaxed_gpu(&call.pending->blocks_begun, 1));
  }

  __device__ __forceinline__ int32_t slot_of(uint32_t epoch) const { return epoch & (peers.layout.num_slots - 1); }

  __device__ __forceinline__ void expect_rank(int32_t axis_index) const {
    if (axis_index != peers.rank) fail(*this, FailureReason::kWrongRank, peers.rank, peers.rank, axis_index);
  }

  // Nobody writes to a peer's slot before the peer has read what it held last. With one warp.
  __device__ __noinline__ static void claim_slots(Epoch op) {
    const int32_t peer = lane_id();
    if (peer == op.peers.rank) await_own_slot(op);  // if it is not free, the others' will not be, either
    __syncwarp();
    if (peer < op.peers.num_ranks) op.wait_for(peer, op.epoch_before(), [&] { return op.newest_known(peer); });
  }

  // The operation that had the slot before, once the peer has read its rows. (It may have read this one's by the time
  // that a block asks which has none for it.)
  __device__ uint32_t epoch_before() const { return state.epoch - peers.layout.num_slots; }
  __device__ uint32_t newest_known(int32_t peer) const {
    const uint32_t finished = load_acquire(&own().finished[state.slot][peer]);
    return static_cast<int32_t>(finished - epoch_before()) >= 0 ? epoch_before() : finished;
  }

  // Nor does a rank look for rows in a slot whose former operation, another launch's, has yet to read its own.
  __device__ __noinline__ static void await_own_slot(Epoch op) {
    const auto newest = [&] { return op.newest_known(op.peers.rank); };
    op.wait_for(op.peers.rank, op.epoch_before(), newest, FailureReason::kSlotTaken);
  }

  // --- work that blocks share ---------------------------------------------------------------------------------------

  // Before a thread's first claim(). The first `num_rows` rows are nobody's to claim. Of the threads that try, one
  // opens.
  __device__ __forceinline__ void open_claims(int32_t num_rows) const {
    unsigned long long* const word = &own().claimed[state.slot];
    const unsigned long long seen = load_relaxed(word);
    if (seen >> 32 != state.epoch) atomic_cas_relaxed_gpu(word, seen, tagged(state.epoch, num_rows));
  }
  // Gives each number once, in their order.
  __device__ __forceinline__ uint32_t claim() const {
    return static_cast<uint32_t>(atomic_add_relaxed_gpu(&own().claimed[state.slot], 1ull));
  }

  // Whether all blocks of the launch run, or have: what a block that has been here longer waits for is on its way.
  __device__ __forceinline__ bool all_have_begun() const {
    if (!takes_epoch()) return load_relaxed(&call.pending->blocks_begun) >= gridDim.x;
    const EntryWord entry = EntryWord::unpack(load_relaxed(&own().entry));
    return entry.newest_epoch == state.epoch || entry.num_entered >= gridDim.x;
  }

  // Leaves the launch, with all threads. poison() fills the results of a failed operation.
  template <typename Poison>
  __device__ __forceinline__ void end(Poison poison) const {
    __syncthreads();
    stamp(Stamp::kWarpsDone);
    const bool takes_epoch = this->takes_epoch();
    if (takes_epoch && state.entered && is_control_warp() && lane_id() == 0 && state.ticket + 1 == gridDim.x)
      open_next_epoch();
    if (state.failed) poison_once(poison);
    if (call.phase == Phase::kDone) {
      leave_done();
    } else if (takes_epoch && threadIdx.x == 0 && state.entered) {
      // A release would wait until all stores have been performed, which the end of the kernel does anyway.
      atomic_add_relaxed_gpu(&own().num_left[state.epoch & 1], 1);
    }
    stamp(Stamp::kLeft);
  }

  // One of the blocks that know of the failure poisons, when all others have left.
  template <typename Poison>
  __device__ __forceinline__ void poison_once(Poison poison) const {
    JAX_EP_SHARED(bool, poisons);
    if (threadIdx.x == 0) {
      poisons = !state.entered || atomic_exchange_relaxed_gpu(poisoning(), 1u) == 0;
      if (poisons && state.entered) await_others();
      if (kHasNetwork && poisons) record_failure_elsewhere();
    }
    __syncthreads();
    if (!poisons) return;
    poison();
    __syncthreads();
    if (threadIdx.x == 0 && state.entered) store_relaxed(poisoning(), 0);
  }
  __device__ uint32_t* poisoning() const { return &own().poisons[call.phase == Phase::kDone][state.slot]; }
  __device__ void await_others() const {
    const bool is_done = call.phase == Phase::kDone;
    const uint32_t* left = is_done ? &own().done_left[state.slot] : &own().num_left[state.epoch & 1];
    // They leave soon, as they know of the failure, too; but where blocks of another launch have entered, never all.
    constexpr uint64_t kSoonNs = 1'000'000'000;
    const uint64_t begun = globaltimer_ns();
    while (load_acquire_gpu(left) != gridDim.x - 1 && globaltimer_ns() - begun < kSoonNs) {
      poll_pause();
    }
    // A block that left without a failure has not waited for its stores: they land within microseconds.
    constexpr uint64_t kLandedNs = 50'000;
    const uint64_t all_left = globaltimer_ns();
    while (globaltimer_ns() - all_left < kLandedNs) poll_pause();
  }

  // The last block tells that the slot has been read; of what whole operations have read, the next operation tells.
  __device__ __forceinline__ void leave_done() const {
    if (threadIdx.x >= 32) return;
    bool is_last = false;
    if (threadIdx.x == 0) {
      is_last = atomic_add_acq_rel_gpu(&own().done_left[state.slot], 1) + 1 == gridDim.x;
      if (is_last) {
        store_relaxed(&own().done_left[state.slot], 0);
        store_release(&own().finished[state.slot][peers.rank], state.epoch);
      }
    }
    is_last = __any_sync(kAllLanes, is_last);
    __syncwarp();
    if (is_last && threadIdx.x < peers.num_ranks) tell_finished(state.epoch, threadIdx.x);
  }

  // Tells a peer that this rank has read an operation's rows. Each word has one kernel that tells it: of two that could
  // run at once, the slower one would take the other's back.
  __device__ __forceinline__ void tell_finished(uint32_t epoch, int32_t peer) const {
    if (peer == peers.rank) return;
    uint32_t* const word = &control_of(peer).finished[slot_of(epoch)][peers.rank];
    if (is_remote(peers, peer)) {
      fence_system();
      store_word(peers, peer, word, epoch);
    } else {
      store_release(word, epoch);
    }
  }
  // Of the operation before, if it was a whole one; a launch that takes an epoch does.
  __device__ __forceinline__ void tell_former_finished() const {
    const bool newest_was_whole = state.whole_slots & EntryWord::kNewestIsWhole;
    if (takes_epoch() && newest_was_whole && threadIdx.x < peers.num_ranks) {
      tell_finished(state.epoch - 1, threadIdx.x);
    }
  }
};

}  // namespace jax_ep
