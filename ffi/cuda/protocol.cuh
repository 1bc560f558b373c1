// How the ranks of a group run one operation together: begin and end, bounded waits, and the words that ranks exchange.
// Kernels (scatter.cu, gather.cu) are written on top of this and know no epochs. Rows are the matter of units.cuh.
//
// An operation is one launch per rank, or two (halves.h): a start, which takes an epoch, and a done, which does the rest.
// All blocks of a launch enter() it and end() it. A block's last warp, the control warp, enters for the block.
//
// Blocks get their roles in the order in which they enter, whatever the order in which CUDA starts them. Senders come
// first, and wait for no rows. So when a receiver has entered, all senders of its launch have entered, too: no block
// waits for one that cannot run yet, however few blocks run at a time. A sender that has sent its rows may receive, but
// only once all_have_begun().
#pragma once

#include "ffi/arena.h"
#include "ffi/cuda/call.h"
#include "ffi/cuda/network.cuh"
#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/warp.cuh"

namespace jax_ep {

// Asks for a kernel's arguments all at once, each warp for some lines of them: asked for one after the other, as they
// are used, they would take microseconds.
template <typename Args>
__device__ __forceinline__ void fetch_arguments(const Args& args) {
  constexpr int32_t kLineWords = 16;
#pragma unroll 2
  for (int32_t word = threadIdx.x / 32 * kLineWords; word * 4 < sizeof(Args); word += blockDim.x / 32 * kLineWords) {
    use(reinterpret_cast<const uint32_t*>(&args)[word]);
  }
}

__device__ __forceinline__ unsigned long long tagged(uint32_t epoch, uint32_t value) {
  return static_cast<unsigned long long>(epoch) << 32 | value;
}

// The barriers of a block; __syncthreads() is 0. A kernel may use those from kFirstBarrier on.
inline constexpr int32_t kWorkersBarrier = 1, kFirstBarrier = 2;

// What a block knows of the operation; in shared memory. The control warp writes it in enter().
struct State {
  PeerTable table;
  uint32_t epoch;
  int32_t slot;
  int32_t ticket;        // blocks of this launch that entered before: it decides the block's role
  uint32_t whole_slots;  // an EntryWord's, as this launch found it
  bool slot_is_free;     // on all ranks, without asking
  bool entered;          // no block of another launch has entered before: the epoch and the slot are this launch's own
  volatile bool failed;  // give up: the results will be poisoned
#ifdef JAX_EP_TIMELINE
  uint64_t begun;
#endif
};

struct Operation {
  const Peers& peers;
  const Call& call;
  const void* result;  // tells this launch from others: EntryWord::tag
  State& state;
  int32_t num_workers;  // threads of the block

