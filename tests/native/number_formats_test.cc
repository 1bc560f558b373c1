// The emulator's number formats against their definitions. Exhaustive over bfloat16, float16 and float8; for float32,
// over all values where a rounding changes and their neighbours, and over random bits.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "check.h"

constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kNan = 0x7fffffffu;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A format with a sign, exponents and mantissas, and the conversions under test. Codes are without the sign here.
struct Format {
  int mantissa_bits, bias;
  uint32_t largest;    // the code of the largest finite value
  uint32_t overflow;   // the code that a larger value becomes
  uint32_t nan, sign;  // the code that every NaN becomes, the bit of the sign
  uint32_t (*from_float)(float);

  // The definition of a finite value. The code after the largest one gives the value that it would have.
  double value(uint32_t code) const {
    const int exponent = static_cast<int>(code >> mantissa_bits);
    const double mantissa = code & ((1u << mantissa_bits) - 1), one = 1u << mantissa_bits;
    return exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                         : std::ldexp(one + mantissa, exponent - bias - mantissa_bits);
  }
};

template <__nv_fp8_interpretation_t kFormat, __nv_saturation_t kSaturation>
uint32_t to_fp8(float value) {
  return __nv_cvt_float2_to_fp8x2({value, 0}, kSaturation, kFormat);
}

const Format kBfloat16 = {
    7, 127, 0x7f7f, 0x7f80, 0x7fff, 0x8000, [](float value) -> uint32_t {
                            return __float2bfloat16_rn(value).__x; }};
const Format kHalf = {10,
                      15,
                      0x7bff,
                      0x7c00,
                      0x7fff,
                      0x8000,
                      [](float value) -> uint32_t {
                        return __half_raw(__float2half_rn(value)).x; }};
const Format kE4m3 = {3, 7, 0x7e, 0x7e, 0x7f, 0x80, to_fp8<__NV_E4M3, __NV_SATFINITE>};
const Format kE5m2 = {2, 15, 0x7b, 0x7b, 0x7f, 0x80, to_fp8<__NV_E5M2, __NV_SATFINITE>};
const Format kE4m3Unsaturated = {3, 7, 0x7e, 0x7f, 0x7f, 0x80, to_fp8<__NV_E4M3, __NV_NOSAT>};
const Format kE5m2Unsaturated = {2, 15, 0x7b, 0x7c, 0x7f, 0x80, to_fp8<__NV_E5M2, __NV_NOSAT>};

// Rounds by comparison with the values halfway between neighbours, all of them exact as doubles.
class Rounding {
 public:
  explicit Rounding(const Format& format) : format_(format) {
    for (uint32_t code = 0; code <= format.largest; ++code) {
      halfway_.push_back((format.value(code) + format.value(code + 1)) / 2);
    }
  }

  const std::vector<double>& halfway() const { return halfway_; }

  uint32_t expected(float value) const {
    if (std::isnan(value)) return format_.nan;
    const double magnitude = std::fabs(static_cast<double>(value));
    const auto above = std::lower_bound(halfway_.begin(), halfway_.end(), magnitude);
    auto code = static_cast<uint32_t>(above - halfway_.begin());  // the nearest code; at a tie, the lower code
    if (above != halfway_.end() && *above == magnitude && code % 2 == 1) ++code;
    return (code > format_.largest ? format_.overflow : code) | (std::signbit(value) ? format_.sign : 0);
  }

 private:
  const Format& format_;
  std::vector<double> halfway_;
};

void expect_rounded(const Format& format, const Rounding& rounding, uint32_t bits) {
  const float value = float_of(bits);
  EXPECT_EQ(format.from_float(value), rounding.expected(value));
}

void test_rounding(const Format& format) {
  const Rounding rounding(format);
  for (const uint32_t sign : {0u, kSign}) {
    for (const double halfway : rounding.halfway()) {
      const uint32_t tie = bits_of(static_cast<float>(halfway));  // exact
      for (const uint32_t bits : {tie - 1, tie, tie + 1}) expect_rounded(format, rounding, bits | sign);
    }
    for (uint32_t code = 0; code <= format.largest; ++code) {
      const uint32_t exact = bits_of(static_cast<float>(format.value(code)));
      expect_rounded(format, rounding, exact | sign);
      expect_rounded(format, rounding, (exact + 1) | sign);
      if (exact > 0) expect_rounded(format, rounding, (exact - 1) | sign);
    }
    const uint32_t special[] = {0, 1, 0x7fffff, 0x800000, kInfinity - 1, kInfinity, kInfinity + 1, 0x7fc00000, kNan};
    for (const uint32_t bits : special) expect_rounded(format, rounding, bits | sign);
  }
  std::mt19937 random(1);
  const uint32_t least = bits_of(static_cast<float>(format.value(1)) / 4);
  const uint32_t most = bits_of(static_cast<float>(format.value(format.largest)));
  std::uniform_int_distribution<uint32_t> in_range(least, std::min(most + 0x1000000, kInfinity));
  for (int i = 0; i < 200000; ++i) {
    expect_rounded(format, rounding, static_cast<uint32_t>(random()));
    expect_rounded(format, rounding, in_range(random) | (i % 2 ? kSign : 0));
  }
}

