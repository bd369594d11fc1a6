// Exact integer dot products: 16 outputs x 4 inputs of weights against 4 inputs of a quantized row.
#pragma once
#include <type_traits>
#include <utility>

#include "level.h"
#include "simd.h"

namespace outrider::LEVEL {

// VNNI reads the weight as its unsigned operand: int8 weights carry an offset of 128 there.
#if defined(__AVX512VNNI__)
constexpr bool kUnsignedBytes = true;
#else
constexpr bool kUnsignedBytes = false;
#endif

// Rows whose sums fit into the registers beside the weights of a block.
#if defined(__AVX512VNNI__)
constexpr int kRowBlock = 8;
#elif defined(__AVX2__)
constexpr int kRowBlock = 2;
#else
constexpr int kRowBlock = 1;
#endif

template <class Body, int... index>
OUTRIDER_INLINE void unroll(const Body& body, std::integer_sequence<int, index...>) {
  (body(std::integral_constant<int, index>{}), ...);
}
template <int count, class Body>
OUTRIDER_INLINE void unroll(const Body& body) {
  unroll(body, std::make_integer_sequence<int, count>{});
}

typedef int8_t i8 __attribute__((vector_size(4 * kWidth)));
typedef uint8_t u8 __attribute__((vector_size(4 * kWidth)));
typedef int16_t i16 __attribute__((vector_size(4 * kWidth)));

OUTRIDER_INLINE i8 load_bytes(const uint8_t* from) {
  i8 out;
  memcpy(&out, from, sizeof out);
  return out;
}
OUTRIDER_INLINE i8 low_nibbles(const i8& value) { return value & 15; }
OUTRIDER_INLINE i8 high_nibbles(const i8& value) {
#if defined(__ARM_NEON)
  return (i8)((u8)value >> 4);
#else
  return (i8)((u32)value >> 4) & 15;  // x86 has no byte shift
#endif
}
// Look up the values of nibbles, in the form that `dot` reads; without a table the nibbles are the weights.
template <Table table>
OUTRIDER_INLINE i8 look_up(const i8& nibbles) {
  constexpr const int8_t* values = kTables[int(table)];
  if constexpr (table == Table::none) return nibbles;
#if defined(__ARM_NEON)
  return (i8)vqtbl1q_s8(vld1q_s8(values), vreinterpretq_u8_s8((int8x16_t)nibbles));
#elif defined(__AVX2__)
  const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(values));
#if defined(__AVX512F__)
  const i8 found = (i8)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), (__m512i)nibbles);
#else
  const i8 found = (i8)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen), (__m256i)nibbles);
#endif
  return kUnsignedBytes ? found ^ int8_t(-128) : found;
#else
  i8 found{};
  for (size_t i = 0; i < sizeof(i8); ++i) found[i] = values[nibbles[i]];
  return found;
#endif
}
// Load int8 weights in the form that `dot` reads.
OUTRIDER_INLINE i8 load_weights(const uint8_t* from) {
  return kUnsignedBytes ? load_bytes(from) ^ int8_t(-128) : load_bytes(from);
}

// Compute start + sum over `quads` quads of w * ((high << kLowBits) + low), for the outputs of `parts` registers and for
// `rows` rows; with_low: some low part is not 0. NEON dot products are in linear_neon.h.
#if !defined(__ARM_FEATURE_DOTPROD)

OUTRIDER_INLINE int32_t load_quad(const int8_t* from) {
  int32_t out;
  memcpy(&out, from, sizeof out);
  return out;
}

#if defined(__AVX512VNNI__)

// Add the products of weights with four inputs. In assembler, as GCC loads and repeats the inputs by an instruction of
// their own, which takes a third more time.
OUTRIDER_INLINE void add_products(i32& sum, const i8& w, const int8_t* quad) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int8_t(*)[4]>(quad)));
}

template <Kind kind, int quads, bool with_low>
OUTRIDER_INLINE i32 dot(const i8* w, const int8_t* high, const int8_t* low, const i32& start) {
  i32 coarse{}, fine = start;
  unroll<quads>([&](auto j) OUTRIDER_LAMBDA {
    add_products(coarse, w[j], high + 4 * j);
    if (with_low) add_products(fine, w[j], low + 4 * j);
  });
  return (coarse << kLowBits) + fine;
}

#else

// Products of bytes are added in pairs to 16 bits. Nibbles leave headroom for 8 quads: 8 * 2 * 15 * 127 = 30480. With
// int8 weights one pair is the limit: 2 * 128 * 127 = 32512.
#if defined(__AVX2__)

template <Kind kind>
OUTRIDER_INLINE i16 pair_products(const i8& w, int32_t quad) {
  const __m256i bytes = (__m256i)w, x = _mm256_set1_epi32(quad);
  if constexpr (kind == Kind::q4) return (i16)_mm256_maddubs_epi16(bytes, x);
  return (i16)_mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(x, bytes));
}
OUTRIDER_INLINE i32 widen(const i16& pairs, int16_t factor) {
  return (i32)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(factor));
}

#else

template <Kind kind>
OUTRIDER_INLINE i16 pair_products(const i8& w, int32_t quad) {
  const i16 bytes = (i16)w, x = (i16)(quad - i32{});
  return ((bytes << 8) >> 8) * ((x << 8) >> 8) + (bytes >> 8) * (x >> 8);
}
OUTRIDER_INLINE i32 widen(const i16& pairs, int32_t factor) {
  return ((((i32)pairs << 16) >> 16) + ((i32)pairs >> 16)) * factor;
}

#endif

template <Kind kind, int quads, bool with_low>
OUTRIDER_INLINE i32 dot(const i8* w, const int8_t* high, const int8_t* low, const i32& start) {
  i32 sum = start;
  i16 coarse{}, fine{};
  unroll<quads>([&](auto j) OUTRIDER_LAMBDA {
    coarse += pair_products<kind>(w[j], load_quad(high + 4 * j));
    if (with_low) fine += pair_products<kind>(w[j], load_quad(low + 4 * j));
    if (kind == Kind::q8 || j == quads - 1) {
      sum += widen(coarse, 1 << kLowBits);
      if (with_low) sum += widen(fine, 1);
      coarse = fine = i16{};
    }
  });
  return sum;
}

#endif

template <Kind kind, int quads, int rows, int parts, bool with_low>
OUTRIDER_INLINE void dots(const i8 (*w)[quads], const int8_t* const* high, const int8_t* const* low, int at,
                          const i32* start, i32 (*out)[parts]) {
  unroll<rows * parts>([&](auto i) OUTRIDER_LAMBDA {
    constexpr int r = i / parts, p = i % parts;
    out[r][p] = dot<kind, quads, with_low>(w[p], high[r] + at, low[r] + at, start[r]);
  });
}

#endif

}  // namespace outrider::LEVEL
