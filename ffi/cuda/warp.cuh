// A thread's position in its block, and collectives of a warp's lanes.
#pragma once

#include <cstdint>

namespace jax_ep {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ int32_t lane_id() { return static_cast<int32_t>(threadIdx.x % 32); }
__device__ __forceinline__ int32_t warp_id() { return static_cast<int32_t>(threadIdx.x / 32); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// The lanes whose number, of num_bits bits, is that of this lane. __match_any_sync takes longer if lanes have many
// different numbers.
__device__ __forceinline__ uint32_t lanes_with_same(int32_t number, int32_t num_bits) {
  uint32_t same = kAllLanes;
  for (int32_t bit = 0; bit < num_bits; ++bit) {
    const bool is_set = number >> bit & 1;
    const uint32_t set = __ballot_sync(kAllLanes, is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

}  // namespace jax_ep
