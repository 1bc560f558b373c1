// The words that ranks exchange: which operation a rank is in, and how many rows it sends.
#pragma once

#include "ffi/cuda/epoch.cuh"

namespace jax_ep {

struct Operation : Epoch {
  // Notifies a peer: tells it which operation this rank is in.
  __device__ __forceinline__ void notify(int32_t peer) const {
    store_word(peers, peer, &control_of(peer).notified[state.slot][peers.rank], tagged(state.epoch, call.hash));
  }

  __device__ __forceinline__ void send_number(int32_t peer, unsigned long long* word, int32_t number) const {
    store_word(peers, peer, word, tagged(state.epoch, static_cast<uint32_t>(number)));
  }

  // Waits until a word from a peer has this operation's epoch, and returns its value; 0 if the operation fails. `seen`:
  // the word as the caller has loaded it.
  __device__ __forceinline__ uint32_t wait_word(int32_t peer, const unsigned long long* word,
                                                unsigned long long seen) const {
    if (static_cast<uint32_t>(seen >> 32) == state.epoch) return static_cast<uint32_t>(seen);
    return wait_word_slow(state, peer, word);
  }
  __device__ __forceinline__ uint32_t wait_word(int32_t peer, const unsigned long long* word) const {
    return wait_word(peer, word, load_relaxed(word));
  }
  __device__ __noinline__ static uint32_t wait_word_slow(State& state, int32_t peer, const unsigned long long* word) {
    const auto op = operation_of<Operation>(state);
    unsigned long long seen = 0;
    const bool came = op.wait_for(peer, op.state.epoch, [&] {
      seen = load_relaxed(word);
      return static_cast<uint32_t>(seen >> 32);
    });
    return came ? static_cast<uint32_t>(seen) : 0;
  }
  __device__ __forceinline__ int32_t wait_number(int32_t peer, const unsigned long long* word) const {
    return static_cast<int32_t>(wait_word(peer, word));
  }

  // Sends each rank the number of rows that it gets. The workers of one block call it. `more_slots`: 0, or
  // kSlotsWithRounds for the number of rows of earlier rounds.
  __device__ __forceinline__ void send_num_rows(const int32_t* num_rows, int32_t more_slots = 0) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < peers.num_ranks * num_copies(); i += num_worker_threads) {
      const int32_t peer = i / num_copies(), copy = i % num_copies();
      if (kHasNetwork && copy > 0 && is_remote(peers, peer)) continue;
      auto& words = control_of(peer).num_rows[state.slot + more_slots];
      send_number(peer, &words[num_rows_index(copy, peers.rank)], num_rows[peer]);
    }
  }
  // Waits for the number of rows that come from a rank.
  __device__ __forceinline__ int32_t wait_num_rows(int32_t source, int32_t more_slots = 0) const {
    const int32_t copy = kHasNetwork && is_remote(peers, source) ? 0 : blockIdx.x % num_copies();
    return wait_number(source, &own_control().num_rows[state.slot + more_slots][num_rows_index(copy, source)]);
  }
  __device__ __forceinline__ int32_t num_copies() const {
    return kRankWords == 1 ? kNumRowsCopies : num_rows_copies(peers.num_ranks);
  }

  // True for the warp of the first receiver that calls wait_peers(): the last worker warp but one. The last worker warp
  // may be the control warp, which polls other words at this time. (If there are several receivers, the first receiver
  // starts without a row.)
  __device__ __forceinline__ bool waits_for_peers() const { return warp_id() == max(num_worker_threads / 32 - 2, 0); }

  // Waits for the notifications of all ranks. One warp calls it. Fails the operation if a rank is in another operation.
  // Adds to the counters: the operation, in its last round, and the time waited for each rank. Returns false if the
  // operation has failed.
  __device__ __forceinline__ bool wait_notified() const {
    // The time for a rank of a later word begins when all ranks of the words before have come.
    for_rank_of_lane(peers, [&](int, int32_t peer) {
      if constexpr (kRankWords == 1) {
        wait_notified_by(peer);
      } else {
        wait_notified_by(state, peer);
      }
    });
    __syncwarp();
    if (state.failed) return false;
    if (lane_id() == 0 && call.round.is_last())
      red_add_relaxed_gpu(&own_control().counters.operations[static_cast<uint32_t>(call.op)], 1);
    return true;
  }
  __device__ __forceinline__ void wait_notified_by(int32_t peer) const {
    const unsigned long long* const notification = &own_control().notified[state.slot][peer];
    const uint64_t start_ns = globaltimer_ns();
    uint64_t looked = start_ns;  // when this lane polled last; after the loop, the clock shows the last lane's time
    unsigned long long seen = 0;
    const bool came = wait_for(peer, state.epoch, [&] {
      looked = globaltimer_ns();
      seen = load_relaxed(notification);
      return static_cast<uint32_t>(seen >> 32);
    });
    const uint32_t hash = static_cast<uint32_t>(seen);
    if (came && hash != call.hash) fail(state, FailureReason::kOtherOp, peer, call.hash, hash);
    red_add_relaxed_gpu(&own_control().counters.peer[peer].waited_ns, looked - start_ns);
  }
  // Not inlined: in a loop over words, it would take more registers than balance_kernel has.
  __device__ __noinline__ static void wait_notified_by(State& state, int32_t peer) {
    operation_of<Operation>(state).wait_notified_by(peer);
  }
  __device__ __noinline__ static void wait_peers(State& state) { operation_of<Operation>(state).wait_notified(); }
  // Calls wait_notified(). Also adds to the counters the rows that come from each rank, or go back to it. Their number
  // is num_rows[rank]; if `num_rows` is null, the rank sends the number. The last round counts the rows of all rounds.
  __device__ __noinline__ static void wait_peers(State& state, RowCounters PeerCounters::* direction,
                                                 const int32_t* num_rows, int32_t row_bytes) {
    const auto op = operation_of<Operation>(state);
    if (!op.wait_notified() || !op.call.round.is_last()) return;
    for_rank_of_lane(op.peers, [&](int, int32_t peer) {
      const int32_t rows = num_rows ? __ldg(num_rows + peer) : op.wait_num_rows(peer);
      RowCounters& counted = op.own_control().counters.peer[peer].*direction;
      red_add_relaxed_gpu(&counted.rows, rows);
      red_add_relaxed_gpu(&counted.bytes, int64_t{rows} * row_bytes);
    });
  }
};

// A barrier of a warp group whose warps are in one block. Returns true if the predicate holds for any of its threads.
// Warp groups use the barrier ids from `first_barrier` on. A warp group of one warp uses no named barrier, since a
// block has fewer ids than it may have warps.
__device__ __forceinline__ bool any_of_warp_group(const WarpGroup& warp_group, int32_t first_barrier, bool predicate) {
  if (warp_group.num_warps == 1) {
    __syncwarp();  // orders the lanes' memory accesses; the vote does not
    return __any_sync(kAllLanes, predicate);
  }
  const int32_t number = warp_id() / warp_group.num_warps;
  return named_barrier_or(first_barrier + number, warp_group.num_warps * 32, predicate);
}

}  // namespace jax_ep
