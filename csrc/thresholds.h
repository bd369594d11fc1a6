// Top-k, top-p and min-p as one threshold in the order (logit, then id), found from a histogram of distances to the
// largest score and a sort of the one bucket that holds the threshold.
#pragma once
#include <algorithm>
#include <cfloat>

#include "vector_math.h"
#include "outrider.h"
#include "threads.h"

namespace outrider::LEVEL {

// Scratch slots of sampling and verification, which run on the same threads.
enum SampleSlot { kSegments = 8, kThresholds, kProcessed, kHistogram, kCandidates, kBucketOfToken, kSums };

// A token passes if its logit is above `threshold`, or equal with an id of at most `last`, and its score is at least
// `floor`.
struct Thresholds {
  float temperature, most;  // most: largest score of the row
  float threshold = -INFINITY;
  int32_t last = INT32_MAX;
  float floor = -INFINITY;
  Thresholds(float temperature, float largest, float min_p) : temperature(temperature), most(score(largest)) {
    if (min_p > 0) floor = float(double(most) + std::log(double(min_p)));
    if (min_p >= 1) floor = most;
  }
  // Clamp scores above, so that differences are finite; NaN scores as -inf.
  float score(float logit) const {
    const float value = logit / temperature;
    return value > -INFINITY ? (value < FLT_MAX / 4 ? value : FLT_MAX / 4) : -INFINITY;
  }
  // Return the score of a token that passes, else -inf.
  float kept_score(float logit, int32_t token) const {
    const float value = score(logit);
    return threshold > logit || (logit == threshold && token > last) || floor > value ? -INFINITY : value;
  }
};

static inline bool truncates(const SamplingMetadata& sampling, int row, int vocabulary) {
  return (sampling.top_k[row] > 0 && sampling.top_k[row] < vocabulary) || sampling.top_p[row] < 1;
}

// Thresholds::score on sixteen lanes.
OUTRIDER_INLINE f32x16 scores_of(const Thresholds& thresholds, const f32x16& logits) {
  const f32x16 low = splat(-INFINITY), high = splat(FLT_MAX / 4);
  const f32x16 value = thresholds.temperature == 1 ? logits : logits / splat(thresholds.temperature);
  return where_greater(value, low, min(value, high), low);
}

OUTRIDER_INLINE f32x16 load_logits(const float* row, int start, int count) {
  if (count >= 16) return load(row + start);
  float padded[16];
  for (int lane = 0; lane < 16; ++lane) padded[lane] = lane < count ? row[start + lane] : -INFINITY;
  return load(padded);
}

// Compute the scores of tokens start .. start + count, -inf for those that do not pass; return the largest before ties
// at the threshold are resolved. If that is -inf, the scores are not written.
OUTRIDER_INLINE float kept_scores(const float* row, int start, int count, const Thresholds& thresholds,
                                  float scores[64]) {
  const f32x16 low = splat(-INFINITY), threshold = splat(thresholds.threshold), floor = splat(thresholds.floor);
  f32x16 logits[4], most = low;
  for (int i = 0; i < 4; ++i) {
    logits[i] = load_logits(row, start + 16 * i, count - 16 * i);
    most = max(logits[i], most);
  }
  if (thresholds.threshold > -INFINITY && thresholds.threshold > largest_lane(most)) return -INFINITY;
  most = low;
  for (int i = 0; i < 4; ++i) {
    f32x16 value = scores_of(thresholds, logits[i]);
    value = where_greater(floor, value, low, value);
    value = where_greater(threshold, logits[i], low, value);
    store(scores + 16 * i, value);
    most = max(value, most);
  }
  if (thresholds.last < start + count)  // tokens of this block may equal the threshold with a larger id
    for (int i = std::max(thresholds.last + 1 - start, 0); i < count; ++i)
      if (row[start + i] == thresholds.threshold) scores[i] = -INFINITY;
  return largest_lane(most);
}

struct Candidate {
  float logit;
  int32_t token;
};

static inline bool precedes(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Scores by distance from the largest, 1/64 per bucket; the last bucket holds the rest.
constexpr int kBuckets = 2048;
struct Histogram {
  int32_t count[kBuckets];
  double mass[kBuckets];  // sum of exp(score - most), if requested
  uint16_t* bucket;       // [V]
};

static inline void count_buckets(const Thresholds& thresholds, const float* row, int vocabulary, bool weigh,
                                 Histogram& histogram) {
  memset(histogram.count, 0, sizeof histogram.count);
  memset(histogram.mass, 0, sizeof histogram.mass);
  const f32x16 end = splat(float(kBuckets - 1));
  float weights[16], buckets[16];
  for (int first = 0; first < vocabulary; first += 16) {
    const int count = std::min(vocabulary - first, 16);
    const f32x16 distance = splat(thresholds.most) - scores_of(thresholds, load_logits(row, first, count));
    store(buckets, min(distance * splat(64.0f), end));
    for (int i = 0; i < count; ++i) {
      histogram.bucket[first + i] = uint16_t(buckets[i]);
      ++histogram.count[int(buckets[i])];
    }
    if (!weigh) continue;
    store(weights, exp(splat(0.0f) - distance));
    for (int i = 0; i < count; ++i) histogram.mass[int(buckets[i])] += weights[i];
  }
}

// Collect and sort the tokens of one bucket that pass so far.
static inline int sorted_bucket(const Thresholds& thresholds, const float* row, int vocabulary,
                                const Histogram& histogram, int bucket, Candidate* out) {
  int count = 0;
  for (int first = 0; first < vocabulary; first += 32) {
    const int last = std::min(first + 32, vocabulary);
    bool any = false;
    for (int i = first; i < last; ++i) any |= histogram.bucket[i] == bucket;
    for (int i = first; any && i < last; ++i) {
      const bool kept = row[i] > thresholds.threshold || (row[i] == thresholds.threshold && i <= thresholds.last) ||
                        thresholds.threshold == -INFINITY;
      if (histogram.bucket[i] == bucket && kept) out[count++] = {row[i] > -INFINITY ? row[i] : -INFINITY, i};
    }
  }
  std::sort(out, out + count, precedes);
  return count;
}

static inline double weight_of(const Thresholds& thresholds, float logit) {
  return std::exp(double(thresholds.score(logit)) - double(thresholds.most));
}

static inline void set_threshold(Thresholds& thresholds, const Candidate& last) {
  thresholds.threshold = last.logit;
  thresholds.last = last.token;
}

static inline void apply_top_k(Thresholds& thresholds, const float* row, int vocabulary, int k, Histogram& histogram,
                               Candidate* candidates) {
  int bucket = 0, before = 0;
  while (before + histogram.count[bucket] < k) before += histogram.count[bucket++];
  sorted_bucket(thresholds, row, vocabulary, histogram, bucket, candidates);
  const int keep = k - before;
  set_threshold(thresholds, candidates[keep - 1]);
  histogram.mass[bucket] = 0;
  for (int i = 0; i < keep; ++i) histogram.mass[bucket] += weight_of(thresholds, candidates[i].logit);
  std::fill(histogram.mass + bucket + 1, histogram.mass + kBuckets, 0.0);
}

// Pass a token if the tokens before it have less than top_p of the total probability.
static inline void apply_top_p(Thresholds& thresholds, const float* row, int vocabulary, float top_p,
                               const Histogram& histogram, Candidate* candidates) {
  double total = 0, before = 0;
  int last = 0;  // last bucket with any mass
  for (int i = 0; i < kBuckets; ++i) {
    total += histogram.mass[i];
    if (histogram.mass[i] > 0) last = i;
  }
  const double wanted = double(top_p) * total;
  int bucket = 0;
  while (bucket < last && before + histogram.mass[bucket] < wanted) before += histogram.mass[bucket++];
  const int count = sorted_bucket(thresholds, row, vocabulary, histogram, bucket, candidates);
  int keep = 1;
  for (before += weight_of(thresholds, candidates[0].logit); keep < count && before < wanted; ++keep)
    before += weight_of(thresholds, candidates[keep].logit);
  set_threshold(thresholds, candidates[keep - 1]);
}

static inline void narrow(Thresholds& thresholds, const float* row, int vocabulary, int top_k, float top_p) {
  if (thresholds.most == -INFINITY) return;
  Histogram* histogram = static_cast<Histogram*>(scratch(kHistogram, sizeof(Histogram)));
  Candidate* candidates = static_cast<Candidate*>(scratch(kCandidates, size_t(vocabulary) * sizeof(Candidate)));
  histogram->bucket = static_cast<uint16_t*>(scratch(kBucketOfToken, size_t(vocabulary) * sizeof(uint16_t)));
  count_buckets(thresholds, row, vocabulary, top_p < 1, *histogram);
  if (top_k > 0 && top_k < vocabulary) apply_top_k(thresholds, row, vocabulary, top_k, *histogram, candidates);
  if (top_p < 1) apply_top_p(thresholds, row, vocabulary, top_p, *histogram, candidates);
}

}  // namespace outrider::LEVEL
