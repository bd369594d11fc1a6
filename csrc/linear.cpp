// Matmul out = x * transpose(W) over weights that stay packed in memory. Every output adds its terms in the order of K,
// group by group, so the bits of a row depend on that row alone.
#include "linear_blocks.h"
#include "bf16_amx.h"
#include "linear_amx.h"
#include "linear_neon.h"
#include "activations.h"

namespace outrider::LEVEL {
namespace {

[[maybe_unused]] constexpr int kBf16Slot = 7;  // scratch slot of the bf16 rows of a thread

// ---- rows of activations ----

OUTRIDER_INLINE void store_narrow(int8_t* to, const i32x16& value) {
#if defined(__ARM_NEON)
  const auto half = [&](int i) {
    return vcombine_s16(vmovn_s32((int32x4_t)value.part[i]), vmovn_s32((int32x4_t)value.part[i + 1]));
  };
  vst1q_s8(to, vcombine_s8(vmovn_s16(half(0)), vmovn_s16(half(2))));
#elif defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)value.part[0]));
#elif defined(__SSE2__)
  __m128i four[4];
  memcpy(four, &value, sizeof value);
  const __m128i low = _mm_packs_epi32(four[0], four[1]), high = _mm_packs_epi32(four[2], four[3]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(low, high));
#else
  int32_t lanes[16];
  store(lanes, value);
  for (int i = 0; i < 16; ++i) to[i] = int8_t(lanes[i]);
#endif
}

OUTRIDER_INLINE int32_t sum(const i32x16& value) {
#if defined(__ARM_NEON)
  return vaddvq_s32((int32x4_t)(value.part[0] + value.part[1] + value.part[2] + value.part[3]));
#elif defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)value.part[0]);
#else
  int32_t lanes[16], total = 0;
  store(lanes, value);
  for (int i = 0; i < 16; ++i) total += lanes[i];
  return total;
#endif
}

// Return the largest magnitude of 32 inputs. Compared as integers: NaN > infinity > finite.
OUTRIDER_INLINE float largest(const float* x) {
  const u32x16 sign = splat(0x7fffffffu), first = as_bits(load(x)) & sign, second = as_bits(load(x + 16)) & sign;
  u32x16 most;
  OUTRIDER_EACH(i) most.part[i] = first.part[i] > second.part[i] ? first.part[i] : second.part[i];
#if defined(__AVX512F__)
  return bits_to_float(_mm512_reduce_max_epu32((__m512i)most.part[0]));
#elif defined(__ARM_NEON)
  const auto larger = [](u32 a, u32 b) { return vmaxq_u32((uint32x4_t)a, (uint32x4_t)b); };
  return bits_to_float(vmaxvq_u32(vmaxq_u32(larger(most.part[0], most.part[1]), larger(most.part[2], most.part[3]))));
#else
  uint32_t lanes[16], out = 0;
  memcpy(lanes, &most, sizeof lanes);
  for (uint32_t lane : lanes) out = lane > out ? lane : out;
  return bits_to_float(out);
#endif
}

// Under Activations::fast, groups whose largest magnitude exceeds this multiple of the mean over the row get low parts:
// 14 % of the groups of SmolLM2-135M, where the KL divergence is 1.0e-3, and 7.8e-3 without low parts.
constexpr float kLargeGroup = 1.5f;

// Write the largest magnitude of each 32 inputs of a row to at(group); return the one above which they get low parts.
template <class At>
OUTRIDER_INLINE float find_maxima(const float* x, int width, Activations activations, const At& at) {
  float total = 0;
  for (int g = 0; g < width / 32; ++g) total += at(g) = largest(x + 32 * g);
  return activations == Activations::fast ? kLargeGroup * total / float(width / 32) : -1.0f;
}

// Quantize 32 inputs and pass them to store(k, high, low, both) sixteen at a time; return the scale. One value that is
// not finite makes the scale NaN.
template <class Store>
OUTRIDER_INLINE float quantize(const float* x, float maximum, bool with_low, const Store& store) {
  constexpr float most = 127 << kLowBits,
                  smallest = 1e-30f;  // groups below it are treated as zero: the scale would be denormal
  if (!(maximum < INFINITY && maximum >= smallest)) {
    for (int k = 0; k < 32; k += 16) store(k, splat(0), splat(0), splat(0));
    return maximum < smallest ? 0.0f : NAN;
  }
  const f32x16 steps = splat((with_low ? most : 127.0f) / maximum);
  const f32x16 magic = splat(0x1.8p23f);  // adding it rounds to an integer, to nearest even
  for (int k = 0; k < 32; k += 16) {
    const u32x16 rounded = as_bits(fma(load(x + k), steps, magic)) - as_bits(magic);
    i32x16 both, high, low = splat(0);
    OUTRIDER_EACH(i) {
      both.part[i] = (i32)rounded.part[i];
      high.part[i] = both.part[i];
      if (with_low) {
        high.part[i] = (both.part[i] + (1 << (kLowBits - 1))) >> kLowBits;
        low.part[i] = both.part[i] - (high.part[i] << kLowBits);
      } else {
        both.part[i] <<= kLowBits;
      }
    }
    store(k, high, low, both);
  }
  return bits_to_float(float_to_bits(maximum * (1.0f / most)) & ~3u);  // 22 bits: panels.h multiplies it by 3
}

// Call body(first, last) for runs of `count` rows or panels, on all threads unless there are few rows, or `alone`.
template <class Body>
void over_runs(int tokens, int count, bool alone, const Body& body) {
  if (alone || tokens <= kFewRows) return body(0, count);
  parallel([&](int part, int parts) {
    const Share share(count, part, parts);
    body(share.first, share.last);
  });
}

#if defined(__ARM_FEATURE_DOTPROD)

QuantizedRows prepare_panels(const float* x, int tokens, int width, Activations activations, int scratch_slot,
                             bool alone) {
  const int groups = width / 32;
  const size_t count = Panel::total(tokens, width);
  auto* inputs = static_cast<Inputs*>(scratch(scratch_slot, count * (sizeof(Inputs) + 32)));
  auto* low_parts = reinterpret_cast<int8_t*>(inputs + count);
  over_runs(tokens, panel_count(tokens), alone, [&](int first, int last) {
    for (int i = first; i < last; ++i) {
      const Panel panel(tokens, width, i);
      const float* const rows = x + size_t(panel.first) * width;
      float limit[kPanelRows];
      for (int row = 0; row < panel.count; ++row)
        limit[row] = find_maxima(rows + size_t(row) * width, width, activations,
                                 [&](int g) -> float& { return inputs[panel.at + g * panel.padded + row].scale; });
      for (int g = 0; g < groups; ++g) {
        const size_t at = panel.at + size_t(g) * panel.padded;
        bool has_low = false;
        for (int row = 0; row < panel.count; ++row) has_low |= inputs[at + row].scale > limit[row];
        for (int row = 0; row < panel.count; ++row) {
          Inputs& one = inputs[at + row];
          int8_t* low_part = low_parts + 32 * (at + row);
          i32x16 sums = splat(0);
          const auto store = [&](int k, const i32x16& high, const i32x16& low, const i32x16& both) OUTRIDER_LAMBDA {
            store_narrow(one.high + k, high);
            if (has_low) store_narrow(low_part + k, low);
            sums = sums + both;
          };
          const float scale =
              quantize(rows + size_t(row) * width + 32 * g, one.scale, one.scale > limit[row], store);
          one.finish(scale, sum(sums), has_low);
        }
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if (panel.count > 1) join_pairs(inputs + at, low_parts + 32 * at, panel.count);
#endif
      }
    }
  });
  return {reinterpret_cast<int8_t*>(inputs), low_parts, nullptr, nullptr, nullptr, nullptr};
}

#else

QuantizedRows prepare_rows(const float* x, int tokens, int width, Activations activations, int scratch_slot,
                           bool alone) {
  const int sixteens = width / 16, groups = width / 32;
  const size_t plane = size_t(tokens) * width, numbers = size_t(tokens) * (sixteens + 2 * groups);
  auto* high = static_cast<int8_t*>(
      scratch(scratch_slot, 2 * plane + numbers * sizeof(float) + size_t(tokens) * groups));
  int8_t* low = high + plane;
  auto* sums = reinterpret_cast<int32_t*>(low + plane);
  auto* scales = reinterpret_cast<float*>(sums + size_t(tokens) * sixteens);
  float* totals = scales + size_t(tokens) * groups;
  auto* has_low = reinterpret_cast<uint8_t*>(totals + size_t(tokens) * groups);
  over_runs(tokens, tokens, alone, [&](int first, int last) {
    for (int t = first; t < last; ++t) {
      const float* row = x + size_t(t) * width;
      float* scale = scales + size_t(t) * groups;
      const float limit = find_maxima(row, width, activations, [&](int g) -> float& { return scale[g]; });
      for (int g = 0; g < groups; ++g) {
        const size_t at = size_t(t) * width + 32 * g;
        int32_t total = 0;
        const auto store = [&](int k, const i32x16& coarse, const i32x16& fine, const i32x16& both) OUTRIDER_LAMBDA {
          store_narrow(high + at + k, coarse);
          store_narrow(low + at + k, fine);
          const int32_t all = sum(both);
          sums[(at + k) / 16] = -128 * all;
          total += all;
        };
        has_low[size_t(t) * groups + g] = scale[g] > limit;
        scale[g] = quantize(row + 32 * g, scale[g], scale[g] > limit, store);
        totals[at / 32] = scale[g] * float(total);
      }
    }
  });
  return {high, low, sums, scales, has_low, totals};
}

#endif

#if defined(__AMX_INT8__)
// Quantize into strips of sixteen rows, see Strip in linear_amx.h. Padding rows of the last strip are zero. Low parts
// cost nothing here; groups lack them as in prepare_rows, since bits must not depend on the number of rows.
QuantizedRows prepare_tiles(const float* x, int tokens, int width, Activations activations, int scratch_slot,
                            bool alone) {
  const size_t strips = size_t(tokens + 15) / 16, groups = size_t(width) / 32, units = strips * groups;
  auto* inputs = static_cast<int8_t*>(scratch(scratch_slot, units * (kTileBytes + 2 * 16 * sizeof(float))));
  auto* scales = reinterpret_cast<float*>(inputs + units * kTileBytes);
  float* totals = scales + units * 16;
  const int padded = padded_rows(tokens);
  const bool paired = tokens == kPairedRows;
  if (paired) memset(inputs, 0, (groups + 1) / 2 * kTileBytes);
  // By strips: the numbers of one strip share cache lines.
  over_runs(tokens, int(strips), alone, [&](int first, int last) {
    for (int t = 16 * first; t < 16 * last && t < padded; ++t) {
      const size_t strip = size_t(t) / 16 * groups;
      const float* row = x + size_t(t) * width;
      const auto scale = [&](int g) -> float& { return scales[(strip + g) * 16 + t % 16]; };
      const float limit = t < tokens ? find_maxima(row, width, activations, scale) : 0.0f;
      for (size_t g = 0; g < groups; ++g) {
        int8_t* high = inputs + (strip + g) * kTileBytes + t % 16 * 64;
        if (paired) high = inputs + g / 2 * kTileBytes + (g % 2 * tokens + t) * 128 + g % 2 * 32;
        int8_t* low = high + (paired ? 64 : 32);
        float& total = totals[(strip + g) * 16 + t % 16];
        if (t >= tokens) {
          memset(high, 0, 64);
          scale(int(g)) = total = 0;
          continue;
        }
        i32x16 all = splat(0);
        const float maximum = scale(int(g));
        scale(int(g)) = quantize(row + 32 * g, maximum, maximum > limit,
                                 [&](int k, const i32x16& coarse, const i32x16& fine, const i32x16& both) OUTRIDER_LAMBDA {
                                   store_narrow(high + k, coarse);
                                   store_narrow(low + k, fine);
                                   all = all + both;
                                 });
        total = scale(int(g)) * float(sum(all));
      }
    }
  });
  return {inputs, nullptr, nullptr, scales, nullptr, totals};
}
#endif

// ---- quantized weights ----

#if defined(__ARM_FEATURE_DOTPROD)

template <class S>
void quantized_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  multiply_panels<S>(matrix, rows, first, last, out, stride);
}

#else

template <class S>
void quantized_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  if (use_tiles(rows.tokens)) return multiply_by_tiles<S>(matrix, rows, first, last, out, stride);
  alignas(64) float sums[kManyRows][kLanes];
  for (int tile = first; tile < last; ++tile) {
    const uint8_t* block = matrix.data.get() + tile * matrix.tile_bytes();
    for (int row = 0; row < rows.tokens; row += kManyRows) {
      const int count = rows.tokens - row < kManyRows ? rows.tokens - row : kManyRows;
      memset(sums, 0, sizeof(sums[0]) * count);
      add_rows<S>(block, rows.width / S::group, {&rows.quantized, row, count, rows.width, sums});
      store_rows(matrix, tile, row, count, sums, out, stride);
    }
  }
}

