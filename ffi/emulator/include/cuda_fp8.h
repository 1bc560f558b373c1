// The emulator's replacement for CUDA's cuda_fp8.h: the types and the conversions that kernels use, with a GPU's bits.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

// Rounds to nearest even. Overflow and infinity become the largest finite value with __NV_SATFINITE, else NaN in E4M3
// and infinity in E5M2; the sign stays. Every NaN becomes 0x7f.
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t saturation,
                                                __nv_fp8_interpretation_t format) {
  const uint32_t largest = format == __NV_E4M3 ? 0x7e : 0x7b;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t magnitude = bits & 0x7fffffffu, sign = bits >> 31 << 7;
  if (magnitude > 0x7f800000u) return 0x7f;
  uint32_t code = largest + 1;
  if (magnitude < 0x7f800000u) {
    code =
        format == __NV_E4M3 ? emulator::round_magnitude<3, 7>(magnitude) : emulator::round_magnitude<2, 15>(magnitude);
  }
  if (code > largest) code = saturation == __NV_SATFINITE ? largest : largest + 1;
  return static_cast<__nv_fp8_storage_t>(sign | code);
}

// The low byte is x, the high byte is y.
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 values, __nv_saturation_t saturation,
                                                     __nv_fp8_interpretation_t format) {
  const unsigned low = __nv_cvt_float_to_fp8(values.x, saturation, format);
  const unsigned high = __nv_cvt_float_to_fp8(values.y, saturation, format);
  return static_cast<__nv_fp8x2_storage_t>(low | high << 8);
}

// Exact. Every NaN becomes 0x7fff.
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t code, __nv_fp8_interpretation_t format) {
  const uint32_t magnitude = code & 0x7fu, sign = uint32_t{code} >> 7 << 15;
  if (format == __NV_E5M2) {  // the upper half of a __half
    return {static_cast<unsigned short>(magnitude > 0x7c ? 0x7fff : sign | magnitude << 8)};
  }
  if (magnitude == 0x7f) return {0x7fff};
  if (magnitude >= 8) return {static_cast<unsigned short>(sign | ((magnitude << 7) + ((15 - 7) << 10)))};
  // A subnormal code counts steps of 2**-9.
  const float value = static_cast<float>(magnitude) * (1.0f / (1 << 9));
  return {static_cast<unsigned short>(sign | __half_raw(__float2half_rn(value)).x)};
}

// The low byte of `codes` is the first code.
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t codes, __nv_fp8_interpretation_t format) {
  const auto half = [=](int shift) {
    return __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(codes >> shift), format).x;
  };
  return {half(0), half(8)};
}
