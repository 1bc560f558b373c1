// How the blocks of a launch enter an operation and leave it: epochs, roles, slots of the arena. The kernels are built
// on this file and do not handle epochs.
//
// An operation is one launch per rank, or two (split_phase.h): a start, which takes an epoch, and a done, which does
// the rest. All blocks of a launch call enter() and end(). The last warp of a block, the control warp, calls enter()
// for the block.
//
// CUDA may start the blocks of a launch in any order, and few at a time. So no block may wait for rows before all
// senders of its launch have entered: a block that waits keeps its SM, and could starve the sender. Senders have the
// first roles and wait for no rows. Blocks get their roles in the order in which they enter, except in the
// low-latency variant (roles.cuh). With work stealing, a sender that has sent its rows may receive, but only if
// all_have_entered() is true by then.
#pragma once

#include "ffi/cuda/roles.cuh"

namespace jax_ep {

// Loads a kernel's arguments into the constant cache; the warps share the cache lines. Without this, each argument
// would be loaded at its first use, one after another, which takes microseconds. All warps except the control warp call
// it as the first statement of the kernel. Meanwhile, the control warp enters. (An argument may begin within a line, so
// the last line of the last argument may be left out.)
template <typename... Args>
__device__ __forceinline__ void fetch_arguments(const Args&... args) {
  constexpr int32_t kLineBytes = 64;
  const int32_t num_warps = static_cast<int32_t>(blockDim.x / 32) - 1;
  int32_t lines_before = 0;  // the number of lines of all arguments before `arg`
  const auto fetch = [&](const auto& arg) {
    constexpr auto kLines = static_cast<int32_t>((sizeof(arg) + kLineBytes - 1) / kLineBytes);
    // The lines of all arguments go to the warps in turn. A negative `line` belongs to an earlier argument.
#pragma unroll 1
    for (int32_t line = warp_id() - lines_before; line < kLines; line += num_warps) {
      if (line >= 0) keep_alive(reinterpret_cast<const uint32_t*>(&arg)[line * kLineBytes / 4]);
    }
    lines_before += kLines;
  };
  (fetch(args), ...);
}

// The ids of a block's named barriers. Id 0 is __syncthreads(). A kernel may use the ids from kFirstBarrier on.
inline constexpr int32_t kWorkersBarrier = 1, kFirstBarrier = 2;

struct Epoch : Roles {
  __device__ bool is_worker() const { return static_cast<int32_t>(threadIdx.x) < num_worker_threads; }
  __device__ static bool is_control_warp() { return threadIdx.x >= blockDim.x - 32; }

  // A barrier of the block's workers.
  __device__ void sync_workers() const { named_barrier(kWorkersBarrier, num_worker_threads); }

  // Enters the operation: gets the epoch and the block's role, and waits until the operation's slot is free. The
  // control warp calls it, and the block meets at a barrier after it.
  //   kRoleByIndex  True: the block's role is its index (roles.cuh). False: the role is the block's ticket.
  //   sends(role)   True if a block with this role writes to peers. Such a block waits until every peer has read the
  //                 rows of the slot's former operation. Any other block waits only until this rank has read its rows
  //                 of that operation.
  //   num_senders   If positive, a block with an index of num_senders or more enters later: it first waits until
  //                 num_senders blocks have entered (await_entries). Not with kRoleByIndex.
  template <bool kRoleByIndex = false, typename Sends>
  __device__ __forceinline__ void enter(Sends sends, int32_t num_senders = 0) const {
    uint8_t* arena[kRankWords] = {};
    Control* control[kRankWords] = {};
    for_rank_of_lane(peers, [&](int w, int32_t peer) {
      arena[w] = peers.table->arena[peer];
      control[w] = peers.table->control[peer];
    });
    if (lane_id() == 0) {
      const bool is_later = num_senders > 0 && static_cast<int32_t>(blockIdx.x) >= num_senders;
      if (!kRoleByIndex && is_later) {
        publish();
        await_entries(state, num_senders);
      }
      if (takes_epoch()) {
        enter_epoch<kRoleByIndex>();
      } else {
        enter_started();
      }
      state.role = kRoleByIndex ? static_cast<int32_t>(blockIdx.x) : state.ticket;
      state.roles_to_take = 0;
    }
    for_each_word(peers, [&](int w) {
      state.table.arena[rank_of_lane(w)] = arena[w];
      state.table.control[rank_of_lane(w)] = control[w];
    });
    __syncwarp();
    if (!state.slot_is_free && !warp_has_failed()) {
      if (sends(state.role)) {
        wait_slots_free(state);
      } else if (call.phase != Phase::kStart && lane_id() == 0) {
        wait_own_slot_free(state);
      }
      __syncwarp();
    }
    if constexpr (kHasNetwork) {
      // Over a network, words may overtake one another. Some words of this launch replace words of the former launch
      // (`finished`, for example). So those of the former launch must arrive first.
      if (state.role == 0 && lane_id() == 0) order_words();
      __syncwarp();
    }
  }

