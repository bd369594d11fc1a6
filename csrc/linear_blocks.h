// Quantized matmul with vectors: packed weight blocks times quantized activation rows, group by group.
#pragma once
#include "dot.h"

namespace outrider::LEVEL {
namespace {

// Template parameters of the kernels: the kind of weights, inputs per group, with or without minima. Zero points are
// minima divided by minus the scale. Nibbles with a table are multiplied as the int8 values that they stand for: q8.
template <Kind kind_, int group_, bool has_min_, bool zero_points_ = false, Table table_ = Table::none>
struct Shape {
  static constexpr Kind kind = kind_;
  static constexpr int group = group_;
  static constexpr bool has_min = has_min_, zero_points = zero_points_;
  static constexpr Table table = table_;
  static constexpr bool nibbles = kind == Kind::q4 || table != Table::none;      // two weights in a byte
  static constexpr bool small = kind == Kind::q4 || table == Table::mxfp4;  // weights of at most 15
  static constexpr int quant_bytes = nibbles ? group * 8 : group * 16;
  static constexpr int block_bytes = quant_bytes + (has_min ? 64 : 32);
  static constexpr int excess = kind == Kind::q8 ? (kUnsignedBytes ? 128 : 0) : has_min ? 0 : 8;  // of stored weights
};

// Load the weights of one block for the outputs of register `part`: one register per quad of inputs.
template <class S>
OUTRIDER_INLINE void load_quads(const uint8_t* block, int part, i8* w) {
  block += part * sizeof(i8);
  if constexpr (S::nibbles) {
    unroll<4>([&](auto j) OUTRIDER_LAMBDA {
      const i8 both = load_bytes(block + 64 * j);
      w[j] = look_up<S::table>(low_nibbles(both));
      w[j + 4] = look_up<S::table>(high_nibbles(both));
    });
  } else {
    unroll<S::group / 4>([&](auto j) OUTRIDER_LAMBDA { w[j] = load_weights(block + 64 * j); });
  }
}

// Return what the excess of the weights adds to the products of a group, negated; sums: of its inputs, see QuantizedRows.
template <class S>
OUTRIDER_INLINE i32 correction(const int32_t* sums) {
  if constexpr (S::excess == 0) return i32{};
  i32 sum = sums[0] - i32{};
  if constexpr (S::group == 32) sum += sums[1] - i32{};
  return S::excess == 128 ? sum : sum >> 4;
}

// Load the scales of register `part`, or the minima or zero points from register kParts on.
template <class S>
OUTRIDER_INLINE f32 load_scale(const uint8_t* block, int part) {
  return load_f16_part(reinterpret_cast<const uint16_t*>(block + S::quant_bytes) + part * kWidth);
}

// Load the minima of register `part`. The product of a zero point and a scale is exact.
template <class S>
OUTRIDER_INLINE f32 load_minimum(const uint8_t* block, int part) {
  const f32 stored = load_scale<S>(block, part + kParts);
  return S::zero_points ? -(stored * load_scale<S>(block, part)) : stored;
}

// Prefetch kFarAhead bytes ahead. On x86 the hardware prefetchers stop at page ends and reach half of the bandwidth;
// the tiles of one thread are contiguous.
constexpr int kFarAhead = 8192;
template <int bytes>
OUTRIDER_INLINE void ask_ahead([[maybe_unused]] const uint8_t* from) {
#if defined(__SSE2__)
  unroll<(bytes + 63) / 64>([&](auto i) OUTRIDER_LAMBDA { _mm_prefetch(from + kFarAhead + 64 * i, _MM_HINT_T1); });
#endif
}
// Prefetch these bytes for tile loads, which do not trigger the hardware prefetcher.
template <int bytes>
OUTRIDER_INLINE void ask_soon([[maybe_unused]] const uint8_t* from) {
#if defined(__SSE2__)
  unroll<(bytes + 63) / 64>([&](auto i) OUTRIDER_LAMBDA { _mm_prefetch(from + 64 * i, _MM_HINT_T0); });
#endif
}

void store_lanes(float* to, const f32x16& value, int lanes) {
  if (lanes >= kLanes) return store(to, value);
  float all[kLanes];
  store(all, value);
  memcpy(to, all, size_t(lanes) * sizeof(float));
}

#if !defined(__ARM_FEATURE_DOTPROD)

constexpr int kManyRows = 64;  // rows whose sums are held at a time

// Quantized activation rows [first, first + count) and their sums so far.
struct Span {
  const QuantizedRows* x;
  int first, count, width;
  float (*sums)[kLanes];  // [count][16]
};

template <class S, int rows, int... index>
OUTRIDER_INLINE void add_groups(const uint8_t* block, int groups, const Span& span, int row,
                                std::integer_sequence<int, index...>) {
  const QuantizedRows& x = *span.x;
  const int per_row = span.width / 16, groups_per_row = span.width / 32;
  const size_t from = size_t(span.first + row) * span.width;
  const int8_t* const high[] = {x.high + from + size_t(index) * span.width...};
  const int8_t* const low[] = {x.low + from + size_t(index) * span.width...};
  const int32_t* sums = x.sums + from / 16;
  f32x16 acc[] = {load(span.sums[row + index])...};
  for (int g = 0, at = 0; g < groups; ++g, at += S::group, sums += S::group / 16, block += S::block_bytes) {
    ask_ahead<S::block_bytes>(block);
    const size_t group = (from + at) / 32;
    const float *scales = x.scale + group, *totals = x.totals + group;
    const uint8_t* has_low = x.has_low + group;
    const auto add = [&](auto with_low) OUTRIDER_LAMBDA {
      constexpr int parts = rows == 1 && kParts > 1 ? 2 : 1;
      const i32 start[] = {correction<S>(sums + index * per_row)...};
      unroll<kParts / parts>([&](auto step) OUTRIDER_LAMBDA {
        i8 w[parts][S::group / 4];
        i32 products[rows][parts];
        unroll<parts>([&](auto p) OUTRIDER_LAMBDA { load_quads<S>(block, step * parts + p, w[p]); });
        dots<S::kind, S::group / 4, rows, parts, with_low>(w, high, low, at, start, products);
        unroll<rows * parts>([&](auto i) OUTRIDER_LAMBDA {
          constexpr int r = i / parts, part = step * parts + i % parts;
          f32& sum = acc[r].part[part];
          // One number for all outputs comes from memory: an instruction that multiplies reads and repeats it as well.
          const f32 product = __builtin_convertvector(products[r][i % parts], f32) * (scales[r * groups_per_row] - f32{});
          sum = fma(load_scale<S>(block, part), product, sum);
          if constexpr (S::has_min)
            sum = fma(load_minimum<S>(block, part), totals[r * groups_per_row] - f32{}, sum);
        });
      });
    };
    if ((has_low[index * groups_per_row] | ...))
      add(std::true_type{});
    else
      add(std::false_type{});
  }
  (store(span.sums[row + index], acc[index]), ...);
}

template <class S, int rows>
__attribute__((noinline)) void add_groups(const uint8_t* block, int groups, const Span& span, int row) {
  add_groups<S, rows>(block, groups, span, row, std::make_integer_sequence<int, rows>{});
}

// Add all rows of the span, as many at a time as the registers hold.
template <class S, int... index>
void add_rows(const uint8_t* block, int groups, const Span& span, std::integer_sequence<int, index...>) {
  using Add = void (*)(const uint8_t* block, int groups, const Span& span, int row);
  constexpr Add by_count[] = {add_groups<S, index + 1>...};
  for (int row = 0; row < span.count; row += kRowBlock) {
    const int count = span.count - row < kRowBlock ? span.count - row : kRowBlock;
    by_count[count - 1](block, groups, span, row);
  }
}
template <class S>
void add_rows(const uint8_t* block, int groups, const Span& span) {
  add_rows<S>(block, groups, span, std::make_integer_sequence<int, kRowBlock>{});
}

// Store the sums of one tile, [count][16].
void store_rows(const Matrix& matrix, int tile, int row, int count, const float (*sums)[kLanes], float* out,
                int stride) {
  for (int r = 0; r < count; ++r)
    store_lanes(out + size_t(row + r) * stride + tile * kLanes, load(sums[r]), matrix.rows - tile * kLanes);
}

#endif

}  // namespace
}  // namespace outrider::LEVEL
