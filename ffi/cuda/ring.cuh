// What a warp will read next, on its way to shared memory: bulk copies run ahead of it and take no registers, so that
// few warps have enough under way to keep memory busy.
#pragma once

#include "ffi/cuda/memory.cuh"
#include "ffi/cuda/warp.cuh"

namespace jax_ep {

// Pieces of at most `kPieceBytes`, of one warp, which are taken in the order in which they were asked for. All lanes
// call together, and count alike.
template <int kPieceBytes>
class Ring {
 public:
  static constexpr int kBytes = 12 * 1024;  // 16 warps have less than an SM
  static constexpr int kPieces = kBytes / kPieceBytes;
  using Landed = uint64_t[kPieces];

  __device__ __forceinline__ void open(uint8_t* pieces, Landed& landed) {
    pieces_ = pieces;
    landed_ = landed;
    if (lane_id() < kPieces) init_landed(&landed_[lane_id()]);
    publish_landed();
    __syncwarp();
  }

  __device__ __forceinline__ bool is_full() const { return num_asked_ == kPieces; }
  __device__ __forceinline__ bool is_empty() const { return num_asked_ == 0; }

  __device__ __forceinline__ void ask(const uint8_t* from, uint32_t bytes) {
    int32_t place = next_ + num_asked_;
    if (place >= kPieces) place -= kPieces;
    if (lane_id() == 0) copy_bulk(pieces_ + place * kPieceBytes, from, bytes, &landed_[place]);
    ++num_asked_;
  }

  // Waits for the next piece, which stays until it is dropped. (It comes from this device: nobody can keep it back.)
  __device__ __forceinline__ const uint8_t* next() const {
    while (!has_landed(&landed_[next_], phase_)) {
    }
    return pieces_ + next_ * kPieceBytes;
  }
  __device__ __forceinline__ void drop() {
    __syncwarp();  // all lanes have read it
    --num_asked_;
    if (++next_ < kPieces) return;
    next_ = 0;
    phase_ ^= 1;
  }
  // A block must not end before what it has asked for has come.
  __device__ __forceinline__ void clear() {
#pragma unroll 1
    while (!is_empty()) next(), drop();
  }

 private:
  uint8_t* pieces_;
  uint64_t* landed_;
  int32_t next_ = 0, num_asked_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace jax_ep
