// Which tokens of a row may be chosen: top-k, top-p and min-p as one cut through the order (logit, then id), found from
// a histogram over distances from the largest score and a sort of the one bucket that the cut falls into.
#pragma once
#include <algorithm>
#include <cfloat>

#include "maths.h"
#include "outrider.h"
#include "threads.h"

namespace outrider::LEVEL {

// Kept: logit above `border`, or equal to it with an id of at most `last`; and a score of at least `floor`.
struct Cut {
  float temperature, most;  // most: the largest score of the row
  float border = -INFINITY;
  int32_t last = INT32_MAX;
  float floor = -INFINITY;
  Cut(float temperature, float largest, float min_p) : temperature(temperature), most(score(largest)) {
    if (min_p > 0) floor = float(double(most) + std::log(double(min_p)));
    if (min_p >= 1) floor = most;
  }
  // Finite above, so that differences of scores are numbers; NaN scores as -inf.
  float score(float logit) const {
    const float value = logit / temperature;
    return value > -INFINITY ? (value < FLT_MAX / 4 ? value : FLT_MAX / 4) : -INFINITY;
  }
};

static inline bool truncates(const Choice& choice, int row, int vocabulary) {
  return (choice.top_k[row] > 0 && choice.top_k[row] < vocabulary) || choice.top_p[row] < 1;
}

// Scores of tokens start .. start + count, -inf for the others of the block and for those not kept; the largest.
OUTRIDER_INLINE float kept_scores(const float* row, int start, int count, const Cut& cut, float scores[64]) {
  const f32x16 low = splat(-INFINITY), temperature = splat(cut.temperature), high = splat(FLT_MAX / 4);
  f32x16 most = low;
  for (int i = 0; i < 64; i += 16) {
    float padded[16];
    for (int lane = 0; lane < 16 && i + 16 > count; ++lane)
      padded[lane] = i + lane < count ? row[start + i + lane] : -INFINITY;
    const f32x16 logits = load(i + 16 > count ? padded : row + start + i);
    f32x16 value = logits / temperature;
    value = where_greater(value, low, min(value, high), low);
    value = where_greater(splat(cut.floor), value, low, value);
    value = where_greater(splat(cut.border), logits, low, value);
    store(scores + i, value);
    most = max(value, most);
  }
  if (cut.last < start + count)  // some of this block may equal the border and come too late
    for (int i = std::max(cut.last + 1 - start, 0); i < count; ++i)
      if (row[start + i] == cut.border) scores[i] = -INFINITY;
  float lanes[16], largest = -INFINITY;
  store(lanes, most);
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

struct Candidate {
  float logit;
  int32_t token;
};

static inline bool precedes(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Scores by their distance from the largest: 1/64 a bucket, the last one takes the rest.
constexpr int kBuckets = 2048;
struct Histogram {
  int32_t count[kBuckets];
  double mass[kBuckets];  // sum of exp(score - most)
};

OUTRIDER_INLINE int bucket_of(float distance) {
  return distance < float(kBuckets - 1) / 64 ? int(distance * 64) : kBuckets - 1;
}

static inline void count_buckets(const Cut& cut, const float* row, int vocabulary, Histogram& histogram) {
  memset(&histogram, 0, sizeof histogram);
  float weights[16], distances[16];
  for (int first = 0; first < vocabulary; first += 16) {
    const int count = std::min(vocabulary - first, 16);
    for (int i = 0; i < 16; ++i) distances[i] = i < count ? cut.most - cut.score(row[first + i]) : INFINITY;
    store(weights, exp(splat(0.0f) - load(distances)));
    for (int i = 0; i < count; ++i) {
      const int bucket = bucket_of(distances[i]);
      ++histogram.count[bucket];
      histogram.mass[bucket] += weights[i];
    }
  }
}

// The tokens of one bucket that `cut` keeps so far, in order.
static inline int sorted_bucket(const Cut& cut, const float* row, int vocabulary, int bucket, Candidate* out) {
  int count = 0;
  for (int i = 0; i < vocabulary; ++i) {
    const bool kept = row[i] > cut.border || (row[i] == cut.border && i <= cut.last) || cut.border == -INFINITY;
    if (bucket_of(cut.most - cut.score(row[i])) == bucket && kept)
      out[count++] = {row[i] > -INFINITY ? row[i] : -INFINITY, i};
  }
  std::sort(out, out + count, precedes);
  return count;
}

static inline double weight_of(const Cut& cut, float logit) {
  return std::exp(double(cut.score(logit)) - double(cut.most));
}

static inline void cut_after(Cut& cut, const Candidate& last) {
  cut.border = last.logit;
  cut.last = last.token;
}

static inline void keep_top_k(Cut& cut, const float* row, int vocabulary, int k, Histogram& histogram,
                              Candidate* room) {
  int bucket = 0, before = 0;
  while (before + histogram.count[bucket] < k) before += histogram.count[bucket++];
  sorted_bucket(cut, row, vocabulary, bucket, room);
  const int keep = k - before;
  cut_after(cut, room[keep - 1]);
  histogram.mass[bucket] = 0;
  for (int i = 0; i < keep; ++i) histogram.mass[bucket] += weight_of(cut, room[i].logit);
  std::fill(histogram.mass + bucket + 1, histogram.mass + kBuckets, 0.0);
}

// Keeps a token if those before it weigh less than top_p of all.
static inline void keep_top_p(Cut& cut, const float* row, int vocabulary, float top_p, const Histogram& histogram,
                              Candidate* room) {
  double total = 0, before = 0;
  int last = 0;  // bucket with any weight
  for (int i = 0; i < kBuckets; ++i) {
    total += histogram.mass[i];
    if (histogram.mass[i] > 0) last = i;
  }
  const double wanted = double(top_p) * total;
  int bucket = 0;
  while (bucket < last && before + histogram.mass[bucket] < wanted) before += histogram.mass[bucket++];
  const int count = sorted_bucket(cut, row, vocabulary, bucket, room);
  int keep = 1;
  for (before += weight_of(cut, room[0].logit); keep < count && before < wanted; ++keep)
    before += weight_of(cut, room[keep].logit);
  cut_after(cut, room[keep - 1]);
}

static inline void narrow(Cut& cut, const float* row, int vocabulary, int top_k, float top_p) {
  if (cut.most == -INFINITY) return;
  Histogram* histogram = static_cast<Histogram*>(scratch(10, sizeof(Histogram)));
  Candidate* room = static_cast<Candidate*>(scratch(11, size_t(vocabulary) * sizeof(Candidate)));
  count_buckets(cut, row, vocabulary, *histogram);
  if (top_k > 0 && top_k < vocabulary) keep_top_k(cut, row, vocabulary, top_k, *histogram, room);
  if (top_p < 1) keep_top_p(cut, row, vocabulary, top_p, *histogram, room);
}

}  // namespace outrider::LEVEL
