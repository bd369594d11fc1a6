// The same sums by AMX tiles of up to 16 rows x 16 outputs. The integers are exact, so rows come out as from blocks.h.
#pragma once
#include "blocks.h"

namespace outrider::LEVEL {
namespace {

#if defined(__AMX_INT8__)

constexpr int kTileRows = 16;
constexpr int kFewestTileRows = 4;

constexpr bool use_tiles(int rows) { return rows >= kFewestTileRows; }
// Up to eight rows go through tiles of eight: half the work.
constexpr int tile_rows(int rows) { return rows <= 8 ? 8 : kTileRows; }
constexpr int padded_rows(int rows) {
  return use_tiles(rows) ? (rows + tile_rows(rows) - 1) / tile_rows(rows) * tile_rows(rows) : rows;
}

// Tiles 0 and 1: sums of high and low of the even groups, 5 and 6: of the odd ones; 2 and 3: high and low of the rows;
// 4 and 7: weights of the even and the odd groups.
class TileConfig {
 public:
  TileConfig(int rows, int group) : used_(use_tiles(rows)) {
    if (!used_) return;
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      const bool weights = tile == 4 || tile == 7, inputs = tile == 2 || tile == 3;
      config.rows[tile] = uint8_t(weights ? group / 4 : tile_rows(rows));
      config.row_bytes[tile] = inputs ? uint16_t(group) : 64;
    }
    asm volatile("" ::"r"(&config) : "memory");  // the intrinsics do not tell the compiler what they read
    _tile_loadconfig(&config);
  }
  ~TileConfig() {
    if (used_) _tile_release();
  }
  TileConfig(const TileConfig&) = delete;

 private:
  bool used_;
};

struct TileSums {
  alignas(64) int32_t high[kTileRows][kLanes], low[kTileRows][kLanes];
};

// The integer products of one group with the rows at `high` and `low`. Even and odd groups take turns with the tiles.
template <bool odd>
OUTRIDER_INLINE void multiply_group(const uint8_t* weights, const int8_t* high, const int8_t* low, int stride,
                                    TileSums& out) {
  asm volatile("" ::: "memory");
  if constexpr (odd) {
    _tile_zero(5);
    _tile_zero(6);
    _tile_loadd(7, weights, 64);
    _tile_loadd(2, high, stride);
    _tile_loadd(3, low, stride);
    _tile_dpbssd(5, 2, 7);
    _tile_dpbssd(6, 3, 7);
    _tile_stored(5, out.high, 64);
    _tile_stored(6, out.low, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, weights, 64);
    _tile_loadd(2, high, stride);
    _tile_loadd(3, low, stride);
    _tile_dpbssd(0, 2, 4);
    _tile_dpbssd(1, 3, 4);
    _tile_stored(0, out.high, 64);
    _tile_stored(1, out.low, 64);
  }
  asm volatile("" ::: "memory");
}

// Scale one group's products and add them, rows in registers. `totals` are those of the group, row by row.
template <class S, int rows>
OUTRIDER_INLINE void add_products(const uint8_t* block, int zero, const float* totals, const TileSums& products,
                                  f32x16* acc) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(block + S::quant_bytes);
  const f32x16 scale = load_f16(halves);
  f32x16 minimum;
  if constexpr (S::has_min) minimum = load_f16(halves + kLanes);
  unroll<rows>([&](auto r) OUTRIDER_LAMBDA {
    i32x16 dot = (load(products.high[r]) << splat(7)) + load(products.low[r]);
    if constexpr (S::kind == Kind::q4 && !S::has_min) dot = dot - splat(int32_t(totals[r]) * zero);
    acc[r] = fma(scale, to_float(dot), acc[r]);
    if constexpr (S::has_min) acc[r] = fma(minimum, splat(totals[r]), acc[r]);
  });
}

// `weights` are the int8 quants of the groups, `step` bytes apart. While the tiles multiply a group, the vectors scale
// the one before it.
template <class S, int rows>
__attribute__((noinline)) void add_tile_rows(const uint8_t* weights, int step, const uint8_t* block, int groups,
                                             int zero, const Span& span, int row) {
  TileSums products[2];
  const Quantised& x = *span.x;
  const size_t first = size_t(span.first + row), from = first * x.stride + span.input;
  const int8_t *high = x.high + from, *low = x.low + from;
  const float* totals = x.totals + (first / kTileRows * (span.width / 32) + span.input / 32) * kTileRows;
  const int count = span.count - row < rows ? span.count - row : rows;
  f32x16 acc[rows];
  unroll<rows>([&](auto r) OUTRIDER_LAMBDA { acc[r] = r < count ? load(span.sums[row + r]) : splat(0.0f); });
  const auto multiply = [&](auto odd, int g) OUTRIDER_LAMBDA {
    multiply_group<odd>(weights + g * step, high + g * S::group, low + g * S::group, x.stride, products[odd]);
  };
  const auto add = [&](auto odd, int g) OUTRIDER_LAMBDA {
    add_products<S, rows>(block + g * S::block_bytes, zero, totals + g * kTileRows, products[odd], acc);
  };
  constexpr std::bool_constant<false> even;
  constexpr std::bool_constant<true> odd;
  multiply(even, 0);
  int g = 0;
  for (; g + 2 < groups; g += 2) {
    multiply(odd, g + 1);
    add(even, g);
    multiply(even, g + 2);
    add(odd, g + 1);
  }
  if (g + 1 < groups) multiply(odd, g + 1);
  add(even, g);
  if (g + 1 < groups) add(odd, g + 1);
  unroll<rows>([&](auto r) OUTRIDER_LAMBDA {
    if (r < count) store(span.sums[row + r], acc[r]);
  });
}

template <class S>
void add_piece(const uint8_t* weights, int step, const uint8_t* block, int groups, int zero, const Span& span) {
  // A span that starts at row 0 and is this short is all there is: the tiles were configured for it.
  if (tile_rows(span.count) == 8 && span.first == 0)
    return add_tile_rows<S, 8>(weights, step, block, groups, zero, span, 0);
  for (int row = 0; row < span.count; row += kTileRows)
    add_tile_rows<S, kTileRows>(weights, step, block, groups, zero, span, row);
}

// Bytes are multiplied where they lie; nibbles are unpacked piece by piece, once for all rows.
template <class S>
void add_rows_by_tiles(const uint8_t* block, int groups, int zero, Span span) {
  if constexpr (S::kind == Kind::q8) return add_piece<S>(block, S::block_bytes, block, groups, zero, span);
  constexpr int most = 8, step = S::group * 16;  // a piece of 4 KB stays in the nearest cache
  alignas(64) uint8_t piece[most * step];
  for (int done = 0; done < groups; done += most, span.input += most * S::group, block += most * S::block_bytes) {
    const int count = groups - done < most ? groups - done : most;
    for (int g = 0; g < count; ++g)
      unroll<4>([&](auto j) OUTRIDER_LAMBDA {
        const i8 both = load_bytes(block + g * S::block_bytes + 64 * j);
        const i8 low = low_nibbles(both), high = high_nibbles(both);
        memcpy(piece + g * step + 64 * j, &low, 64);
        memcpy(piece + g * step + 64 * (j + 4), &high, 64);
      });
    add_piece<S>(piece, step, block, count, zero, span);
  }
}

#else

constexpr bool use_tiles(int) { return false; }
constexpr int padded_rows(int rows) { return rows; }
struct TileConfig {
  TileConfig(int, int) {}
};
template <class S>
void add_rows_by_tiles(const uint8_t*, int, int, const Span&) {}

#endif

}  // namespace
}  // namespace outrider::LEVEL
