// Quantized matmul on AMX tiles of 16 rows x 16 outputs, for four rows and more, with the bits of linear_blocks.h: the
// integer sums are exact, and vectors scale and add them group by group in the same order.
//
// A tile multiplication and the store of its products take 31 cycles together, however few of the 16 rows are used, and
// vectors wait meanwhile. So few rows share tiles:
//   4-bit weights: a tile of 64 inputs has 16 * nibble for 32 inputs, which meets the high parts of the activations, and
//     the nibbles themselves, which meet the low parts: it adds both parts. Of four rows a tile has two groups; high and
//     low parts are rows of their own.
//   8-bit weights: up to eight rows, high and low parts are rows of one tile; more need two multiplications. Vectors
//     combine the parts.
#pragma once
#include "linear_blocks.h"
#include "threads.h"
#include "tiles.h"

namespace outrider::LEVEL {
namespace {

#if defined(__AMX_INT8__)

constexpr int kFewestTileRows = 4;  // with three, 8-bit weights from memory take longer than with vectors
constexpr int kTileBytes = 1024;
constexpr int kTileSlot = 6;  // scratch slot of a thread's unpacked weights
constexpr int kStrips = 16;   // strips of 16 rows that share unpacked weights; their inputs fit into L2
constexpr int kTogether = 8;  // output tiles written together: the rows of the logits lie far apart
constexpr int kBatch =
    6;  // groups unpacked, then multiplied, then scaled together: one at a time they wait for their stores
constexpr int kPairedRows = 4;  // rows of which one tile of products holds both parts of two groups

constexpr bool use_tiles(int rows) { return rows >= kFewestTileRows; }

// Round rows up to those that kernels are compiled for: scaling costs by rows.
constexpr int padded_rows(int rows) {
  return rows > 16 ? (rows + 15) / 16 * 16 : rows > 6 ? (rows + 3) / 4 * 4 : rows;
}

// ---- tiles ----

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
template <int tile, int stride = 64>
OUTRIDER_INLINE void load_tile(const void* from) {
  asm volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t(stride)), "i"(tile) : "memory");
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

// Unpack nibbles that have a table into half a tile: the values of 32 inputs.
template <class S>
OUTRIDER_INLINE void unpack_values(const uint8_t* block, uint8_t* to) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kTables[int(S::table)])));
  const __m512i low = _mm512_set1_epi8(15);
  const auto put = [&](int line, const __m512i& nibbles) OUTRIDER_LAMBDA {
    _mm512_store_si512(to + 64 * line, _mm512_shuffle_epi8(values, _mm512_and_si512(nibbles, low)));
  };
  unroll<4>([&](auto j) OUTRIDER_LAMBDA {
    const __m512i both = _mm512_loadu_si512(block + 64 * j);
    put(j, both);
    put(4 + j, _mm512_srli_epi16(both, 4));
  });
}

// Unpack one block into a tile of its own.
template <class S>
OUTRIDER_INLINE void unpack_block(const uint8_t* block, uint8_t* to) {
  if constexpr (S::table == Table::none)
    unpack_nibbles<S>(block, to);
  else
    unpack_values<S>(block, to);
}

