// Arithmetic on rows: 16-byte vectors of elements, and the fp8 casts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "ffi/constants.h"
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

// Converts a vector's elements to float. For bfloat16, this takes one instruction per element.
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

// Loads a unit of y. With kReadsOnce, the L2 cache evicts the data first. It does not return a Vector, which would be
// copied: then each load would wait for the one before. It does not load `*unit`: after keep(), the compiler does
// not know that the address is global.
template <bool kReadsOnce>
__device__ __forceinline__ uint4 load_unit_of_y(const uint8_t* address) {
  const auto* const unit = reinterpret_cast<const uint4*>(address);
  return kReadsOnce ? __ldcs(unit) : __ldca(unit);
}

struct Fp8Scale {
  float scale, factor;  // x ~= q * scale, q = x * factor
};

// The scale and the factor of a block whose block_amax is `amax`. If amax is not finite, both are NaN, and so the whole
// block becomes NaN.
__device__ __forceinline__ Fp8Scale fp8_scale(float amax, Cast cast) {
  const float scale = __fmul_rn(amax, 1.0f / 448.0f);
  Fp8Scale finite;
  if (cast == Cast::kPowerOfTwo) {
    const uint32_t power = (__float_as_uint(scale) + 0x7fffffu) & ~0x7fffffu;
    finite = {__uint_as_float(power), __uint_as_float((254u << 23) - power)};
  } else {
    finite = {scale, __fdiv_rn(448.0f, amax)};
    // The largest value of E5M2 is 448 * 2**7. Multiplying by a power of two does not round.
    if (cast == Cast::kE5m2) finite = {scale * 0x1p-7f, finite.factor * 0x1p7f};
  }
  const float nan = __uint_as_float(0x7fc00000u);
  return isfinite(amax) ? finite : Fp8Scale{nan, nan};
}

// Two vectors of bfloat16, with the channels of one unit of fp8. The dispatch kernel casts only bfloat16 rows:
// jax_ep/_backends/cuda.py casts rows of other types. The combine kernel casts float32 sums.
using ChannelsOfUnit = Vector<__nv_bfloat16>[2];
constexpr int kChannelsPerUnit = 16;  // of fp8

constexpr int kLanesOfBlock = 8;  // consecutive lanes, which share a block of 128 channels of fp8

// The largest value of the lanes of a block. Whole warps call it.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t largest) {
#pragma unroll
  for (int offset = kLanesOfBlock / 2; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  return largest;
}

// Returns the largest |x| of a block of 128 channels, but at least 1e-4. A lane without channels passes zeros, or the
// channels of another lane of its block. If no lane has channels of the block, nobody uses the result. Whole warps call
// it. If a channel is NaN, the result is NaN. fmaxf would drop the NaN, so the function compares the bits of |x| as
// integers: numbers come in the order of their values, then infinity, then NaN.
__device__ __forceinline__ float block_amax(const ChannelsOfUnit& x) {
  uint32_t pairs = 0;  // the largest |x| of even and of odd channels: two of them share a word
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const uint32_t words[] = {x[v].bits.x, x[v].bits.y, x[v].bits.z, x[v].bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) pairs = __vmaxu2(pairs, words[w] & 0x7fff7fffu);
  }
  return __uint_as_float(largest_of_block(max(__float_as_uint(1e-4f), max(pairs << 16, pairs & 0xffff0000u))));
}

// The same for 16 float32 channels per lane. All eight lanes of the block get the result. Whole warps call it.
__device__ __forceinline__ float block_amax(const float (&x)[kChannelsPerUnit]) {
  uint32_t largest = __float_as_uint(1e-4f);
#pragma unroll
  for (int c = 0; c < kChannelsPerUnit; ++c) largest = max(largest, __float_as_uint(x[c]) & 0x7fffffffu);
  return __uint_as_float(largest_of_block(largest));
}

__device__ __forceinline__ uint4 multiply_and_cast(const float (&x)[kChannelsPerUnit], float factor, Cast cast) {
  union {
    __nv_fp8x2_storage_t pairs[8];
    uint4 unit;
  };
  const auto format = cast == Cast::kE5m2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto channel = [&](int c) { return __fmul_rn(x[c], factor); };
    pairs[i] = __nv_cvt_float2_to_fp8x2({channel(2 * i), channel(2 * i + 1)}, __NV_SATFINITE, format);  // NaN: 0x7f
  }
  return unit;
}

// Casts 16 channels to fp8 and returns the scale of their block in `scale`. Whole warps call it.
__device__ __forceinline__ uint4 cast_to_fp8(const float (&x)[kChannelsPerUnit], Cast cast, float& scale) {
  const Fp8Scale fp8 = fp8_scale(block_amax(x), cast);
  scale = fp8.scale;
  return multiply_and_cast(x, fp8.factor, cast);
}

