// Quantize float matrices into checkpoint blocks of 32 weights: q8_0, q5_1 and q4_1 (layouts as in GGUF files).
//
// Compiled without contraction of multiplications and additions: the blocks are the same on every machine.
#include <algorithm>
#include <cmath>
#include <limits>

#include "half.h"
#include "outrider.h"
#include "threads.h"

namespace outrider {
namespace {

constexpr int kBlock = 32;
// Fractions of a block's range that are clipped at each end: outliers lose a little precision, all others gain.
constexpr float kCuts[] = {0.0f, 0.03f, 0.06f, 0.09f, 0.12f};
constexpr int kEnds = 5, kRanges = kEnds * kEnds;

void read_f32(const uint8_t* from, float* to) { memcpy(to, from, kBlock * sizeof(float)); }

template <float (*widen)(uint16_t)>
void read_16_bits(const uint8_t* from, float* to) {
  uint16_t halves[kBlock];
  memcpy(halves, from, sizeof halves);
  for (int i = 0; i < kBlock; ++i) to[i] = widen(halves[i]);
}

uint8_t* put_half(uint8_t* to, float value) {
  const uint16_t half = float_to_half(value);
  memcpy(to, &half, 2);
  return to + 2;
}

// half_to_float(float_to_half(value)) without branches, so that it vectorizes.
inline float rounded_to_half(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff;
  uint32_t rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fffu;
  const uint32_t denormal = float_to_bits((bits_to_float(magnitude) + 0.75f) - 0.75f);  // a multiple of 2^-24
  rounded = magnitude < 0x38800000 ? denormal : rounded;
  rounded = magnitude >= 0x477ff000 ? 0x7f800000 : rounded;
  rounded = magnitude > 0x7f800000 ? magnitude : rounded;
  return bits_to_float(rounded | (bits & 0x80000000));
}

// 0 for a block of equal weights, or of weights too small for fp16.
float reciprocal(float scale) { return scale == 0 ? 0.0f : 1 / scale; }

// Errors are summed in lanes, in a fixed order..
constexpr int kLanesOfSum = 4;
typedef float Lanes __attribute__((vector_size(kLanesOfSum * sizeof(float))));

// Round numbers below 2^22 to integers, to nearest even.
template <class Number>
inline Number rounded(Number value) {
  return (value + 0x1.8p23f) - 0x1.8p23f;
}

// Clip as `min` and `max` would, but map NaN to `low`.
template <class Number>
inline Number clipped(Number value, Number low, Number high) {
  value = value > low ? value : low;
  return value < high ? value : high;
}

void to_q8_0(const float* x, uint8_t* to) {
  uint32_t most = 0;  // bits of the largest magnitude; compared as integers, NaN > infinity > finite
  for (int i = 0; i < kBlock; ++i) most = std::max(most, float_to_bits(x[i]) & 0x7fffffff);
  const float scale = rounded_to_half(bits_to_float(most) / 127), inverse = reciprocal(scale);
  to = put_half(to, scale);
  for (int i = 0; i < kBlock; ++i) to[i] = uint8_t(int8_t(rounded(clipped(x[i] * inverse, -127.0f, 127.0f))));
}

struct Range {
  float scale = 0, minimum = 0;
};

// Return the clipped range with the least squared error. Of weights that are not all finite, none: they become 0.
Range best_range(const float* x, float levels) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kBlock; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
  float scales[kRanges], minima[kRanges];
  for (int i = 0; i < kRanges; ++i) {
    const float below = kCuts[i / kEnds], above = kCuts[i % kEnds];
    scales[i] = rounded_to_half((high - low) * ((1 - below - above) / levels));
    minima[i] = rounded_to_half(low + (high - low) * below);
  }
  float errors[kRanges];
  for (int range = 0; range < kRanges; ++range) {
    const float scale = scales[range], minimum = minima[range], inverse = reciprocal(scale);
    Lanes sum{};
    for (int i = 0; i < kBlock; i += kLanesOfSum) {
      Lanes values;
      memcpy(&values, x + i, sizeof values);
      const Lanes level = rounded(clipped((values - minimum) * inverse, Lanes{}, levels - Lanes{}));
      const Lanes error = level * scale + minimum - values;
      sum += error * error;
    }
    errors[range] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  float least = std::numeric_limits<float>::infinity();
  Range best;
  for (int range = 0; range < kRanges; ++range)
    if (errors[range] < least) least = errors[range], best = {scales[range], minima[range]};
  return best;
}

// Store scale, minimum and, above 15 levels, the fifth bits; then the nibbles.
template <int levels>
void to_affine(const float* x, uint8_t* to) {
  const Range range = best_range(x, levels);
  const float inverse = reciprocal(range.scale);
  uint8_t quants[kBlock];
  for (int i = 0; i < kBlock; ++i)
    quants[i] = uint8_t(rounded(clipped((x[i] - range.minimum) * inverse, 0.0f, float(levels))));
  to = put_half(put_half(to, range.scale), range.minimum);
  if (levels > 15) {
    uint32_t fifth = 0;
    for (int i = 0; i < kBlock; ++i) fifth |= uint32_t(quants[i] >> 4) << i;
    for (int i = 0; i < 4; ++i) *to++ = uint8_t(fifth >> (8 * i));
  }
  for (int i = 0; i < 16; ++i) to[i] = uint8_t((quants[i] & 15) | (quants[i + 16] & 15) << 4);
}

struct Source {
  const char* name;
  int bytes;  // of a block
  void (*read)(const uint8_t* from, float* to);
};
struct Target {
  const char* name;
  int bytes;
  void (*write)(const float* x, uint8_t* to);
};

const Source kSources[] = {{"f32", 128, read_f32},
                           {"f16", 64, read_16_bits<half_to_float>},
                           {"bf16", 64, read_16_bits<bf16_to_float>}};
const Target kTargets[] = {{"q8_0", 34, to_q8_0}, {"q5_1", 24, to_affine<31>}, {"q4_1", 20, to_affine<15>}};

template <class Formats>
const auto& find(const Formats& formats, const std::string& name) {
  for (const auto& format : formats)
    if (name == format.name) return format;
  refuse("cannot quantize from or to `" + name + "`");
}

}  // namespace

void quantize(const std::string& from, const std::string& to, int64_t weights, const void* source, void* target) {
  const Source& reader = find(kSources, from);
  const Target& writer = find(kTargets, to);
  if (weights < 0 || weights % kBlock) refuse("cannot quantize " + std::to_string(weights) + " weights");
  constexpr int64_t run = 1024;  // blocks
  const int64_t blocks = weights / kBlock;
  Queue queue(int((blocks + run - 1) / run), 1);
  parallel([&](int, int) {
    for (int first, last; queue.take(first, last);)
      for (int64_t block = first * run; block < std::min(last * run, blocks); ++block) {
        float x[kBlock];
        reader.read(static_cast<const uint8_t*>(source) + block * reader.bytes, x);
        writer.write(x, static_cast<uint8_t*>(target) + block * writer.bytes);
      }
  });
}

}  // namespace outrider
