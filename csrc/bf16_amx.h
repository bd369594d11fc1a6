// bf16 weights on AMX tiles. Activations are split into the sum of two bf16 numbers, which keeps 16 of their 24 bits.
#pragma once
#include "dot.h"
#include "half.h"
#include "threads.h"
#include "tiles.h"

#if defined(__AMX_BF16__)
namespace outrider::LEVEL {
namespace {

constexpr int kBf16Tiles = 4;  // output tiles per pass: a single one would wait for its own sums

// The activation rows of one call, split and padded: [T padded to 16][K padded to 32], high parts, then low parts.
// Tiles 0 to 3 hold the sums of four output tiles, 4 and 5 the high and low parts of 16 rows, 6 and 7 weights.
class Bf16Rows {
 public:
  Bf16Rows(const Rows& rows, int slot)
      : stride_((rows.width + 31) / 32 * 32),
        tiles_([&](int tile) { return Tiles::Shape{tile < 6 && rows.tokens < 16 ? rows.tokens : 16, 64}; }) {
    const size_t padded = size_t(rows.tokens + 15) / 16 * 16;
    high_ = static_cast<uint16_t*>(scratch(slot, 2 * padded * stride_ * sizeof(uint16_t)));
    low_ = high_ + padded * stride_;
    memset(high_, 0, 2 * padded * stride_ * sizeof(uint16_t));
    for (int t = 0; t < rows.tokens; ++t)
      for (int k = 0; k < rows.width; ++k) {
        const float value = rows.x[size_t(t) * rows.width + k];
        const uint16_t high = float_to_bf16(value);
        high_[size_t(t) * stride_ + k] = high;
        low_[size_t(t) * stride_ + k] = float_to_bf16(value - bf16_to_float(high));
      }
  }

  // Multiply rows row .. row + 15 by four weight tiles. Each sum adds its inputs in order, 32 at a time, high then low.
  void multiply(const uint8_t* const weights[kBf16Tiles], int row, float (*sums)[16][kLanes]) const {
    const int64_t step = int64_t(stride_) * 2, line = 64;
    const uint16_t *high = high_ + size_t(row) * stride_, *low = low_ + size_t(row) * stride_;
    asm volatile("tilezero\t%%tmm0\n\ttilezero\t%%tmm1\n\ttilezero\t%%tmm2\n\ttilezero\t%%tmm3" ::: "memory");
    for (int k = 0; k < stride_; k += 32) {
      // Tile loads do not trigger the hardware prefetcher: prefetch the weights of four steps ahead.
      for (int i = 0; i < kBf16Tiles; ++i)
        for (int at = 0; at < 1024; at += 64) _mm_prefetch(weights[i] + 32 * (k + 128) + at, _MM_HINT_T0);
      asm volatile(
          "tileloadd\t(%0,%6,1), %%tmm4\n\t"
          "tileloadd\t(%2,%7,1), %%tmm6\n\t"
          "tdpbf16ps\t%%tmm6, %%tmm4, %%tmm0\n\t"
          "tileloadd\t(%3,%7,1), %%tmm7\n\t"
          "tdpbf16ps\t%%tmm7, %%tmm4, %%tmm1\n\t"
          "tileloadd\t(%1,%6,1), %%tmm5\n\t"
          "tdpbf16ps\t%%tmm6, %%tmm5, %%tmm0\n\t"
          "tdpbf16ps\t%%tmm7, %%tmm5, %%tmm1\n\t"
          "tileloadd\t(%4,%7,1), %%tmm6\n\t"
          "tdpbf16ps\t%%tmm6, %%tmm4, %%tmm2\n\t"
          "tileloadd\t(%5,%7,1), %%tmm7\n\t"
          "tdpbf16ps\t%%tmm7, %%tmm4, %%tmm3\n\t"
          "tdpbf16ps\t%%tmm6, %%tmm5, %%tmm2\n\t"
          "tdpbf16ps\t%%tmm7, %%tmm5, %%tmm3" ::"r"(high + k),
          "r"(low + k), "r"(weights[0] + 32 * k), "r"(weights[1] + 32 * k), "r"(weights[2] + 32 * k),
          "r"(weights[3] + 32 * k), "r"(step), "r"(line)
          : "memory");
    }
    asm volatile(
        "tilestored\t%%tmm0, (%0,%4,1)\n\ttilestored\t%%tmm1, (%1,%4,1)\n\t"
        "tilestored\t%%tmm2, (%2,%4,1)\n\ttilestored\t%%tmm3, (%3,%4,1)" ::"r"(sums[0]),
        "r"(sums[1]), "r"(sums[2]), "r"(sums[3]), "r"(line)
        : "memory");
  }

 private:
  const int stride_;
  const Tiles tiles_;
  uint16_t *high_, *low_;
};

}  // namespace
}  // namespace outrider::LEVEL
#endif