  // Writes what operation_of() reads. It must run before any function that takes a State. (A block that awaits entries
  // runs it twice.)
  __device__ __forceinline__ void publish() const {
    state.peers = &peers;
    state.call = &call;
    state.result = result;
    state.num_worker_threads = num_worker_threads;
  }

  // Waits until `num_blocks` blocks of the launch have entered, but at most kBlocksEnterNs: if the other blocks cannot
  // start, this block must take one of the first tickets. The wait makes the blocks with the lowest indices senders.
  // GPUs start blocks with consecutive indices on SMs of different TPCs. (A TPC is a pair of SMs.) So most senders
  // share their TPC with a receiver, and not with another sender. With many rows, this is faster.
  __device__ __noinline__ static void await_entries(State& state, int32_t num_blocks) {
    const auto op = operation_of<Epoch>(state);
    const uint64_t start_ns = globaltimer_ns();
    while (op.num_entered() < num_blocks && globaltimer_ns() - start_ns < kBlocksEnterNs) poll_pause();
  }
  // The number of blocks that have entered. Call it only before this block enters: the count is reset after all blocks
  // have entered.
  __device__ int32_t num_entered() const {
    return static_cast<int32_t>(takes_epoch() ? EntryWord::unpack(load_relaxed(&own_control().entry)).num_entered
                                              : load_relaxed(&call.pending->num_entered));
  }

  // True for a whole operation and for a start. A done uses the epoch of its start.
  __device__ bool takes_epoch() const { return call.phase != Phase::kDone; }

  // Takes the next epoch, by the atomic addition that also counts this block as entered. All loads are issued before
  // the first result is used, and publish() runs while they are in flight.
  template <bool kRoleByIndex>
  __device__ __forceinline__ void enter_epoch() const {
    const uint32_t tag = EntryWord::tag(reinterpret_cast<unsigned long long>(result));
    const int32_t axis_index = *call.axis_index;
    const uint4 launches = load_unit(own_control().num_left);  // num_left[0], num_left[1], num_blocks[0], num_blocks[1]
    const unsigned long long word =
        atomic_add_relaxed_gpu(address_in_lane_0(&own_control().entry), EntryWord::step(tag));
    const uint32_t group_failed = load_relaxed(&own_control().failed);
    publish();
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
    // The block with role 0 checks the rank, because it notifies the peers. Without its notification, no peer completes
    // the operation. With roles by ticket, the block with ticket 0 checks last, below. So the other blocks do not fetch
    // the code of the check.
    if (kRoleByIndex && blockIdx.x == 0) check_rank(axis_index);
    if (state.ticket != 0) return;
    // The words at the other index belong to the former launch, and then to the next one, for which they are reset
    // here. All blocks of the former launch must have left.
    const bool has_former_left = epoch & 1 ? launches.x == launches.z : launches.y == launches.w;
    if (!has_former_left && !state.failed) fail_overlap();
    store_relaxed(&own_control().num_left[~epoch & 1], 0);
    store_relaxed(&own_control().role_counts[~epoch & 1], 0ull);
    if (newest_is_whole) store_relaxed(&own_control().finished[slot_of(epoch - 1)][peers.rank], epoch - 1);
    if (!kRoleByIndex) check_rank(axis_index);
  }

  // Fails the operation, because blocks of two launches are in operations of the group at the same time.
  __device__ void fail_overlap() const { fail(state, FailureReason::kOverlap, peers.rank, 1, 2); }

