// The emulator's replacement for CUDA's cuda_fp16.h: the type and the conversions that kernels use, with a GPU's bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

struct __half_raw {
  unsigned short x;
};

struct __half2_raw {
  unsigned short x, y;
};

struct __half {
  uint16_t __x;

  __half() = default;
  constexpr __half(__half_raw raw) : __x(raw.x) {}
  constexpr operator __half_raw() const { return {__x}; }
};

namespace emulator {

// Rounds |value| to nearest even, on a grid with `kMantissaBits` bits of mantissa and exponents of bias `kBias`.
// Returns the code without a sign. The grid has no largest code: the caller handles overflow. `magnitude` holds the
// bits of a finite float, without its sign.
template <int kMantissaBits, int kBias>
inline uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int kDroppedBits = 23 - kMantissaBits;
  constexpr int kLeastNormal = 127 - kBias + 1;  // as a float's exponent field
  const int exponent = static_cast<int>(magnitude >> 23);
  if (exponent >= kLeastNormal) {
    const uint32_t is_odd = magnitude >> kDroppedBits & 1;
    const uint32_t rounded = magnitude + (1u << (kDroppedBits - 1)) - 1 + is_odd;  // may carry into the exponent
    return (rounded >> kDroppedBits) - (uint32_t{kLeastNormal - 1} << kMantissaBits);
  }
  // A subnormal code counts steps of one size. All floats below half the least step round to zero.
  const int dropped_bits = kDroppedBits + kLeastNormal - exponent;
  if (exponent == 0 || dropped_bits > 24) return 0;
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t is_odd = mantissa >> dropped_bits & 1;
  return (mantissa + (1u << (dropped_bits - 1)) - 1 + is_odd) >> dropped_bits;
}

}  // namespace emulator

// Every NaN becomes 0x7fffffff.
inline float __half2float(__half half) {
  const uint32_t sign = uint32_t{half.__x} >> 15 << 31;
  const uint32_t exponent = half.__x >> 10 & 0x1fu, mantissa = half.__x & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1f) {
    bits = mantissa ? 0x7fffffffu : sign | 0x7f800000u;
  } else if (exponent > 0) {
    bits = sign | (exponent + 127 - 15) << 23 | mantissa << 13;
  } else {  // subnormal: the mantissa counts steps of 2**-24, exact in a float
    const float magnitude = static_cast<float>(mantissa) * (1.0f / (1 << 24));
    std::memcpy(&bits, &magnitude, sizeof(bits));
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to nearest even; overflows to infinity. Every NaN becomes 0x7fff.
inline __half __float2half_rn(float value) {
  constexpr uint32_t kInfinity = 0x7c00;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t magnitude = bits & 0x7fffffffu, sign = bits >> 31 << 15;
  if (magnitude > 0x7f800000u) return __half_raw{0x7fff};
  const uint32_t code = magnitude < 0x7f800000u ? emulator::round_magnitude<10, 15>(magnitude) : kInfinity;
  return __half_raw{static_cast<unsigned short>(sign | (code < kInfinity ? code : kInfinity))};
}
