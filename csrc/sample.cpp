// Sampling: logits to tokens.
//
// A row is read in fixed segments (segments.h), which threads share if there are few rows. A segment's result and the
// order in which results are combined do not depend on the threads.
#include <algorithm>
#include <numeric>
#include <vector>

#include "segments.h"
#include "level.h"

namespace outrider::LEVEL {
namespace {

// Find the largest value of each segment, and where the segment begins: [R][segments].
Best* find_largest(const Table& table) {
  Best* segments = static_cast<Best*>(scratch(kSegments, size_t(table.rows) * table.segments * sizeof(Best)));
  over_segments(table, [&](int row, int segment) {
    const int first = segment * kSegment;
    const float most = largest(table.row(row), first, table.end_of(segment));
    segments[table.cell(row, segment)] = {most, first};
  });
  return segments;
}

// Find the top-k, top-p and min-p thresholds of each row with a temperature above 0: [R].
const Thresholds* find_thresholds(const Table& table, const SamplingMetadata& sampling, const Best* segments) {
  Thresholds* thresholds = static_cast<Thresholds*>(scratch(kThresholds, size_t(table.rows) * sizeof(Thresholds)));
  bool truncated = false;
  for (int row = 0; row < table.rows; ++row) {
    const float most = first_largest(segments + table.cell(row), table.segments).value;
    thresholds[row] = Thresholds(sampling.temperature[row], most, sampling.min_p[row]);
    truncated |= sampling.temperature[row] > 0 && truncates(sampling, row, table.vocabulary);
  }
  if (truncated)
    each_row(table.rows, [&](int row) {
      if (sampling.temperature[row] > 0 && truncates(sampling, row, table.vocabulary))
        narrow(thresholds[row], table.row(row), table.vocabulary, sampling.top_k[row], sampling.top_p[row]);
    });
  return thresholds;
}

// Add Gumbel noise to the rows with a temperature above 0. Rows at 0 keep the results of their segments.
void add_noise(const Table& table, const SamplingMetadata& sampling, Best* segments) {
  const Thresholds* thresholds = find_thresholds(table, sampling, segments);
  over_segments(table, [&](int row, int segment) {
    if (!(sampling.temperature[row] > 0)) return;
    const Key key = key_of(sampling, row, sampling.stream, sampling.epoch(row));
    segments[table.cell(row, segment)] =
        noisy(table.row(row), segment * kSegment, table.end_of(segment), key, thresholds[row], Unchanged{});
  });
}

void process_row(float* row, int vocabulary, const LogitsProcessors& processors, int first, int last, bool only) {
  float* processed = static_cast<float*>(scratch(kProcessed, size_t(last - first) * sizeof(float) + 4));
  for (int i = first; i < last; ++i) {
    const int token = processors.tokens[i];
    if (token < 0 || token >= vocabulary) refuse("a logits processor names a token outside the vocabulary");
    const float before = row[token];
    processed[i - first] =
        (before > 0 ? before / processors.scale[i] : before * processors.scale[i]) + processors.bias[i];
  }
  if (only) std::fill(row, row + vocabulary, -INFINITY);
  for (int i = first; i < last; ++i) row[processors.tokens[i]] = processed[i - first];
}

bool comes_first(const Best& a, const Best& b) { return a.value != b.value ? a.value > b.value : a.token < b.token; }

// The largest values added so far, in order; ties go to the first.
class TopCandidates {
 public:
  TopCandidates(Best* held, int count) : held_(held), count_(count) {
    std::fill(held, held + count, Best{-INFINITY, -1});
  }
  float bar() const { return held_[count_ - 1].value; }  // a further value must exceed it
  void add(float value, int32_t token) {
    if (!(value > bar())) return;
    int at = count_ - 1;
    for (; at > 0 && value > held_[at - 1].value; --at) held_[at] = held_[at - 1];
    held_[at] = {value, token};
  }

 private:
  Best* held_;
  int count_;
};

void collect_logits(TopCandidates& few, const float* row, int first, int last) {
  for (int start = first; start < last; start += 16) {
    const int count = std::min(last - start, 16);
    if (!(largest_lane(load_logits(row, start, count)) > few.bar())) continue;
    for (int i = start; i < start + count; ++i) few.add(row[i], i);
  }
}

// Collect the same values as `noisy`.
void collect_noisy(TopCandidates& few, const float* row, int first, int last, const Key& key,
                   const Thresholds& thresholds) {
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    if (!(kept_scores(row, start, count, thresholds, scores) + kMostNoise > few.bar())) continue;
    if (!(add_noise(scores, start, key) > few.bar())) continue;
    for (int i = 0; i < count; ++i) few.add(scores[i], start + i);
  }
}

// Clamp infinite logits, so that differences are finite.
double bounded(float logit) { return std::min(logit, FLT_MAX / 4); }

// Sum of exp((logit - most) / temperature) over [first, last).
double sum_exp(const float* row, int first, int last, float most, float temperature) {
  if (most == -INFINITY) return 0;
  const f32x16 top = splat(float(bounded(most))), divisor = splat(temperature);
  double total = 0;
  for (int start = first; start < last; start += kNoiseBlock) {
    f32x16 lanes = splat(0.0f);
    for (int i = start; i < std::min(start + kNoiseBlock, last); i += 16) {
      const f32x16 logits = min(load_logits(row, i, last - i), splat(FLT_MAX / 4));
      lanes = lanes + exp((logits - top) / divisor);
    }
    total += sum(lanes);
  }
  return total;
}

// Return log(sum(exp(row))), added in one order: sixteen lanes along each segment, segments in double.
float log_sum_exp(const float* row, int vocabulary, float most) {
  double total = 0;
  for (int first = 0; first < vocabulary; first += kSegment) {
    f32x16 lanes = splat(0.0f);
    const int last = std::min(first + kSegment, vocabulary);
    int i = first;
    for (; i + 16 <= last; i += 16) lanes = lanes + exp(load(row + i) - splat(most));
    total += sum(lanes);
    for (; i < last; ++i) total += std::exp(row[i] - most);
  }
  return most + float(std::log(total));
}

int rank_of(const float* row, int vocabulary, float value) {
  int larger = 0;
  for (int i = 0; i < vocabulary; ++i) larger += row[i] > value;
  return 1 + larger;
}

// Collect the `count` largest values in order while the row is read.
void largest_few(const float* row, int vocabulary, int count, float* values, int32_t* ids) {
  int held = 0;
  for (int i = 0; i < vocabulary; ++i) {
    const float value = row[i] > -INFINITY ? row[i] : -INFINITY;
    if (held == count && !(value > values[count - 1])) continue;
    int at = held < count ? held++ : count - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = i;
  }
}

}  // namespace

