// The two patterns of a unit that have a meaning in the in-band protocol (ll_units.cuh): the sentinel and the escape.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

inline constexpr uint32_t kSentinelWord = kSentinelByte * 0x01010101u;

__device__ __forceinline__ uint4 sentinel_unit() {
  return make_uint4(kSentinelWord, kSentinelWord, kSentinelWord, kSentinelWord);
}
// True for the sentinel, the escape, and a few other units. Most other units take one comparison.
__device__ __forceinline__ bool begins_like_sentinel(uint4 u) { return u.x == kSentinelWord; }
__device__ __forceinline__ bool is_sentinel_but_last(uint4 u) {
  return u.x == kSentinelWord && u.y == kSentinelWord && u.z == kSentinelWord;
}
__device__ __forceinline__ bool is_sentinel(uint4 u) { return is_sentinel_but_last(u) && u.w == kSentinelWord; }
__device__ __forceinline__ bool is_escape(uint4 u) { return is_sentinel_but_last(u) && u.w == (kSentinelWord ^ 1); }
__device__ __forceinline__ uint4 escape() {
  return make_uint4(kSentinelWord, kSentinelWord, kSentinelWord, kSentinelWord ^ 1);
}

}  // namespace jax_ep
