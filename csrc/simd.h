// Vectors of sixteen lanes on every level, made of as many registers as needed: GCC's vector extensions plus a few
// conversions by intrinsics. Sums over lanes add in one fixed order.
#pragma once
#include "half.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outrider::LEVEL {

#define OUTRIDER_INLINE static inline __attribute__((always_inline))
#define OUTRIDER_MEMBER inline __attribute__((always_inline))
#define OUTRIDER_LAMBDA __attribute__((always_inline))

// The registers of this level; sixteen lanes take kParts of them.
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
#define OUTRIDER_OPERATOR(op)                                                           \
  template <class Part>                                                                 \
  OUTRIDER_INLINE Lanes<Part> operator op(const Lanes<Part>& a, const Lanes<Part>& b) { \
    Lanes<Part> out;                                                                    \
    OUTRIDER_EACH(i) out.part[i] = a.part[i] op b.part[i];                              \
    return out;                                                                         \
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
// Copy register by register: copying the struct would go through memory.
OUTRIDER_INLINE f32x16 load(const float* from) {
  f32x16 out;
  OUTRIDER_EACH(i) memcpy(&out.part[i], from + i * kWidth, sizeof(f32));
  return out;
}
OUTRIDER_INLINE void store(float* to, const f32x16& value) {
  OUTRIDER_EACH(i) memcpy(to + i * kWidth, &value.part[i], sizeof(f32));
}
OUTRIDER_INLINE i32x16 load(const int32_t* from) {
  i32x16 out;
  OUTRIDER_EACH(i) memcpy(&out.part[i], from + i * kWidth, sizeof(i32));
  return out;
}
OUTRIDER_INLINE void store(int32_t* to, const i32x16& value) {
  OUTRIDER_EACH(i) memcpy(to + i * kWidth, &value.part[i], sizeof(i32));
}

// a * b + c with one rounding if the level has the instruction; explicit, not left to the compiler.
OUTRIDER_INLINE f32 fma(const f32& a, const f32& b, const f32& c) {
#if defined(__ARM_NEON)
  return (f32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
  return (f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
OUTRIDER_INLINE f32x16 fma(const f32x16& a, const f32x16& b, const f32x16& c) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return out;
}
OUTRIDER_INLINE f32x16 to_float(const i32x16& value) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = __builtin_convertvector(value.part[i], f32);
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
// Select lane by lane: a > b ? yes : no.
OUTRIDER_INLINE f32x16 where_greater(const f32x16& a, const f32x16& b, const f32x16& yes, const f32x16& no) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = a.part[i] > b.part[i] ? yes.part[i] : no.part[i];
  return out;
}
// Return the larger of each lane, b if a is NaN.
OUTRIDER_INLINE f32x16 max(const f32x16& a, const f32x16& b) {
#if defined(__ARM_NEON)  // one instruction instead of two; b is never NaN
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = (f32)vmaxnmq_f32((float32x4_t)a.part[i], (float32x4_t)b.part[i]);
  return out;
#else
  return where_greater(a, b, a, b);
#endif
}
OUTRIDER_INLINE f32x16 min(const f32x16& a, const f32x16& b) { return where_greater(a, b, b, a); }

// Lane i adds lane i + 8, then i + 4, i + 2, i + 1.
OUTRIDER_INLINE float sum(const f32x16& v) {
#if defined(__ARM_NEON)
  const float32x4_t four = (float32x4_t)((v.part[0] + v.part[2]) + (v.part[1] + v.part[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
#elif defined(__SSE2__)
#if defined(__AVX512F__)
  const __m256 eight =
      _mm256_add_ps(_mm512_castps512_ps256((__m512)v.part[0]), _mm512_extractf32x8_ps((__m512)v.part[0], 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX2__)
  const __m256 eight = (__m256)(v.part[0] + v.part[1]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#else
  const __m128 four = (__m128)((v.part[0] + v.part[2]) + (v.part[1] + v.part[3]));
#endif
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[16];
  store(lanes, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

OUTRIDER_INLINE f32x16 load_bf16(const uint16_t* from) {
  f32x16 out;
#if defined(__ARM_NEON)
  OUTRIDER_EACH(i) out.part[i] = (f32)vshll_n_u16(vld1_u16(from + 4 * i), 16);
#elif defined(__AVX512F__)
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  out.part[0] = (f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif defined(__AVX2__)
  OUTRIDER_EACH(i) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * i));
    out.part[i] = (f32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
  }
#else
  OUTRIDER_EACH(i) {
    u16 raw;
    memcpy(&raw, from + i * kWidth, sizeof raw);
    out.part[i] = (f32)(__builtin_convertvector(raw, u32) << 16);
  }
#endif
  return out;
}

// Load kWidth f16 values into one register.
OUTRIDER_INLINE f32 load_f16_part(const uint16_t* from) {
#if defined(__ARM_NEON)
  return (f32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#elif defined(__AVX512F__)
  return (f32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (f32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  f32 out;
  for (int i = 0; i < kWidth; ++i) out[i] = half_to_float(from[i]);
  return out;
#endif
}
// Load sixteen e4m3 bytes as 2^-8 times their values.
OUTRIDER_INLINE f32x16 load_fp8(const uint8_t* from) {
  f32x16 out;
#if defined(__ARM_NEON)
  const uint8x16_t bytes = vld1q_u8(from), zero = vdupq_n_u8(0);
  const auto half = [](uint8x16_t high_bytes) {  // the sign is copied by the shift and cleared in its copy
    const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u8(high_bytes), 1);
    return vreinterpretq_f16_s16(vandq_s16(shifted, vdupq_n_s16(int16_t(0xbfff))));
  };
  const float16x8_t halves[] = {half(vzip1q_u8(zero, bytes)), half(vzip2q_u8(zero, bytes))};
  for (int i = 0; i < 2; ++i) {
    out.part[2 * i] = (f32)vcvt_f32_f16(vget_low_f16(halves[i]));
    out.part[2 * i + 1] = (f32)vcvt_high_f32_f16(halves[i]);
  }
#elif defined(__F16C__)
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i shifted = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 1);
  const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff)));
#if defined(__AVX512F__)
  out.part[0] = (f32)_mm512_cvtph_ps(halves);
#else
  out.part[0] = (f32)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  out.part[1] = (f32)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
#else
  OUTRIDER_EACH(i)
    for (int lane = 0; lane < kWidth; ++lane)
      out.part[i][lane] = half_to_float(fp8_to_half(from[i * kWidth + lane]));
#endif
  return out;
}
OUTRIDER_INLINE f32x16 load_i8(const int8_t* from) {
  f32x16 out;
#if defined(__ARM_NEON)
  // Place each byte at the top of a lane, with zeros below (an index out of range gives 0): 2^24 times its value.
  const int8x16_t bytes = vld1q_s8(from);
  OUTRIDER_EACH(i) {
    const uint32x4_t index = {0x00ffffff | 4u * i << 24, 0x00ffffff | (4u * i + 1) << 24,
                              0x00ffffff | (4u * i + 2) << 24, 0x00ffffff | (4u * i + 3) << 24};
    out.part[i] = (f32)vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(bytes, vreinterpretq_u8_u32(index))), 24);
  }
#elif defined(__AVX512F__)
  out.part[0] = (f32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  OUTRIDER_EACH(i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * i));
    out.part[i] = (f32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
#else
  OUTRIDER_EACH(i)
    for (int lane = 0; lane < kWidth; ++lane) out.part[i][lane] = from[i * kWidth + lane];
#endif
  return out;
}
OUTRIDER_INLINE f32x16 load_f16(const uint16_t* from) {
  f32x16 out;
  OUTRIDER_EACH(i) out.part[i] = load_f16_part(from + i * kWidth);
  return out;
}

}  // namespace outrider::LEVEL
