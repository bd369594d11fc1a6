// Vectors of sixteen lanes on every level: as many registers as that takes, by GCC's vector extensions, plus the few
// conversions that need to be spelled out. Sums over lanes add in one fixed order.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outrider::LEVEL {

#define OUTRIDER_INLINE static inline __attribute__((always_inline))

// The registers of this level, and a vector of sixteen lanes made of them.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;
typedef float f32 __attribute__((vector_size(4 * kWidth)));
typedef int32_t i32 __attribute__((vector_size(4 * kWidth)));
typedef uint32_t u32 __attribute__((vector_size(4 * kWidth)));
typedef uint16_t u16 __attribute__((vector_size(2 * kWidth)));

template <class Part>
struct Lanes {
  Part part[kParts];
};
using f32x16 = Lanes<f32>;
using i32x16 = Lanes<i32>;
using u32x16 = Lanes<u32>;

#define OUTRIDER_EACH(i) _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)
#define OUTRIDER_OPERATOR(op)                                                 \
  template <class Part>                                                       \
  OUTRIDER_INLINE Lanes<Part> operator op(const Lanes<Part>& a, const Lanes<Part>& b) { \
    Lanes<Part> out;                                                          \
    OUTRIDER_EACH(i) out.part[i] = a.part[i] op b.part[i];                    \
    return out;                                                               \
  }
OUTRIDER_OPERATOR(+)
OUTRIDER_OPERATOR(-)
OUTRIDER_OPERATOR(*)
OUTRIDER_OPERATOR(/)
OUTRIDER_OPERATOR(&)
OUTRIDER_OPERATOR(|)
OUTRIDER_OPERATOR(^)
OUTRIDER_OPERATOR(<<)
OUTRIDER_OPERATOR(>>)
#undef OUTRIDER_OPERATOR

OUTRIDER_INLINE f32x16 splat(float value) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = value - f32{};
  return out;
}
OUTRIDER_INLINE i32x16 splat(int32_t value) {
  i32x16 out;
  OUTRIDER_EACH(i) out.part[i] = value - i32{};
  return out;
}
OUTRIDER_INLINE u32x16 splat(uint32_t value) {
  u32x16 out;
  OUTRIDER_EACH(i) out.part[i] = value - u32{};
  return out;
}
OUTRIDER_INLINE f32x16 load(const float* from) {
  f32x16 out;
  memcpy(&out, from, sizeof out);
  return out;
}
OUTRIDER_INLINE void store(float* to, const f32x16& value) { memcpy(to, &value, sizeof value); }
// a * b + c, contracted to one instruction where the level has it
OUTRIDER_INLINE f32x16 fma(const f32x16& a, const f32x16& b, const f32x16& c) { return a * b + c; }
OUTRIDER_INLINE f32x16 to_float(const i32x16& value) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = __builtin_convertvector(value.part[i], f32);
  return out;
}
OUTRIDER_INLINE i32x16 to_int(const f32x16& value) {  // toward zero
  i32x16 out;
  OUTRIDER_EACH(i) out.part[i] = __builtin_convertvector(value.part[i], i32);
  return out;
}
OUTRIDER_INLINE f32x16 as_float(const u32x16& value) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = (f32)value.part[i];
  return out;
}
OUTRIDER_INLINE u32x16 as_bits(const f32x16& value) {
  u32x16 out;
  OUTRIDER_EACH(i) out.part[i] = (u32)value.part[i];
  return out;
}
// Where a > b: yes, else no, lane by lane.
OUTRIDER_INLINE f32x16 where_greater(const f32x16& a, const f32x16& b, const f32x16& yes, const f32x16& no) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = a.part[i] > b.part[i] ? yes.part[i] : no.part[i];
  return out;
}
OUTRIDER_INLINE f32x16 max(const f32x16& a, const f32x16& b) { return where_greater(a, b, a, b); }
OUTRIDER_INLINE f32x16 min(const f32x16& a, const f32x16& b) { return where_greater(a, b, b, a); }

// Lane i adds lane i + 8, then i + 4, i + 2, i + 1.
OUTRIDER_INLINE float sum(const f32x16& v) {
  float lanes[16];
  store(lanes, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

OUTRIDER_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (fraction << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {
    float value = std::ldexp(float(fraction), -24);
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest even, as torch does.
OUTRIDER_INLINE uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
OUTRIDER_INLINE float bf16_to_float(uint16_t h) {
  uint32_t bits = uint32_t(h) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

OUTRIDER_INLINE f32x16 load_bf16(const uint16_t* from) {
  f32x16 out;
  OUTRIDER_EACH(i) {
    u16 raw;
    memcpy(&raw, from + i * kWidth, sizeof raw);
    out.part[i] = (f32)(__builtin_convertvector(raw, u32) << 16);
  }
  return out;
}

OUTRIDER_INLINE f32x16 load_f16(const uint16_t* from) {
  f32x16 out;
#if defined(__ARM_NEON)
  OUTRIDER_EACH(i) out.part[i] = (f32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i)));
#elif defined(__AVX512F__)
  out.part[0] = (f32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  OUTRIDER_EACH(i) out.part[i] = (f32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * i)));
#else
  for (int i = 0; i < 16; ++i) out.part[i / kWidth][i % kWidth] = half_to_float(from[i]);
#endif
  return out;
}

}  // namespace outrider::LEVEL
