// Quantized matmul with NEON dot products; at level i8mm, linear_i8mm.h multiplies two rows and more. Integer sums are
// exact and every output adds its groups in the order of K, so the bits of a row do not depend on the rows beside it.
#pragma once
#include <algorithm>

#include "activations.h"
#include "linear_i8mm.h"
#include "panels.h"

namespace outrider::LEVEL {
namespace {

#if defined(__ARM_FEATURE_DOTPROD)

template <int quad>
OUTRIDER_INLINE int32x4_t add_dot(int32x4_t sum, int8x16_t w, int8x16_t inputs) {
  asm volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(w), "w"(inputs), "i"(quad));
  return sum;
}
template <int lane>
OUTRIDER_INLINE float32x4_t add_lane(float32x4_t sum, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(a), "w"(b), "i"(lane));
  return sum;
}

// Add weights times one part of the inputs, from input `from` on, to the sums [parts][rows]. Sums are computed in pairs,
// one per vector unit; an odd last one joins the last pair.
template <class S, int rows, int parts, bool low>
OUTRIDER_INLINE void add_dots(const i8 (*w)[S::group / 4], const PanelInputs& x, int from, int32x4_t* sums) {
  constexpr int count = rows * parts, pairs = count < 2 ? 1 : count / 2;
  unroll<S::group / 16 * pairs>([&](auto slot) OUTRIDER_LAMBDA {
    constexpr int step = slot / pairs, first = slot % pairs * 2, size = slot % pairs == pairs - 1 ? count - first : 2;
    int8x16_t bytes[size];
    unroll<size>([&](auto member) OUTRIDER_LAMBDA {
      bytes[member] = fetch<int8x16_t>(x.part<low>((first + member) % rows) + from + 16 * step);
    });
    unroll<4 * size>([&](auto i) OUTRIDER_LAMBDA {
      constexpr int quad = i / size, sum = first + i % size;
      sums[sum] = add_dot<quad>(sums[sum], (int8x16_t)w[sum / rows][4 * step + quad], bytes[i % size]);
    });
  });
}

// The same, reading the weights of `block` when they are used, so that the sums of more parts fit into registers. Faster
// for one row (by 13 %) and three (by 25 %), slower for two and four (by 26 and 11 %).
constexpr bool streams(int rows) { return rows == 1 || rows == 3; }
template <class S, int rows, int parts, bool low>
OUTRIDER_INLINE void stream_dots(const uint8_t* block, int part, const PanelInputs& x, int from, int32x4_t* sums) {
  constexpr int halves = S::group / 16;
  int8x16_t bytes[halves][rows];
  unroll<halves * rows>([&](auto i) OUTRIDER_LAMBDA {
    bytes[i / rows][i % rows] = vld1q_s8(x.part<low>(i % rows) + from + 16 * (i / rows));
  });
  const auto add = [&](auto quad, int p, const int8x16_t& weights) OUTRIDER_LAMBDA {
    unroll<rows>([&](auto r) OUTRIDER_LAMBDA {
      int32x4_t& sum = sums[p * rows + r];
      sum = vdotq_laneq_s32(sum, weights, bytes[quad / 4][r], quad % 4);
    });
  };
  unroll<S::group / (S::nibbles ? 8 : 4)>([&](auto j) OUTRIDER_LAMBDA {
    unroll<parts>([&](auto p) OUTRIDER_LAMBDA {
      const i8 weights = load_bytes(block + 64 * j + sizeof(i8) * (part + p));
      if constexpr (S::nibbles) {
        add(j, p, (int8x16_t)look_up<S::table>(low_nibbles(weights)));
        add(std::integral_constant<int, j + 4>{}, p, (int8x16_t)look_up<S::table>(high_nibbles(weights)));
      } else {
        add(j, p, (int8x16_t)weights);
      }
    });
  });
}

// Add one group of inputs to the outputs of `parts` registers from `part` on, for all rows: sums [parts][rows].
template <class S, int rows, int parts, bool has_low>
OUTRIDER_INLINE void add_group(const uint8_t* block, int part, const PanelInputs& x, int from, float32x4_t* sums) {
  constexpr int count = rows * parts;
  constexpr bool has_zero = S::kind == Kind::q4 && !S::has_min;
  constexpr int start = !has_low ? 0 : S::small ? 1 : 2;
  i8 w[parts][S::group / 4];
  float32x4_t scale[parts], minimum[parts], facts[count], floats[count];
  int32x4_t products[count];
  if constexpr (!streams(rows)) unroll<parts>([&](auto p) OUTRIDER_LAMBDA { load_quads<S>(block, part + p, w[p]); });
  unroll<count>([&](auto i) OUTRIDER_LAMBDA { products[i] = fetch<int32x4_t>(kStart[start]); });
  const auto add = [&](auto low) OUTRIDER_LAMBDA {
    if constexpr (streams(rows))
      stream_dots<S, rows, parts, low>(block, part, x, from, products);
    else
      add_dots<S, rows, parts, low>(w, x, from, products);
  };
  add(std::false_type{});
  if constexpr (has_low) {
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { products[i] = shift_high(products[i]); });
    add(std::true_type{});
  }
  unroll<parts>([&](auto p) OUTRIDER_LAMBDA {
    scale[p] = fetch_halves(block + S::quant_bytes + 8 * (part + p));
    if constexpr (S::has_min) minimum[p] = fetch_halves(block + S::quant_bytes + 32 + 8 * (part + p));
    if constexpr (S::zero_points) minimum[p] = vnegq_f32(vmulq_f32(scale[p], minimum[p]));
    if constexpr (has_zero) minimum[p] = vmulq_n_f32(scale[p], -8.0f);
  });
  unroll<count>([&](auto i) OUTRIDER_LAMBDA {
    facts[i] = fetch<float32x4_t>(&x.inputs[i % rows].scale);
    if constexpr (has_low && !S::small)
      floats[i] = vmulq_laneq_f32(to_float(products[i]), facts[i], 0);
    else
      floats[i] = add_lane<0>(fetch<float32x4_t>(x.inputs[i % rows].less), vreinterpretq_f32_s32(products[i]), facts[i]);
  });
  unroll<count>([&](auto i) OUTRIDER_LAMBDA { sums[i] = add_product(sums[i], scale[i / rows], floats[i]); });
  if constexpr (S::has_min || has_zero)
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { sums[i] = add_lane<1>(sums[i], minimum[i / rows], facts[i]); });
}

