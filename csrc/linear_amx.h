// The sums of blocks.h by AMX tiles of 16 rows x 16 outputs, for five rows and more, with the same bits.
//
// Bytes: int8 tiles, exact, one for the high and one for the low halves of the rows; vectors put them together.
// Nibbles: bf16 tiles. A nibble, 128 * high and low are bf16 numbers without rounding, and the sum over a group of 32
// inputs stays below 15 * 32 * 16256 < 2^23, so that every partial sum is an integer that fits a float, whatever the
// order. Both halves meet in one tile, as the float that other levels convert their integers to: half as much to store
// and less than half the work for the vectors, which are what one waits for here.
#pragma once
#include "blocks.h"
#include "tiles.h"

namespace outrider::LEVEL {
namespace {

#if defined(__AMX_INT8__)

constexpr int kFewestTileRows = 5;
constexpr int kTileBytes = 1024;
constexpr int kStrips = 4;  // strips of 16 rows that share the unpacked weights

constexpr bool use_tiles(int rows) { return rows >= kFewestTileRows; }

// ---- rows and weights as bf16 ----

// Sixteen small integers as pairs (0, 2), (1, 3) in the first two of every four lanes.
OUTRIDER_INLINE __m512i brain_pairs(const i32x16& value) {
  const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps((__m512i)value.part[0]));
  return _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_shuffle_epi32(bits, _MM_PERM_DCDC));
}

// 32 inputs of a row in the order in which unpack_nibbles leaves the weights.
OUTRIDER_INLINE void store_brain(uint8_t* to, const i32x16& first, const i32x16& second) {
  _mm512_storeu_si512(to, _mm512_unpacklo_epi32(brain_pairs(first), brain_pairs(second)));
}

// A group of 16 outputs as a tile: line 4 j + s has the nibbles s of the words of vector j, which are inputs
// 4 j + s / 2 + 16 (s % 2) and the second next one. `numbers`: what the sixteen nibbles stand for, twice.
OUTRIDER_INLINE void unpack_nibbles(const uint8_t* block, const __m512i& numbers, uint8_t* to) {
  unroll<4>([&](auto j) OUTRIDER_LAMBDA {
    const __m512i words = _mm512_loadu_si512(block + 64 * j);
    unroll<4>([&](auto s) OUTRIDER_LAMBDA {
      _mm512_store_si512(to + 256 * j + 64 * s, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * s), numbers));
    });
  });
}

OUTRIDER_INLINE __m512i nibble_numbers(int zero) {
  alignas(64) uint16_t words[32];
  for (int i = 0; i < 32; ++i) words[i] = float_to_bf16(float(i % 16 - zero));
  return _mm512_load_si512(words);
}

// ---- tiles ----

// Tiles 0 to 3 hold sums, 4 and 5 high and low halves of the rows, 6 and 7 weights of two tiles of outputs.
template <int tile>
OUTRIDER_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
OUTRIDER_INLINE void store_tile(void* to) {
  asm volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t(64)), "i"(tile) : "memory");
}
template <int tile>
OUTRIDER_INLINE void clear_tile() {
  asm volatile("tilezero\t%%tmm%c0" ::"i"(tile));
}
template <int sums, int rows, int weights, bool nibbles>
OUTRIDER_INLINE void multiply_tiles() {
  if constexpr (nibbles)
    asm volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights));
  else
    asm volatile("tdpbssd\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights));
}

// What is multiplied between two looks at the sums: `count` groups from `group` on of two tiles of outputs, or of one
// where there is no other, with one strip of rows.
struct Slab {
  int tile, group, count, strip;
};

// The order of the slabs: all strips, then the next groups, then the next two tiles.
struct Order {
  int last, groups, chunk, strips;
  Slab first(int tile) const { return {tile, 0, length(0), 0}; }
  Slab next(const Slab& slab) const {
    if (slab.strip + 1 < strips) return {slab.tile, slab.group, slab.count, slab.strip + 1};
    return after(slab);
  }
  // The next slab with other weights.
  Slab after(const Slab& slab) const {
    const int group = slab.group + slab.count;
    if (group < groups) return {slab.tile, group, length(group), 0};
    return first(slab.tile + 2);
  }
  bool ends(const Slab& slab) const { return slab.tile >= last; }
  int width(const Slab& slab) const { return slab.tile + 1 < last ? 2 : ends(slab) ? 0 : 1; }
  int length(int group) const { return groups - group < chunk ? groups - group : chunk; }
};