  // Writes the entry word for the next launch. The block that has entered last calls it, when all blocks of the launch
  // know its epoch.
  __device__ __forceinline__ void open_next_epoch() const {
    const uint32_t slot_bit = 1u << state.slot, others = state.whole_slots & ~(slot_bit | EntryWord::kNewestIsWhole);
    const uint32_t whole_slots = call.phase == Phase::kWhole ? others | slot_bit | EntryWord::kNewestIsWhole : others;
    store_relaxed(&own_control().num_blocks[state.epoch & 1], gridDim.x);
    store_relaxed(&own_control().entry, EntryWord::pack(state.epoch, whole_slots));
  }

  // Enters a done: it has the epoch of its start.
  __device__ __forceinline__ void enter_started() const {
    publish();
    state.entered = true;
    state.failed = load_relaxed(&own_control().failed) != 0;
    state.epoch = load_relaxed(&call.pending->epoch);
    state.slot = slot_of(state.epoch);
    state.slot_is_free = false;
    state.ticket = static_cast<int32_t>(atomic_add_relaxed_gpu(&call.pending->num_entered, 1));
  }

  __device__ __forceinline__ int32_t slot_of(uint32_t epoch) const { return epoch & (peers.layout.num_slots - 1); }

  __device__ __forceinline__ void check_rank(int32_t axis_index) const {
    if (!state.failed && axis_index != peers.rank)
      fail(state, FailureReason::kWrongRank, peers.rank, peers.rank, axis_index);
  }

  // Waits until this rank and every peer have read the rows of the slot's former operation. Before a peer has read its
  // rows, this rank must not write to the slot in the peer's arena. One warp calls it.
  __device__ __noinline__ static void wait_slots_free(State& state) {
    const auto op = operation_of<Epoch>(state);
    // This rank's own slot comes first. If a start was never done, the slot is in use on all ranks, and the failure
    // record must say kSlotTaken. It must not blame a peer.
    if (lane_id() == 0) wait_own_slot_free(state);
    __syncwarp();
    for_rank_of_lane(op.peers, [&](int, int32_t peer) {
      op.wait_for(peer, op.epoch_before(), [&] { return op.newest_known(peer); });
    });
  }

  // The epoch of the slot's former operation.
  __device__ uint32_t epoch_before() const { return state.epoch - peers.layout.num_slots; }
  // Returns the epoch of the newest operation of the slot whose rows `peer` has read, but at most epoch_before():
  // wait_for() compares for equality. (The peer's newest epoch may be that of this operation already. A peer that gets
  // no rows from this block may finish the operation before the block asks.)
  __device__ uint32_t newest_known(int32_t peer) const {
    const uint32_t finished = load_acquire(&own_control().finished[state.slot][peer]);
    return static_cast<int32_t>(finished - epoch_before()) >= 0 ? epoch_before() : finished;
  }

  // Waits until this rank has read its rows of the slot's former operation. Another launch of this rank may still be
  // reading them. Before that, this launch must not look for rows in the slot.
  __device__ __noinline__ static void wait_own_slot_free(State& state) {
    const auto op = operation_of<Epoch>(state);
    const auto newest = [&] { return op.newest_known(op.peers.rank); };
    op.wait_for(op.peers.rank, op.epoch_before(), newest, FailureReason::kSlotTaken);
  }

  // --- work stealing ------------------------------------------------------------------------------------------------

  using ClaimCounter = unsigned long long (Control::*)[kMaxSlots];  // claimed_items or claimed_padding
  // Sets a claim counter to `first`, the first item that can be claimed. Each thread calls it before its first claim().
  // Only the first of these calls changes the counter.
  __device__ __forceinline__ void open_claims(ClaimCounter counter, int32_t first) const {
    unsigned long long* const word = &(own_control().*counter)[state.slot];
    const unsigned long long seen = load_relaxed(word);
    if (seen >> 32 != state.epoch) atomic_cas_relaxed_gpu(word, seen, tagged(state.epoch, first));
  }
  // Claims the next item, and returns its number.
  __device__ __forceinline__ uint32_t claim(ClaimCounter counter) const {
    return static_cast<uint32_t>(atomic_add_relaxed_gpu(&(own_control().*counter)[state.slot], 1ull));
  }

