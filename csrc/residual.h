// Distributions of a target and of a draft in log space, segment by segment, and what the one leaves of the other: no
// probabilities are stored.
#pragma once
#include "draw.h"

namespace outrider::LEVEL {

// A distribution: the softmax of the scores that a cut keeps. A score becomes a log-probability in two steps, since
// each alone keeps its digits.
struct Law {
  bool used;
  Cut cut;
  float base;  // log of the sum of exp(score - most)
  float of(float score) const { return (score - cut.most) - base; }
  f32x16 of(const f32x16& scores) const { return (scores - splat(cut.most)) - splat(base); }
};

// Sum over the kept tokens of [first, last) of exp(score - most).
static inline double weigh(const float* row, int first, int last, const Cut& cut) {
  double total = 0;
  float scores[kNoiseBlock];
  int start = first;
  if (cut.border == -INFINITY && cut.floor == -INFINITY)  // all are kept
    for (; start + 4 * kNoiseBlock <= last; start += 4 * kNoiseBlock) {
      f32x16 lanes = splat(0.0f);
      for (int i = 0; i < 4 * kNoiseBlock; i += 16)
        lanes = lanes + exp(scores_of(cut, load(row + start + i)) - splat(cut.most));
      total += sum(lanes);
    }
  for (; start < last; start += kNoiseBlock) {
    if (kept_scores(row, start, std::min(last - start, kNoiseBlock), cut, scores) == -INFINITY) continue;
    f32x16 lanes = splat(0.0f);
    for (int i = 0; i < kNoiseBlock; i += 16) lanes = lanes + exp(load(scores + i) - splat(cut.most));
    total += sum(lanes);
  }
  return total;
}

// 1 - exp(x) for x below 0; the series where the difference would lose its digits.
OUTRIDER_INLINE f32x16 complement(const f32x16& x) {
  const f32x16 near = (splat(0.0f) - x) * fma(x, splat(0.5f), splat(1.0f));
  return where_greater(x, splat(-1e-3f), near, splat(1.0f) - exp(x));
}

// max(weight * p - q, 0) as a part of weight * p. `row` holds q's logits.
struct Residual {
  const float* row;
  const Law &p, &q;
  float log_weight;
  // log(q / (weight * p)) of sixteen tokens: not below 0 where nothing is left.
  f32x16 ratio(const f32x16& scores, int start, int count) const {
    return q.of(scores_of(q.cut, load_logits(row, start, count))) - p.of(scores) - splat(log_weight);
  }
  void operator()(float* scores, int start, int count) const {
    for (int i = 0; i < kNoiseBlock; i += 16) {
      const f32x16 score = load(scores + i), x = ratio(score, start + i, count - i);
      // Even the least float below 0 leaves a normal number, as log wants it.
      const f32x16 left = max(complement(x), splat(FLT_MIN));
      store(scores + i, where_greater(splat(0.0f), x, score + log(left), splat(-INFINITY)));
    }
  }
};

// Sum of max(weight * p - q, 0) over [first, last).
static inline double weigh_residual(const float* row, int first, int last, const Residual& residual) {
  double total = 0;
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    if (kept_scores(row, start, count, residual.p.cut, scores) == -INFINITY) continue;
    f32x16 lanes = splat(0.0f);
    for (int i = 0; i < kNoiseBlock; i += 16) {
      const f32x16 score = load(scores + i), x = residual.ratio(score, start + i, count - i);
      const f32x16 mass = exp(residual.p.of(score) + splat(residual.log_weight)) * complement(x);
      lanes = lanes + where_greater(splat(0.0f), x, mass, splat(0.0f));
    }
    total += sum(lanes);
  }
  return total;
}

// The residual of a guess that was not drawn: everything but its token.
struct Without {
  int token;
  void operator()(float* scores, int start, int count) const {
    if (token >= start && token < start + count) scores[token - start] = -INFINITY;
  }
};

}  // namespace outrider::LEVEL