// Up to kStrips strips of 16 rows from row `from` on, of which `rows` count. While the tiles multiply a slab, vectors
// scale the slab before it and unpack the weights of the one after it: vectors that read what a tile has just stored
// would wait for it.
template <class S, int rows>
class Slabs {
 public:
  Slabs(const Matrix& matrix, const Rows& x, int from, float* out, int stride)
      : matrix_(matrix),
        x_(x),
        from_(from),
        out_(out),
        stride_(stride),
        blocks_(matrix.data.get()),
        tile_bytes_(matrix.tile_bytes()),
        numbers_(nibble_numbers(matrix.zero)) {}

  __attribute__((noinline)) void run(int first, int last) {
    const int left = (x_.tokens - from_ + 15) / 16;
    const Order order{last, x_.width / S::group, kChunk, left < kStrips ? left : kStrips};
    Slab before{}, now = order.first(first);
    for (int g = 0; g < now.count; ++g) fetch(order, now, g, 0);
    for (int turn = 0, weights = 0, sides = 0; sides || !order.ends(now); ++turn) {
      const bool last_strip = now.strip + 1 == order.strips;
      const Slab next = order.after(now);
      f32x16 acc[rows];
      int side = 0, group = 0;
      const auto scale = [&]() OUTRIDER_LAMBDA {
        if (side == sides) return;
        add(order, before, side, group, 1 - turn % 2, acc);
        if (++group == before.count) group = 0, ++side;
      };
      for (int g = 0; g < kChunk; ++g) {
        if (last_strip && g < next.count) fetch(order, next, g, 1 - weights);
        if (g < now.count) multiply(order, now, g, weights, turn % 2);
        scale(), scale();
      }
      if (before.group + before.count == order.groups)
        for (int done = 0; done < sides; ++done) finish(before, done);
      if (last_strip) weights = 1 - weights;
      sides = order.width(now);
      before = now, now = order.next(now);
    }
  }

 private:
  static constexpr bool kNibbles = S::kind == Kind::q4;
  static constexpr int kChunk = kNibbles ? 4 : 3;  // groups: weights and products of two slabs stay in the nearest cache
  static constexpr int kHalves = kNibbles ? 1 : 2;  // tiles of sums for each tile of outputs

  const uint8_t* block(int tile, int group) const {
    return blocks_ + tile * tile_bytes_ + size_t(group) * S::block_bytes;
  }
  // Which 32 inputs of the strip's rows hold the group.
  size_t place(const Order& order, const Slab& slab, int g) const {
    return size_t(from_ / 16 + slab.strip) * (order.groups * S::group / 32) + (slab.group + g) * S::group / 32;
  }

  // Unpacks nibbles. Tile loads do not wake the prefetcher: bytes are asked for.
  OUTRIDER_MEMBER void fetch(const Order& order, const Slab& slab, int g, int at) {
    for (int side = 0; side < order.width(slab); ++side) {
      const uint8_t* from = block(slab.tile + side, slab.group + g);
      ask_ahead<S::block_bytes>(from);
      if constexpr (kNibbles)
        unpack_nibbles(from, numbers_, weights_[at][side][g]);
      else
        unroll<(S::block_bytes + 63) / 64>([&](auto i) OUTRIDER_LAMBDA { _mm_prefetch(from + 64 * i, _MM_HINT_T0); });
    }
  }

  OUTRIDER_MEMBER void multiply(const Order& order, const Slab& slab, int g, int weights, int to) {
    if (order.ends(slab)) return;
    if constexpr (kNibbles)
      g % 2 ? multiply_nibbles<2>(order, slab, g, weights, to) : multiply_nibbles<0>(order, slab, g, weights, to);
    else
      multiply_bytes(order, slab, g, to);
  }

  template <int tile>
  OUTRIDER_MEMBER void multiply_nibbles(const Order& order, const Slab& slab, int g, int weights, int to) {
    const bool both = order.width(slab) == 2;
    const uint8_t* inputs = x_.quantised.brain + place(order, slab, g) * 2 * kTileBytes;
    load_tile<6>(weights_[weights][0][g], 64);
    load_tile<4>(inputs, 64);
    clear_tile<tile>(), multiply_tiles<tile, 4, 6, true>();
    if (both) load_tile<7>(weights_[weights][1][g], 64), clear_tile<tile + 1>(), multiply_tiles<tile + 1, 4, 7, true>();
    load_tile<5>(inputs + kTileBytes, 64);
    multiply_tiles<tile, 5, 6, true>();
    if (both) multiply_tiles<tile + 1, 5, 7, true>();
    store_tile<tile>(products_[to][0][g]);
    if (both) store_tile<tile + 1>(products_[to][1][g]);
  }