// Every code becomes its exact value as a float, and comes back from there.
template <typename ToFloat>
void test_codes(const Format& format, uint32_t infinity, uint32_t (*nan_to_float)(uint32_t code), ToFloat to_float) {
  for (uint32_t code = 0; code < 2 * format.sign; ++code) {
    const uint32_t magnitude = code & (format.sign - 1), sign = code & format.sign ? kSign : 0;
    const float value = to_float(code);
    if (magnitude <= format.largest) {
      EXPECT_EQ(bits_of(value), bits_of(static_cast<float>(format.value(magnitude))) | sign);
      EXPECT_EQ(format.from_float(value), code);
    } else if (magnitude == infinity) {
      EXPECT_EQ(bits_of(value), kInfinity | sign);
      EXPECT_EQ(format.from_float(value), format.overflow | (sign ? format.sign : 0));
    } else {
      EXPECT_EQ(bits_of(value), nan_to_float(code));
      EXPECT_EQ(format.from_float(value), format.nan);
    }
  }
}

template <__nv_fp8_interpretation_t kFormat>
float fp8_to_float(uint32_t code) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), kFormat);
  constexpr uint32_t kOther = 0x3c;
  for (const uint32_t shift : {0, 8}) {  // the low byte is the first code
    const auto codes = static_cast<__nv_fp8x2_storage_t>(code << shift | kOther << (8 - shift));
    const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(codes, kFormat);
    EXPECT_EQ(shift == 0 ? both.x : both.y, half.x);
    EXPECT_EQ(shift == 0 ? both.y : both.x, __nv_cvt_fp8_to_halfraw(kOther, kFormat).x);
  }
  if ((half.x & 0x7fff) > 0x7c00) EXPECT_EQ(half.x, 0x7fff);
  return __half2float(__half(half));
}

void test_all_codes() {
  const auto one_nan = [](uint32_t) { return kNan; };
  constexpr uint32_t kNoInfinity = 0x80;
  // A bfloat16 is the upper half of a float, also if it is NaN.
  test_codes(
      kBfloat16, 0x7f80, [](uint32_t code) { return code << 16; },
      [](uint32_t code) { return __bfloat162float({static_cast<uint16_t>(code)}); });
  test_codes(kHalf, 0x7c00, one_nan,
             [](uint32_t code) { return __half2float(__half(__half_raw{static_cast<unsigned short>(code)})); });
  test_codes(kE4m3, kNoInfinity, one_nan, fp8_to_float<__NV_E4M3>);
  test_codes(kE5m2, 0x7c, one_nan, fp8_to_float<__NV_E5M2>);
}

void test_pairs() {
  EXPECT_EQ(__nv_cvt_float2_to_fp8x2({1, -2}, __NV_SATFINITE, __NV_E4M3), 0xc038);
  EXPECT_EQ(__nv_cvt_float2_to_fp8x2({-1, 2}, __NV_SATFINITE, __NV_E5M2), 0x40bc);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(__nv_cvt_float2_to_fp8x2({-infinity, 464}, __NV_SATFINITE, __NV_E4M3), 0x7efe);
  EXPECT_EQ(__nv_cvt_float2_to_fp8x2({-nan, infinity}, __NV_SATFINITE, __NV_E4M3), 0x7e7f);
}

// Kernels keep these types in unions and copy them by their bytes.
template <typename T>
constexpr bool is_plain() {
  return sizeof(T) == 2 && std::is_trivial_v<T>;
}
static_assert(is_plain<__nv_bfloat16>() && is_plain<__half>() && is_plain<__half_raw>());

int main() {
  test_all_codes();
  for (const Format& format : {kBfloat16, kHalf, kE4m3, kE5m2, kE4m3Unsaturated, kE5m2Unsaturated}) {
    test_rounding(format);
  }
  test_pairs();
  return check::exit_status();
}