// Bytes that a single pass over a tile prefetches ahead. The hardware would prefetch as well, but into the L2 cache.
constexpr int kStreamAhead = 512;

// Add `groups` groups of a tile, from `block` on, to its outputs for all rows of a panel; prefetch the same groups of the
// next tile, `tile_bytes` further on.
template <class S, int rows>
__attribute__((noinline)) void multiply_panel(const uint8_t* block, int groups, size_t tile_bytes, PanelInputs panel,
                                              float (*out)[kLanes]) {
  constexpr int parts = rows == 1 ? 4 : rows <= 3 ? 2 : 1, count = rows * parts;
  for (int part = 0; part < kParts; part += parts) {
    float32x4_t sums[count];
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { sums[i] = vld1q_f32(out[i % rows] + 4 * (part + i / rows)); });
    const uint8_t* at = block;
    PanelInputs x = panel;
    for (int g = 0; g < groups; g += 32 / S::group, x.inputs += rows, x.low += 32 * rows) {
      const auto add = [&](auto low) OUTRIDER_LAMBDA {
        unroll<32 / S::group>([&](auto i) OUTRIDER_LAMBDA {
          add_group<S, rows, parts, low>(at, part, x, i * S::group, sums);
          prefetch_share<S, parts>(at + (parts < kParts ? tile_bytes : kStreamAhead), part);
          at += S::block_bytes;
        });
      };
      if (x.inputs->has_low)
        add(std::true_type{});
      else
        add(std::false_type{});
    }
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { vst1q_f32(out[i % rows] + 4 * (part + i / rows), sums[i]); });
  }
}

// Add `groups` groups of a tile to the outputs of a panel of `rows` rows.
template <class S>
void multiply_panel(const uint8_t* block, int groups, size_t tile_bytes, PanelInputs panel, int rows,
                    float (*out)[kLanes]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if (rows == 1) return multiply_panel<S, 1>(block, groups, tile_bytes, panel, out);
  unroll<kPanelRows / 2>([&](auto i) OUTRIDER_LAMBDA {
    if (rows == 2 * (i + 1)) multiply_pairs<S, i + 1>(block, groups, tile_bytes, panel, out);
  });
#else
  unroll<kPanelRows>([&](auto i) OUTRIDER_LAMBDA {
    if (rows == i + 1) multiply_panel<S, i + 1>(block, groups, tile_bytes, panel, out);
  });
#endif
}

// Inputs that several rows multiply by all tiles before the next ones, so that those of eight rows stay in L1 with the
// weights of a tile. Of 8960 inputs, 4 and 8 rows take 17 and 11 % longer at once, a single row takes 14 % less.
constexpr int kInputsAtOnce = 1024;

// Compute tiles [first, last) for all rows.
template <class S>
void multiply_panels(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  const int at_once = rows.tokens > 1 ? kInputsAtOnce : rows.width;
  for (int from = 0; from < rows.width; from += at_once) {
    const int groups = std::min(at_once, rows.width - from) / S::group;
    for (int tile = first; tile < last; ++tile) {
      const uint8_t* block = matrix.data.get() + tile * matrix.tile_bytes() + size_t(from / S::group) * S::block_bytes;
      const int lanes = matrix.rows - tile * kLanes;
      for (int i = 0; i < panel_count(rows.tokens); ++i) {
        const Panel panel(rows.tokens, rows.width, i);
        alignas(64) float sums[kPanelRows][kLanes];
        float* const to = out + size_t(panel.first) * stride + tile * kLanes;
        for (int r = 0; r < panel.padded; ++r)
          store(sums[r], from == 0 || r == panel.count ? splat(0.0f) : load_some(to + size_t(r) * stride, lanes));
        const size_t at = panel.at + size_t(from / 32) * panel.padded;
        const PanelInputs x{reinterpret_cast<const Inputs*>(rows.quantized.high) + at, rows.quantized.low + 32 * at};
        multiply_panel<S>(block, groups, matrix.tile_bytes(), x, panel.padded, sums);
        for (int r = 0; r < panel.count; ++r) store_lanes(to + size_t(r) * stride, load(sums[r]), lanes);
      }
    }
  }
}

#endif

}  // namespace
}  // namespace outrider::LEVEL