  OUTRIDER_MEMBER void multiply_bytes(const Order& order, const Slab& slab, int g, int to) {
    const bool both = order.width(slab) == 2;
    const int8_t* inputs = x_.quantised.high + place(order, slab, g) * kTileBytes + (slab.group + g) * S::group % 32;
    load_tile<6>(block(slab.tile, slab.group + g), 64);
    load_tile<4>(inputs, 32);
    clear_tile<0>(), multiply_tiles<0, 4, 6, false>();
    if (both) load_tile<7>(block(slab.tile + 1, slab.group + g), 64), clear_tile<2>(), multiply_tiles<2, 4, 7, false>();
    load_tile<5>(inputs + kTileBytes / 2, 32);
    clear_tile<1>(), multiply_tiles<1, 5, 6, false>();
    if (both) clear_tile<3>(), multiply_tiles<3, 5, 7, false>();
    store_tile<0>(products_[to][0][g]), store_tile<1>(products_[to][0][g] + kTileBytes);
    if (both) store_tile<2>(products_[to][1][g]), store_tile<3>(products_[to][1][g] + kTileBytes);
  }

  // Row r of the products of a group.
  OUTRIDER_MEMBER f32x16 product(const uint8_t* from, int r) const {
    if constexpr (kNibbles) return load(reinterpret_cast<const float*>(from) + r * kLanes);
    const auto* high = reinterpret_cast<const int32_t*>(from) + r * kLanes;
    return to_float((load(high) << splat(7)) + load(high + kTileBytes / 4));
  }

  // Scales group g of a slab's tile of outputs and adds it.
  OUTRIDER_MEMBER void add(const Order& order, const Slab& slab, int side, int g, int from, f32x16* acc) {
    float(*sums)[kLanes] = sums_[slab.strip][side];
    if (g == 0)
      unroll<rows>([&](auto r) OUTRIDER_LAMBDA { acc[r] = slab.group == 0 ? splat(0.0f) : load(sums[r]); });
    const auto* halves = reinterpret_cast<const uint16_t*>(block(slab.tile + side, slab.group + g) + S::quant_bytes);
    const f32x16 scale = load_f16(halves);
    const uint8_t* products = products_[from][side][g];
    unroll<rows>([&](auto r) OUTRIDER_LAMBDA { acc[r] = fma(scale, product(products, r), acc[r]); });
    if constexpr (S::has_min) {
      const f32x16 minimum = load_f16(halves + kLanes);
      const float* totals = x_.quantised.totals + place(order, slab, g) * 16;
      unroll<rows>([&](auto r) OUTRIDER_LAMBDA { acc[r] = fma(minimum, splat(totals[r]), acc[r]); });
    }
    if (g + 1 == slab.count) unroll<rows>([&](auto r) OUTRIDER_LAMBDA { store(sums[r], acc[r]); });
  }

  __attribute__((noinline)) void finish(const Slab& slab, int side) {
    const int row = from_ + 16 * slab.strip, left = x_.tokens - row;
    const int count = left < rows ? left : rows;
    store_scaled(matrix_, x_, slab.tile + side, row, count, sums_[slab.strip][side], out_, stride_);
  }

  const Matrix& matrix_;
  const Rows& x_;
  const int from_;
  float* const out_;
  const int stride_;
  const uint8_t* const blocks_;
  const size_t tile_bytes_;
  const __m512i numbers_;
  alignas(64) uint8_t weights_[kNibbles ? 2 : 1][2][kChunk][kTileBytes];  // bytes are multiplied where they lie
  alignas(64) uint8_t products_[2][2][kChunk][kHalves * kTileBytes];
  alignas(64) float sums_[kStrips][2][16][kLanes];
};

// Tiles [first, last) for all rows.
template <class S>
void tiles_by_slabs(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  const bool few = rows.tokens <= 8, nibbles = S::kind == Kind::q4;
  const Tiles tiles([&](int tile) {
    if (tile >= 6) return Tiles::Shape{nibbles ? 16 : S::group / 4, 64};
    return Tiles::Shape{few ? 8 : 16, tile < 4 || nibbles ? 64 : S::group};
  });
  if (few) return Slabs<S, 8>(matrix, rows, 0, out, stride).run(first, last);
  for (int row = 0; row < rows.tokens; row += 16 * kStrips)
    Slabs<S, 16>(matrix, rows, row, out, stride).run(first, last);
}

#else

constexpr bool use_tiles(int) { return false; }
template <class S>
void tiles_by_slabs(const Matrix&, const Rows&, int, int, float*, int) {}

#endif

}  // namespace
}  // namespace outrider::LEVEL
