// Quantized matmul of two rows and more with SMMLA, which multiplies 2 rows x 8 inputs by 8 inputs x 2 outputs: twice
// the products of a dot product instruction. The bits are those of linear_neon.h: integer sums are exact, and each
// output takes the same floating-point operations.
#pragma once
#include <new>

#include "panels.h"

namespace outrider::LEVEL {
namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)

// 32 inputs of two rows, in the place of their two Inputs. Factors are repeated for the lanes of a sum, [row][output].
struct alignas(64) InputPair {
  int8_t high[4][2][8];  // [inputs / 8][row][8]
  float less[4], scale[4], total[4];
  int32_t has_low;
};
static_assert(sizeof(InputPair) == 2 * sizeof(Inputs));

// Rearrange the bytes of two rows from [row][32] to [inputs / 8][row][8].
OUTRIDER_INLINE void interleave(const int8_t* first, const int8_t* second, int8_t* to) {
  int64x2_t of_first[2], of_second[2];
  memcpy(of_first, first, 32);
  memcpy(of_second, second, 32);
  unroll<2>([&](auto i) OUTRIDER_LAMBDA {
    vst1q_s8(to + 32 * i, vreinterpretq_s8_s64(vzip1q_s64(of_first[i], of_second[i])));
    vst1q_s8(to + 32 * i + 16, vreinterpretq_s8_s64(vzip2q_s64(of_first[i], of_second[i])));
  });
}

// Join the inputs of `rows` rows to pairs, and their low parts. The last row of an odd number is joined with zeros.
OUTRIDER_INLINE void join_pairs(Inputs* inputs, int8_t* low, int rows) {
  for (int row = 0; row < rows; row += 2, inputs += 2, low += 64) {
    const bool odd = row + 1 == rows;
    const Inputs first = inputs[0], second = odd ? Inputs{} : inputs[1];
    auto* pair = new (inputs) InputPair;
    interleave(first.high, second.high, pair->high[0][0]);
    for (int lane = 0; lane < 4; ++lane) {
      const Inputs& row_of_lane = lane < 2 ? first : second;
      pair->less[lane] = row_of_lane.less[lane];
      pair->scale[lane] = row_of_lane.scale;
      pair->total[lane] = row_of_lane.total;
    }
    pair->has_low = first.has_low;
    if (first.has_low) interleave(low, odd ? second.high : low + 32, low);
  }
}

// Load the weights of one block for four outputs: [outputs / 2][inputs / 8], each 2 outputs x 8 inputs. Two quads of
// inputs are zipped before their nibbles are separated.
template <class S>
OUTRIDER_INLINE void load_pairs(const uint8_t* block, int part, int8x16_t (*w)[S::group / 8]) {
  unroll<S::group / (S::nibbles ? 16 : 8)>([&](auto j) OUTRIDER_LAMBDA {
    const auto quad = [&](int i) OUTRIDER_LAMBDA {
      return vreinterpretq_s32_s8((int8x16_t)load_bytes(block + 64 * (2 * j + i) + sizeof(i8) * part));
    };
    const int32x4_t both[] = {vzip1q_s32(quad(0), quad(1)), vzip2q_s32(quad(0), quad(1))};
    unroll<2>([&](auto o) OUTRIDER_LAMBDA {
      if constexpr (S::nibbles) {
        w[o][j] = (int8x16_t)look_up<S::table>(low_nibbles((i8)both[o]));
        w[o][j + 2] = (int8x16_t)look_up<S::table>(high_nibbles((i8)both[o]));
      } else {
        w[o][j] = vreinterpretq_s8_s32(both[o]);
      }
    });
  });
}

OUTRIDER_INLINE int32x4_t add_matmul(int32x4_t sum, int8x16_t inputs, int8x16_t w) {
  asm volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(inputs), "w"(w));
  return sum;
}

// Load four scales or minima and repeat those of each pair of outputs.
OUTRIDER_INLINE void fetch_pairs(const uint8_t* from, float32x4_t* to) {
  const float64x2_t four = vreinterpretq_f64_f32(fetch_halves(from));
  to[0] = vreinterpretq_f32_f64(vzip1q_f64(four, four));
  to[1] = vreinterpretq_f32_f64(vzip2q_f64(four, four));
}