void sample(const float* logits, int rows, int vocabulary, const SamplingMetadata& sampling, int32_t* tokens) {
  const Table table(logits, rows, vocabulary);
  Best* segments = find_largest(table);
  bool greedy = true;
  for (int row = 0; row < rows; ++row) greedy &= !(sampling.temperature[row] > 0);
  if (!greedy) add_noise(table, sampling, segments);
  for (int row = 0; row < rows; ++row) {
    const Best best = first_largest(segments + table.cell(row), table.segments);
    tokens[row] = sampling.temperature[row] > 0
                      ? best.token
                      : find(table.row(row), best.token, std::min(best.token + kSegment, vocabulary), best.value);
  }
}

void sample_children(const float* logits, int rows, int vocabulary, const SamplingMetadata& sampling, int count,
                     int32_t* tokens, float* logprobs) {
  if (count == 0) return;
  const Table table(logits, rows, vocabulary);
  const Best* segments = find_largest(table);
  const Thresholds* thresholds = find_thresholds(table, sampling, segments);
  const size_t cells = size_t(rows) * table.segments;
  std::vector<Best> best(cells * count);  // [R][segments][count]; -inf if there are fewer
  std::vector<double> sums(cells);
  over_segments(table, [&](int row, int segment) {
    const size_t cell = table.cell(row, segment);
    const float* values = table.row(row);
    const int first = segment * kSegment, last = table.end_of(segment);
    const bool warm = sampling.temperature[row] > 0;
    TopCandidates few(&best[cell * count], count);
    if (!warm) collect_logits(few, values, first, last);
    if (warm)
      collect_noisy(few, values, first, last, key_of(sampling, row, sampling.stream, sampling.epoch(row)),
                    thresholds[row]);
    const float most = first_largest(segments + table.cell(row), table.segments).value;
    sums[cell] = sum_exp(values, first, last, most, warm ? sampling.temperature[row] : 1.0f);
  });
  for (int row = 0; row < rows; ++row) {
    const size_t cell = table.cell(row);
    const float most = first_largest(segments + cell, table.segments).value;
    const double temperature = sampling.temperature[row] > 0 ? sampling.temperature[row] : 1.0f;
    const double total = std::accumulate(&sums[cell], &sums[cell] + table.segments, 0.0);
    const auto begin = best.begin() + cell * count, end = begin + size_t(table.segments) * count;
    std::sort(begin, end, comes_first);
    for (int i = 0; i < count; ++i) {
      const bool some = begin[i].value > -INFINITY;
      tokens[size_t(row) * count + i] = some ? begin[i].token : i == 0 ? 0 : -1;
      logprobs[size_t(row) * count + i] =
          some ? float((bounded(table.row(row)[begin[i].token]) - bounded(most)) / temperature - std::log(total))
               : -INFINITY;
    }
  }
}

void process_logits(float* logits, int rows, int vocabulary, const LogitsProcessors& processors) {
  each_row(rows, [&](int row) {
    process_row(logits + size_t(row) * vocabulary, vocabulary, processors, processors.starts[row],
                processors.starts[row + 1], processors.only[row] != 0);
  });
}

void mask_logits(float* logits, int rows, int vocabulary, const int32_t* masks, const int32_t* row_ids, int count) {
  const int words = (vocabulary + 31) / 32;
  each_row(count, [&](int m) {
    if (row_ids[m] < 0 || row_ids[m] >= rows) refuse("a mask belongs to no row of logits");
    float* row = logits + size_t(row_ids[m]) * vocabulary;
    const int32_t* mask = masks + size_t(m) * words;
    for (int word = 0; word < words; ++word) {
      const uint32_t bits = uint32_t(mask[word]);
      if (bits == ~0u) continue;
      const int first = word * 32, end = std::min(32, vocabulary - first);
      for (int bit = 0; bit < end; ++bit) row[first + bit] = bits >> bit & 1 ? row[first + bit] : -INFINITY;
    }
  });
}

void top_logprobs(const float* logits, int rows, int vocabulary, const int32_t* tokens, int count, float* chosen,
                  int32_t* rank, float* values, int32_t* ids) {
  each_row(rows, [&](int i) {
    const float* row = logits + size_t(i) * vocabulary;
    if (tokens[i] < 0 || tokens[i] >= vocabulary) refuse("a token lies outside the vocabulary");
    const float total = log_sum_exp(row, vocabulary, largest(row, 0, vocabulary));
    chosen[i] = row[tokens[i]] - total;
    rank[i] = rank_of(row, vocabulary, row[tokens[i]]);
    float* top = values + size_t(i) * count;
    if (count > 0) largest_few(row, vocabulary, count, top, ids + size_t(i) * count);
    for (int j = 0; j < count; ++j) top[j] -= total;
  });
}

}  // namespace outrider::LEVEL
