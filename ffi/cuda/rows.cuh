// Arithmetic on rows: 16-byte vectors of elements, the fp8 casts, sums over a team.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "ffi/cuda/protocol.cuh"
#include "ffi/layout.h"

namespace jax_ep {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename X>
__device__ __forceinline__ X from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// 16 bytes of a row.
template <typename X>
union Vector {
  static constexpr int kSize = 16 / sizeof(X);
  uint4 bits;
  X element[kSize];
  __device__ Vector() {}
};

template <typename X>
__device__ __forceinline__ Vector<X> load_vector(const void* row, int64_t index) {
  Vector<X> v;
  v.bits = static_cast<const uint4*>(row)[index];
  return v;
}
template <typename X>
__device__ __forceinline__ Vector<X> load_arrived_vector(const void* row, int64_t index) {
  Vector<X> v;
  v.bits = load_arrived(static_cast<const uint4*>(row) + index);
  return v;
}

// The fp8 formats of jax_ep/_wires.py; the same bits.
enum class Cast : int32_t { kNone, kAmax, kPowerOfTwo };

struct Fp8Scale {
  float scale, factor;  // x ~= q * scale, q = x * factor
};

__device__ __forceinline__ Fp8Scale fp8_scale(float amax, Cast cast) {
  amax = fmaxf(amax, 1e-4f);
  const float scale = __fmul_rn(amax, 1.0f / 448.0f);
  if (cast == Cast::kAmax) return {scale, __fdiv_rn(448.0f, amax)};
  const uint32_t power = (__float_as_uint(scale) + 0x7fffffu) & ~0x7fffffu;
  const float rounded = __uint_as_float(power);
  return {rounded, isfinite(rounded) ? __uint_as_float((254u << 23) - power) : 1.0f / rounded};
}

// Casts one vector. The threads that share a block of 128 channels are neighbours in a warp: 32 in float32, 16 in the
// 16-bit types. Returns the block's scale.
template <typename X>
__device__ float cast_to_fp8(const Vector<X>& x, Cast cast, __nv_fp8_storage_t (&q)[Vector<X>::kSize]) {
  constexpr int kLanes = kChannelsPerScale / Vector<X>::kSize;
  float amax = 0;
  for (int i = 0; i < Vector<X>::kSize; ++i) amax = fmaxf(amax, fabsf(to_float(x.element[i])));
  const uint32_t mask = kLanes == 32 ? 0xffffffffu : 0xffffu << (threadIdx.x & 16);
  for (int offset = kLanes / 2; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(mask, amax, offset));
  const Fp8Scale scale = fp8_scale(amax, cast);
  for (int i = 0; i < Vector<X>::kSize; ++i) {
    q[i] = __nv_cvt_float_to_fp8(__fmul_rn(to_float(x.element[i]), scale.factor), __NV_SATFINITE, __NV_E4M3);
  }
  return scale.scale;
}

__device__ __forceinline__ float fp8_to_float(__nv_fp8_storage_t q) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(q, __NV_E4M3)));
}

// The sum of one float per thread of the team, in a fixed order, in every thread. `shared`: 32 floats of the team's
// own.
__device__ inline float team_sum(const Team& team, float x, float* shared) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  team.sync();
  if (team.lane % 32 == 0) shared[team.lane / 32] = x;
  team.sync();
  float total = 0;
  for (int warp = 0; warp < team.size / 32; ++warp) total += shared[warp];
  return total;
}

// Fills an array, if there is one, with a byte: the poison of failed operations. All ones are NaN in every
// floating-point format. Every array of an operation has whole 4-byte words.
__device__ inline void fill_bytes(void* p, int64_t bytes, uint8_t value) {
  if (p == nullptr) return;
  const uint32_t word = value * 0x01010101u;
  for (int64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) static_cast<uint32_t*>(p)[i] = word;
}

}  // namespace jax_ep