// Casts N units per lane. In each group of kLanesOfBlock lanes, the lanes' i-th units are block i, and the group's i-th
// lane gets the scale of block i in `scale`. The `scale` of the group's other lanes is unspecified. Each lane computes
// one scale, so a call takes at most one division. Whole warps call it.
template <int N>
__device__ __forceinline__ void cast_to_fp8(const ChannelsOfUnit (&x)[N], Cast cast, uint4* units, float& scale) {
  static_assert(N <= kLanesOfBlock);
  float amax = block_amax(x[0]);
#pragma unroll
  for (int i = 1; i < N; ++i) {
    const float amax_of_unit = block_amax(x[i]);
    if (lane_id() % kLanesOfBlock == i) amax = amax_of_unit;
  }
  const Fp8Scale fp8 = fp8_scale(amax, cast);
  scale = fp8.scale;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float values[2][kChannelsPerUnit / 2], channels[kChannelsPerUnit];
#pragma unroll
    for (int v = 0; v < 2; ++v) to_floats(x[i][v], values[v]);
#pragma unroll
    for (int c = 0; c < kChannelsPerUnit; ++c) channels[c] = values[c / 8][c % 8];
    const float factor = N == 1 ? fp8.factor : __shfl_sync(kAllLanes, fp8.factor, i, kLanesOfBlock);
    units[i] = multiply_and_cast(channels, factor, cast);
  }
}

// Exchanges channels between lanes 2j and 2j + 1, so that together they access whole 32-byte sectors of a row of
// two-byte elements. Before, each lane has 16 consecutive channels of fp8, which become two consecutive units of the
// row. After, lane 2j has units 4j and 4j + 2, and lane 2j + 1 has units 4j + 1 and 4j + 3. Both lanes have the same
// scale. Whole warps call it.
__device__ __forceinline__ uint4 pair_channels(const uint4& unit) {
  const bool is_odd = lane_id() % 2 != 0;
  const uint32_t first = __shfl_xor_sync(kAllLanes, is_odd ? unit.x : unit.z, 1);
  const uint32_t second = __shfl_xor_sync(kAllLanes, is_odd ? unit.y : unit.w, 1);
  return is_odd ? make_uint4(first, second, unit.z, unit.w) : make_uint4(unit.x, unit.y, first, second);
}
// After pair_channels(): the index of this lane's unit v (0 or 1) among the 64 units that a chunk of fp8 becomes.
__device__ __forceinline__ int32_t paired_unit(int32_t v) { return lane_id() / 2 * 4 + 2 * v + lane_id() % 2; }

// Converts a unit of fp8 to float32.
__device__ __forceinline__ void cast_from_fp8(uint4 unit, float scale, Cast cast, float (&x)[kChannelsPerUnit]) {
  const auto format = cast == Cast::kE5m2 ? __NV_E5M2 : __NV_E4M3;
  const auto* pairs = reinterpret_cast<const __nv_fp8x2_storage_t*>(&unit);
#pragma unroll
  for (int i = 0; i < kChannelsPerUnit / 2; ++i) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(pairs[i], format);
    x[2 * i] = __fmul_rn(__half2float(__half(__half_raw{pair.x})), scale);
    x[2 * i + 1] = __fmul_rn(__half2float(__half(__half_raw{pair.y})), scale);
  }
}

// Replaces a GPU's NaN by NumPy's NaN in a word of two bfloat16. A GPU's arithmetic sets all bits of a NaN but the
// sign, so its NaN is the largest signed integer. NumPy's NaN is larger than any number and infinity.
__device__ __forceinline__ uint32_t with_numpy_nan(uint32_t word) { return __vmins2(word, 0x7fc07fc0u); }

// Converts a unit of fp8 to bfloat16. Every NaN has NumPy's bits, as on the other backends.
__device__ __forceinline__ void cast_from_fp8(uint4 unit, float scale, Cast cast, ChannelsOfUnit& x) {
  float values[kChannelsPerUnit];
  cast_from_fp8(unit, scale, cast, values);
#pragma unroll
  for (int i = 0; i < kChannelsPerUnit; ++i) x[i / 8].element[i % 8] = from_float<__nv_bfloat16>(values[i]);
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const uint4 raw = x[v].bits;
    x[v].bits = make_uint4(with_numpy_nan(raw.x), with_numpy_nan(raw.y), with_numpy_nan(raw.z), with_numpy_nan(raw.w));
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
