// Norms, the projections into and out of attention, the gated MLP.
#include <algorithm>

#include "half.h"
#include "vector_math.h"
#include "lora.h"

namespace outrider::LEVEL {
namespace {

// out[i] = x[i] cos - x[i + D/2] sin, out[i + D/2] = x[i + D/2] cos + x[i] sin.
void rotate(float* head, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += 16) {
    const int count = half - i;
    const f32x16 left = load_some(head + i, count), right = load_some(head + half + i, count);
    const f32x16 c = load_some(cos + i, count), s = load_some(sin + i, count);
    store_some(head + i, left * c - right * s, count);
    store_some(head + half + i, right * c + left * s, count);
  }
}

void add_bias(float* x, const float* bias, int width) {
  if (!bias) return;
  for (int i = 0; i < width; ++i) x[i] += bias[i];
}

// Apply bias, norm and rope in place to one token's heads [heads][D].
void finish_heads(const Attention& layer, float* x, int heads, const float* bias, const float* norm, int position) {
  const int width = layer.head_dim, half = width / 2;
  add_bias(x, bias, heads * width);
  if (norm && layer.whole_norms) norm_row(x, norm, layer.eps, heads * width, x);
  for (int head = 0; head < heads; ++head) {
    float* at = x + size_t(head) * width;
    if (norm && !layer.whole_norms) norm_row(at, norm, layer.eps, width, at);
    if (layer.cos) rotate(at, layer.cos + size_t(position) * half, layer.sin + size_t(position) * half, half);
  }
}

// Quantize a head as quantize_heads of kv_quantization.py does. Return its scale.
float quantize_head(KvType dtype, const float* x, int width, uint8_t* to) {
  const float limit = dtype == KvType::i8 ? 127.0f : 448.0f;
  f32x16 tops = splat(0.0f), zeros = splat(0.0f);
  for (int i = 0; i < width; i += 16) {
    const f32x16 values = load_some(x + i, width - i);
    tops = max(as_float(as_bits(values) & splat(uint32_t(0x7fffffff))), tops);
    zeros = fma(values, splat(0.0f), zeros);  // NaN if a value is not finite
  }
  const float top = largest_lane(tops), scale = top / limit + sum(zeros);
  if (!(top >= 1e-30f) || !std::isfinite(scale)) {
    memset(to, 0, size_t(width));
    return scale;
  }
  const float factor = limit / top;
  if (dtype == KvType::i8)
    for (int i = 0; i < width; ++i) to[i] = uint8_t(int8_t(std::nearbyint(x[i] * factor)));
  else
    for (int i = 0; i < width; ++i) to[i] = float_to_fp8(x[i] * factor);
  return scale;
}

void store_head(void* pages, KvType dtype, size_t offset, const float* x, int width) {
  if (dtype == KvType::f32) {
    memcpy(static_cast<float*>(pages) + offset, x, size_t(width) * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(pages) + offset;
  int i = 0;
  if (dtype == KvType::f16) {
#if defined(__ARM_NEON)
    for (; i + 4 <= width; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
#elif defined(__F16C__)
    for (; i + 8 <= width; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
    for (; i < width; ++i) to[i] = float_to_half(x[i]);
  } else {
    for (; i < width; ++i) to[i] = float_to_bf16(x[i]);
  }
}

// Finish the key and value of one token in place and store them; slot -1: do not store.
void store_token(const Attention& layer, const Pages& pages, int slot, int position, float* key, float* value) {
  if (slot == -1) return;
  finish_heads(layer, key, layer.kv_heads, layer.key_bias, layer.key_norm, position);
  add_bias(value, layer.value_bias, layer.kv_heads * layer.head_dim);
  const int width = layer.head_dim, page = slot / pages.page_size, line = slot % pages.page_size;
  for (int head = 0; head < layer.kv_heads; ++head) {
    const size_t row = (size_t(page) * layer.kv_heads + head) * pages.page_size + line, offset = row * width;
    float* own_key = key + size_t(head) * width;
    const float* own_value = value + size_t(head) * width;
    if (pages.dtype == KvType::i8 && layer.key_factors)
      for (int i = 0; i < width; ++i) own_key[i] /= layer.key_factors[size_t(head) * width + i];
    if (pages.key_scales) {
      uint8_t *keys = static_cast<uint8_t*>(pages.keys), *values = static_cast<uint8_t*>(pages.values);
      pages.key_scales[row] = quantize_head(pages.dtype, own_key, width, keys + offset);
      pages.value_scales[row] = quantize_head(pages.dtype, own_value, width, values + offset);
    } else {
      store_head(pages.keys, pages.dtype, offset, own_key, width);
      store_head(pages.values, pages.dtype, offset, own_value, width);
    }
  }
}

template <class Activation>
void activate(const Mlp& layer, const Activation& gated, float* gate, const float* up, int tokens, int first,
              int last) {
  const int width = layer.gate->rows;
  for (int token = 0; token < tokens; ++token)
    for (int i = first; i < last; i += 16) {
      const int count = last - i;
      float* at = gate + size_t(token) * width + i;
      f32x16 g = load_some(at, count), u = load_some(up + size_t(token) * width + i, count);
      if (layer.gate_bias) g = g + load_some(layer.gate_bias + i, count);
      if (layer.up_bias) u = u + load_some(layer.up_bias + i, count);
      store_some(at, gated(g, u), count);
    }
}

// Compute activation(gate(x)) * up(x): [T][N]. A thread finishes the columns whose two tiles it computed.
const float* gated(const Mlp& layer, const Input& input, const int32_t* adapters) {
  const int width = layer.gate->rows, tokens = input.tokens;
  float* gate = floats(kFirst, size_t(tokens) * width);
  float* up = floats(kSecond, size_t(tokens) * width);
  const LoraSlots* const slots[] = {layer.gate_lora.get(), layer.up_lora.get()};
  Lora loras[2];
  shrink(slots, 2, adapters, input, loras);
  over_input(input, layer.gate->tiles(), [&](const Rows& rows, int first, int last) {
    linear_tiles(*layer.gate, rows, first, last, gate, width);
    linear_tiles(*layer.up, rows, first, last, up, width);
    loras[0].add(first, last, gate, width);
    loras[1].add(first, last, up, width);
    activate_columns(layer, gate, up, tokens, first * kLanes, std::min(last * kLanes, width));
  });
  return gate;
}

}  // namespace

void project(const Projection* projections, int count, Input input, const int32_t* adapters) {
  int total = 0;
  const LoraSlots* slots[kMostProjections];
  Lora loras[kMostProjections];
  for (int i = 0; i < count; ++i) {
    slots[i] = projections[i].lora;
    total += projections[i].matrix->tiles();
    input.activations = std::max(input.activations, projections[i].matrix->activations);
  }
  input.order = projections[0].matrix->input_order();  // of all of them, by check_order
  shrink(slots, count, adapters, input, loras);
  over_input(input, total, [&](const Rows& rows, int first, int last) {
    int base = 0;
    for (int i = 0; i < count; ++i) {
      const Matrix& matrix = *projections[i].matrix;
      const int from = std::max(first - base, 0), to = std::min(last - base, matrix.tiles());
      if (from < to) {
        linear_tiles(matrix, rows, from, to, projections[i].out, matrix.rows);
        loras[i].add(from, to, projections[i].out, matrix.rows);
      }
      base += matrix.tiles();
    }
  });
}

void norm_row(const float* x, const float* weight, float eps, int width, float* out) {
  f32x16 squares = splat(0.0f);
  for (int i = 0; i < width; i += 16) {
    const f32x16 v = load_some(x + i, width - i);
    squares = fma(v, v, squares);
  }
  const f32x16 scale = splat(1.0f / std::sqrt(sum(squares) / float(width) + eps));
  for (int i = 0; i < width; i += 16)
    store_some(out + i, load_some(x + i, width - i) * scale * load_some(weight + i, width - i), width - i);
}

void add_row(float* x, const float* y, const float* bias, int width) {
  if (bias)
    for (int i = 0; i < width; ++i) x[i] += y[i] + bias[i];
  else
    for (int i = 0; i < width; ++i) x[i] += y[i];
}

void activate_columns(const Mlp& layer, float* gate, const float* up, int tokens, int first, int last) {
  const auto run = [&](const auto& gated) { activate(layer, gated, gate, up, tokens, first, last); };
  if (layer.activation == 0) run([](const f32x16& g, const f32x16& u) { return silu(g) * u; });
  else if (layer.activation == 1) run([](const f32x16& g, const f32x16& u) { return gelu_tanh(g) * u; });
  else run([](const f32x16& g, const f32x16& u) { return swiglu_oai(g, u); });
}

void rms_norm(const float* x, const float* weight, float eps, int tokens, int width, float* out) {
  over_rows(tokens, [&](int first, int last) {
    for (int token = first; token < last; ++token)
      norm_row(x + size_t(token) * width, weight, eps, width, out + size_t(token) * width);
  });
}

void soft_cap(float* x, float cap, int rows, int width) {
  const f32x16 factor = splat(cap), inverse = splat(1 / cap);
  const size_t total = size_t(rows) * width;
  parallel([&](int part, int parts) {
    const size_t step = (total / parts + 16) / 16 * 16, first = std::min(step * part, total);
    const size_t last = std::min(first + step, total);
    for (size_t i = first; i < last; i += 16) {
      const int count = int(std::min(last - i, size_t(16)));
      store_some(x + i, factor * tanh(load_some(x + i, count) * inverse), count);
    }
  });
}

void project_back(const Matrix& matrix, const LoraSlots* lora, const int32_t* adapters, const float* input,
                  const float* bias, const float* post_norm, float eps, float* x, int tokens) {
  const int width = matrix.rows;
  float* product = floats(kProduct, size_t(tokens) * width);  // [T][E]
  const Input rows_of{input, nullptr, eps, tokens, matrix.cols, matrix.activations, matrix.input_order()};
  Lora low_rank;
  shrink(&lora, 1, adapters, rows_of, &low_rank);
  over_input(rows_of, matrix.tiles(), [&](const Rows& rows, int first, int last) {
    linear_tiles(matrix, rows, first, last, product, width);
    low_rank.add(first, last, product, width);
    if (post_norm) return;
    const int from = first * kLanes, count = std::min(last * kLanes, width) - from;
    for (int token = 0; token < tokens && count > 0; ++token) {
      const size_t at = size_t(token) * width + from;
      add_row(x + at, product + at, bias ? bias + from : nullptr, count);
    }
  });
  if (!post_norm) return;
  over_rows(tokens, [&](int first, int last) {
    for (int token = first; token < last; ++token) {
      float* row = product + size_t(token) * width;
      add_bias(row, bias, width);
      norm_row(row, post_norm, eps, width, row);
      add_row(x + size_t(token) * width, row, nullptr, width);
    }
  });
}

void project_qkv(const Attention& layer, const float* x, const Batch& batch, const Pages& pages, float* q) {
  check_batch(layer, batch, pages, true);
  const int tokens = batch.tokens;
  const int query_width = layer.heads * layer.head_dim, key_width = layer.kv_heads * layer.head_dim;
  float* keys = floats(kFirst, size_t(tokens) * key_width);  // [T][G * D], as are the values
  float* values = floats(kSecond, size_t(tokens) * key_width);
  const Projection projections[] = {{layer.query.get(), q, layer.query_lora.get()},
                                    {layer.key.get(), keys, layer.key_lora.get()},
                                    {layer.value.get(), values, layer.value_lora.get()}};
  project(projections, 3, {x, layer.norm, layer.eps, tokens, layer.query->cols, Activations::none}, batch.adapters);
  over_rows(tokens, [&](int first, int last) {
    for (int token = first; token < last; ++token) {
      const int position = batch.positions[token];
      const size_t at = size_t(token) * key_width;
      finish_heads(layer, q + size_t(token) * query_width, layer.heads, layer.query_bias, layer.query_norm, position);
      store_token(layer, pages, batch.slots[token], position, keys + at, values + at);
    }
  });
}

void project_kv(const Attention& layer, const float* x, const Batch& batch, const Pages& pages) {
  check_batch(layer, batch, pages, false);
  const int tokens = batch.tokens, key_width = layer.kv_heads * layer.head_dim;
  float* keys = floats(kFirst, size_t(tokens) * key_width);  // [T][G * D], as are the values
  float* values = floats(kSecond, size_t(tokens) * key_width);
  const Projection projections[] = {{layer.key.get(), keys, layer.key_lora.get()},
                                    {layer.value.get(), values, layer.value_lora.get()}};
  project(projections, 2, {x, nullptr, 0, tokens, layer.key->cols, Activations::none}, batch.adapters);
  over_rows(tokens, [&](int first, int last) {
    for (int token = first; token < last; ++token) {
      const size_t at = size_t(token) * key_width;
      store_token(layer, pages, batch.slots[token], batch.positions[token], keys + at, values + at);
    }
  });
}

void mlp(const Mlp& layer, float* x, int tokens, const int32_t* adapters) {
  const Activations activations = std::max(layer.gate->activations, layer.up->activations);
  const Input input{x, layer.norm, layer.eps, tokens, layer.gate->cols, activations, layer.gate->input_order()};
  const float* hidden = gated(layer, input, adapters);  // [T][N]
  project_back(*layer.down, layer.down_lora.get(), adapters, hidden, layer.down_bias, layer.post_norm, layer.eps, x,
               tokens);
}

}  // namespace outrider::LEVEL
