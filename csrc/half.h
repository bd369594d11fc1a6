// Scalar conversions of 16-bit floats, round to nearest even, as torch and numpy do. The same bits on every level.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace outrider {

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | (fraction << 13));
  if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (fraction << 13));
  return bits_to_float(sign | float_to_bits(float(fraction) * 0x1p-24f));
}

static inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) return sign | uint16_t(std::nearbyint(bits_to_float(magnitude) * 0x1p24f));
  return sign | uint16_t((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}

static inline float bf16_to_float(uint16_t half) { return bits_to_float(uint32_t(half) << 16); }

static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Convert a finite number of at most 464 to e4m3.
static inline uint8_t float_to_fp8(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff;
  const uint8_t sign = uint8_t((bits >> 24) & 0x80);
  if (magnitude < 0x3c800000) return sign | uint8_t(std::nearbyint(bits_to_float(magnitude) * 0x1p9f));  // below 2^-6
  return sign | uint8_t((magnitude - 0x3c000000 + 0x7ffff + ((magnitude >> 20) & 1)) >> 20);
}

// Shift the bits of an e4m3 byte into a half: 2^-8 times its value.
constexpr uint16_t fp8_to_half(uint8_t bits) { return uint16_t((bits & 0x80) << 8 | (bits & 0x7f) << 7); }

}  // namespace outrider
