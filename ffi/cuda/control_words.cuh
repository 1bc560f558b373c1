// The words that ranks exchange: which operation a rank is in, and how many rows it sends.
#pragma once

#include "ffi/cuda/epoch.cuh"

namespace jax_ep {

struct Operation : Epoch {
  // Tells a peer which operation this rank is in.
  __device__ __forceinline__ void notify(int32_t peer) const {
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
      if (kHasNetwork && copy > 0 && is_remote(peers, peer)) continue;
      send_number(peer, &control_of(peer).num_rows[state.slot][copy][peers.rank], num_rows[peer]);
    }
  }
  // How many come from a rank.
  __device__ __forceinline__ int32_t expect_num_rows(int32_t source) const {
    const int32_t copy = kHasNetwork && is_remote(peers, source) ? 0 : blockIdx.x % kNumRowsCopies;
    return expect_number(source, &own().num_rows[state.slot][copy][source]);
  }

  // Whether this warp of the first receiver, which takes no rows if there are others, is to wait_peers(): the last but
  // one, as the last one may be the control warp, which looks at other words meanwhile.
  __device__ __forceinline__ bool waits_for_peers() const { return warp_id() == max(num_workers / 32 - 2, 0); }

  // Waits for the notification of all ranks, with a warp, a lane for each; a rank in another operation is an error.
  // Counts the operation, how long each rank was waited for, and the rows that come from it (or go back to it), as many
  // as `num_rows` says or, if it is null, the rank.
  __device__ __noinline__ static void wait_peers(Operation op, RowCounters PeerCounters::* direction,
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
      red_add_relaxed_gpu(&counters.peer[peer].waited_ns, looked - begun);
    }
    __syncwarp();
    if (op.state.failed) return;
    if (peer == 0) red_add_relaxed_gpu(&counters.operations[static_cast<uint32_t>(op.call.op)], 1);
    if (peer >= op.peers.num_ranks) return;
    const int32_t rows = num_rows ? __ldg(num_rows + peer) : op.expect_num_rows(peer);
    RowCounters& counted = counters.peer[peer].*direction;
    red_add_relaxed_gpu(&counted.rows, rows);
    red_add_relaxed_gpu(&counted.bytes, int64_t{rows} * row_bytes);
  }
};

// A barrier of a warp group whose warps are of one block, that says whether the predicate holds for any thread. Warp
// groups have the barriers from `first_barrier` on; there are not barriers for as many warp groups as have one warp.
__device__ __forceinline__ bool any_of_warp_group(const WarpGroup& warp_group, int32_t first_barrier, bool predicate) {
  if (warp_group.num_warps == 1) {
    __syncwarp();  // which orders the lanes' memory accesses, as the vote does not
    return __any_sync(kAllLanes, predicate);
  }
  const int32_t number = warp_id() / warp_group.num_warps;
  return named_barrier_or(first_barrier + number, warp_group.num_warps * 32, predicate);
}

}  // namespace jax_ep
