// The sums of blocks.h by AMX tiles of 16 rows x 16 outputs, for five rows and more, with the same bits.
//
// Bytes: int8 tiles, exact, one for the high and one for the low halves of the rows; vectors put them together.
// Nibbles: bf16 tiles. A nibble, 128 * high and low are bf16 numbers without rounding, and the sum over a group of 32
// inputs stays below 15 * 32 * 16256 < 2^23, so that every partial sum is an integer that fits a float, whatever the
// order. Both halves meet in one tile, as the float that other levels convert their integers to: half as much to store
// and less than half the work for the vectors, which are what one waits for here.
#pragma once
#include "blocks.h"
#include "threads.h"
#include "tiles.h"

namespace outrider::LEVEL {
namespace {

#if defined(__AMX_INT8__)

constexpr int kFewestTileRows = 5;
constexpr int kTileBytes = 1024;
constexpr int kTileSlot = 6;  // scratch of a thread's unpacked weights
constexpr int kStrips = 8;  // strips of 16 rows that share unpacked weights: their inputs stay in the second cache

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

// Tiles 0 to 3 hold sums, 4 and 5 high and low halves of the rows, 6 and 7 weights of one unit and the next.
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

// ---- the pipeline ----

// How many units the vectors unpack before the tiles multiply, and how many they scale after: what a tile has just
// stored is slow to read, and tiles go on while vectors work.
constexpr int kLead = 2, kLag = 5, kRing = 8;  // kRing: products that wait to be scaled

// A unit is one group of one tile of outputs with one strip of rows. They come tile by tile, in each strip by strip, in
// each group by group.
struct Units {
  int groups, strips;
  int group = 0, strip = 0;
  enum End { kNone, kOfStrip, kOfTile };
  OUTRIDER_MEMBER End step() {
    if (++group < groups) return kNone;
    group = 0;
    if (++strip < strips) return kOfStrip;
    strip = 0;
    return kOfTile;
  }
};

// Tiles of outputs for up to kStrips strips of 16 rows. While tiles multiply a unit, vectors unpack the weights of a
// later one and scale the products of an earlier one. The stages live in run(): what a member holds would be read again
// after every instruction on tiles, since each may write memory.
template <class S, int rows>
class Pipeline {
 public:
  Pipeline(const Matrix& matrix, const Rows& x, int from, float* out, int stride)
      : matrix_(matrix), x_(x), from_(from), out_(out), stride_(stride) {}

  __attribute__((noinline)) void run(int first, int last) {
    const int groups = x_.width / S::group, left = (x_.tokens - from_ + 15) / 16;
    const Units start{groups, left < kStrips ? left : kStrips};
    const int units = (last - first) * start.strips * groups;
    const size_t place = size_t(from_ / 16) * (x_.width / 32);
    const uint8_t* blocks = matrix_.data.get() + first * matrix_.tile_bytes();
    Fetcher fetcher(matrix_, blocks, start);
    Multiplier multiplier(x_, place, blocks, fetcher.weights, start);
    Scaler scaler(x_, place, blocks, start);
    f32x16 sums[rows];
    for (int unit = 0; unit < kLead && unit < units; ++unit) fetcher.next();
    for (int unit = 0; unit < units + kLag; unit += 4)
      unroll<4>([&](auto i) OUTRIDER_LAMBDA {
        constexpr int tile = kNibbles ? i : i % 2 * 2, before = kNibbles ? (i + 3) % 4 : (i + 1) % 2 * 2;
        const bool multiplies = unit + i < units, scales = unit + i >= kLag && unit + i < units + kLag;
        const uint8_t* products = products_[unsigned(unit + i - kLag) % kRing];
        if (multiplies) multiplier.template high<tile, i % 2>();
        if (scales) scaler.template add<0, rows / 2>(products, sums);
        if (multiplies) multiplier.template low<tile + kHalves - 1, i % 2>();
        if (unit + i + kLead < units) fetcher.next();
        if (scales) {
          scaler.template add<rows / 2, rows>(products, sums);
          if (scaler.units.group + 1 == groups) finish(first, scaler.units.strip, sums);
          first += scaler.next();
        }
        if (unit + i > 0 && unit + i <= units) store_products<before>(products_[unsigned(unit + i - 1) % kRing]);
      });
  }

