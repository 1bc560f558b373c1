// A ring in shared memory, into which a warp prefetches data. Bulk copies run ahead of the warp and take no registers,
// so that few warps keep enough bytes in flight to keep memory busy.
#pragma once

#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/warp.cuh"
#include "ffi/plan.h"

namespace jax_ep {

// The ring of one warp. It holds pieces of at most `kPieceBytes`. Pieces are numbered, and the warp takes them in the
// order of numbers. A single lane may call has_room_for() and prefetch(); all lanes together call the other functions.
// The warp may use `kSpareBytes` behind the pieces as it likes.
template <int kPieceBytes, int kSpareBytes>
class PrefetchRing {
 public:
  // More pieces were slower, perhaps because they leave less of an SM's memory to the L1 cache, which holds spilled
  // registers.
  static constexpr int32_t kPieces = 8 * 1024 / kPieceBytes;
  static constexpr int32_t kBytesOfSpare = kSpareBytes;
  static constexpr int32_t kBytes = kPieces * kPieceBytes + kSpareBytes;
  using Landed = uint64_t[kPieces];
  using LandedOfWarps = Landed[kMaxBlockWarps];

  __device__ __forceinline__ void open(uint8_t* pieces, Landed& landed) {
    pieces_ = keep(shared_address(pieces));
    landed_ = keep(shared_address(landed));
    if (lane_id() < kPieces) init_landed(landed_ + 8 * lane_id());
    publish_landed();
    __syncwarp();
  }

  // The room behind the pieces.
  __device__ __forceinline__ uint32_t spare() const { return pieces_ + kPieces * kPieceBytes; }

  // The number of pieces that the warp has taken, which is also the number of the next piece.
  __device__ __forceinline__ int32_t num_taken() const { return num_taken_; }

  __device__ __forceinline__ bool has_room_for(int32_t number) const { return number - num_taken_ < kPieces; }
  template <bool kEvictsFirst>
  __device__ __forceinline__ void prefetch(int32_t number, const uint8_t* from, uint32_t bytes) const {
    const uint32_t stage = static_cast<uint32_t>(number) % kPieces;
    copy_bulk<kEvictsFirst>(pieces_ + stage * kPieceBytes, from, bytes, landed_ + 8 * stage);
  }

  // Waits for the next piece and returns its address. The piece stays in the ring until drop(). (The wait needs no
  // deadline: the copy is from this device's memory, so no peer can delay it. It does not wait for a peer's data.)
  __device__ __forceinline__ uint32_t next() const {
    const uint32_t stage = num_taken_ % kPieces;
    await_landed(landed_ + 8 * stage, num_taken_ / kPieces % 2);
    return pieces_ + stage * kPieceBytes;
  }
  __device__ __forceinline__ void drop() {
    __syncwarp();  // all lanes have read the piece
    ++num_taken_;
  }

 private:
  uint32_t pieces_, landed_;  // addresses in shared memory
  uint32_t num_taken_ = 0;
};

}  // namespace jax_ep