// Unpack them into half a tile: the nibbles of 32 inputs, minus 8 if there is no minimum.
template <class S>
OUTRIDER_INLINE void unpack_half(const uint8_t* block, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(8);
  const auto put = [&](int line, const __m512i& value) OUTRIDER_LAMBDA {
    _mm512_store_si512(to + 64 * line, S::has_min ? value : _mm512_sub_epi8(value, zero));
  };
  unroll<4>([&](auto j) OUTRIDER_LAMBDA {
    const __m512i both = _mm512_loadu_si512(block + 64 * j);
    put(j, _mm512_and_si512(both, low));
    put(4 + j, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
  });
}

// A strip of 16 activation rows: [K/32][16][high 32, low 32], with scales and totals [K/32][16]. The inputs of four
// rows: [K/64][group of the pair][row][high, low][64], where a line has its 32 inputs in the half of its group and zeros
// in the other, so that one tile multiplication keeps two groups apart.
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

// Groups of one output tile that are unpacked, then multiplied, then scaled together, for `rows` rows of one strip or of
// two strips that share the weights.
template <class S, int rows, int strips>
struct GroupBatch {
  static constexpr bool kNibbles = S::kind == Kind::q4;
  static constexpr bool kFew = rows == kPairedRows;
  static constexpr bool kPaired = kNibbles && kFew;
  // Both parts of a row are lines of one tile of products.
  static constexpr bool kStacked = kPaired || (!kNibbles && rows <= 8);
  static constexpr int kPerTile = kPaired ? 2 : 1;  // groups
  static constexpr int kPerScale = 32 / S::group;   // groups per activation scale
  static constexpr int kProducts = kNibbles || kStacked ? kTileBytes : 2 * kTileBytes;
  alignas(64) uint8_t weights[S::nibbles ? kBatch / kPerTile : 1][kTileBytes];
  alignas(64) uint8_t products[kBatch / kPerTile * strips][kProducts];  // [tile][strip]

  // Add `count` groups from `first` on, whose blocks lie at `block`. `unpacked`: their nibbles, or null.
  template <int count>
  OUTRIDER_MEMBER void add(const uint8_t* block, const uint8_t* unpacked, const Strip* x, int first,
                           f32x16 (*acc)[rows]) {
    if (!unpacked)
      unroll<count>([&](auto i) OUTRIDER_LAMBDA {
        const uint8_t* one = block + i * S::block_bytes;
        ask_ahead<S::block_bytes>(one);
        if constexpr (kPaired)
          unpack_half<S>(one, weights[i / 2] + i % 2 * (kTileBytes / 2));
        else if constexpr (S::nibbles)
          unpack_block<S>(one, weights[i]);
        else
          ask_soon<S::block_bytes>(one + kBatch * S::block_bytes);
      });
    const uint8_t* tile = !S::nibbles ? block : unpacked ? unpacked : weights[0];
    constexpr int tiles = (count + kPerTile - 1) / kPerTile * strips;
    unroll<(tiles + 1) / 2>([&](auto pair) OUTRIDER_LAMBDA {
      constexpr int one = 2 * pair, other = one + 1;
      multiply_one<one>(x, tile, first);
      if constexpr (other < tiles) multiply_one<other>(x, tile, first);
      store_one<one>();
      if constexpr (other < tiles) store_one<other>();
    });
    unroll<strips>([&](auto strip) OUTRIDER_LAMBDA {
      for (int i = 0; i < count; ++i) {
        const uint8_t* from = products[i / kPerTile * strips + strip] + i % kPerTile * (2 * rows * 64);
        scale(x[strip], from, block + i * S::block_bytes, first + i, acc[strip]);
      }
    });
  }

 private:
  // Scale the products of one group and add them.
  OUTRIDER_MEMBER static void scale(const Strip& x, const uint8_t* from, const uint8_t* block, int group, f32x16* acc) {
    const auto* halves = reinterpret_cast<const uint16_t*>(block + S::quant_bytes);
    const size_t at = size_t(group / kPerScale) * 16;
    const f32x16 scale = load_f16(halves), stored = S::has_min ? load_f16(halves + kLanes) : f32x16{},
                 minimum = S::zero_points ? stored * scale * splat(-1.0f) : stored;
    unroll<rows>([&](auto r) OUTRIDER_LAMBDA {
      acc[r] = fma(scale, to_float(product(from, r)) * splat(x.scales[at + r]), acc[r]);
      if constexpr (S::has_min) acc[r] = fma(minimum, splat(x.totals[at + r]), acc[r]);
    });
  }
  // Multiply tile `number` of the batch, of strip number % strips.
  template <int number>
  OUTRIDER_MEMBER static void multiply_one(const Strip* x, const uint8_t* tile, int first) {
    constexpr int i = number / strips, to = number % 2 * 2, weights = 6 + i % 2, inputs = 4 + number % 2;
    if (number % strips == 0) load_tile<weights>(tile + i * (S::nibbles ? kTileBytes : S::block_bytes));
    const uint8_t* from = x[number % strips].inputs;
    if constexpr (kPaired) {
      load_tile<inputs>(from + size_t(first / 2 + i) * kTileBytes);
      multiply_tiles<to, inputs, weights, S::has_min>();
    } else if constexpr (kNibbles) {
      load_tile<inputs>(from + size_t(first + i) * kTileBytes);
      multiply_tiles<to, inputs, weights, S::has_min>();
    } else {
      const int group = (first + i) / kPerScale, half = group % 2;
      from += (first + i) % kPerScale * S::group;
      if constexpr (kFew)
        load_tile<inputs>(from + size_t(group / 2) * kTileBytes + half * (2 * rows * 64 + 32));
      else if constexpr (kStacked)
        load_tile<inputs, 32>(from + size_t(group) * kTileBytes);
      else
        load_tile<4>(from + size_t(group) * kTileBytes);
      multiply_tiles<to, kStacked ? inputs : 4, weights, false>();
      if constexpr (!kStacked) {
        load_tile<5>(from + size_t(group) * kTileBytes + 32);
        multiply_tiles<to + 1, 5, weights, false>();
      }
    }
  }
  template <int number>
  OUTRIDER_MEMBER void store_one() {
    store_tile<number % 2 * 2>(products[number]);
    if constexpr (!kNibbles && !kStacked) store_tile<number % 2 * 2 + 1>(products[number] + kTileBytes);
  }
  OUTRIDER_MEMBER static i32x16 product(const uint8_t* from, int r) {
    const auto* line = reinterpret_cast<const int32_t*>(from) + (kStacked ? 2 : 1) * r * kLanes;
    if constexpr (kNibbles && !kStacked) return load(line);
    return (load(line) << splat(kLowBits)) + load(line + (kStacked ? kLanes : kTileBytes / 4));
  }
};

// Multiply one or two strips by one output tile. `unpacked`: the nibbles of all groups, or null if no other strip needs
// them.
template <class S, int rows, int strips>
__attribute__((noinline)) void multiply_strips(const uint8_t* block, const uint8_t* unpacked, const Strip* x,
                                               int groups, float (*sums)[16][kLanes]) {
  GroupBatch<S, rows, strips> batch;
  f32x16 acc[strips][rows];
  unroll<strips * rows>([&](auto i) OUTRIDER_LAMBDA { acc[i / rows][i % rows] = splat(0.0f); });
  int first = 0;
  const auto add = [&](auto count) OUTRIDER_LAMBDA {
    for (; first + count <= groups; first += count, block += count * S::block_bytes) {
      batch.template add<count>(block, unpacked, x, first, acc);
      if (unpacked) unpacked += count * kTileBytes;
    }
  };
  add(std::integral_constant<int, kBatch>{});
  add(std::integral_constant<int, 2>{});
  add(std::integral_constant<int, 1>{});
  unroll<strips * rows>([&](auto i) OUTRIDER_LAMBDA { store(sums[i / rows][i % rows], acc[i / rows][i % rows]); });
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
  static_assert(kFewestTileRows == 4 && padded_rows(7) == 8);
  constexpr decltype(&multiply_strips<S, 16, 1>) by_rows[] = {multiply_strips<S, 4, 1>,  multiply_strips<S, 5, 1>,
                                                              multiply_strips<S, 6, 1>,  multiply_strips<S, 8, 1>,
                                                              multiply_strips<S, 12, 1>, multiply_strips<S, 16, 1>};
  const int padded = padded_rows(rows.tokens);
  const auto multiply = by_rows[padded <= 6 ? padded - 4 : padded / 4 + 1];
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
  const int groups = rows.width / S::group;
  auto* unpacked = S::nibbles ? static_cast<uint8_t*>(scratch(kTileSlot, size_t(groups) * kTileBytes)) : nullptr;
  for (int tile = first; tile < last; ++tile) {
    const uint8_t* block = matrix.data.get() + tile * matrix.tile_bytes();
    if constexpr (S::nibbles)
      for (int g = 0; g < groups; ++g) {
        ask_ahead<S::block_bytes>(block + g * S::block_bytes);
        unpack_block<S>(block + g * S::block_bytes, unpacked + size_t(g) * kTileBytes);
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
    int lines = padded < 16 ? padded : 16;
    if (nibbles && padded == kPairedRows) lines = 4 * padded;
    if (!nibbles && padded <= 8) lines = 2 * padded;
    return Tiles::Shape{lines, tile < 4 || nibbles ? 64 : S::group};
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