// Add one group of inputs to the four outputs of register `part`, for all pairs of rows: sums [outputs / 2][pairs],
// each 2 rows x 2 outputs. `from` is the first input of the group in the 32 inputs at `x` and `low`.
template <class S, int pairs, bool has_low>
OUTRIDER_INLINE void add_pairs(const uint8_t* block, int part, const InputPair* x, const int8_t* low, int from,
                               float32x4_t* sums) {
  constexpr int count = 2 * pairs, steps = S::group / 8;
  constexpr bool has_zero = S::kind == Kind::q4 && !S::has_min;
  constexpr int start = !has_low ? 0 : S::small ? 1 : 2;
  int8x16_t w[2][steps];
  int32x4_t products[count];
  load_pairs<S>(block, part, w);
  unroll<count>([&](auto i) OUTRIDER_LAMBDA { products[i] = fetch<int32x4_t>(kStart[start]); });
  const auto add = [&](auto low_parts) OUTRIDER_LAMBDA {
    unroll<steps * pairs>([&](auto i) OUTRIDER_LAMBDA {
      constexpr int step = i / pairs, pair = i % pairs;
      const int8_t* const bytes = low_parts ? low + 64 * pair : x[pair].high[0][0];
      const auto inputs = fetch<int8x16_t>(bytes + 2 * from + 16 * step);
      products[pair] = add_matmul(products[pair], inputs, w[0][step]);
      products[pairs + pair] = add_matmul(products[pairs + pair], inputs, w[1][step]);
    });
  };
  add(std::false_type{});
  if constexpr (has_low) {
    unroll<count>([&](auto i) OUTRIDER_LAMBDA { products[i] = shift_high(products[i]); });
    add(std::true_type{});
  }
  float32x4_t scale[2], minimum[2];
  fetch_pairs(block + S::quant_bytes + 8 * part, scale);
  if constexpr (S::has_min) fetch_pairs(block + S::quant_bytes + 32 + 8 * part, minimum);
  if constexpr (S::zero_points)
    unroll<2>([&](auto o) OUTRIDER_LAMBDA { minimum[o] = vnegq_f32(vmulq_f32(scale[o], minimum[o])); });
  if constexpr (has_zero) unroll<2>([&](auto o) OUTRIDER_LAMBDA { minimum[o] = vmulq_n_f32(scale[o], -8.0f); });
  unroll<pairs>([&](auto pair) OUTRIDER_LAMBDA {
    const auto row_scale = fetch<float32x4_t>(x[pair].scale);
    float32x4_t floats[2];
    unroll<2>([&](auto o) OUTRIDER_LAMBDA {
      const int32x4_t product = products[o * pairs + pair];
      if constexpr (has_low && !S::small)
        floats[o] = vmulq_f32(to_float(product), row_scale);
      else
        floats[o] = add_product(fetch<float32x4_t>(x[pair].less), vreinterpretq_f32_s32(product), row_scale);
    });
    unroll<2>([&](auto o) OUTRIDER_LAMBDA {
      sums[o * pairs + pair] = add_product(sums[o * pairs + pair], scale[o], floats[o]);
    });
  });
  if constexpr (S::has_min || has_zero) {
    unroll<pairs>([&](auto pair) OUTRIDER_LAMBDA {
      const auto total = fetch<float32x4_t>(x[pair].total);
      unroll<2>([&](auto o) OUTRIDER_LAMBDA {
        sums[o * pairs + pair] = add_product(sums[o * pairs + pair], minimum[o], total);
      });
    });
  }
}

// Add `groups` groups of a tile, from `block` on, to its outputs for a panel of pairs of rows; prefetch the same groups
// of the next tile, `tile_bytes` further on.
template <class S, int pairs>
__attribute__((noinline)) void multiply_pairs(const uint8_t* block, int groups, size_t tile_bytes, PanelInputs panel,
                                              float (*out)[kLanes]) {
  const auto* const inputs = reinterpret_cast<const InputPair*>(panel.inputs);
  for (int part = 0; part < kParts; ++part) {
    float64x2_t rows[2];  // four outputs of each row of a pair
    float32x4_t sums[2 * pairs];
    unroll<pairs>([&](auto pair) OUTRIDER_LAMBDA {
      unroll<2>([&](auto r) OUTRIDER_LAMBDA { memcpy(&rows[r], out[2 * pair + r] + 4 * part, 16); });
      sums[pair] = vreinterpretq_f32_f64(vzip1q_f64(rows[0], rows[1]));
      sums[pairs + pair] = vreinterpretq_f32_f64(vzip2q_f64(rows[0], rows[1]));
    });
    const uint8_t* at = block;
    for (int g = 0; g < groups; ++g, at += S::block_bytes) {
      const size_t first = size_t(g * S::group / 32) * pairs;
      const InputPair* const x = inputs + first;
      const int8_t* const low = panel.low + 64 * first;
      if (x->has_low)
        add_pairs<S, pairs, true>(at, part, x, low, g * S::group % 32, sums);
      else
        add_pairs<S, pairs, false>(at, part, x, low, g * S::group % 32, sums);
      prefetch_share<S, 1>(at + tile_bytes, part);
    }
    unroll<pairs>([&](auto pair) OUTRIDER_LAMBDA {
      const float64x2_t first = vreinterpretq_f64_f32(sums[pair]), second = vreinterpretq_f64_f32(sums[pairs + pair]);
      rows[0] = vzip1q_f64(first, second);
      rows[1] = vzip2q_f64(first, second);
      unroll<2>([&](auto r) OUTRIDER_LAMBDA { memcpy(out[2 * pair + r] + 4 * part, &rows[r], 16); });
    });
  }
}

#endif

}  // namespace
}  // namespace outrider::LEVEL
