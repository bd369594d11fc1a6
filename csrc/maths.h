// exp, log and the activations on sixteen lanes. Polynomials fitted for the least largest relative error; the results
// are within 2e-7 of the truth.
#pragma once
#include "simd.h"

namespace outrider::LEVEL {

typedef float f32x4 __attribute__((vector_size(16)));
#define OUTRIDER_PICK __builtin_shufflevector

// Lane i adds lane i + 8, then i + 4.
OUTRIDER_INLINE f32x4 fold_to_four(const f32x16& v) {
#if defined(__AVX512F__)
  const f32 a = v.part[0];
  return (OUTRIDER_PICK(a, a, 0, 1, 2, 3) + OUTRIDER_PICK(a, a, 8, 9, 10, 11)) +
         (OUTRIDER_PICK(a, a, 4, 5, 6, 7) + OUTRIDER_PICK(a, a, 12, 13, 14, 15));
#elif defined(__AVX2__)
  const f32 a = v.part[0] + v.part[1];
  return OUTRIDER_PICK(a, a, 0, 1, 2, 3) + OUTRIDER_PICK(a, a, 4, 5, 6, 7);
#else
  return (v.part[0] + v.part[2]) + (v.part[1] + v.part[3]);
#endif
}

// The four sums over sixteen lanes, without a detour through memory, in the order of `sum`.
OUTRIDER_INLINE f32x4 sum_four(const f32x16& first, const f32x16& second, const f32x16& third, const f32x16& fourth) {
  const f32x4 a = fold_to_four(first), b = fold_to_four(second), c = fold_to_four(third), d = fold_to_four(fourth);
  const f32x4 left = OUTRIDER_PICK(a, b, 0, 4, 1, 5) + OUTRIDER_PICK(a, b, 2, 6, 3, 7);
  const f32x4 right = OUTRIDER_PICK(c, d, 0, 4, 1, 5) + OUTRIDER_PICK(c, d, 2, 6, 3, 7);
  return OUTRIDER_PICK(left, right, 0, 1, 4, 5) + OUTRIDER_PICK(left, right, 2, 3, 6, 7);
}

OUTRIDER_INLINE f32x16 join(const f32x4 four[4]) {
  f32x16 out;
#if defined(__AVX2__)
  typedef float f32x8 __attribute__((vector_size(32)));
  const f32x8 low = OUTRIDER_PICK(four[0], four[1], 0, 1, 2, 3, 4, 5, 6, 7);
  const f32x8 high = OUTRIDER_PICK(four[2], four[3], 0, 1, 2, 3, 4, 5, 6, 7);
#if defined(__AVX512F__)
  out.part[0] = OUTRIDER_PICK(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  out.part[0] = low;
  out.part[1] = high;
#endif
#else
  OUTRIDER_EACH(i) out.part[i] = four[i];
#endif
  return out;
}

// The largest lane; NaN never wins, and -inf is the least.
OUTRIDER_INLINE float largest_lane(const f32x16& value) {
  f32 folded = -INFINITY - f32{};
  OUTRIDER_EACH(i) folded = value.part[i] > folded ? value.part[i] : folded;
  float largest = -INFINITY;
  for (int i = 0; i < kWidth; ++i) largest = folded[i] > largest ? folded[i] : largest;
  return largest;
}

// exp(x): 0 below -87, and no infinity above 88.
OUTRIDER_INLINE f32x16 exp(const f32x16& x) {
  const f32x16 bounded = min(max(x, splat(-87.0f)), splat(88.0f));
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const f32x16 shifted = fma(bounded, splat(1.44269504f), splat(12582912.0f));
  const f32x16 whole = shifted - splat(12582912.0f);
  const f32x16 rest = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), bounded));
  f32x16 p = splat(0.0013814465f);
  p = fma(p, rest, splat(0.0083687809f));
  p = fma(p, rest, splat(0.0416683943f));
  p = fma(p, rest, splat(0.1666652010f));
  p = fma(p, rest, splat(0.4999999341f));
  const f32x16 value = fma(p, rest * rest, rest) + splat(1.0f);
  const f32x16 power = as_float((as_bits(shifted) << splat(23u)) + splat(127u << 23));
  return where_greater(splat(-87.0f), x, splat(0.0f), value * power);
}

// log(2^exponent * (1 + fraction)) for a fraction in [sqrt(1/2) - 1, sqrt(2) - 1].
OUTRIDER_INLINE f32x16 log_of_parts(const f32x16& exponent, const f32x16& fraction) {
  f32x16 p = splat(-0.0763443461f);
  p = fma(p, fraction, splat(0.1276156207f));
  p = fma(p, fraction, splat(-0.1316019884f));
  p = fma(p, fraction, splat(0.1420176114f));
  p = fma(p, fraction, splat(-0.1662335598f));
  p = fma(p, fraction, splat(0.2000122671f));
  p = fma(p, fraction, splat(-0.2500082107f));
  p = fma(p, fraction, splat(0.3333333171f));
  const f32x16 square = fraction * fraction;
  f32x16 tail = fma(p, square * fraction, exponent * splat(-2.12194440e-4f));
  tail = fma(square, splat(-0.5f), tail);
  return fma(exponent, splat(0.693359375f), fraction + tail);
}

struct Parts {
  f32x16 exponent, fraction;
};

// A positive, normal x as 2^exponent * (1 + fraction).
OUTRIDER_INLINE Parts split(const f32x16& x) {
  const uint32_t root = 0x3f3504f3;  // sqrt(1/2)
  i32x16 exponent;
  const u32x16 offset = as_bits(x) - splat(root);
  OUTRIDER_EACH(i) exponent.part[i] = (i32)offset.part[i] >> 23;
  u32x16 mantissa;
  OUTRIDER_EACH(i) mantissa.part[i] = (u32)x.part[i] - ((u32)exponent.part[i] << 23);
  return {to_float(exponent), as_float(mantissa) - splat(1.0f)};
}

OUTRIDER_INLINE f32x16 log(const f32x16& x) {
  const Parts parts = split(x);
  return log_of_parts(parts.exponent, parts.fraction);
}

OUTRIDER_INLINE f32x16 silu(const f32x16& x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

// x / 2 * (1 + tanh(u)) is x / (1 + exp(-2 u)), which loses no digits where tanh nears -1.
OUTRIDER_INLINE f32x16 gelu_tanh(const f32x16& x) {
  const f32x16 cubic = fma(x * x * x, splat(0.044715f), x);
  return x / (splat(1.0f) + exp(cubic * splat(-1.5957691216f)));
}

}  // namespace outrider::LEVEL
