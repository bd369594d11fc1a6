// Low-rank adapters (LoRA): out += B * (A * x) for the rows that have one. Rows without one are not touched.
//
// A row's result does not depend on its neighbours: A * x adds its terms in the order of K as every matmul does, and
// B * (A * x) in the order of the rank.
#pragma once
#include <algorithm>

#include "activations.h"

namespace outrider::LEVEL {
namespace {

constexpr int64_t kSerialWork = 1 << 15;  // multiply-adds below which waking threads costs more than it saves

// The adapters of a step over one matrix, after `shrink`.
struct Lora {
  const LoraSlots* slots = nullptr;   // null: nothing to add
  const int32_t* adapters = nullptr;  // [T]: slot of each token, -1: none
  int tokens = 0;
  float* low = nullptr;  // [T][rank]: A * x

  const LoraSlots::Pair& pair(int token) const { return slots->pairs[adapters[token]]; }
  bool has(int token) const { return adapters[token] >= 0 && pair(token).a; }

  // Multiply tile `tile` of A by rows [first, last), runs of tokens with the same adapter together.
  void multiply(const float* x, int tile, int first, int last) const {
    for (int token = first, end; token < last; token = end) {
      for (end = token + 1; end < last && adapters[end] == adapters[token];) ++end;
      if (!has(token)) continue;
      const Matrix& a = *pair(token).a;
      if (tile >= a.tiles()) continue;
      const Rows rows{x + size_t(token) * a.cols, end - token, a.cols, {}};
      linear_tiles(a, rows, tile, tile + 1, low + size_t(token) * slots->rank, slots->rank);
    }
  }

  // Add B * low to tiles [first, last) of out [T][stride].
  void add(int first, int last, float* out, int stride) const {
    if (!slots) return;
    for (int tile = first; tile < last; ++tile) {
      const int lanes = slots->rows - tile * kLanes;
      for (int token = 0; token < tokens; ++token) {
        if (!has(token)) continue;
        const Matrix& b = *pair(token).b;
        const float* weights = reinterpret_cast<const float*>(b.data.get() + size_t(tile) * b.tile_bytes());
        const float* factors = low + size_t(token) * slots->rank;
        f32x16 sums = splat(0.0f);
        for (int i = 0; i < b.cols; ++i) sums = fma(load(weights + size_t(i) * kLanes), splat(factors[i]), sums);
        float* at = out + size_t(token) * stride + size_t(tile) * kLanes;
        store_some(at, load_some(at, lanes) + sums, lanes);
      }
    }
  }
};

// Compute A * x for matrices that read the same rows. `found` gets one entry for each of them.
void shrink(const LoraSlots* const* slots, int count, const int32_t* adapters, const Input& input, Lora* found) {
  int ranks = 0, tiles = 0;
  for (int i = 0; i < count; ++i) {
    found[i] = {};
    if (!adapters || !slots[i] || slots[i]->rank == 0) continue;
    found[i] = {slots[i], adapters, input.tokens, nullptr};
    ranks += slots[i]->rank;
    tiles = std::max(tiles, (slots[i]->rank + kLanes - 1) / kLanes);
  }
  if (!ranks) return;
  float* low = floats(kLow, size_t(input.tokens) * ranks);
  for (int i = 0; i < count; ++i)
    if (found[i].slots) {
      found[i].low = low;
      low += size_t(input.tokens) * found[i].slots->rank;
    }
  const float* x = input.x;
  if (input.norm) {
    float* normed = floats(kLoraInput, size_t(input.tokens) * input.width);
    rms_norm(x, input.norm, input.eps, input.tokens, input.width, normed);
    x = normed;
  }
  const auto run = [&](int unit, int first, int last) {
    const Lora& lora = found[unit / tiles];
    if (lora.slots) lora.multiply(x, unit % tiles, first, last);
  };
  const int units = count * tiles;
  if (int64_t(input.tokens) * ranks * input.width <= kSerialWork) {
    for (int unit = 0; unit < units; ++unit) run(unit, 0, input.tokens);
    return;
  }
  parallel([&](int part, int parts) {
    if (input.tokens >= 4 * parts) {
      const Share share(input.tokens, part, parts);
      for (int unit = 0; unit < units; ++unit) run(unit, share.first, share.last);
    } else {
      for (int unit = part; unit < units; unit += parts) run(unit, 0, input.tokens);
    }
  });
}

}  // namespace
}  // namespace outrider::LEVEL
