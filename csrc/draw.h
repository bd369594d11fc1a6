// Rows of logits in fixed segments, which threads share when there are few rows, and the noisy choice within a segment.
#pragma once
#include "philox.h"
#include "select.h"

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
  size_t cell(int row, int segment = 0) const { return size_t(row) * segments + segment; }  // among all segments
};

// body(row, segment) for all of them, on all threads.
template <class Body>
void over_segments(const Table& table, const Body& body) {
  const int units = table.rows * table.segments;
  Queue queue(units, std::max(units / (8 * thread_count()), 1));
  parallel([&](int, int) {
    for (int first, last; queue.take(first, last);)
      for (int unit = first; unit < last; ++unit) body(unit / table.segments, unit % table.segments);
  });
}

// body(row) for all of them, on all threads.
template <class Body>
void each_row(int rows, const Body& body) {
  if (rows == 1) return body(0);
  Queue queue(rows, 1);
  parallel([&](int, int) {
    for (int row, end; queue.take(row, end);) body(row);
  });
}

// The largest of [first, last); NaN never wins.
static inline float largest(const float* row, int first, int last) {
  f32x16 lanes = splat(-INFINITY);
  int i = first;
  for (; i + 16 <= last; i += 16) lanes = max(load(row + i), lanes);
  float most = largest_lane(lanes);
  for (; i < last; ++i) most = row[i] > most ? row[i] : most;
  return most;
}

// The first of [first, last) that equals `value`; `first` where that is -inf, since NaN counts as -inf.
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

static inline Key key_of(const Choice& choice, int row, uint32_t stream, uint32_t epoch) {
  return {uint64_t(choice.seeds[row]), uint32_t(choice.positions[row]), stream, epoch};
}

struct Unchanged {
  void operator()(float*, int, int) const {}
};

constexpr float kMostNoise = 17.4f;  // -log(-log(1 - 2^-25)) is 17.33

// Adds the noise of tokens start .. start + 63 to their scores; returns the largest.
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

// The largest of logit / temperature + noise among the kept tokens of [first, last). lower(scores, start, count) may
// first take from the scores of a block, those of tokens start .. start + count.
template <class Lower>
Best noisy(const float* row, int first, int last, const Key& key, const Cut& cut, const Lower& lower) {
  Best best{-INFINITY, first};
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    if (!(kept_scores(row, start, count, cut, scores) + kMostNoise > best.value)) continue;
    lower(scores, start, count);
    const float most = add_noise(scores, start, key);
    if (most > best.value) best = {most, start + find(scores, 0, count, most)};
  }
  return best;
}

}  // namespace outrider::LEVEL
