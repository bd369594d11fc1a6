// Rows of logits in fixed segments, which threads share if there are few rows, and the Gumbel argmax of a segment.
#pragma once
#include "philox.h"
#include "thresholds.h"

namespace outrider::LEVEL {

constexpr int kSegment = 4096;

struct Best {
  float value;
  int32_t token;
};

struct Table {
  const float* logits;
  int rows, vocabulary, segments;
  Table(const float* logits, int rows, int vocabulary)
      : logits(logits), rows(rows), vocabulary(vocabulary), segments((vocabulary + kSegment - 1) / kSegment) {}
  const float* row(int i) const { return logits + size_t(i) * vocabulary; }
  int end_of(int segment) const { return std::min((segment + 1) * kSegment, vocabulary); }
  size_t cell(int row, int segment = 0) const { return size_t(row) * segments + segment; }  // index among all segments
};

// Call body(row, segment) for all of them, on all threads.
template <class Body>
void over_segments(const Table& table, const Body& body) {
  const int units = table.rows * table.segments;
  Queue queue(units, std::max(units / (8 * thread_count()), 1));
  parallel([&](int, int) {
    for (int first, last; queue.take(first, last);)
      for (int unit = first; unit < last; ++unit) body(unit / table.segments, unit % table.segments);
  });
}

// Call body(row) for all rows, on all threads.
template <class Body>
void each_row(int rows, const Body& body) {
  if (rows == 1) return body(0);
  Queue queue(rows, 1);
  parallel([&](int, int) {
    for (int row, end; queue.take(row, end);) body(row);
  });
}

// Return the largest value of [first, last); NaN counts as -inf.
static inline float largest(const float* row, int first, int last) {
  f32x16 lanes = splat(-INFINITY);
  int i = first;
  for (; i + 16 <= last; i += 16) lanes = max(load(row + i), lanes);
  float most = largest_lane(lanes);
  for (; i < last; ++i) most = row[i] > most ? row[i] : most;
  return most;
}

// Return the first index of [first, last) that equals `value`; `first` if that is -inf, since NaN counts as -inf.
static inline int32_t find(const float* row, int first, int last, float value) {
  for (int i = first; i < last && value > -INFINITY; ++i)
    if (row[i] == value) return i;
  return first;
}

static inline Best first_largest(const Best* segments, int count) {
  Best best = segments[0];
  for (int i = 1; i < count; ++i)
    if (segments[i].value > best.value) best = segments[i];
  return best;
}

static inline Key key_of(const SamplingMetadata& sampling, int row, uint32_t stream, uint32_t epoch) {
  return {uint64_t(sampling.seeds[row]), uint32_t(sampling.positions[row]), stream, epoch};
}

struct Unchanged {
  void operator()(float*, int, int) const {}
};

constexpr float kMostNoise = 17.4f;  // -log(-log(1 - 2^-25)) is 17.33

// Add the noise of tokens start .. start + 63 to their scores; return the largest.
OUTRIDER_INLINE float add_noise(float scores[kNoiseBlock], int start, const Key& key) {
  float noise[kNoiseBlock];
  gumbel(key, uint32_t(start) / 4, noise);
  f32x16 lanes = splat(-INFINITY);
  for (int i = 0; i < kNoiseBlock; i += 16) {
    const f32x16 noised = load(scores + i) + load(noise + i);
    store(scores + i, noised);
    lanes = max(noised, lanes);
  }
  return largest_lane(lanes);
}

// Return the argmax of logit / temperature + noise over the tokens of [first, last) within the thresholds.
// lower(scores, start, count) may reduce the scores of a block first.
template <class Lower>
Best noisy(const float* row, int first, int last, const Key& key, const Thresholds& thresholds, const Lower& lower) {
  Best best{-INFINITY, first};
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    if (!(kept_scores(row, start, count, thresholds, scores) + kMostNoise > best.value)) continue;
    lower(scores, start, count);
    const float most = add_noise(scores, start, key);
    if (most > best.value) best = {most, start + find(scores, 0, count, most)};
  }
  return best;
}

}  // namespace outrider::LEVEL
