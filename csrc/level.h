// Declarations shared by the kernel files of one level. LEVEL is defined by the build.
#pragma once
#include "outrider.h"

#ifndef LEVEL
#error "compile kernel files with -DLEVEL=portable, neon, avx2, avx512 or amx"
#endif

namespace outrider::LEVEL {

// Quantized activations in two parts: x ~ scale * ((high << kLowBits) + low). 15 bits with one scale per row keep the
// argmax of 99.8 % of the tokens, 12 bits with a scale per 32 inputs 99.7 %, 8 bits with a scale per 32 inputs 97.7 %.
// 12 bits need half the tile multiplications, see linear_amx.h.
#if defined(__AMX_INT8__)
constexpr int kLowBits = 4;
constexpr bool kGroupScales = true;
#else
constexpr int kLowBits = 7;
constexpr bool kGroupScales = false;
#endif

struct QuantizedRows {
  const int8_t *high, *low;  // [T][K padded to 64]; on tiles high is [T/16][K/32][16][high 32, low 32]
                             // on panels high points to the Inputs of linear_neon.h and only scale is set besides
  const int32_t* sums;       // [T][K/16] sum of (high << kLowBits) + low over each 16 inputs
  const float* scale;        // [T], or [T][K/32] with kGroupScales; on tiles [T/16][K/32][16]
  int stride;                // bytes between rows
  const float* totals;       // on tiles only: [T/16][K/32][16], sums over 32 inputs times their scale
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
// `width` is a multiple of 16 if `quantize`. linear() uses slot 0.
Rows prepare(const float* x, int tokens, int width, bool quantize, int scratch_slot);

// Compute tiles [first, last) of `matrix` for all rows: out[t * stride + n]. Serial: callers split tiles over threads.
// The row count selects different code with the same bits.
void linear_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride);

OUTRIDER_FUNCTIONS(OUTRIDER_DECLARE)
// Rejection sampling of the requests whose drafts are trees (verify_trees.cpp).
void verify_rejection_trees(const float* logits, int vocabulary, const VerifyInputs& drafts,
                            const SamplingMetadata& sampling, bool with_replacement, const std::vector<int>& requests,
                            const VerifyOutput& output);

}  // namespace outrider::LEVEL