  // True if all blocks of the launch have entered. Then a sender may wait for rows: no block of this launch needs the
  // sender's SM to start.
  __device__ __forceinline__ bool all_have_entered() const {
    if (!takes_epoch()) return load_relaxed(&call.pending->num_entered) >= gridDim.x;
    const EntryWord entry = EntryWord::unpack(load_relaxed(&own_control().entry));
    return entry.newest_epoch == state.epoch || entry.num_entered >= gridDim.x;
  }

  // Leaves the launch. All threads call it. poison() overwrites the results of a failed operation. The launch lasts
  // until its last block has left. So each thread loads what it needs before the barrier.
  template <typename Poison>
  __device__ __forceinline__ void end(Poison poison) const {
    const bool is_first_thread = threadIdx.x == 0, counts_block = is_first_thread && takes_epoch() && state.entered;
    const bool entered_last = state.ticket + 1 == gridDim.x;
    uint32_t* const num_left = address_in_lane_0(&own_control().num_left[state.epoch & 1]);  // valid in thread 0
    const bool failed = __syncthreads_or(state.failed) != 0;
    stamp(Stamp::kWarpsDone);
    if (counts_block && entered_last) open_next_epoch();
    if (failed) poison_once(poison);
    // Relaxed: a release would wait until all stores have been performed. The end of the kernel waits for them anyway.
    if (counts_block) atomic_add_relaxed_gpu(num_left, 1);
    if (call.phase == Phase::kDone) leave_done();
    stamp(Stamp::kLeft);
  }

  // Poisons the results of a failed operation. One of the blocks that have entered does so, after the others have left,
  // or after a bounded wait. A block that has not entered does so at once.
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
  __device__ uint32_t* poisoning() const { return &own_control().poisons[call.phase == Phase::kDone][state.slot]; }
  __device__ void await_others() const {
    const bool is_done = call.phase == Phase::kDone;
    const uint32_t* left = is_done ? &own_control().done_left[state.slot] : &own_control().num_left[state.epoch & 1];
    // The other blocks leave soon, because they see the failure, too. But if blocks of another launch have entered, the
    // count never becomes complete, so the wait is bounded.
    constexpr uint64_t kOthersLeaveNs = 1'000'000'000;
    const uint64_t start_ns = globaltimer_ns();
    while (load_acquire_gpu(left) != gridDim.x - 1 && globaltimer_ns() - start_ns < kOthersLeaveNs) {
      poll_pause();
    }
    // A block that left without seeing the failure has not waited for its stores. They are performed within
    // microseconds.
    constexpr uint64_t kLandedNs = 50'000;
    const uint64_t all_left = globaltimer_ns();
    while (globaltimer_ns() - all_left < kLandedNs) poll_pause();
  }

  // Leaves a done. The last block tells all peers that this rank has read the rows of the slot. For a whole operation,
  // the next launch tells them (tell_former_finished).
  __device__ __forceinline__ void leave_done() const {
    if (threadIdx.x >= 32) return;
    bool is_last = false;
    if (threadIdx.x == 0) {
      is_last = atomic_add_acq_rel_gpu(&own_control().done_left[state.slot], 1) + 1 == gridDim.x;
      if (is_last) {
        store_relaxed(&own_control().done_left[state.slot], 0);
        store_release(&own_control().finished[state.slot][peers.rank], state.epoch);
      }
    }
    is_last = __any_sync(kAllLanes, is_last);
    __syncwarp();
    if (is_last) for_rank_of_thread(peers, 32, [&](int32_t peer) { tell_finished(state.epoch, peer); });
  }

  // Tells a peer that this rank has read an operation's rows. At most one kernel at a time may write a word of
  // `finished`: if two wrote it, the slower one could overwrite a newer epoch with an older one.
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
  // Tells all peers that this rank has read the rows of the former operation, if that was a whole one. Only a launch
  // that takes an epoch does this.
  __device__ __forceinline__ void tell_former_finished() const {
    const bool newest_was_whole = state.whole_slots & EntryWord::kNewestIsWhole;
    if (!takes_epoch() || !newest_was_whole) return;
    for_rank_of_thread(peers, num_worker_threads, [&](int32_t peer) { tell_finished(state.epoch - 1, peer); });
  }
};

}  // namespace jax_ep
