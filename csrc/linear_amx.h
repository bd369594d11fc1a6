// The same sums by AMX tiles of 16 rows x 16 outputs. The integers are exact, so rows come out as from blocks.h.
#pragma once
#include "blocks.h"

namespace outrider::LEVEL {
namespace {

#if defined(__AMX_INT8__)

constexpr int kTileRows = 16;
constexpr int kFewestTileRows = 4;
constexpr int kPieceInputs = 256;  // unpacked for all rows at once: 4 KB of weights, which stay in the nearest cache
template <class S>
constexpr int kPlainBytes = S::group * 16 + 128;

constexpr bool use_tiles(int rows) { return rows >= kFewestTileRows; }
constexpr int padded_rows(int rows) { return use_tiles(rows) ? (rows + kTileRows - 1) / kTileRows * kTileRows : rows; }

// Tiles 0 and 1: sums of high and low; 2 and 3: high and low of 16 rows; 4: weights.
class TileConfig {
 public:
  TileConfig(int rows, int group) : used_(use_tiles(rows)) {
    if (!used_) return;
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 4; ++tile) {
      config.rows[tile] = kTileRows;
      config.row_bytes[tile] = tile < 2 ? 64 : uint16_t(group);
    }
    config.rows[4] = uint8_t(group / 4);
    config.row_bytes[4] = 64;
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

// A block as int8 quants, 16 scales and 16 minima, the latter two as floats.
template <class S>
void unpack_block(const uint8_t* from, uint8_t* to) {
  constexpr int step = sizeof(i8);
  for (int at = 0; at < S::quant_bytes; at += step) {
    const i8 first = S::kind == Kind::q4 ? low_nibbles(load_bytes(from + at)) : load_weights(from + at);
    memcpy(to + at, &first, step);
    if constexpr (S::kind == Kind::q4) {
      const i8 second = high_nibbles(load_bytes(from + at));
      memcpy(to + S::quant_bytes + at, &second, step);
    }
  }
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + S::quant_bytes);
  float* floats = reinterpret_cast<float*>(to + S::group * 16);
  store(floats, load_f16(halves));
  if constexpr (S::has_min) store(floats + kLanes, load_f16(halves + kLanes));
}

template <class S>
void add_piece(const uint8_t* piece, int groups, int zero, const Span& span) {
  alignas(64) int32_t high[kTileRows][kLanes], low[kTileRows][kLanes];
  const Quantised& x = *span.x;
  const int per_row = span.width / 16;
  asm volatile("" ::: "memory");
  for (int g = 0; g < groups; ++g, piece += kPlainBytes<S>) {
    _tile_loadd(4, piece, 64);
    const f32x16 scale = load(reinterpret_cast<const float*>(piece + S::group * 16));
    const f32x16 minimum = load(reinterpret_cast<const float*>(piece + S::group * 16) + kLanes);
    const int input = span.input + g * S::group;
    for (int row = 0; row < span.count; row += kTileRows) {
      const size_t from = size_t(span.first + row) * x.stride + input;
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(2, x.high + from, x.stride);
      _tile_loadd(3, x.low + from, x.stride);
      _tile_dpbsud(0, 2, 4);
      _tile_dpbsud(1, 3, 4);
      _tile_stored(0, high, 64);
      _tile_stored(1, low, 64);
      const int32_t* totals = x.sums + size_t(span.first + row) * per_row + input / 16;
      const int count = span.count - row < kTileRows ? span.count - row : kTileRows;
      for (int r = 0; r < count; ++r, totals += per_row) {
        const int32_t total = totals[0] + (S::group == 32 ? totals[1] : 0);
        const i32x16 dot = (load(high[r]) << splat(7)) + load(low[r]) - splat((zero + S::offset) * total);
        f32x16 sum = fma(scale, to_float(dot), load(span.sums[row + r]));
        if constexpr (S::has_min) sum = fma(minimum, splat(float(total)), sum);
        store(span.sums[row + r], sum);
      }
    }
  }
}

template <class S>
void add_rows_by_tiles(const uint8_t* block, int groups, int zero, Span span) {
  constexpr int most = kPieceInputs / S::group;
  alignas(64) uint8_t piece[most * kPlainBytes<S>];
  for (int done = 0; done < groups; done += most, span.input += kPieceInputs) {
    const int count = groups - done < most ? groups - done : most;
    for (int g = 0; g < count; ++g, block += S::block_bytes) unpack_block<S>(block, piece + g * kPlainBytes<S>);
    add_piece<S>(piece, count, zero, span);
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
