// A thread's position in its block, and a collective of a warp's lanes.
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

}  // namespace jax_ep