 private:
  static constexpr bool kNibbles = S::kind == Kind::q4;
  static constexpr int kHalves = kNibbles ? 1 : 2;  // tiles of sums for each unit
  static constexpr int kInputBytes = kNibbles ? 2 * kTileBytes : kTileBytes;  // of 32 inputs of a strip

  // Where unpacked weights lie: of one strip the next few, of several all of a tile and of the one after it.
  struct Slots {
    uint8_t *begin, *end, *tile, *now;
    Slots(uint8_t* memory, const Units& units)
        : begin(memory), end(kNibbles ? memory + bytes(units) : memory), tile(memory), now(memory) {}
    static size_t bytes(const Units& units) {
      return size_t(units.strips == 1 ? 2 * kLead : 2 * units.groups) * kTileBytes;
    }
    OUTRIDER_MEMBER void step(Units::End ended) {
      if constexpr (!kNibbles) return;
      now += kTileBytes;
      if (now == end) now = begin;
      if (ended == Units::kOfStrip) now = tile;
      if (ended == Units::kOfTile) tile = now;
    }
  };

  // Unpacks nibbles, for the first strip of a tile. Tile loads do not wake the prefetcher: bytes are asked for.
  struct Fetcher {
    const __m512i numbers;
    const uint8_t* block;
    uint8_t* const weights;
    Units units;
    Slots slots;
    Fetcher(const Matrix& matrix, const uint8_t* blocks, const Units& start)
        : numbers(nibble_numbers(matrix.zero)),
          block(blocks),
          weights(kNibbles ? static_cast<uint8_t*>(scratch(kTileSlot, Slots::bytes(start))) : nullptr),
          units(start),
          slots(weights, start) {}
    OUTRIDER_MEMBER void next() {
      if (units.strip == 0) {
        ask_ahead<S::block_bytes>(block);
        if constexpr (kNibbles)
          unpack_nibbles(block, numbers, slots.now);
        else
          unroll<(S::block_bytes + 63) / 64>([&](auto i) OUTRIDER_LAMBDA {
            _mm_prefetch(block + 64 * i, _MM_HINT_T0);
          });
        block += S::block_bytes;
      }
      slots.step(units.step());
    }
  };

  // Multiplies the high halves of a unit's rows, then the low ones; those of nibbles meet in one tile.
  struct Multiplier {
    const uint8_t* const strips;  // inputs of the first
    const uint8_t *inputs, *tile, *block;
    Units units;
    Slots slots;
    Multiplier(const Rows& x, size_t place, const uint8_t* blocks, uint8_t* weights, const Units& start)
        : strips(planes(x) + place * kInputBytes),
          inputs(strips),
          tile(blocks),
          block(blocks),
          units(start),
          slots(weights, start) {}
    static const uint8_t* planes(const Rows& x) {
      return kNibbles ? x.quantised.brain : reinterpret_cast<const uint8_t*>(x.quantised.high);
    }
    template <int sums, int odd>
    OUTRIDER_MEMBER void high() {
      load_tile<4>(inputs + half(), kRowBytes);
      load_tile<6 + odd>(kNibbles ? slots.now : block, 64);
      clear_tile<sums>();
      if constexpr (!kNibbles) clear_tile<sums + 1>();
      multiply_tiles<sums, 4, 6 + odd, kNibbles>();
      load_tile<5>(inputs + half() + 16 * kRowBytes, kRowBytes);
    }
    template <int sums, int odd>
    OUTRIDER_MEMBER void low() {
      multiply_tiles<sums, 5, 6 + odd, kNibbles>();
      if (units.group % (32 / S::group) == 32 / S::group - 1) inputs += kInputBytes;
      const Units::End ended = units.step();
      slots.step(ended);
      block += S::block_bytes;
      if (ended == Units::kOfStrip) block = tile;
      if (ended == Units::kOfTile) inputs = strips, tile = block;
    }
    static constexpr int kRowBytes = kNibbles ? 64 : 32;
    OUTRIDER_MEMBER int half() const { return units.group * S::group % 32; }  // of 32 inputs, where groups are of 16
  };

