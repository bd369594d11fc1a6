// A node's distribution as probabilities in memory, and what is left of it when guesses drawn from others are rejected.
#pragma once
#include <numeric>
#include <vector>

#include "draw.h"

namespace outrider::LEVEL {

// The body for each segment: on all threads, or on this one where other requests keep the others busy.
class Segments {
 public:
  Segments(int vocabulary, bool spread) : table_(nullptr, 1, vocabulary), spread_(spread) {}
  int count() const { return table_.segments; }
  int first(int segment) const { return segment * kSegment; }
  int last(int segment) const { return table_.end_of(segment); }
  template <class Body>
  void each(const Body& body) const {
    if (spread_) return over_segments(table_, [&](int, int segment) { body(segment); });
    for (int segment = 0; segment < count(); ++segment) body(segment);
  }

 private:
  Table table_;
  bool spread_;
};

// Numbers that add up to `total`, where 1 is meant.
struct Shares {
  float* values;              // [V]
  std::vector<double> sums;   // of each segment
  double total() const { return std::accumulate(sums.begin(), sums.end(), 0.0); }
};

// exp(score - most) of the kept tokens of [first, last), 0 of the others; returns their sum. May work in place.
static inline double share_out(const float* row, int first, int last, const Cut& cut, float* out) {
  double total = 0;
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    if (kept_scores(row, start, count, cut, scores) == -INFINITY) {
      std::fill(out + start, out + start + count, 0.0f);
      continue;
    }
    f32x16 lanes = splat(0.0f);
    for (int i = 0; i < kNoiseBlock; i += 16) {
      const f32x16 share = exp(load(scores + i) - splat(cut.most));
      store(scores + i, share);
      lanes = lanes + share;
    }
    std::copy(scores, scores + count, out + start);
    total += sum(lanes);
  }
  return total;
}

// out = max(p - scale * q, 0) on [first, last); returns its sum.
static inline double take_away(const float* p, const float* q, float scale, int first, int last, float* out) {
  double total = 0;
  for (int start = first; start < last; start += kNoiseBlock) {
    f32x16 lanes = splat(0.0f);
    int i = start;
    for (; i + 16 <= std::min(start + kNoiseBlock, last); i += 16) {
      const f32x16 rest = max(load(p + i) - splat(scale) * load(q + i), splat(0.0f));
      store(out + i, rest);
      lanes = lanes + rest;
    }
    total += sum(lanes);
    for (; i < std::min(start + kNoiseBlock, last); ++i) total += out[i] = std::max(p[i] - scale * q[i], 0.0f);
  }
  return total;
}

// The largest of log(share) + noise on [first, last).
static inline Best noisy_share(const float* shares, int first, int last, const Key& key) {
  Best best{-INFINITY, first};
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    f32x16 most = splat(-INFINITY);
    for (int i = 0; i < kNoiseBlock; i += 16) {
      const f32x16 share = load_logits(shares, start + i, count - i);
      // The least float is no normal number, as log wants it.
      const f32x16 score = where_greater(share, splat(0.0f), log(max(share, splat(FLT_MIN))), splat(-INFINITY));
      store(scores + i, score);
      most = max(score, most);
    }
    if (!(largest_lane(most) + kMostNoise > best.value)) continue;
    const float value = add_noise(scores, start, key);
    if (value > best.value) best = {value, start + find(scores, 0, count, value)};
  }
  return best;
}

}  // namespace outrider::LEVEL
