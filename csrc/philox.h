// Counter-based noise: a number that depends only on (seed, position, token, stream, epoch). Philox 4x32-10; one block
// gives four words, one for each of four consecutive tokens. The same numbers as kernels/philox.py.
#pragma once
#include "vector_math.h"

namespace outrider::LEVEL {

constexpr int kNoiseBlock = 64;  // tokens per call of gumbel: sixteen counters of four words

struct Key {
  uint64_t seed;
  uint32_t position, stream, epoch;
};
enum Stream : uint32_t { kTarget, kDraft, kAccept, kResidual };

struct Product {
  u32x16 high, low;
};

OUTRIDER_INLINE Product multiply(const u32x16& a, uint32_t factor) {
  Product out;
#if defined(__ARM_NEON)
  const uint32x2_t two = vdup_n_u32(factor);
  const uint32x4_t four = vdupq_n_u32(factor);
  OUTRIDER_EACH(i) {
    const uint32x4_t part = (uint32x4_t)a.part[i];
    const uint32x4_t left = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(part), two));
    const uint32x4_t right = vreinterpretq_u32_u64(vmull_high_u32(part, four));
    out.low.part[i] = (u32)vuzp1q_u32(left, right);
    out.high.part[i] = (u32)vuzp2q_u32(left, right);
  }
#elif defined(__AVX512F__)
  const __m512i even = _mm512_mul_epu32((__m512i)a.part[0], _mm512_set1_epi32(int(factor)));
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a.part[0], 32), _mm512_set1_epi32(int(factor)));
  out.low.part[0] = (u32)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  out.high.part[0] = (u32)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  OUTRIDER_EACH(i) {
    const __m256i even = _mm256_mul_epu32((__m256i)a.part[i], _mm256_set1_epi32(int(factor)));
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a.part[i], 32), _mm256_set1_epi32(int(factor)));
    out.low.part[i] = (u32)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    out.high.part[i] = (u32)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  }
#else
  for (int lane = 0; lane < 16; ++lane) {
    const uint64_t wide = uint64_t(a.part[lane / kWidth][lane % kWidth]) * factor;
    out.low.part[lane / kWidth][lane % kWidth] = uint32_t(wide);
    out.high.part[lane / kWidth][lane % kWidth] = uint32_t(wide >> 32);
  }
#endif
  return out;
}

// Compute the words of blocks `first` .. `first` + 15: word j of block first + i in lane i of words[j].
OUTRIDER_INLINE void philox(const Key& key, uint32_t first, u32x16 words[4]) {
  u32x16 a, b = splat(key.position), c = splat(key.stream), d = splat(key.epoch);
  for (int lane = 0; lane < 16; ++lane) a.part[lane / kWidth][lane % kWidth] = first + uint32_t(lane);
  uint32_t low = uint32_t(key.seed), high = uint32_t(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Product one = multiply(a, 0xD2511F53u), two = multiply(c, 0xCD9E8D57u);
    a = two.high ^ b ^ splat(low);
    b = two.low;
    c = one.high ^ d ^ splat(high);
    d = one.low;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  words[0] = a;
  words[1] = b;
  words[2] = c;
  words[3] = d;
}

// Return the uniform number in (0, 1) of this token.
static inline double coin(const Key& key, uint32_t token = 0) {
  u32x16 words[4];
  philox(key, token / 4, words);
  return (double(words[token % 4].part[0][0] >> 8) + 0.5) * 0x1p-24;
}

// Return -log(-log(u)) for u = ((word >> 8) + 1/2) / 2^24. Above 1/2, u does not fit a float but 1 - u does, and the
// logarithm needs u - 1 anyway.
OUTRIDER_INLINE f32x16 gumbel_of_word(const u32x16& word) {
  const u32x16 top = word >> splat(8u);
  i32x16 below, above;  // (word >> 8), and 2^24 - 1 less that
  OUTRIDER_EACH(i) below.part[i] = (i32)top.part[i];
  OUTRIDER_EACH(i) above.part[i] = 0xffffff - (i32)top.part[i];
  const f32x16 unit = splat(0x1p-24f), half = splat(0.5f);
  const f32x16 u = (to_float(below) + half) * unit, rest = (to_float(above) + half) * unit;
  const Parts low = split(u);
  const f32x16 near_one = where_greater(rest, splat(0.29f), splat(1.0f) - (rest + rest), splat(0.0f) - rest);
  const f32x16 near_exponent = where_greater(rest, splat(0.29f), splat(-1.0f), splat(0.0f));
  const f32x16 fraction = where_greater(half, rest, near_one, low.fraction);
  const f32x16 exponent = where_greater(half, rest, near_exponent, low.exponent);
  return splat(0.0f) - log(splat(0.0f) - log_of_parts(exponent, fraction));
}

// Compute the noise of tokens 4 * block .. 4 * block + 63.
OUTRIDER_INLINE void gumbel(const Key& key, uint32_t block, float out[kNoiseBlock]) {
  u32x16 words[4];
  philox(key, block, words);
  float lanes[4][16];
  for (int word = 0; word < 4; ++word) store(lanes[word], gumbel_of_word(words[word]));
  for (int i = 0; i < 16; ++i)
    for (int word = 0; word < 4; ++word) out[4 * i + word] = lanes[word][i];
}

}  // namespace outrider::LEVEL
