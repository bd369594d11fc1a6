// Helpers on rows of activations, shared by pointwise.cpp and attention.cpp.
#pragma once
#include "level.h"
#include "simd.h"
#include "threads.h"

namespace outrider::LEVEL {

// Scratch slots of these two files; linear.cpp uses the slots below.
enum Slot { kPrepared = 0, kNormed = 8, kFirst, kSecond, kProduct, kPlan, kPartial, kOfThread, kLow, kLoraInput, kOrdered };

OUTRIDER_INLINE float* floats(int slot, size_t count) {
  return static_cast<float*>(scratch(slot, count * sizeof(float)));
}

// Load or store the first `count` of sixteen lanes; the others read as 0 and are not written.
OUTRIDER_INLINE f32x16 load_some(const float* from, int count) {
  if (count >= 16) return load(from);
  float lanes[16] = {};
  memcpy(lanes, from, size_t(count) * sizeof(float));
  return load(lanes);
}
OUTRIDER_INLINE void store_some(float* to, const f32x16& value, int count) {
  if (count >= 16) return store(to, value);
  float lanes[16];
  store(lanes, value);
  memcpy(to, lanes, size_t(count) * sizeof(float));
}

// Call body(first, last) for runs of rows that cover 0 .. tokens.
template <class Body>
void over_rows(int tokens, const Body& body) {
  if (tokens <= kFewRows) return body(0, tokens);
  parallel([&](int part, int parts) {
    const Share share(tokens, part, parts);
    body(share.first, share.last);
  });
}

void norm_row(const float* x, const float* weight, float eps, int width, float* out);  // out may be x
void add_row(float* x, const float* y, const float* bias, int width);                  // x += y (+ bias)

// Input of a matmul: x [T][K], normed if `norm` is not null, then in the order of the matrix if that is not null.
struct Input {
  const float *x, *norm;
  float eps;
  int tokens, width;
  Activations activations;
  const int32_t* order = nullptr;  // [K]
  Rows rows() const {
    const float* from = x;
    if (norm) {
      float* normed = floats(kNormed, size_t(tokens) * width);  // [T][K]
      rms_norm(x, norm, eps, tokens, width, normed);
      from = normed;
    }
    if (order) {
      float* ordered = floats(kOrdered, size_t(tokens) * width);  // [T][K]
      over_rows(tokens, [&](int first, int last) {
        for (int token = first; token < last; ++token)
          for (size_t at = size_t(token) * width, k = 0; k < size_t(width); ++k) ordered[at + k] = from[at + order[k]];
      });
      from = ordered;
    }
    return prepare(from, tokens, width, activations, kPrepared);
  }
};

// From this many threads on, threads take short runs of tiles on demand: threads that share a core with others, or with
// other programs, would delay all. Fewer threads have one contiguous run each: short runs cost a seventh of a decode step
// of a small model on two. So do float weights, since a run splits the rows for tiles of bf16.
constexpr int kManyThreads = 4;
constexpr int kRunsPerThread = 8;

// Call body(rows, first, last) on all threads, for runs of tiles that cover 0 .. tiles.
template <class Body>
void over_input(const Input& input, int tiles, const Body& body) {
  const bool alone = input.tokens <= kFewRows;
  const bool on_demand = thread_count() >= kManyThreads && input.activations != Activations::none;
  const Rows shared = alone ? Rows{} : input.rows();
  Queue queue(tiles, tiles / (kRunsPerThread * thread_count()));
  parallel([&](int part, int parts) {
    const Rows rows = alone ? input.rows() : shared;
    const Share share(tiles, part, parts);
    if (!on_demand) return body(rows, share.first, share.last);
    for (int first, last; queue.take(first, last);) body(rows, first, last);
  });
}

constexpr int kMostProjections = 3;  // matrices that read the same rows

struct Projection {
  const Matrix* matrix;
  float* out;  // [T][N]
  const LoraSlots* lora;
};

// Multiply several matrices by the same rows in one parallel region.
void project(const Projection* projections, int count, Input input, const int32_t* adapters);

// gate := activation(gate + bias) * (up + bias), columns [first, last) of all rows of [T][N].
void activate_columns(const Mlp& layer, float* gate, const float* up, int tokens, int first, int last);

// x += post_norm(matrix * input + bias): the end of every block of a layer. `lora` may be null, as may `adapters`.
void project_back(const Matrix& matrix, const LoraSlots* lora, const int32_t* adapters, const float* input,
                  const float* bias, const float* post_norm, float eps, float* x, int tokens);

}  // namespace outrider::LEVEL
