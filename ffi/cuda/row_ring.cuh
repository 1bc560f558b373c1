// Rows of a long transfer between two ranks. They go through the arena's rows for this pair of ranks. A transfer may
// have more rows than the arena has for the pair. So a row of the arena may be used several times.
//
// The rows of a transfer have indices, and are divided among tracks: row `index` is row index / num_tracks of track
// index % num_tracks. One warp at each end handles a track, in order, with `depth` rows in flight. The receiver tells
// the sender how many rows of the track it has taken: a credit. The sender may store row n of a track only after row
// n - depth has been taken.
//
// A warp sends row n of its track, and then takes row n - depth + 1 of the same track, if these rows exist. If all
// ranks have done this for all rows before n, every rank can do it for row n. So no rank waits for ever, whatever ranks
// send to each other.
//
// Units travel by the in-band protocol (ll_units.cuh). A row has no header.
#pragma once

#include "ffi/cuda/ll_units.cuh"
#include "ffi/plan_balance.h"

namespace jax_ep {

struct RowRing {
  static constexpr int kBatch = 4;  // chunks that a warp handles at once

  const Operation& op;
  const int32_t num_tracks, depth;

  __device__ RowRing(const Operation& op, const CopyPlan& plan)
      : op(op), num_tracks(plan.num_tracks), depth(op.peers.layout.round_tokens / plan.num_tracks) {}

  // The rows of a track, if a transfer has num_rows rows.
  __device__ int32_t rows_of_track(int32_t track, int64_t num_rows) const {
    return num_rows <= track ? 0 : static_cast<int32_t>((num_rows - track + num_tracks - 1) / num_tracks);
  }
  // Row n of a track: its index in the transfer, and its place among the arena's rows for the pair of ranks.
  __device__ int64_t index(int32_t track, int32_t n) const { return int64_t{n} * num_tracks + track; }
  __device__ int32_t place(int32_t track, int32_t n) const { return n % depth * num_tracks + track; }

  // Calls send(n) for each row n that the track sends, and take(n) for each row that it takes, until the operation
  // fails.
  template <typename Send, typename Take>
  __device__ void run_track(int32_t num_sent, int32_t num_taken, Send send, Take take) const {
    const int32_t end = max(num_sent, num_taken > 0 ? num_taken + depth - 1 : 0);
    for (int32_t n = 0; n < end && !op.warp_has_failed(); ++n) {
      if (n < num_sent) send(n);
      const int32_t behind = n - depth + 1;
      if (behind >= 0 && behind < num_taken && !op.warp_has_failed()) take(behind);
    }
  }

  // --- sending ------------------------------------------------------------------------------------------------------

  // Waits until the ranks in `ranks` have taken row n - depth of the track: row n goes to the same row of the arena.
  // first_row: the first row of the track that goes to rank = lane_id(), or -1 if there was none before; this function
  // sets it. Rows before first_row need no credit.
  __device__ void await_credits(int32_t track, int32_t n, uint32_t ranks, int32_t& first_row) const {
    const int32_t rank = lane_id();
    if (ranks >> rank & 1) {
      const int32_t needed = n - depth + 1;
      if (first_row < 0) {
        first_row = n;
      } else if (first_row < needed) {
        const unsigned long long* const credit = op.credit_at(op.peers.rank, rank, track);
        op.wait_until(rank, [&] {
          const unsigned long long word = load_relaxed(credit);
          return word >> 32 == op.state.epoch && static_cast<int32_t>(static_cast<uint32_t>(word)) >= needed;
        });
        fence_system();  // the receiver has stored sentinels before the credit
      }
    }
    __syncwarp();
  }

  // Sends `bytes` bytes as row n of a track to the ranks in `ranks`. A warp calls it.
  __device__ void send(int32_t track, int32_t n, uint32_t ranks, const uint8_t* from, int32_t bytes) const {
    RowAddress row = {};  // at rank = lane_id()
    if (ranks >> lane_id() & 1) row = RowAddress(op, lane_id(), op.peers.rank, place(track, n));
    const int32_t num_chunks = jax_ep::num_chunks(bytes);
    for (int32_t first = 0; first < num_chunks; first += kBatch) {
      uint4 units[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t at = unit_in_row(first + i);
        if (at < bytes) units[i] = __ldcs(reinterpret_cast<const uint4*>(from + at));
      }
      Chunk chunks[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) chunks[i] = Chunk::of(units[i], unit_in_row(first + i) < bytes);
      for (uint32_t left = ranks; left != 0; left &= left - 1) {
        const int32_t peer = __ffs(static_cast<int>(left)) - 1;
        RowAddress to;
        to.begin = row.begin_of_lane(peer);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int32_t chunk = first + i;
          chunks[i].send(
              op, peer, to.unit(op, chunk), [&] { return row.escape_masks_of_lane(peer) + chunk; },
              unit_in_row(chunk) < bytes);
        }
      }
    }
  }

  // --- taking -------------------------------------------------------------------------------------------------------

  struct Addresses {
    uint8_t* first;
    int32_t bytes_left;  // from the first unit on
    __device__ bool has(int i) const { return i * kChunkBytes < bytes_left; }
    __device__ uint8_t* at(int i) const { return first + i * kChunkBytes; }
  };

  // Waits for the batch of row n that begins with chunk `first`, and takes it. `bytes`: of the row. A warp calls it.
  __device__ void take(int32_t track, int32_t n, int32_t source, int32_t first, int32_t bytes,
                       uint4 (&units)[kBatch]) const {
    const RowAddress row(op, op.peers.layout.row_number(op.state.slot, source, place(track, n)));
    const Addresses addresses = {row.unit(op, first), bytes - unit_in_row(first)};
    look_at_units(units, addresses);
    uint32_t escaped = 0;  // bits of this lane's escapes in the batch
    const auto resolve = [&](int i) {
      escaped |= 1u << i;
      return true_unit(op.state, source, row.escape_masks + first + i, lane_id());
    };
    take_units(op, [=](int) { return source; }, units, addresses, resolve, [] { return true; });
    escaped = __reduce_or_sync(kAllLanes, escaped);
    // Clears the masks: the next row in this row of the arena has the same epoch, and must not find them.
    if (lane_id() < kBatch && escaped >> lane_id() & 1) {
      store_relaxed(row.escape_masks + first + lane_id(), tagged(op.state.epoch - 1, 0));
    }
  }

  // Tells the ranks in `sources` that this rank has taken the rows 0 to n of the track.
  __device__ void give_credit(int32_t track, int32_t n, uint32_t sources) const {
    __syncwarp();
    const int32_t source = lane_id();
    if (sources >> source & 1) {
      fence_system();  // all lanes have stored sentinels before the credit
      store_relaxed(op.credit_at(source, op.peers.rank, track), tagged(op.state.epoch, static_cast<uint32_t>(n + 1)));
    }
  }

  __device__ static int32_t unit_in_row(int32_t chunk) { return chunk * kChunkBytes + lane_id() * kUnitBytes; }
};

}  // namespace jax_ep
