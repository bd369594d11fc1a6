// bf16 weights by AMX tiles: rows as the sum of two bf16 numbers, which leaves 16 of their 24 bits.
#pragma once
#include "dot.h"
#include "half.h"
#include "threads.h"

#if defined(__AMX_BF16__)
namespace outrider::LEVEL {
namespace {

// The rows of one call, split and padded: [T padded to 16][K padded to 32], high parts, then low parts. Tiles 0 and 1
// hold the sums of two tiles of outputs, 2 and 3 the high and low parts of 16 rows, 4 and 5 the weights.
class BrainRows {
 public:
  BrainRows(const Rows& rows, int slot) : stride_((rows.width + 31) / 32 * 32) {
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
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 6; ++tile) {
      config.rows[tile] = uint8_t(tile < 4 && rows.tokens < 16 ? rows.tokens : 16);
      config.row_bytes[tile] = 64;
    }
    asm volatile("ldtilecfg\t%0" ::"m"(config) : "memory");
  }
  ~BrainRows() { asm volatile("tilerelease" ::: "memory"); }
  BrainRows(const BrainRows&) = delete;

  // Rows row .. row + 15 times two tiles of weights. Each sum takes its inputs in order, 32 at a time, high then low.
  void multiply(const uint8_t* first, const uint8_t* second, int row, float (*sums)[16][kLanes]) const {
    const int64_t step = int64_t(stride_) * 2, line = 64;
    const uint16_t *high = high_ + size_t(row) * stride_, *low = low_ + size_t(row) * stride_;
    asm volatile("tilezero\t%%tmm0\n\ttilezero\t%%tmm1" ::: "memory");
    for (int k = 0; k < stride_; k += 32, first += 1024, second += 1024)
      asm volatile(
          "tileloadd\t(%2,%5,1), %%tmm4\n\t"
          "tileloadd\t(%0,%4,1), %%tmm2\n\t"
          "tdpbf16ps\t%%tmm4, %%tmm2, %%tmm0\n\t"
          "tileloadd\t(%3,%5,1), %%tmm5\n\t"
          "tdpbf16ps\t%%tmm5, %%tmm2, %%tmm1\n\t"
          "tileloadd\t(%1,%4,1), %%tmm3\n\t"
          "tdpbf16ps\t%%tmm4, %%tmm3, %%tmm0\n\t"
          "tdpbf16ps\t%%tmm5, %%tmm3, %%tmm1" ::"r"(high + k),
          "r"(low + k), "r"(first), "r"(second), "r"(step), "r"(line)
          : "memory");
    asm volatile("tilestored\t%%tmm0, (%0,%2,1)\n\ttilestored\t%%tmm1, (%1,%2,1)" ::"r"(sums[0]), "r"(sums[1]),
                 "r"(line)
                 : "memory");
  }

 private:
  int stride_;
  uint16_t *high_, *low_;
};

}  // namespace
}  // namespace outrider::LEVEL
#endif
