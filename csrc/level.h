// Declarations shared by the kernel files of one level. LEVEL is defined by the build.
#pragma once
#include "outrider.h"

#ifndef LEVEL
#error "compile kernel files with -DLEVEL=portable, neon, i8mm, avx2, avx512 or amx"
#endif

namespace outrider::LEVEL {

// Quantized activations: x ~ scale * ((high << kLowBits) + low), with a scale for every 32 inputs. Tiles multiply both
// parts at once if the low one has 4 bits, see linear_amx.h; elsewhere 6 bits are as fast.
#if defined(__AMX_INT8__)
constexpr int kLowBits = 4;
#else
constexpr int kLowBits = 6;
#endif

struct QuantizedRows {
  const int8_t *high, *low;  // [T][K]; on tiles high is [T/16][K/32][16][high 32, low 32]
                             // on panels, see panels.h, high points to Inputs and the rest is not set
  const int32_t* sums;       // [T][K/16] sum of (high << kLowBits) + low over each 16 inputs, times -128
  const float* scale;        // [T][K/32]; on tiles [T/16][K/32][16]
  const uint8_t* has_low;    // [T][K/32] whether a low part is not 0
  const float* totals;       // as scale: sums over 32 inputs times their scale
};

// Input of linear_tiles: x always, `quantized` if any matrix is q4 or q8.
struct Rows {
  const float* x;  // [T][K]
  int tokens, width;
  QuantizedRows quantized;
};

// Up to this number of rows each thread norms and quantizes the rows it needs for itself: a fork, and moving the
// results between cores, costs more.
#if defined(__AMX_INT8__)
constexpr int kFewRows = 16;
#else
constexpr int kFewRows = 7;
#endif

// Quantize rows into the calling thread's scratch; more than kFewRows on all threads, so not from inside parallel().
// `width` is a multiple of 32 unless `activations` is none. linear() uses slot 0. `alone`: on the calling thread, also
// from inside parallel().
Rows prepare(const float* x, int tokens, int width, Activations activations, int scratch_slot, bool alone = false);

// Compute tiles [first, last) of `matrix` for all rows: out[t * stride + n]. Serial: callers split tiles over threads.
// The row count selects different code with the same bits.
void linear_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride);

OUTRIDER_FUNCTIONS(OUTRIDER_DECLARE)
// Rejection sampling of the requests whose drafts are trees (verify_trees.cpp). ignored: [R], tokens that are not tried.
void verify_rejection_trees(const float* logits, int vocabulary, const VerifyInputs& drafts,
                            const SamplingMetadata& sampling, bool with_replacement, const std::vector<int>& requests,
                            const std::vector<uint8_t>& ignored, const VerifyOutput& output);

}  // namespace outrider::LEVEL
