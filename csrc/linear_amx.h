// Quantized matmul on AMX tiles of 16 rows x 16 outputs, for five rows and more, with the bits of linear_blocks.h: the
// integer sums are exact, and vectors scale and add them group by group in the same order.
//
// 4-bit weights need one tile multiplication per group. A tile holds 64 inputs: 16 * nibble for 32 inputs meets the
// high parts of the activations, the nibbles themselves meet the low parts, so the tile adds both parts. 8-bit weights
// need two, one per part, which vectors combine.
#pragma once
#include "linear_blocks.h"
#include "threads.h"
#include "tiles.h"

namespace outrider::LEVEL {
namespace {

#if defined(__AMX_INT8__)

constexpr int kFewestTileRows = 5;
constexpr int kTileBytes = 1024;
constexpr int kTileSlot = 6;  // scratch slot of a thread's unpacked weights
constexpr int kStrips = 16;   // strips of 16 rows that share unpacked weights; their inputs fit into L2
constexpr int kTogether = 8;  // output tiles written together: the rows of the logits lie far apart
constexpr int kBatch =
    6;  // groups unpacked, then multiplied, then scaled together: one at a time they wait for their stores

constexpr bool use_tiles(int rows) { return rows >= kFewestTileRows; }

// Round rows up to a multiple of 4, above 16 to a multiple of 16: the cost grows with the rows of a tile.
constexpr int padded_rows(int rows) { return rows > 16 ? (rows + 15) / 16 * 16 : (rows + 3) / 4 * 4; }

// ---- tiles ----

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
template <int tile>
OUTRIDER_INLINE void load_tile(const void* from) {
  asm volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t(64)), "i"(tile) : "memory");
}
template <int tile>
OUTRIDER_INLINE void store_tile(void* to) {
  asm volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t(64)), "i"(tile) : "memory");
}
// Set tile `products` to rows * weights; the weights are unsigned or signed.
template <int products, int rows, int weights, bool is_unsigned>
OUTRIDER_INLINE void multiply_tiles() {
  asm volatile("tilezero\t%%tmm%c0" ::"i"(products));
  if constexpr (is_unsigned)
    asm volatile("tdpbsud\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(products), "i"(rows), "i"(weights));
  else
    asm volatile("tdpbssd\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(products), "i"(rows), "i"(weights));
}

// ---- groups ----

// Unpack the nibbles of 16 outputs into a tile of 64 inputs: 16 * nibble, then nibble. Without a minimum, 8 is
// subtracted first.
template <class S>
OUTRIDER_INLINE void unpack_nibbles(const uint8_t* block, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(char(240));
  const auto put = [&](int line, const __m512i& value, int zero) OUTRIDER_LAMBDA {
    const __m512i centred = S::has_min ? value : _mm512_sub_epi8(value, _mm512_set1_epi8(char(zero)));
    _mm512_store_si512(to + 64 * line, centred);
  };
  unroll<4>([&](auto j) OUTRIDER_LAMBDA {
    const __m512i both = _mm512_loadu_si512(block + 64 * j);
    put(j, _mm512_and_si512(_mm512_slli_epi16(both, 4), high), 128);
    put(4 + j, _mm512_and_si512(both, high), 128);
    put(8 + j, _mm512_and_si512(both, low), 8);
    put(12 + j, _mm512_and_si512(_mm512_srli_epi16(both, 4), low), 8);
  });
}

// A strip of 16 activation rows: [K/32][16][high 32, low 32], with scales and totals [K/32][16].
struct Strip {
  const uint8_t* inputs;
  const float *scales, *totals;
  Strip(const QuantizedRows& x, int number, int width) {
    const size_t at = size_t(number) * (width / 32);
    inputs = reinterpret_cast<const uint8_t*>(x.high) + at * kTileBytes;
    scales = x.scale + at * 16;
    totals = x.totals + at * 16;
  }
};

// A batch of groups of one output tile, for `rows` rows of one strip or of two strips that share the weights.
template <class S, int rows, int strips>
struct GroupBatch {
  static constexpr bool kNibbles = S::kind == Kind::q4;
  static constexpr int kPerScale = 32 / S::group;  // groups per activation scale
  alignas(64) uint8_t weights[kNibbles ? kBatch : 1][kTileBytes];
  alignas(64) uint8_t products[kBatch * strips][kNibbles ? kTileBytes : 2 * kTileBytes];  // [group][strip]

  // Multiply groups [first, first + count), whose weights lie at `tile`: unpacked nibbles or blocks of bytes. Two tile
  // multiplications are interleaved (two groups or two strips) to hide their latency.
  OUTRIDER_MEMBER void multiply(const Strip* x, const uint8_t* tile, int first, int count) {
    unroll<kBatch * strips / 2>([&](auto pair) OUTRIDER_LAMBDA {
      constexpr int one = 2 * pair, other = one + 1;
      if (one / strips < count) multiply_one<one>(x, tile, first);
      if (other / strips < count) multiply_one<other>(x, tile, first);
      if (one / strips < count) store_one<one>();
      if (other / strips < count) store_one<other>();
    });
  }

  // Scale the sums of the groups from `block` on, of strip number `strip`, and add them to sums [rows].
  OUTRIDER_MEMBER void scale(const Strip& x, int strip, const uint8_t* block, int first, int count,
                             float (*sums)[kLanes]) const {
    f32x16 acc[rows];
    unroll<rows>([&](auto r) OUTRIDER_LAMBDA { acc[r] = first == 0 ? splat(0.0f) : load(sums[r]); });
    for (int i = 0; i < count; ++i, block += S::block_bytes) {
      const auto* halves = reinterpret_cast<const uint16_t*>(block + S::quant_bytes);
      const size_t at = size_t((first + i) / kPerScale) * 16;
      const f32x16 scale = load_f16(halves), stored = S::has_min ? load_f16(halves + kLanes) : f32x16{},
                   minimum = S::zero_points ? stored * scale * splat(-1.0f) : stored;
      unroll<rows>([&](auto r) OUTRIDER_LAMBDA {
        acc[r] = fma(scale, product(products[i * strips + strip], r) * splat(x.scales[at + r]), acc[r]);
        if constexpr (S::has_min) acc[r] = fma(minimum, splat(x.totals[at + r]), acc[r]);
      });
    }
    unroll<rows>([&](auto r) OUTRIDER_LAMBDA { store(sums[r], acc[r]); });
  }

 private:
  template <int number>
  OUTRIDER_MEMBER static void multiply_one(const Strip* x, const uint8_t* tile, int first) {
    constexpr int i = number / strips, to = number % 2 * 2, weights = 6 + i % 2;
    const uint8_t* inputs = x[number % strips].inputs + size_t((first + i) / kPerScale) * kTileBytes;
    if (number % strips == 0) load_tile<weights>(tile + i * (kNibbles ? kTileBytes : S::block_bytes));
    if constexpr (kNibbles) {
      load_tile<4 + number % 2>(inputs);
      multiply_tiles<to, 4 + number % 2, weights, S::has_min>();
    } else {
      inputs += (first + i) % kPerScale * S::group;
      load_tile<4>(inputs);
      multiply_tiles<to, 4, weights, false>();
      load_tile<5>(inputs + 32);
      multiply_tiles<to + 1, 5, weights, false>();
    }
  }
  template <int number>
  OUTRIDER_MEMBER void store_one() {
    store_tile<number % 2 * 2>(products[number]);
    if constexpr (!kNibbles) store_tile<number % 2 * 2 + 1>(products[number] + kTileBytes);
  }
  OUTRIDER_MEMBER static f32x16 product(const uint8_t* from, int r) {
    const auto* line = reinterpret_cast<const int32_t*>(from) + r * kLanes;
    if constexpr (kNibbles) return to_float(load(line));
    return to_float((load(line) << splat(kLowBits)) + load(line + kTileBytes / 4));
  }
};

// Multiply one or two strips by one output tile. `unpacked`: the nibbles of all groups, or null if no other strip needs
// them.
template <class S, int rows, int strips>
__attribute__((noinline)) void multiply_strips(const uint8_t* block, const uint8_t* unpacked, const Strip* x,
                                               int groups, float (*sums)[16][kLanes]) {
  using Groups = GroupBatch<S, rows, strips>;
  Groups batch;
  for (int first = 0; first < groups; first += kBatch, block += kBatch * S::block_bytes) {
    const int count = groups - first < kBatch ? groups - first : kBatch;
    const uint8_t* tile = unpacked ? unpacked + size_t(first) * kTileBytes : batch.weights[0];
    if (!Groups::kNibbles) tile = block;
    if (!unpacked)
      for (int i = 0; i < count; ++i) {
        const uint8_t* one = block + i * S::block_bytes;
        ask_ahead<S::block_bytes>(one);
        if constexpr (Groups::kNibbles)
          unpack_nibbles<S>(one, batch.weights[i]);
        else
          ask_soon<S::block_bytes>(one + kBatch * S::block_bytes);
      }
    batch.multiply(x, tile, first, count);
    unroll<strips>([&](auto i) OUTRIDER_LAMBDA { batch.scale(x[i], i, block, first, count, sums[i]); });
  }
}

// Write the sums of `tiles` output tiles for a strip, [tile][16][16], to rows from `row` on.
inline void write_strip(const Matrix& matrix, const Rows& rows, int tile, int tiles, int row,
                        const float (*sums)[16][kLanes], float* out, int stride) {
  for (int r = 0; r < 16 && row + r < rows.tokens; ++r)
    for (int i = 0, column = tile * kLanes; i < tiles; ++i, column += kLanes)
      store_lanes(out + size_t(row + r) * stride + column, load(sums[i][r]), matrix.rows - column);
}

// Compute output tiles [first, last) for up to sixteen rows.
template <class S>
void multiply_few(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  static_assert(padded_rows(kFewestTileRows) == 8);
  constexpr auto most = multiply_strips<S, 16, 1>;
  constexpr decltype(most) by_fours[] = {multiply_strips<S, 8, 1>, multiply_strips<S, 12, 1>, most};
  const auto multiply = by_fours[padded_rows(rows.tokens) / 4 - 2];
  const Strip strip(rows.quantized, 0, rows.width);
  alignas(64) float sums[kTogether][16][kLanes];
  for (int tile = first; tile < last; tile += kTogether) {
    const int tiles = last - tile < kTogether ? last - tile : kTogether;
    for (int i = 0; i < tiles; ++i)
      multiply(matrix.data.get() + (tile + i) * matrix.tile_bytes(), nullptr, &strip, rows.width / S::group, sums + i);
    write_strip(matrix, rows, tile, tiles, 0, sums, out, stride);
  }
}

// Compute output tiles [first, last) for strips [begin, end).
template <class S>
void multiply_many(const Matrix& matrix, const Rows& rows, int begin, int end, int first, int last, float* out,
                   int stride) {
  constexpr bool nibbles = S::kind == Kind::q4;
  const int groups = rows.width / S::group;
  auto* unpacked = nibbles ? static_cast<uint8_t*>(scratch(kTileSlot, size_t(groups) * kTileBytes)) : nullptr;
  for (int tile = first; tile < last; ++tile) {
    const uint8_t* block = matrix.data.get() + tile * matrix.tile_bytes();
    if constexpr (nibbles)
      for (int g = 0; g < groups; ++g) {
        ask_ahead<S::block_bytes>(block + g * S::block_bytes);
        unpack_nibbles<S>(block + g * S::block_bytes, unpacked + size_t(g) * kTileBytes);
      }
    for (int number = begin; number < end; number += 2) {
      const bool two = number + 1 < end;
      const Strip strips[] = {{rows.quantized, number, rows.width}, {rows.quantized, number + two, rows.width}};
      alignas(64) float sums[2][16][kLanes];
      (two ? multiply_strips<S, 16, 2> : multiply_strips<S, 16, 1>)(block, unpacked, strips, groups, sums);
      for (int i = 0; i <= two; ++i) write_strip(matrix, rows, tile, 1, 16 * (number + i), sums + i, out, stride);
    }
  }
}

// Compute output tiles [first, last) for all rows.
template <class S>
void multiply_by_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  constexpr bool nibbles = S::kind == Kind::q4;
  const int padded = padded_rows(rows.tokens), strips = padded / 16;
  const Tiles shapes([&](int tile) {
    if (tile >= 6) return Tiles::Shape{nibbles ? 16 : S::group / 4, 64};
    return Tiles::Shape{padded < 16 ? padded : 16, tile < 4 || nibbles ? 64 : S::group};
  });
  if (rows.tokens <= 16) return multiply_few<S>(matrix, rows, first, last, out, stride);
  for (int begin = 0; begin < strips; begin += kStrips) {
    const int end = strips - begin < kStrips ? strips : begin + kStrips;
    multiply_many<S>(matrix, rows, begin, end, first, last, out, stride);
  }
}

#else

constexpr bool use_tiles(int) { return false; }
template <class S>
void multiply_by_tiles(const Matrix&, const Rows&, int, int, float*, int) {}

#endif

}  // namespace
}  // namespace outrider::LEVEL