#endif

// ---- float weights ----

// Load input k of sixteen outputs; `odd` is k % 2.
template <Kind kind>
OUTRIDER_INLINE f32x16 load_floats(const uint8_t* tile, int k, bool odd) {
  if constexpr (kind == Kind::f32) return load(reinterpret_cast<const float*>(tile) + size_t(k) * kLanes);
  if constexpr (kind == Kind::f16) return load_f16(reinterpret_cast<const uint16_t*>(tile) + size_t(k) * kLanes);
  const u32x16 pairs = as_bits(load(reinterpret_cast<const float*>(tile) + size_t(k / 2) * kLanes));
  return as_float(odd ? pairs & splat(0xffff0000u) : pairs << splat(16u));
}

// Four inputs of a row.
struct Four {
#if defined(__ARM_NEON)
  float32x4_t values;
  OUTRIDER_MEMBER explicit Four(const float* from) : values(vld1q_f32(from)) {}
  template <int lane>
  OUTRIDER_MEMBER f32x16 splat_lane() const {
    return splat(vgetq_lane_f32(values, lane));
  }
#else
  const float* values;
  OUTRIDER_MEMBER explicit Four(const float* from) : values(from) {}
  template <int lane>
  OUTRIDER_MEMBER f32x16 splat_lane() const {
    return splat(values[lane]);
  }
#endif
};

