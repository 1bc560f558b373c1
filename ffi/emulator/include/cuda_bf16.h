// The emulator's replacement for CUDA's cuda_bf16.h: the type and the conversions that kernels use, with a GPU's bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t __x;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = uint32_t{x.__x} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to nearest even. Every NaN becomes 0x7fff.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  const uint32_t is_odd = bits >> 16 & 1;
  return {static_cast<uint16_t>((bits + 0x7fffu + is_odd) >> 16)};
}
