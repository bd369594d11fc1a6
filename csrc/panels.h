// Panels: rows of quantized activations that share the unpacked weights, and instructions on them, for the quantized
// matmuls of linear_neon.h and linear_i8mm.h.
#pragma once
#include "linear_blocks.h"
#include "threads.h"

namespace outrider::LEVEL {
namespace {

#if defined(__ARM_FEATURE_DOTPROD)

constexpr int kPanelRows = 8;  // rows that share the unpacked weights: as many as the registers hold
constexpr int panel_count(int rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// An int-to-float conversion blocks one of two vector units for two cycles. A sum below 2^22 avoids it: added to the bits
// of 1.5 * 2^23, it yields the float 1.5 * 2^23 plus that sum, and one multiply-add subtracts 1.5 * 2^23 and scales,
// exactly, because 3 * scale has no more than 24 bits. Sums of 8-bit weights times both parts are too large for it.
constexpr int32_t kMagic = 0x4b400000;
constexpr int32_t kShiftedMagic = kMagic >> kLowBits;
alignas(16) constexpr int32_t kStart[][4] = {{kMagic, kMagic, kMagic, kMagic},
                                             {kShiftedMagic, kShiftedMagic, kShiftedMagic, kShiftedMagic},
                                             {}};
static_assert(15 * 32 * (127 << kLowBits) < 1 << 22 && kMagic % (1 << kLowBits) == 0);

// The high parts of 32 inputs of a row. A panel is [K/32][rows] of them; the low parts are elsewhere, because few are
// read. If no row of the panel has low parts in these inputs, `scale` is that of the high parts.
struct alignas(64) Inputs {
  int8_t high[32];
  float less[4];       // minus 1.5 * 2^23 * scale, four times: a vector load is free, a lane broadcast is not
  float scale, total;  // total: sum of the inputs
  int32_t has_low;     // of any row of the panel

  void finish(float fine_scale, int32_t sum, bool panel_has_low) {
    scale = panel_has_low ? fine_scale : fine_scale * (1 << kLowBits);
    total = fine_scale * float(sum);
    has_low = panel_has_low;
    for (float& lane : less) lane = -0x1.8p23f * scale;
  }
};

// Inputs of a panel from some group on: [K/32][rows], and their low parts [K/32][rows][32].
struct PanelInputs {
  const Inputs* inputs;
  const int8_t* low;
  template <bool low_parts>
  OUTRIDER_MEMBER const int8_t* part(int row) const {
    return low_parts ? low + 32 * row : inputs[row].high;
  }
};

// Instructions in a fixed order: the compiler would finish one row before the next, and each sum would wait for the
// previous one.
template <class Vector>
OUTRIDER_INLINE Vector fetch(const void* from) {
  Vector to;
  asm volatile("ldr %q0, %1" : "=w"(to) : "m"(*static_cast<const Vector*>(from)));
  return to;
}
OUTRIDER_INLINE float32x4_t fetch_halves(const uint8_t* from) {
  float32x4_t to;
  asm volatile("ldr %d0, %1\n\tfcvtl %0.4s, %0.4h" : "=w"(to) : "m"(*reinterpret_cast<const uint64_t*>(from)));
  return to;
}
OUTRIDER_INLINE int32x4_t shift_high(int32x4_t sum) {
  asm volatile("shl %0.4s, %0.4s, %1" : "+w"(sum) : "i"(kLowBits));
  return sum;
}
OUTRIDER_INLINE float32x4_t to_float(int32x4_t sum) {
  float32x4_t to;
  asm volatile("scvtf %0.4s, %1.4s" : "=w"(to) : "w"(sum));
  return to;
}
OUTRIDER_INLINE float32x4_t add_product(float32x4_t sum, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}

// The matrix instruction of level i8mm takes rows in pairs, so an odd panel gets a row of zeros. A single row does
// without.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kPadding = 1;  // most rows of padding in a panel
#else
constexpr int kPadding = 0;
#endif

// Rows [first, first + count) and their inputs [K/32][padded].
struct Panel {
  int first, count;
  int padded;  // `count` and the row of zeros
  size_t at;   // offset of its inputs
  Panel(int tokens, int width, int panel) {
    const Share share(tokens, panel, panel_count(tokens));
    first = share.first;
    count = share.last - share.first;
    padded = count + (count > 1 ? count % 2 * kPadding : 0);
    at = size_t(first + panel * kPadding) * (width / 32);
  }
  // Inputs of all panels.
  static size_t total(int tokens, int width) {
    return size_t(tokens + panel_count(tokens) * kPadding) * (width / 32);
  }
};

// Prefetch the share of a block of weights that falls to registers [part, part + parts) of its kParts: passes over these
// together prefetch all of it. Streaming prefetches (PLDL1STRM), since a step reads weights once: so less of the
// interpreter is evicted from L2, and the host time of a step falls by 6 to 11 % (N1, docs/log.md, "Host work").
template <class S, int parts>
OUTRIDER_INLINE void prefetch_share(const uint8_t* block, int part) {
  constexpr int lines = (S::block_bytes + 63) / 64;
  const uint8_t* const first = block + part * lines / kParts * 64;
  unroll<(lines * parts + kParts - 1) / kParts>(
      [&](auto line) OUTRIDER_LAMBDA { __builtin_prefetch(first + 64 * line, 0, 0); });
}

#endif

}  // namespace
}  // namespace outrider::LEVEL
