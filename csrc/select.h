// Which tokens of a row may be chosen: top-k, top-p and min-p as one cut through the order (logit, then id), found from
// a histogram over distances from the largest score and a sort of the one bucket that the cut falls into.
#pragma once
#include <algorithm>
#include <cfloat>

#include "maths.h"
#include "outrider.h"
#include "threads.h"

namespace outrider::LEVEL {

// The scratch of sampling and verification; select.h and its users run on the same threads.
enum SampleSlot { kSegments = 8, kCuts, kEdited, kHistogram, kCandidates, kBucketOfToken, kSums };

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
  // The score of a token that is kept, -inf of one that is not.
  float kept_score(float logit, int32_t token) const {
    const float value = score(logit);
    return border > logit || (logit == border && token > last) || floor > value ? -INFINITY : value;
  }
};

static inline bool truncates(const Choice& choice, int row, int vocabulary) {
  return (choice.top_k[row] > 0 && choice.top_k[row] < vocabulary) || choice.top_p[row] < 1;
}

// As Cut::score, lane by lane.
OUTRIDER_INLINE f32x16 scores_of(const Cut& cut, const f32x16& logits) {
  const f32x16 low = splat(-INFINITY), high = splat(FLT_MAX / 4);
  const f32x16 value = cut.temperature == 1 ? logits : logits / splat(cut.temperature);
  return where_greater(value, low, min(value, high), low);
}

OUTRIDER_INLINE f32x16 load_logits(const float* row, int start, int count) {
  if (count >= 16) return load(row + start);
  float padded[16];
  for (int lane = 0; lane < 16; ++lane) padded[lane] = lane < count ? row[start + lane] : -INFINITY;
  return load(padded);
}

// Scores of tokens start .. start + count, -inf for the others of the block and for those not kept; returns the largest
// before ties with the border are settled. Where that is -inf, the scores are not written.
OUTRIDER_INLINE float kept_scores(const float* row, int start, int count, const Cut& cut, float scores[64]) {
  const f32x16 low = splat(-INFINITY), border = splat(cut.border), floor = splat(cut.floor);
  f32x16 logits[4], most = low;
  for (int i = 0; i < 4; ++i) {
    logits[i] = load_logits(row, start + 16 * i, count - 16 * i);
    most = max(logits[i], most);
  }
  if (cut.border > -INFINITY && cut.border > largest_lane(most)) return -INFINITY;
  most = low;
  for (int i = 0; i < 4; ++i) {
    f32x16 value = scores_of(cut, logits[i]);
    value = where_greater(floor, value, low, value);
    value = where_greater(border, logits[i], low, value);
    store(scores + 16 * i, value);
    most = max(value, most);
  }
  if (cut.last < start + count)  // some of this block may equal the border and come too late
    for (int i = std::max(cut.last + 1 - start, 0); i < count; ++i)
      if (row[start + i] == cut.border) scores[i] = -INFINITY;
  return largest_lane(most);
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
  double mass[kBuckets];  // sum of exp(score - most), if asked for
  uint16_t* bucket;       // [V]
};

static inline void count_buckets(const Cut& cut, const float* row, int vocabulary, bool weigh, Histogram& histogram) {
  memset(histogram.count, 0, sizeof histogram.count);
  memset(histogram.mass, 0, sizeof histogram.mass);
  const f32x16 end = splat(float(kBuckets - 1));
  float weights[16], places[16];
  for (int first = 0; first < vocabulary; first += 16) {
    const int count = std::min(vocabulary - first, 16);
    const f32x16 distance = splat(cut.most) - scores_of(cut, load_logits(row, first, count));
    store(places, min(distance * splat(64.0f), end));
    for (int i = 0; i < count; ++i) {
      histogram.bucket[first + i] = uint16_t(places[i]);
      ++histogram.count[int(places[i])];
    }
    if (!weigh) continue;
    store(weights, exp(splat(0.0f) - distance));
    for (int i = 0; i < count; ++i) histogram.mass[int(places[i])] += weights[i];
  }
}

// The tokens of one bucket that `cut` keeps so far, in order.
static inline int sorted_bucket(const Cut& cut, const float* row, int vocabulary, const Histogram& histogram,
                                int bucket, Candidate* out) {
  int count = 0;
  for (int first = 0; first < vocabulary; first += 32) {
    const int last = std::min(first + 32, vocabulary);
    bool any = false;
    for (int i = first; i < last; ++i) any |= histogram.bucket[i] == bucket;
    for (int i = first; any && i < last; ++i) {
      const bool kept = row[i] > cut.border || (row[i] == cut.border && i <= cut.last) || cut.border == -INFINITY;
      if (histogram.bucket[i] == bucket && kept) out[count++] = {row[i] > -INFINITY ? row[i] : -INFINITY, i};
    }
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
  sorted_bucket(cut, row, vocabulary, histogram, bucket, room);
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
  const int count = sorted_bucket(cut, row, vocabulary, histogram, bucket, room);
  int keep = 1;
  for (before += weight_of(cut, room[0].logit); keep < count && before < wanted; ++keep)
    before += weight_of(cut, room[keep].logit);
  cut_after(cut, room[keep - 1]);
}

static inline void narrow(Cut& cut, const float* row, int vocabulary, int top_k, float top_p) {
  if (cut.most == -INFINITY) return;
  Histogram* histogram = static_cast<Histogram*>(scratch(kHistogram, sizeof(Histogram)));
  Candidate* room = static_cast<Candidate*>(scratch(kCandidates, size_t(vocabulary) * sizeof(Candidate)));
  histogram->bucket = static_cast<uint16_t*>(scratch(kBucketOfToken, size_t(vocabulary) * sizeof(uint16_t)));
  count_buckets(cut, row, vocabulary, top_p < 1, *histogram);
  if (top_k > 0 && top_k < vocabulary) keep_top_k(cut, row, vocabulary, top_k, *histogram, room);
  if (top_p < 1) keep_top_p(cut, row, vocabulary, top_p, *histogram, room);
}

}  // namespace outrider::LEVEL