template <Kind kind, int... index>
OUTRIDER_INLINE void float_rows(const uint8_t* tile, const float* x, int width, float* out, int stride, int lanes,
                                std::integer_sequence<int, index...>) {
  f32x16 sums[] = {(void(index), splat(0.0f))...};
  const float* const rows[] = {x + size_t(index) * width...};
  int k = 0;
  for (; k + 4 <= width; k += 4) {
    const Four four[] = {Four(rows[index] + k)...};
    unroll<4>([&](auto lane) OUTRIDER_LAMBDA {
      const f32x16 weights = load_floats<kind>(tile, k + lane, lane % 2);
      ((sums[index] = fma(weights, four[index].template splat_lane<lane>(), sums[index])), ...);
    });
  }
  for (; k < width; ++k) {
    const f32x16 weights = load_floats<kind>(tile, k, k % 2);
    ((sums[index] = fma(weights, splat(rows[index][k]), sums[index])), ...);
  }
  (store_lanes(out + size_t(index) * stride, sums[index], lanes), ...);
}

// The sums of 32 inputs are scaled, then added.
template <int... index>
OUTRIDER_INLINE void fp8_rows(const uint8_t* tile, const float* x, int width, float* out, int stride, int lanes,
                              std::integer_sequence<int, index...>) {
  f32x16 sums[] = {(void(index), splat(0.0f))...};
  const float* const rows[] = {x + size_t(index) * width...};
  for (int from = 0; from < width; from += kFp8Group, tile += kFp8Block) {
    f32x16 parts[] = {(void(index), splat(0.0f))...};
    for (int k = 0; k < kFp8Group; k += 4) {
      const Four four[] = {Four(rows[index] + from + k)...};
      unroll<4>([&](auto lane) OUTRIDER_LAMBDA {
        const f32x16 weights = load_fp8(tile + (k + lane) * kLanes);
        ((parts[index] = fma(weights, four[index].template splat_lane<lane>(), parts[index])), ...);
      });
    }
    const f32x16 scale = load(reinterpret_cast<const float*>(tile + kFp8Quants));
    ((sums[index] = fma(scale, parts[index], sums[index])), ...);
  }
  (store_lanes(out + size_t(index) * stride, sums[index], lanes), ...);
}

