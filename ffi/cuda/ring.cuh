// What a warp will read next, on its way to shared memory: bulk copies run ahead of it and take no registers, so that
// few warps have enough under way to keep memory busy.
#pragma once

#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/warp.cuh"
#include "ffi/plan.h"

namespace jax_ep {

// Pieces of at most `kPieceBytes`, of one warp, which are numbered, and taken in that order. Each lane asks for its
// own; else all lanes call together.
template <int kPieceBytes>
class PrefetchRing {
 public:
  // More was slower, perhaps as it leaves less of an SM's memory to its cache, where registers are spilled.
  static constexpr int32_t kPieces = 8 * 1024 / kPieceBytes;
  static constexpr int32_t kBytes = (kPieces + 1) * kPieceBytes;
  using Landed = uint64_t[kPieces];
  using LandedOfWarps = Landed[kMaxBlockWarps];

  __device__ __forceinline__ void open(uint8_t* pieces, Landed& landed) {
    pieces_ = keep_address(shared_address(pieces));
    landed_ = keep_address(shared_address(landed));
    if (lane_id() < kPieces) init_landed(landed_ + 8 * lane_id());
    publish_landed();
    __syncwarp();
  }

  // Room for a piece of the warp's own.
  __device__ __forceinline__ uint32_t spare() const { return pieces_ + kPieces * kPieceBytes; }

  // The number of the one that is taken next.
  __device__ __forceinline__ int32_t num_taken() const { return num_taken_; }

  __device__ __forceinline__ bool has_room_for(int32_t number) const { return number - num_taken_ < kPieces; }
  __device__ __forceinline__ void prefetch(int32_t number, const uint8_t* from, uint32_t bytes) const {
    const uint32_t place = static_cast<uint32_t>(number) % kPieces;
    copy_bulk(pieces_ + place * kPieceBytes, from, bytes, landed_ + 8 * place);
  }

  // Waits for the next piece, which stays until it is dropped, and gives its address. (It comes from this device:
  // nobody can keep it back.)
  __device__ __forceinline__ uint32_t next() const {
    const uint32_t place = num_taken_ % kPieces;
    await_landed(landed_ + 8 * place, num_taken_ / kPieces % 2);
    return pieces_ + place * kPieceBytes;
  }
  __device__ __forceinline__ void drop() {
    __syncwarp();  // all lanes have read it
    ++num_taken_;
  }

 private:
  uint32_t pieces_, landed_;  // addresses in shared memory
  uint32_t num_taken_ = 0;
};

}  // namespace jax_ep