  // Notes when this block got somewhere, in a build that looks at it (benchmarks/native). Phases: 0 begun, 1 in; of
  // scatter's senders 2 knows where its rows go, or has told how many come, 3 has sent; of its receivers 8 has looked
  // for a row, 2 knows where rows go, 3 has a row, 6 begins to write it, or a batch of it, 7 has; 4 all warps are done,
  // 5 out. What comes again is noted as it was last.
  __device__ void stamp([[maybe_unused]] int32_t phase) const {
#ifdef JAX_EP_TIMELINE
    if (threadIdx.x != 0) return;
    compiler_barrier();
    const uint64_t now = globaltimer_ns();
    if (phase == 0) {  // of which operation, is not known yet
      state.begun = now;
    } else {
      const uint32_t block = state.epoch % kTimelineOps * kTimelineBlocks + blockIdx.x;
      peers.timeline[block * kTimelinePhases + phase] = now;
      if (phase == 5) peers.timeline[block * kTimelinePhases] = state.begun;
    }
    compiler_barrier();
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
  // is up, for which `peer` is to blame, or peer().
  template <typename Peer, typename Probe>
  __device__ __forceinline__ bool wait_for(Peer peer, uint32_t expected, Probe probe,
                                           FailureReason reason = FailureReason::kTimeout) const {
    uint64_t deadline_ns = 0;
    for (uint32_t polls = 1;; ++polls) {
      const uint32_t seen = probe();
      if (seen == expected) return true;
      poll_pause();
      if (polls % 64 > 1) continue;  // few instructions between two looks
      if (state.failed) return false;
      if (polls % 64 == 0) deadline_ns = lose_patience(*this, deadline_ns, reason, blamed(peer), expected, seen);
    }
  }

  // The same until probe() holds; until then, the former epoch stands for what is seen.
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

  // Called at times while a thread waits. Fails the operation once `deadline_ns` has passed. Returns the deadline,
  // which it computes at the first call (`deadline_ns` is 0).
  __device__ __noinline__ static uint64_t lose_patience(Operation op, uint64_t deadline_ns, FailureReason reason,
                                                        int32_t peer, uint32_t expected, uint32_t seen) {
    const uint64_t now = globaltimer_ns();
    if (load_relaxed(&op.own().failed) != 0) op.state.failed = true;
    if (deadline_ns == 0) return op.deadline(now);
    if (now < deadline_ns) return deadline_ns;
    if (reason == FailureReason::kTimeout && op.state.entered) {
      op.expect_no_other_call();
      if constexpr (kHasNetwork) peer = op.silent_rank(peer);
    }
    fail(op, reason, peer, expected, seen);
    return deadline_ns;
  }

  // The deadline that all blocks of the operation share: its first long wait, plus the time-out. So a peer that is late
  // again and again cannot extend it. A block that has not entered yet has a deadline of its own.
  __device__ __forceinline__ uint64_t deadline(uint64_t now) const {
    constexpr int32_t kLogTickNs = 20;  // a millisecond, roughly
    if (!state.entered) return now + peers.timeout_ns;
    unsigned long long* const word = &own().first_wait[call.half == Half::kDone][state.slot];
    const uint32_t tick = static_cast<uint32_t>(now >> kLogTickNs) | 1;  // a word of 0 is none, also of epoch 0
    unsigned long long first = load_relaxed(word);
    if (first >> 32 != state.epoch || first == 0) {
      const unsigned long long before = atomic_cas_relaxed_gpu(word, first, tagged(state.epoch, tick));
      first = before == first ? tagged(state.epoch, tick) : before;
    }
    // Another block may have read its clock later than this one, and have written first.
    const auto waited_ticks = max(static_cast<int32_t>(tick - static_cast<uint32_t>(first)), 0);
    const uint64_t waited_ns = uint64_t{static_cast<uint32_t>(waited_ticks)} << kLogTickNs;
    return now + peers.timeout_ns - min(waited_ns, peers.timeout_ns);
  }

  // What does not come may be that of ranks in another operation.
  __device__ void expect_no_other_call() const {
#pragma unroll 1
    for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
      const unsigned long long word = load_relaxed(&own().op[state.slot][rank]);
      const uint32_t hash = static_cast<uint32_t>(word);
      if (word >> 32 == state.epoch && hash != call.hash) {
        fail(*this, FailureReason::kOtherOp, rank, call.hash, hash);
      }
    }
  }

  // Whom to blame for what does not come from `peer`: what it has sent may have to pass through a rank that is not in
  // the operation.
  __device__ int32_t silent_rank(int32_t peer) const {
#pragma unroll 1
    for (int32_t i = 0, rank = peer; i < peers.num_ranks; ++i, rank = rank + 1 == peers.num_ranks ? 0 : rank + 1) {
      if (load_relaxed(&own().op[state.slot][rank]) >> 32 != state.epoch) return rank;
    }
    return peer;
  }

  // Records the first failure of this rank and makes every rank of the group give up.
  __device__ __noinline__ static void fail(Operation op, FailureReason reason, int32_t peer, uint32_t expected,
                                           uint32_t seen) {
    const int32_t self = op.peers.rank;
    op.state.failed = true;
    if (atomic_cas_relaxed_sys(&op.own().failed, 0u, 1u + self) != 0) return;
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

  // Of a rank whose own record this process does not see: it may be on another host.
  __device__ __forceinline__ void record_failure_elsewhere() const {
    const uint32_t failed = load_relaxed(&own().failed);
    const bool is_known = load_relaxed(&peers.failure->valid) != 0;
    if (failed == 0 || failed == kClosed || failed == 1u + peers.rank || is_known) return;
    record_failure(FailureReason::kElsewhere, peers.rank, static_cast<int32_t>(failed - 1), 0, 0);
  }

  // Whether the operation has failed, the same for all lanes of a warp: each lane by itself may see it sooner or later.
  __device__ __forceinline__ bool warp_has_failed() const { return __any_sync(kAllLanes, state.failed); }

  // --- begin and end ------------------------------------------------------------------------------------------------

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
      } else if (call.half != Half::kStart && peer == 0) {
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
  __device__ bool takes_epoch() const { return call.half != Half::kDone; }

  // Takes the next epoch, and a ticket: both come with the answer to one atomic addition. All loads are issued before the
  // first answer is needed.
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
    const uint32_t whole_slots = call.half == Half::kWhole ? others | slot | EntryWord::kNewestIsWhole : others;
    store_relaxed(&own().num_blocks[state.epoch & 1], gridDim.x);
    store_relaxed(&own().entry, EntryWord::pack(state.epoch, whole_slots));
  }

