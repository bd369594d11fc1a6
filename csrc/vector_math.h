// exp, log and activations on sixteen lanes: minimax polynomials, within 2e-7 relative error.
#pragma once
#include "simd.h"

namespace outrider::LEVEL {

typedef float f32x4 __attribute__((vector_size(16)));
#define OUTRIDER_PICK __builtin_shufflevector

// Return the largest lane; NaN counts as -inf.
OUTRIDER_INLINE float largest_lane(const f32x16& value) {
#if defined(__ARM_NEON)
  const f32x16 lanes = max(value, splat(-INFINITY));
  const auto larger = [&](int i) {
    return vmaxnmq_f32((float32x4_t)lanes.part[i], (float32x4_t)lanes.part[i + 1]);
  };
  return vmaxnmvq_f32(vmaxnmq_f32(larger(0), larger(2)));
#else
  f32 folded = -INFINITY - f32{};
  OUTRIDER_EACH(i) folded = value.part[i] > folded ? value.part[i] : folded;
#if defined(__AVX512F__)
  typedef float f32x8 __attribute__((vector_size(32)));
  const f32x8 a = OUTRIDER_PICK(folded, folded, 0, 1, 2, 3, 4, 5, 6, 7);
  const f32x8 b = OUTRIDER_PICK(folded, folded, 8, 9, 10, 11, 12, 13, 14, 15), eight = a > b ? a : b;
#elif defined(__AVX2__)
  const f32 eight = folded;
#endif
#if defined(__AVX2__)
  const f32x4 c = OUTRIDER_PICK(eight, eight, 0, 1, 2, 3), d = OUTRIDER_PICK(eight, eight, 4, 5, 6, 7);
  const f32x4 four = c > d ? c : d;
#else
  const f32x4 four = folded;
#endif
  const f32x4 swapped = OUTRIDER_PICK(four, four, 2, 3, 0, 1), two = four > swapped ? four : swapped;
  const f32x4 rotated = OUTRIDER_PICK(two, two, 1, 0, 3, 2), one = two > rotated ? two : rotated;
  return one[0];
#endif
}

// A constant in all lanes of a register.
struct Repeated {
  alignas(16) float lanes[4];
  constexpr explicit Repeated(float value) : lanes{value, value, value, value} {}
};

// Compute a * b + constant. On NEON a multiply-add overwrites its addend: loading the constant each time is free beside
// the arithmetic, copying a register is not. Attention weighs its scores in 0.7 of the time.
OUTRIDER_INLINE f32x16 fma(const f32x16& a, const f32x16& b, const Repeated& constant) {
#if defined(__ARM_NEON)
  f32x16 out;
  OUTRIDER_EACH(i) {
    asm volatile("ldr %q0, %1" : "=w"(out.part[i]) : "m"(constant.lanes));
    out.part[i] = fma(a.part[i], b.part[i], out.part[i]);
  }
  return out;
#else
  return fma(a, b, splat(constant.lanes[0]));
#endif
}

// exp(x) for x in -87 .. 88.
constexpr Repeated kRounder(12582912.0f), kExp[] = {Repeated(0.0083687809f), Repeated(0.0416683943f),
                                                    Repeated(0.1666652010f), Repeated(0.4999999341f)};
OUTRIDER_INLINE f32x16 exp_within(const f32x16& bounded) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const f32x16 shifted = fma(bounded, splat(1.44269504f), kRounder);
  const f32x16 whole = shifted - splat(12582912.0f);
  const f32x16 rest = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), bounded));
  f32x16 p = splat(0.0013814465f);
  p = fma(p, rest, kExp[0]);
  p = fma(p, rest, kExp[1]);
  p = fma(p, rest, kExp[2]);
  p = fma(p, rest, kExp[3]);
  const f32x16 value = fma(p, rest * rest, rest) + splat(1.0f);
  const f32x16 power = as_float((as_bits(shifted) << splat(23u)) + splat(127u << 23));
  return value * power;
}

// exp(x): 0 below -87, and no infinity above 88.
OUTRIDER_INLINE f32x16 exp(const f32x16& x) {
  return where_greater(splat(-87.0f), x, splat(0.0f), exp_within(min(max(x, splat(-87.0f)), splat(88.0f))));
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

// Split a positive, normal x into 2^exponent * (1 + fraction).
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

// tanh(x) with an absolute error of 1e-7.
OUTRIDER_INLINE f32x16 tanh(const f32x16& x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp(x + x)); }

// x / 2 * (1 + tanh(u)) equals x / (1 + exp(-2 u)), which stays precise as tanh approaches -1.
OUTRIDER_INLINE f32x16 gelu_tanh(const f32x16& x) {
  const f32x16 cubic = fma(x * x * x, splat(0.044715f), x);
  return x / (splat(1.0f) + exp(cubic * splat(-1.5957691216f)));
}

// The activation of gpt-oss.
OUTRIDER_INLINE f32x16 swiglu_oai(const f32x16& gate, const f32x16& up) {
  const f32x16 limit = splat(7.0f), g = min(gate, limit);
  return g / (splat(1.0f) + exp(g * splat(-1.702f))) * (max(min(up, limit), splat(-7.0f)) + splat(1.0f));
}

}  // namespace outrider::LEVEL
