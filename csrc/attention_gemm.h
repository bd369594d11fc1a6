// The two GEMMs of attention: rows of queries times panels of keys, rows of weights times panels of values. A panel has
// sixteen columns.
#pragma once
#include <algorithm>

#include "dot.h"
#include "vector_math.h"

namespace outrider::LEVEL {

// Conversions of page elements to f32. kScaled: a token's head has a scale, which counts `kUnit` times.
struct F32 {
  using Element = float;
  static constexpr bool kScaled = false;
  static OUTRIDER_MEMBER f32x16 widen(const float* from) { return load(from); }
};
struct F16 {
  using Element = uint16_t;
  static constexpr bool kScaled = false;
  static OUTRIDER_MEMBER f32x16 widen(const uint16_t* from) { return load_f16(from); }
};
struct BF16 {
  using Element = uint16_t;
  static constexpr bool kScaled = false;
  static OUTRIDER_MEMBER f32x16 widen(const uint16_t* from) { return load_bf16(from); }
};
struct I8 {
  using Element = int8_t;
  static constexpr bool kScaled = true;
  static constexpr float kUnit = 1.0f;
  static OUTRIDER_MEMBER f32x16 widen(const int8_t* from) { return load_i8(from); }
};
struct FP8 {
  using Element = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr float kUnit = 256.0f;  // load_fp8 divides by it
  static OUTRIDER_MEMBER f32x16 widen(const uint8_t* from) { return load_fp8(from); }
};

// Not memcpy: the compiler may route it through integer registers.
typedef float unaligned __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
OUTRIDER_INLINE f32 load_part(const float* from) { return *reinterpret_cast<const unaligned*>(from); }
OUTRIDER_INLINE void store_part(float* to, const f32& value) { *reinterpret_cast<unaligned*>(to) = value; }

typedef uint8_t u8x16 __attribute__((vector_size(16)));
OUTRIDER_INLINE u8x16 zip_low(u8x16 a, u8x16 b) {
  return OUTRIDER_PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
OUTRIDER_INLINE u8x16 zip_high(u8x16 a, u8x16 b) {
  return OUTRIDER_PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
typedef uint16_t u16x8 __attribute__((vector_size(16)));
OUTRIDER_INLINE u16x8 zip_low(u16x8 a, u16x8 b) { return OUTRIDER_PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
OUTRIDER_INLINE u16x8 zip_high(u16x8 a, u16x8 b) { return OUTRIDER_PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
OUTRIDER_INLINE f32x4 zip_low(f32x4 a, f32x4 b) { return OUTRIDER_PICK(a, b, 0, 4, 1, 5); }
OUTRIDER_INLINE f32x4 zip_high(f32x4 a, f32x4 b) { return OUTRIDER_PICK(a, b, 2, 6, 3, 7); }

// Transpose one square: element i of row j becomes element j of line i; a line has sixteen elements.
template <class Vector, class Element>
OUTRIDER_INLINE void transpose_square(const Element* const* rows, int at, Element* to) {
  constexpr int size = sizeof(Vector) / sizeof(Element);
  Vector now[size], next[size];
  unroll<size>([&](auto i) OUTRIDER_LAMBDA { memcpy(&now[i], rows[i] + at, sizeof(Vector)); });
  const auto step = [](const Vector* from, Vector* into) OUTRIDER_LAMBDA {
    unroll<size / 2>([&](auto i) OUTRIDER_LAMBDA {
      into[2 * i] = zip_low(from[i], from[i + size / 2]);
      into[2 * i + 1] = zip_high(from[i], from[i + size / 2]);
    });
  };
  step(now, next);
  step(next, now);
  if (size >= 8) step(now, next);
  if (size == 16) step(next, now);
  const Vector* last = size == 8 ? next : now;
  unroll<size>([&](auto i) OUTRIDER_LAMBDA { memcpy(to + 16 * i, &last[i], sizeof(Vector)); });
}

// to[i][j] = rows[j][i] for sixteen rows of `width` elements, a multiple of sixteen.
template <class Element>
void transpose(const Element* const* rows, int width, Element* to) {
  using Wide = std::conditional_t<sizeof(Element) == 2, u16x8, f32x4>;
  using Vector = std::conditional_t<sizeof(Element) == 1, u8x16, Wide>;
  constexpr int size = sizeof(Vector) / sizeof(Element);
  for (int at = 0; at < width; at += size)
    for (int row = 0; row < 16; row += size) transpose_square<Vector>(rows + row, at, to + 16 * at + row);
}

// A panel: sixteen lanes for each k and each group of columns c, at rows[k] + c * column. The loops prefetch what
// follows this panel: `ahead` has kAhead rows of `lines` cache lines. Pages are scattered, so hardware prefetchers miss
// them, and issuing all prefetches at once stalls the core.
constexpr int kAhead = 64;
template <class Format>
struct ColumnPanel {
  const typename Format::Element* const* rows;
  int column;
  const char* const* ahead;
  int lines;
};

// out[r][c] = sum of left[r][k] * panel[k][c] over k in [first, last), in that order; with `onto` the sum continues
// from the value in out.
struct Gemm {
  const float* left;
  int left_stride, first, last;
  float* out;
  int out_stride;
};

template <class Format, bool onto, int rows, int columns>
OUTRIDER_INLINE void multiply_tile(const Gemm gemm, const ColumnPanel<Format> panel, int row, int column) {
  const size_t step = size_t(panel.column), offset = size_t(column) * step;
  const float* left[rows];
  unroll<rows>([&](auto r) OUTRIDER_LAMBDA { left[r] = gemm.left + size_t(row + r) * gemm.left_stride; });
  constexpr bool asks = rows < 4 || !std::is_same_v<Format, F32>;  // many rows hide the latency without prefetching
  const char* const* ahead = panel.ahead;
  size_t line[columns];
  unroll<columns>([&](auto c) OUTRIDER_LAMBDA { line[c] = size_t(std::min(column + c, panel.lines - 1)) * 64; });
  float* const out = gemm.out + size_t(row) * gemm.out_stride + 16 * column;
  const auto sum_at = [&](int i) OUTRIDER_LAMBDA {
    return out + size_t(i / (columns * kParts)) * gemm.out_stride + i % (columns * kParts) * kWidth;
  };
  f32 sums[rows * columns * kParts];
  unroll<rows * columns * kParts>([&](auto i) OUTRIDER_LAMBDA { sums[i] = onto ? load_part(sum_at(i)) : f32{}; });
  for (size_t k = size_t(gemm.first), last = size_t(gemm.last); k < last; ++k) {
    const typename Format::Element* from = panel.rows[k] + offset;
    f32 factors[rows];
    unroll<rows>([&](auto r) OUTRIDER_LAMBDA { factors[r] = left[r][k] - f32{}; });
    unroll<columns>([&](auto c) OUTRIDER_LAMBDA {
      if (asks) __builtin_prefetch(ahead[k % kAhead] + line[c]);
      const f32x16 lanes = Format::widen(from + c * step);
      unroll<rows * kParts>([&](auto i) OUTRIDER_LAMBDA {
        constexpr int r = i / kParts, p = i % kParts, at = (r * columns + c) * kParts + p;
        sums[at] = fma(factors[r], lanes.part[p], sums[at]);
      });
    });
  }
  unroll<rows * columns * kParts>([&](auto i) OUTRIDER_LAMBDA { store_part(sum_at(i), sums[i]); });
}

// Groups of columns per pass: enough sums to hide the latency of an fma, few enough for the registers.
constexpr int columns_beside(int rows) { return kWidth == 16 || rows == 1 ? 4 : rows == 2 ? 2 : 1; }

template <class Format, bool onto, int rows, int columns = columns_beside(rows)>
__attribute__((noinline)) void multiply_rows(const Gemm& gemm, const ColumnPanel<Format>& panel, int row, int first,
                                             int last) {
  for (; first + columns <= last; first += columns) multiply_tile<Format, onto, rows, columns>(gemm, panel, row, first);
  if constexpr (columns > 1)
    if (first < last) multiply_rows<Format, onto, rows, columns / 2>(gemm, panel, row, first, last);
}

// Multiply `rows` rows by column groups [first, last). All rows pass over four groups before the next four, which keeps
// those in L1.
template <class Format, bool onto = false>
void multiply(const Gemm& gemm, int rows, const ColumnPanel<Format>& panel, int first, int last) {
  for (int next; first < last; first = next) {
    next = std::min(first + 4, last);
    int row = 0;
    for (; row + 4 <= rows; row += 4) multiply_rows<Format, onto, 4>(gemm, panel, row, first, next);
    if (rows - row == 3) multiply_rows<Format, onto, 3>(gemm, panel, row, first, next);
    if (rows - row == 2) multiply_rows<Format, onto, 2>(gemm, panel, row, first, next);
    if (rows - row == 1) multiply_rows<Format, onto, 1>(gemm, panel, row, first, next);
  }
}

}  // namespace outrider::LEVEL