template <Kind kind>
void float_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  constexpr int most = kWidth == 4 ? 4 : 8;
  for (int tile = first; tile < last; ++tile) {
    const uint8_t* weights = matrix.data.get() + tile * matrix.tile_bytes();
    const int lanes = matrix.rows - tile * kLanes;
    int row = 0;
    const auto run = [&](auto count) {
      for (; row + count <= rows.tokens; row += count) {
        const float* x = rows.x + size_t(row) * rows.width;
        float* to = out + size_t(row) * stride + tile * kLanes;
        constexpr std::make_integer_sequence<int, count> each{};
        if constexpr (kind == Kind::fp8)
          fp8_rows(weights, x, rows.width, to, stride, lanes, each);
        else
          float_rows<kind>(weights, x, rows.width, to, stride, lanes, each);
      }
    };
    run(std::integral_constant<int, most>{});
    run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
  }
}

#if defined(__AMX_BF16__)
// All row counts use the tiles: another order of additions would give other bits.
void bf16_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  const Bf16Rows split(rows, kBf16Slot);
  for (int tile = first; tile < last; tile += kBf16Tiles) {
    alignas(64) float sums[kBf16Tiles][16][kLanes];
    const int count = last - tile < kBf16Tiles ? last - tile : kBf16Tiles;
    const uint8_t* weights[kBf16Tiles];  // missing tiles at the end repeat the first and are discarded
    for (int i = 0; i < kBf16Tiles; ++i)
      weights[i] = matrix.data.get() + (i < count ? tile + i : tile) * matrix.tile_bytes();
    for (int row = 0; row < rows.tokens; row += 16) {
      split.multiply(weights, row, sums);
      for (int i = 0; i < count; ++i)
        for (int r = 0; r < 16 && row + r < rows.tokens; ++r) {
          const int from = (tile + i) * kLanes;
          store_lanes(out + size_t(row + r) * stride + from, load(sums[i][r]), matrix.rows - from);
        }
    }
  }
}
#else
void bf16_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  float_tiles<Kind::bf16>(matrix, rows, first, last, out, stride);
}
#endif

}  // namespace

