// Quantized matmul for several rows with NEON dot products. Integer sums are exact and every output adds its groups in
// the order of K, so the bits equal those of linear_blocks.h.
#pragma once
#include "linear_blocks.h"
#include "threads.h"

namespace outrider::LEVEL {
namespace {

#if defined(__ARM_FEATURE_DOTPROD)

constexpr int kPanelRows = 8;  // rows that share the unpacked weights: as many as the registers hold

// A single row is bound by memory: linear_blocks.h computes it.
constexpr bool use_panels(int rows) { return rows > 1; }
constexpr int panel_count(int rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// 32 inputs of a row. A panel is [K/32][rows] of them, read through one pointer.
//
// An int-to-float conversion blocks one of two vector units for two cycles. Sums of nibbles avoid it: added to the bits
// of 1.5 * 2^23, an integer below 2^22 yields the float 1.5 * 2^23 plus that integer. Such a sum may reach 15 * 32 *
// 16256 > 2^22, so about eight times the total is subtracted, which centers the nibbles: 8 * 32 * 16256 + 64 < 2^22.
// The sum starts at `start`; adding `less` or `less_zero` gives the true value.
struct alignas(16) Inputs {
  int8_t high[32], low[32];
  int32_t start[4];  // one value four times: a vector load is free, a lane broadcast is not
  float total, less, less_zero, unused;

  void finish(int32_t sum) {
    constexpr float magic = 0x1.8p23f;
    const int32_t eighth = (sum + 8) >> 4;  // times 128: about eight times the sum
    for (int32_t& lane : start) lane = (0x4b400000 >> 7) - eighth;
    total = float(sum);
    less = float(128 * eighth) - magic;
    less_zero = float(128 * eighth - 8 * sum) - magic;
  }
};

// Instructions in a fixed order: the compiler would finish one row before the next, and each sum would wait for the
// previous one.
template <class Vector>
OUTRIDER_INLINE Vector fetch(const void* from) {
  Vector to;
  asm volatile("ldr %q0, %1" : "=w"(to) : "m"(*static_cast<const Vector*>(from)));
  return to;
}
OUTRIDER_INLINE float32x4_t fetch_halves(const uint8_t* from) {
  float32x4_t to;
  asm volatile("ldr %d0, %1\n\tfcvtl %0.4s, %0.4h" : "=w"(to) : "m"(*reinterpret_cast<const uint64_t*>(from)));
  return to;
}
template <int quad>
OUTRIDER_INLINE int32x4_t add_dot(int32x4_t sum, int8x16_t w, int8x16_t inputs) {
  asm volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(w), "w"(inputs), "i"(quad));
  return sum;
}
OUTRIDER_INLINE int32x4_t times_128(int32x4_t sum) {
  asm volatile("shl %0.4s, %0.4s, 7" : "+w"(sum));
  return sum;
}
OUTRIDER_INLINE float32x4_t to_float(int32x4_t sum) {
  float32x4_t to;
  asm volatile("scvtf %0.4s, %1.4s" : "=w"(to) : "w"(sum));
  return to;
}
OUTRIDER_INLINE float32x4_t add_product(float32x4_t sum, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}
template <int lane>
OUTRIDER_INLINE float32x4_t add_lane(float32x4_t sum, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(a), "w"(b), "i"(lane));
  return sum;
}

// Schedule of the dot products. Sums are computed in pairs, one per vector unit; while a pair waits for its results,
// the next one computes. One slot multiplies sixteen inputs of one part for a pair. An odd last sum pairs its high part
// with its low part.
template <class S, int count>
struct Schedule {
  static constexpr int pairs = count / 2, odd = count % 2, steps = S::group / 16;
  static constexpr int of_high = steps * (pairs + odd), all = of_high + steps * pairs;
  static constexpr bool high(int slot) { return slot < of_high; }
  static constexpr int step(int slot) { return high(slot) ? slot / (pairs + odd) : (slot - of_high) / pairs; }
  static constexpr int pair(int slot) { return high(slot) ? slot % (pairs + odd) : (slot - of_high) % pairs; }
  // Return the pair whose high part the previous slot finished, or an index out of range.
  static constexpr int shifted(int slot) { return slot - (steps - 1) * (pairs + odd) - 1; }
};

// Compute the integer sums of one group, from input `from` on: [parts][rows].
template <class S, int rows, int parts>
OUTRIDER_INLINE void multiply_group(const i8 (*w)[S::group / 4], const Inputs* inputs, int from, int32x4_t* products) {
  constexpr int count = rows * parts;
  using T = Schedule<S, count>;
  int8x16_t bytes[2][2];
  const auto fetch_slot = [&](auto slot) OUTRIDER_LAMBDA {
    if constexpr (slot < T::all)
      unroll<2>([&](auto member) OUTRIDER_LAMBDA {
        constexpr int i = 2 * T::pair(slot) + member;
        constexpr bool low = !T::high(slot) || i == count;
        const Inputs& row = inputs[i == count ? rows - 1 : i % rows];
        bytes[slot % 2][member] = fetch<int8x16_t>((low ? row.low : row.high) + from + 16 * T::step(slot));
        if constexpr (T::high(slot) && T::step(slot) == 0)
          products[i] = S::kind == Kind::q4 && !low ? fetch<int32x4_t>(row.start) : fresh_zero();
      });
  };
  fetch_slot(std::integral_constant<int, 0>{});
  unroll<T::all>([&](auto slot) OUTRIDER_LAMBDA {
    fetch_slot(std::integral_constant<int, slot + 1>{});
    unroll<8>([&](auto j) OUTRIDER_LAMBDA {
      constexpr int i = 2 * T::pair(slot) + j % 2, part = i == count ? parts - 1 : i / rows;
      const i8& weights = w[part][4 * T::step(slot) + j / 2];
      products[i] = add_dot<j / 2>(products[i], (int8x16_t)weights, bytes[slot % 2][j % 2]);
      constexpr int shifted = 2 * T::shifted(slot) + j / 4;
      if constexpr (j % 4 == 1 && shifted >= 0 && shifted < count) products[shifted] = times_128(products[shifted]);
    });
  });
  if constexpr (T::odd) products[count - 1] = vaddq_s32(products[count - 1], products[count]);
}

// Add one group of inputs to the outputs of `parts` registers from `part` on, for all rows: sums [parts][rows].
template <class S, int rows, int parts>
OUTRIDER_INLINE void add_group(const uint8_t* block, int part, const Inputs* inputs, int from, float32x4_t* sums) {
  constexpr int count = rows * parts;
  i8 w[parts][S::group / 4];
  float32x4_t scale[parts], minimum[parts], facts[count], floats[count];
  const float32x4_t one = vdupq_n_f32(1.0f);
  int32x4_t products[count + 1];
  unroll<parts>([&](auto p) OUTRIDER_LAMBDA { load_quads<S>(block, part + p, w[p]); });
  const auto fetch_scales = [&](auto p) OUTRIDER_LAMBDA {
    scale[p] = fetch_halves(block + S::quant_bytes + 8 * (part + p));
    if constexpr (S::has_min) minimum[p] = fetch_halves(block + S::quant_bytes + 32 + 8 * (part + p));
  };
  if constexpr (rows > 4)
    unroll<parts>(fetch_scales);  // up to 4 rows load them after the dot products, which is a few percent faster
  multiply_group<S, rows, parts>(w, inputs, from, products);
  if constexpr (rows <= 4) unroll<parts>(fetch_scales);
  unroll<count>([&](auto i) OUTRIDER_LAMBDA {
    facts[i] = fetch<float32x4_t>(&inputs[i % rows].total);
    if constexpr (S::kind == Kind::q4)
      floats[i] = add_lane < S::has_min ? 1 : 2 > (vreinterpretq_f32_s32(products[i]), one, facts[i]);
    else
      floats[i] = to_float(products[i]);
  });
  unroll<count>([&](auto i) OUTRIDER_LAMBDA { sums[i] = add_product(sums[i], scale[i / rows], floats[i]); });
  if constexpr (S::has_min)
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { sums[i] = add_lane<0>(sums[i], minimum[i / rows], facts[i]); });
}