  // Scales the products of a unit and adds them.
  struct Scaler {
    const float* const strips;  // totals of the first
    const float* totals;
    const uint8_t *tile, *block;
    Units units;
    Scaler(const Rows& x, size_t place, const uint8_t* blocks, const Units& start)
        : strips(x.quantised.totals + place * 16), totals(strips), tile(blocks), block(blocks), units(start) {}
    template <int first, int last>
    OUTRIDER_MEMBER void add(const uint8_t* products, f32x16* sums) const {
      if (units.group == 0) unroll<last - first>([&](auto r) OUTRIDER_LAMBDA { sums[first + r] = splat(0.0f); });
      const auto* halves = reinterpret_cast<const uint16_t*>(block + S::quant_bytes);
      const f32x16 scale = load_f16(halves);
      unroll<last - first>([&](auto i) OUTRIDER_LAMBDA {
        constexpr int r = first + i;
        sums[r] = fma(scale, product(products, r), sums[r]);
      });
      if constexpr (S::has_min) {
        const f32x16 minimum = load_f16(halves + kLanes);
        unroll<last - first>([&](auto i) OUTRIDER_LAMBDA {
          constexpr int r = first + i;
          sums[r] = fma(minimum, splat(totals[r]), sums[r]);
        });
      }
    }
    // Whether the tile of outputs is complete.
    OUTRIDER_MEMBER int next() {
      if constexpr (S::has_min) totals += 16;
      const Units::End ended = units.step();
      block += S::block_bytes;
      if (ended == Units::kOfStrip) block = tile;
      if (ended == Units::kOfTile) totals = strips, tile = block;
      return ended == Units::kOfTile;
    }
  };

  template <int tile>
  OUTRIDER_MEMBER static void store_products(uint8_t* to) {
    store_tile<tile>(to);
    if constexpr (!kNibbles) store_tile<tile + 1>(to + kTileBytes);
  }

  // Row r of the products of a unit.
  OUTRIDER_MEMBER static f32x16 product(const uint8_t* from, int r) {
    if constexpr (kNibbles) return load(reinterpret_cast<const float*>(from) + r * kLanes);
    const auto* high = reinterpret_cast<const int32_t*>(from) + r * kLanes;
    return to_float((load(high) << splat(7)) + load(high + kTileBytes / 4));
  }

  OUTRIDER_MEMBER void finish(int tile, int strip, const f32x16* sums) {
    unroll<rows>([&](auto r) OUTRIDER_LAMBDA { store(sums_[r], sums[r]); });
    write(tile, strip);
  }
  __attribute__((noinline)) void write(int tile, int strip) const {
    const int row = from_ + 16 * strip, left = x_.tokens - row;
    store_scaled(matrix_, x_, tile, row, left < rows ? left : rows, sums_, out_, stride_);
  }

  const Matrix& matrix_;
  const Rows& x_;
  const int from_;
  float* const out_;
  const int stride_;
  alignas(64) uint8_t products_[kRing][kHalves * kTileBytes];
  alignas(64) float sums_[rows][kLanes];
};

// Tiles [first, last) for all rows.
template <class S>
void multiply_by_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride) {
  const bool few = rows.tokens <= 8, nibbles = S::kind == Kind::q4;
  const Tiles tiles([&](int tile) {
    if (tile >= 6) return Tiles::Shape{nibbles ? 16 : S::group / 4, 64};
    return Tiles::Shape{few ? 8 : 16, tile < 4 || nibbles ? 64 : S::group};
  });
  if (few) return Pipeline<S, 8>(matrix, rows, 0, out, stride).run(first, last);
  for (int row = 0; row < rows.tokens; row += 16 * kStrips)
    Pipeline<S, 16>(matrix, rows, row, out, stride).run(first, last);
}

#else

constexpr bool use_tiles(int) { return false; }
template <class S>
void multiply_by_tiles(const Matrix&, const Rows&, int, int, float*, int) {}

#endif

}  // namespace
}  // namespace outrider::LEVEL