  // A done, with the epoch of its start.
  __device__ __forceinline__ void enter_started() const {
    state.entered = true;
    state.failed = load_relaxed(&own().failed) != 0;
    state.epoch = call.ticket->epoch;
    state.slot = slot_of(state.epoch);
    state.slot_is_free = false;
    state.ticket = static_cast<int32_t>(count(&call.ticket->blocks_begun, 1));
  }

  __device__ __forceinline__ int32_t slot_of(uint32_t epoch) const { return epoch & (peers.layout.num_slots - 1); }

  __device__ __forceinline__ void expect_rank(int32_t axis_index) const {
    if (axis_index != peers.rank) fail(*this, FailureReason::kWrongRank, peers.rank, peers.rank, axis_index);
  }

  // Nobody writes to a peer's slot before the peer has read what it held last. With one warp.
  __device__ __noinline__ static void claim_slots(Operation op) {
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
  __device__ __noinline__ static void await_own_slot(Operation op) {
    const auto newest = [&] { return op.newest_known(op.peers.rank); };
    op.wait_for(op.peers.rank, op.epoch_before(), newest, FailureReason::kSlotTaken);
  }

  // --- work that blocks share ---------------------------------------------------------------------------------------

  // Before a thread's first claim(). The first `num_rows` rows are nobody's to claim.
  __device__ __forceinline__ void open_claims(int32_t num_rows) const {
    for (Work work : {Work::kRows, Work::kPadding}) {
      unsigned long long* const word = &own().claimed[static_cast<int32_t>(work)][state.slot];
      const unsigned long long seen = load_relaxed(word);
      if (seen >> 32 == state.epoch) continue;
      atomic_cas_relaxed_gpu(word, seen,
                             tagged(state.epoch, work == Work::kRows ? num_rows : 0));  // of those who try, one does it
    }
  }
  // Gives each number once, in their order.
  __device__ __forceinline__ uint32_t claim(Work work) const {
    return static_cast<uint32_t>(atomic_add_relaxed_gpu(&own().claimed[static_cast<int32_t>(work)][state.slot], 1ull));
  }

  // Whether all blocks of the launch run, or have: what a block that has been here longer waits for is on its way.
  __device__ __forceinline__ bool all_have_begun() const {
    if (!takes_epoch()) return load_relaxed(&call.ticket->blocks_begun) >= gridDim.x;
    const EntryWord entry = EntryWord::unpack(load_relaxed(&own().entry));
    return entry.newest_epoch == state.epoch || entry.num_entered >= gridDim.x;
  }

  // Leaves the launch, with all threads. poison() fills the results of a failed operation.
  template <typename Poison>
  __device__ __forceinline__ void end(Poison poison) const {
    __syncthreads();
    stamp(4);
    const bool takes_epoch = this->takes_epoch();
    if (takes_epoch && state.entered && is_control_warp() && lane_id() == 0 && state.ticket + 1 == gridDim.x)
      open_next_epoch();
    if (state.failed) poison_once(poison);
    if (call.half == Half::kDone) {
      leave_done();
    } else if (takes_epoch && threadIdx.x == 0 && state.entered) {
      count_release(&own().num_left[state.epoch & 1], 1);
    }
    stamp(5);
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
  __device__ uint32_t* poisoning() const { return &own().poisons[call.half == Half::kDone][state.slot]; }
  __device__ void await_others() const {
    const bool is_done = call.half == Half::kDone;
    const uint32_t* left = is_done ? &own().done_left[state.slot] : &own().num_left[state.epoch & 1];
    // They leave soon, as they know of the failure, too; but where blocks of another launch have entered, never all.
    constexpr uint64_t kSoonNs = 1'000'000'000;
    const uint64_t begun = globaltimer_ns();
    while (load_acquire_here(left) != gridDim.x - 1 && globaltimer_ns() - begun < kSoonNs) {
      poll_pause();
    }
  }

  // The last block tells that the slot has been read; of what whole operations have read, the next operation tells.
  __device__ __forceinline__ void leave_done() const {
    if (threadIdx.x >= 32) return;
    bool is_last = false;
    if (threadIdx.x == 0) {
      is_last = count_in_order(&own().done_left[state.slot], 1) + 1 == gridDim.x;
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
    if (is_far(peers, peer)) {
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

  // --- words between ranks ------------------------------------------------------------------------------------------

  // Tells a peer which operation this rank is in.
  __device__ __forceinline__ void announce(int32_t peer) const {
    store_word(peers, peer, &control_of(peer).op[state.slot][peers.rank], tagged(state.epoch, call.hash));
  }

  __device__ __forceinline__ void send_number(int32_t peer, unsigned long long* word, int32_t number) const {
    store_word(peers, peer, word, tagged(state.epoch, static_cast<uint32_t>(number)));
  }

  // Waits for a tagged word of a peer, of which one has been `seen`. 0 if the operation fails.
  __device__ __forceinline__ uint32_t expect_word(int32_t peer, const unsigned long long* word,
                                                  unsigned long long seen) const {
    if (static_cast<uint32_t>(seen >> 32) == state.epoch) return static_cast<uint32_t>(seen);
    return await_word(*this, peer, word);
  }
  __device__ __forceinline__ uint32_t expect_word(int32_t peer, const unsigned long long* word) const {
    return expect_word(peer, word, load_relaxed(word));
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

  // Tells each rank how many rows it gets, with a block.
  __device__ __forceinline__ void send_num_rows(const int32_t* num_rows) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < peers.num_ranks * kNumRowsCopies; i += num_workers) {
      const int32_t peer = i / kNumRowsCopies, copy = i % kNumRowsCopies;
      if (kHasNetwork && copy > 0 && is_far(peers, peer)) continue;
      send_number(peer, &control_of(peer).num_rows[state.slot][copy][peers.rank], num_rows[peer]);
    }
  }
  // How many come from a rank.
  __device__ __forceinline__ int32_t expect_num_rows(int32_t source) const {
    const int32_t copy = kHasNetwork && is_far(peers, source) ? 0 : blockIdx.x % kNumRowsCopies;
    return expect_number(source, &own().num_rows[state.slot][copy][source]);
  }

  // Whether this warp of the first receiver, which takes no rows if there are others, is to meet_peers(): the last but
  // one, as the last one may be the control warp, which looks at other words meanwhile.
  __device__ __forceinline__ bool meets_peers() const { return warp_id() == max(num_workers / 32 - 2, 0); }

  // Waits for the announcements of all ranks, with a warp, a lane for each; a rank in another operation is an error.
  // Counts the operation, how long each rank was waited for, and the rows that come from it (or go back to it), as many
  // as `num_rows` says or, if it is null, the rank.
  __device__ __noinline__ static void meet_peers(Operation op, RowCounters PeerCounters::* direction,
                                                 const int32_t* num_rows, int32_t row_bytes) {
    const int32_t peer = lane_id();
    Counters& counters = op.own().counters;
    if (peer < op.peers.num_ranks) {
      const unsigned long long* const announced = &op.own().op[op.state.slot][peer];
      const uint64_t begun = globaltimer_ns();
      uint64_t looked = begun;  // the time behind the loop would be that of the warp's last lane
      unsigned long long seen = 0;
      const bool came = op.wait_for(peer, op.state.epoch, [&] {
        looked = globaltimer_ns();
        seen = load_relaxed(announced);
        return static_cast<uint32_t>(seen >> 32);
      });
      const uint32_t hash = static_cast<uint32_t>(seen);
      if (came && hash != op.call.hash) fail(op, FailureReason::kOtherOp, peer, op.call.hash, hash);
      add(&counters.peer[peer].waited_ns, looked - begun);
    }
    __syncwarp();
    if (op.state.failed) return;
    if (peer == 0) add(&counters.operations[static_cast<uint32_t>(op.call.op)], 1);
    if (peer >= op.peers.num_ranks) return;
    const int32_t rows = num_rows ? __ldg(num_rows + peer) : op.expect_num_rows(peer);
    RowCounters& counted = counters.peer[peer].*direction;
    add(&counted.rows, rows);
    add(&counted.bytes, int64_t{rows} * row_bytes);
  }
};

// A barrier of a team whose warps are of one block, that says whether the predicate holds for any thread. Teams have
// the barriers from `first_barrier` on; there are not barriers for as many teams as have one warp.
__device__ __forceinline__ bool any_of_team(const Team& team, int32_t first_barrier, bool predicate) {
  if (team.num_warps == 1) {
    __syncwarp();  // which orders the lanes' memory accesses, as the vote does not
    return __any_sync(kAllLanes, predicate);
  }
  const int32_t number = warp_id() / team.num_warps;
  return named_barrier_or(first_barrier + number, team.num_warps * 32, predicate);
}

}  // namespace jax_ep