// Compute the tile's outputs for all rows of a panel, before the row scales, and prefetch the next tile.
template <class S, int rows>
__attribute__((noinline)) void multiply_panel(const uint8_t* tile, int groups, const Inputs* panel,
                                              float (*out)[kLanes]) {
  constexpr int parts = rows == 2 ? 2 : 1, count = rows * parts;
  const size_t bytes = size_t(groups) * S::block_bytes;
  for (int part = 0; part < kParts; part += parts) {
    float32x4_t sums[count];
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { sums[i] = vdupq_n_f32(0.0f); });
    const uint8_t* block = tile;
    for (int g = 0; g < groups; ++g, block += S::block_bytes) {
      const Inputs* inputs = panel + g * S::group / 32 * rows;
      add_group<S, rows, parts>(block, part, inputs, g * S::group % 32, sums);
      for (int line = part; line < part + parts + 1; ++line) __builtin_prefetch(block + bytes + 64 * line);
    }
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { vst1q_f32(out[i % rows] + 4 * (part + i / rows), sums[i]); });
  }
}

// Rows [first, first + count) and their inputs [K/32][count].
struct Panel {
  int first, count;
  size_t at;  // offset of its inputs
  Panel(int tokens, int width, int panel) {
    const Share share(tokens, panel, panel_count(tokens));
    first = share.first;
    count = share.last - share.first;
    at = size_t(first) * (width / 32);
  }
};

// Multiply one tile of a matrix by the rows of one panel.
template <class S>
void multiply_rows(const uint8_t* tile, const Rows& rows, const Panel& panel, float (*out)[kLanes]) {
  const Inputs* inputs = reinterpret_cast<const Inputs*>(rows.quantized.high) + panel.at;
  unroll<kPanelRows - 1>([&](auto i) OUTRIDER_LAMBDA {
    if (panel.count == i + 2) multiply_panel<S, i + 2>(tile, rows.width / S::group, inputs, out);
  });
}

#else

constexpr bool use_panels(int) { return false; }

#endif

}  // namespace
}  // namespace outrider::LEVEL