Rows prepare(const float* x, int tokens, int width, Activations activations, int scratch_slot, bool alone) {
  Rows rows{x, tokens, width, {}};
  if (activations == Activations::none) return rows;
#if defined(__ARM_FEATURE_DOTPROD)
  rows.quantized = prepare_panels(x, tokens, width, activations, scratch_slot, alone);
#else
#if defined(__AMX_INT8__)
  if (use_tiles(tokens)) {
    rows.quantized = prepare_tiles(x, tokens, width, activations, scratch_slot, alone);
    return rows;
  }
#endif
  rows.quantized = prepare_rows(x, tokens, width, activations, scratch_slot, alone);
#endif
  return rows;
}

void linear_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  switch (matrix.kind) {
    case Kind::f32:
      return float_tiles<Kind::f32>(matrix, rows, first, last, out, stride);
    case Kind::f16:
      return float_tiles<Kind::f16>(matrix, rows, first, last, out, stride);
    case Kind::fp8:
      return float_tiles<Kind::fp8>(matrix, rows, first, last, out, stride);
    case Kind::bf16:
      return bf16_tiles(matrix, rows, first, last, out, stride);
    case Kind::q4:
      if (matrix.table == Table::iq4_nl)
        return quantized_tiles<Shape<Kind::q8, 32, false, false, Table::iq4_nl>>(matrix, rows, first, last, out, stride);
      if (matrix.table == Table::mxfp4)
        return quantized_tiles<Shape<Kind::q8, 32, false, false, Table::mxfp4>>(matrix, rows, first, last, out, stride);
      if (matrix.zero_points)
        return quantized_tiles<Shape<Kind::q4, 32, true, true>>(matrix, rows, first, last, out, stride);
      if (matrix.has_min) return quantized_tiles<Shape<Kind::q4, 32, true>>(matrix, rows, first, last, out, stride);
      return quantized_tiles<Shape<Kind::q4, 32, false>>(matrix, rows, first, last, out, stride);
    case Kind::q8:
      if (matrix.group == 16)
        return quantized_tiles<Shape<Kind::q8, 16, false>>(matrix, rows, first, last, out, stride);
      if (matrix.zero_points)
        return quantized_tiles<Shape<Kind::q8, 32, true, true>>(matrix, rows, first, last, out, stride);
      if (matrix.has_min) return quantized_tiles<Shape<Kind::q8, 32, true>>(matrix, rows, first, last, out, stride);
      return quantized_tiles<Shape<Kind::q8, 32, false>>(matrix, rows, first, last, out, stride);
  }
}

void linear(const Matrix& matrix, const float* x, int tokens, float* out, int stride) {
  const Input input{x, nullptr, 0, tokens, matrix.cols, matrix.activations, matrix.input_order()};
  over_input(input, matrix.tiles(), [&](const Rows& rows, int first, int last) {
    linear_tiles(matrix, rows, first, last, out, stride);
  });
}

}  // namespace outrider::LEVEL
