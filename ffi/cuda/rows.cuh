// Arithmetic on rows: 16-byte vectors of elements, the fp8 casts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "ffi/cuda/warp.cuh"
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

// Its elements; of bfloat16, with one instruction for each.
template <typename X>
__device__ __forceinline__ void to_floats(const Vector<X>& x, float (&values)[Vector<X>::kSize]) {
#pragma unroll
  for (int e = 0; e < Vector<X>::kSize; ++e) values[e] = to_float(x.element[e]);
}
template <>
__device__ __forceinline__ void to_floats(const Vector<__nv_bfloat16>& x, float (&values)[8]) {
  const uint32_t words[] = {x.bits.x, x.bits.y, x.bits.z, x.bits.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    values[2 * w] = __uint_as_float(words[w] << 16);
    values[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
  }
}

// `kReadsOnce`: what is read is the first to leave the L2 cache. (Not as a Vector, which would be copied: each load
// would wait for the one before. And not as `*unit`: the compiler no longer knows that a kept address is global.)
template <bool kReadsOnce>
__device__ __forceinline__ uint4 load_unit_of_y(const uint8_t* place) {
  const auto* const unit = reinterpret_cast<const uint4*>(place);
  return kReadsOnce ? __ldcs(unit) : __ldca(unit);
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

// Casts 16 channels; call it with whole warps. Eight neighbours share a block of 128 channels, and get its scale.
template <typename X>
__device__ __forceinline__ uint4 cast_to_fp8(const Vector<X> (&x)[sizeof(X)], Cast cast, float& scale) {
  constexpr int kSize = Vector<X>::kSize;
  float values[sizeof(X)][kSize];
  float amax = 0;
#pragma unroll
  for (int v = 0; v < sizeof(X); ++v) {
    to_floats(x[v], values[v]);
#pragma unroll
    for (int e = 0; e < kSize; ++e) amax = fmaxf(amax, fabsf(values[v][e]));
  }
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, offset));
  const Fp8Scale fp8 = fp8_scale(amax, cast);
  scale = fp8.scale;
  union {
    __nv_fp8x2_storage_t pairs[8];
    uint4 unit;
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto channel = [&](int c) { return __fmul_rn(values[c / kSize][c % kSize], fp8.factor); };
    pairs[i] = __nv_cvt_float2_to_fp8x2({channel(2 * i), channel(2 * i + 1)}, __NV_SATFINITE, __NV_E4M3);
  }
  return unit;
}

// The reverse, rounded to X.
template <typename X>
__device__ __forceinline__ void cast_from_fp8(uint4 unit, float scale, Vector<X> (&x)[sizeof(X)]) {
  const auto* q = reinterpret_cast<const __nv_fp8_storage_t*>(&unit);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float value = __half2float(__half(__nv_cvt_fp8_to_halfraw(q[i], __NV_E4M3)));
    x[i / Vector<X>::kSize].element[i % Vector<X>::kSize] = from_float<X>(__fmul_rn(value, scale));
  }
}

// Fills an array, if there is one, with a byte: the poison of failed operations. All ones are NaN in every
// floating-point format. Every array of an operation has whole 4-byte words.
__device__ __noinline__ static void fill_bytes(void* p, int64_t bytes, uint8_t value) {
  if (p == nullptr) return;
  const uint32_t word = value * 0x01010101u;
  for (int64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) static_cast<uint32_t*>(p)[i] = word;
}

}  // namespace jax_ep
