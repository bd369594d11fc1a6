// What the kernel files of one level tell each other. LEVEL is defined by the build.
#pragma once
#include "outrider.h"

#ifndef LEVEL
#error "compile kernel files with -DLEVEL=portable, neon, avx2, avx512 or amx"
#endif

namespace outrider::LEVEL {

// Rows of activations as the quantised kernels eat them, in two halves: x ~ scale * ((high << kLowBits) + low). Fifteen
// bits with one scale a row keep 99.8 % of the likeliest tokens, twelve with a scale per 32 inputs 99.7 %; eight with a
// scale per 32 inputs would keep 97.7 %. Twelve need half the products of tiles, see linear_amx.h.
#if defined(__AMX_INT8__)
constexpr int kLowBits = 4;
constexpr bool kGroupScales = true;
#else
constexpr int kLowBits = 7;
constexpr bool kGroupScales = false;
#endif

struct Quantised {
  const int8_t *high, *low;  // [T][K padded to 64]; where tiles are used, high has [T/16][K/32][16][high 32, low 32]
                             // where panels are used: high points to the Inputs of panels.h, only scale is set beside
  const int32_t* sums;       // [T][K/16] sum of (high << kLowBits) + low over each 16 inputs
  const float* scale;        // [T], or [T][K/32] with kGroupScales; where tiles are used, [T/16][K/32][16]
  int stride;                // bytes from row to row
  const float* totals;       // only where tiles are used: [T/16][K/32][16] sums over 32 inputs, times their scale
};

// What linear_tiles reads: x always, `quantised` when any matrix is q4 or q8.
struct Rows {
  const float* x;  // [T][K]
  int tokens, width;
  Quantised quantised;
};

// Rows up to so many are not worth a fork: a thread that needs them normed or quantised does it for itself. Where
// threads do it together, what one wrote has to travel to the others.
#if defined(__AMX_INT8__)
constexpr int kFewRows = 16;
#else
constexpr int kFewRows = 7;
#endif

// Quantises into the calling thread's scratch, more than a few rows on all threads: then not from inside parallel().
// `width` is a multiple of 16 when `quantise`. linear() uses slot 0.
Rows prepare(const float* x, int tokens, int width, bool quantise, int scratch_slot);

// Tiles [first, last) of `matrix` for all rows: out[t * stride + n]. Serial: callers split tiles over threads.
// Row counts choose different code, never different bits.
void linear_tiles(const Matrix& matrix, const Rows& rows, int first, int last, float* out, int stride);

OUTRIDER_FUNCTIONS(OUTRIDER_DECLARE)
// The part of reject that has several guesses after one token: these requests. siblings.cpp.
void reject_trees(const float* logits, int vocabulary, const Drafts& drafts, const Choice& choice, bool again,
                  const std::vector<int>& requests, const Kept& kept);

}  // namespace outrider::LEVEL
