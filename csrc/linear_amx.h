// The same sums by AMX tiles of 8 rows x 16 outputs. The integers are exact, so rows come out as from blocks.h.
#pragma once
#include <optional>

#include "blocks.h"
#include "tiles.h"

namespace outrider::LEVEL {
namespace {

#if defined(__AMX_INT8__)

constexpr int kUnitRows = 8;  // rows of one tile: their high halves above, their low halves below
constexpr int kFewestTileRows = 5;

constexpr bool use_tiles(int rows) { return rows >= kFewestTileRows; }
constexpr int padded_rows(int rows) {
  return use_tiles(rows) ? (rows + kUnitRows - 1) / kUnitRows * kUnitRows : rows;
}

// Eight tiles: two of sums, three of rows, three of weights. Tile instructions wait for the one before them that uses
// the same tile, so rows and weights are loaded two products ahead, and sums are stored one product late.
template <int tile>
OUTRIDER_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
OUTRIDER_INLINE void store_tile(void* to) {
  asm volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t(64)), "i"(tile) : "memory");
}
template <int sums, int rows, int weights>
OUTRIDER_INLINE void multiply_tiles() {
  asm volatile("tilezero\t%%tmm%c0\n\ttdpbssd\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights));
}
constexpr int sums_tile(int unit) { return unit % 2; }
constexpr int rows_tile(int unit) { return 2 + unit % 3; }
constexpr int weights_tile(int group) { return 5 + group % 3; }

// The shape of the tiles while many rows are multiplied.
class TileConfig {
 public:
  TileConfig(int rows, int group) {
    if (!use_tiles(rows)) return;
    tiles_.emplace([=](int tile) {
      if (tile >= weights_tile(0)) return Tiles::Shape{group / 4, 64};
      return Tiles::Shape{2 * kUnitRows, tile >= rows_tile(0) ? group : 64};
    });
  }

 private:
  std::optional<Tiles> tiles_;
};

// Vectors read what a tile stored only when it has reached the cache: they follow that many products behind.
constexpr int kLag = 5, kBuffers = 8;

// High and low products of eight rows, as a tile leaves them.
struct alignas(64) Products {
  int32_t rows[2 * kUnitRows][kLanes];
};

// Scale a group's products of eight rows and add them. `totals` are those of the group, row by row.
template <class S>
OUTRIDER_INLINE void add_products(const uint8_t* block, int zero, const float* totals, const Products& products,
                                  f32x16* acc) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(block + S::quant_bytes);
  const f32x16 scale = load_f16(halves);
  f32x16 minimum;
  if constexpr (S::has_min) minimum = load_f16(halves + kLanes);
  unroll<kUnitRows>([&](auto r) OUTRIDER_LAMBDA {
    i32x16 dot = (load(products.rows[r]) << splat(7)) + load(products.rows[r + kUnitRows]);
    if constexpr (S::kind == Kind::q4 && !S::has_min) dot = dot - splat(int32_t(totals[r]) * zero);
    acc[r] = fma(scale, to_float(dot), acc[r]);
    if constexpr (S::has_min) acc[r] = fma(minimum, splat(totals[r]), acc[r]);
  });
}

// What one pass over a piece of weights reads: the int8 quants of its groups, `step` bytes apart, and their blocks.
struct Piece {
  const uint8_t *weights, *block;
  int step, groups, zero;
};

// `units` times eight rows, from `row` of the span on. Unit u multiplies group u / units with rows 8 (u % units) ...
template <class S, int units>
__attribute__((noinline)) void add_units(const Piece& piece, const Span& span, int row) {
  Products products[kBuffers];
  const Quantised& x = *span.x;
  const size_t first = size_t(span.first + row);
  const int8_t* rows = x.high + first * 2 * x.stride + span.input;  // low halves lie eight rows below
  const float* totals = x.totals + (first * (span.width / 32) + span.input / 32 * kUnitRows);
  const int totals_stride = span.width / 32 * kUnitRows, count = span.count - row;
  f32x16 acc[units * kUnitRows];
  unroll<units * kUnitRows>([&](auto r) OUTRIDER_LAMBDA {
    acc[r] = r < count ? load(span.sums[row + r]) : splat(0.0f);
  });
  const int last = piece.groups * units;
  // `phase` is the unit modulo 6: it names the tiles.
  const auto fetch = [&](auto phase, int unit) OUTRIDER_LAMBDA {
    if (unit >= last) return;
    const int group = unit / units, half = unit % units;
    if (units == 1 || phase % units == 0)
      load_tile<weights_tile(phase / units)>(piece.weights + group * piece.step, 64);
    load_tile<rows_tile(phase)>(rows + size_t(half) * 2 * kUnitRows * x.stride + group * S::group, x.stride);
  };
  const auto add = [&](auto half, int unit) OUTRIDER_LAMBDA {
    const int group = unit / units;
    add_products<S>(piece.block + group * S::block_bytes, piece.zero, totals + half * totals_stride + group * kUnitRows,
                    products[unit % kBuffers], acc + half * kUnitRows);
  };
  const auto advance = [&](auto phase, int unit) OUTRIDER_LAMBDA {
    multiply_tiles<sums_tile(phase), rows_tile(phase), weights_tile(phase / units)>();
    fetch(std::integral_constant<int, (phase + 2) % 6>{}, unit + 2);
    if (unit >= 1) store_tile<sums_tile(phase + 1)>(products[(unit - 1) % kBuffers].rows);
    if (unit >= kLag) add(std::integral_constant<int, (phase + 6 - kLag) % units>{}, unit - kLag);
  };
  fetch(std::integral_constant<int, 0>{}, 0);
  fetch(std::integral_constant<int, 1>{}, 1);
  for (int unit = 0; unit < last; unit += 6)
    unroll<6>([&](auto phase) OUTRIDER_LAMBDA {
      if (unit + phase < last) advance(phase, unit + phase);
    });
  unroll<2>([&](auto parity) OUTRIDER_LAMBDA {
    if ((last - 1) % 2 == parity) store_tile<sums_tile(parity)>(products[(last - 1) % kBuffers].rows);
  });
  const int left = last > kLag ? last - kLag : 0;
  unroll<kLag + 1>([&](auto i) OUTRIDER_LAMBDA {
    const int unit = left / 2 * 2 + i;  // even, so that `i` tells which half
    if (unit >= left && unit < last) add(std::integral_constant<int, i % units>{}, unit);
  });
  unroll<units * kUnitRows>([&](auto r) OUTRIDER_LAMBDA {
    if (r < count) store(span.sums[row + r], acc[r]);
  });
}

template <class S>
void add_piece(const Piece& piece, const Span& span) {
  int row = 0;
  for (; span.count - row > kUnitRows; row += 2 * kUnitRows) add_units<S, 2>(piece, span, row);
  if (row < span.count) add_units<S, 1>(piece, span, row);
}

// Bytes are multiplied where they lie; nibbles are unpacked piece by piece, once for all rows.
template <class S>
void add_rows_by_tiles(const uint8_t* block, int groups, int zero, Span span) {
  if constexpr (S::kind == Kind::q8) return add_piece<S>({block, block, S::block_bytes, groups, zero}, span);
  constexpr int most = 24, step = S::group * 16;  // a piece of 12 KB stays in the nearest cache
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
    add_piece<S>({piece, block, step, count, zero}, span);
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
