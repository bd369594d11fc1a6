// Rejection sampling of trees: the children of a node are tried in order, each against the residual that the ones
// before it left of p.
//
// Only rows on the accepted path are read. The distribution of a node with children is written out, since the residual
// after several rejections has no closed form; the draft distributions pass through one buffer. With few requests the
// threads share segments, with many they share requests: the sums and their order are the same.
#include <numeric>
#include <vector>

#include "level.h"
#include "segments.h"

namespace outrider::LEVEL {
namespace {

// ---- a node's distribution as probabilities in memory, and its residual after rejections ----

// Runs a body for each segment: on all threads, or on this one if the others work on other requests.
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

// Unnormalized probabilities: divide by total().
struct Probs {
  float* values;             // [V]
  std::vector<double> sums;  // per segment
  double total() const { return std::accumulate(sums.begin(), sums.end(), 0.0); }
};

// Write exp(score - most) for the tokens of [first, last) within the thresholds, else 0; return the sum. May work in
// place.
static inline double exp_segment(const float* row, int first, int last, const Thresholds& thresholds, float* out) {
  double total = 0;
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    if (kept_scores(row, start, count, thresholds, scores) == -INFINITY) {
      std::fill(out + start, out + start + count, 0.0f);
      continue;
    }
    f32x16 lanes = splat(0.0f);
    for (int i = 0; i < kNoiseBlock; i += 16) {
      const f32x16 share = exp(load(scores + i) - splat(thresholds.most));
      store(scores + i, share);
      lanes = lanes + share;
    }
    std::copy(scores, scores + count, out + start);
    total += sum(lanes);
  }
  return total;
}

// out = max(p - scale * q, 0) on [first, last); return the sum.
static inline double subtract(const float* p, const float* q, float scale, int first, int last, float* out) {
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

// Return the argmax of log(probability) + noise on [first, last).
static inline Best noisy_prob(const float* shares, int first, int last, const Key& key) {
  Best best{-INFINITY, first};
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    f32x16 most = splat(-INFINITY);
    for (int i = 0; i < kNoiseBlock; i += 16) {
      const f32x16 share = load_logits(shares, start + i, count - i);
      // Clamp to a normal number, as log requires.
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

// ---- verification ----

class TreeVerifier {
 public:
  TreeVerifier(const float* logits, int vocabulary, const VerifyInputs& drafts, const SamplingMetadata& sampling,
               bool with_replacement, const std::vector<uint8_t>& ignored, bool spread)
      : drafts_(drafts),
        sampling_(sampling),
        ignored_(ignored),
        with_replacement_(with_replacement),
        target_(logits, drafts.rows, vocabulary),
        draft_(drafts.logits, drafts.rows, vocabulary),
        segments_(vocabulary, spread),
        best_(segments_.count()) {
    // The buffers of the chains are free by now.
    float* buffer = static_cast<float*>(scratch(kSegments, 3 * size_t(vocabulary) * sizeof(float)));
    for (Probs* probs : {&remaining_, &next_remaining_, &draft_probs_}) {
      *probs = {buffer, std::vector<double>(segments_.count())};
      buffer += vocabulary;
    }
  }

  void run(int request, const VerifyOutput& output) {
    const int first = drafts_.starts[request], end = drafts_.starts[request + 1];
    const size_t columns = size_t(drafts_.width) + 1;
    int32_t *tokens = output.tokens + request * columns, *path = output.rows + request * columns;
    std::fill(tokens, tokens + columns, -1);
    std::fill(path, path + columns, -1);
    int row = first, depth = 0;
    for (int child = first;; row = child, ++depth) {
      path[depth] = row - first;
      child = follow(row, first, end, tokens[depth]);
      if (child < 0) break;
    }
    output.counts[request] = depth + 1;
  }

 private:
  bool is_token(int32_t id) const { return id >= 0 && id < target_.vocabulary; }

  // Return the accepted child of a row, or -1, and set the row's token.
  int follow(int row, int first, int end, int32_t& token) {
    children_.clear();
    for (int child = row + 1; child < end; ++child) {
      if (drafts_.parents[child] != row - first) continue;
      if (!is_token(drafts_.tokens[child])) break;
      if (!ignored_[child]) children_.push_back(child);
    }
    const float* logits = target_.row(row);
    const float most = largest_of(logits);
    if (!(sampling_.temperature[row] > 0)) {
      token = find(logits, 0, target_.vocabulary, most);
      for (int child : children_)
        if (drafts_.tokens[child] == token) return child;
      return -1;
    }
    Thresholds thresholds(sampling_.temperature[row], most, sampling_.min_p[row]);
    if (truncates(sampling_, row, target_.vocabulary))
      narrow(thresholds, logits, target_.vocabulary, sampling_.top_k[row], sampling_.top_p[row]);
    if (children_.empty()) {
      const Key key = key_of(sampling_, row, kTarget, 0);
      token = draw([&](int first, int last) { return noisy(logits, first, last, key, thresholds, Unchanged{}); });
      return -1;
    }
    share(logits, thresholds, remaining_);
    rejected_tokens_.clear();
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      token = drafts_.tokens[children_[rank]];
      if (try_child(row, children_[rank], uint32_t(rank))) return children_[rank];
    }
    const Key key = key_of(sampling_, row, kResidual, sampling_.epoch(row));
    token = draw([&](int first, int last) { return noisy_prob(remaining_.values, first, last, key); });
    return -1;
  }

  float largest_of(const float* logits) {
    segments_.each([&](int segment) {
      best_[segment].value = largest(logits, segments_.first(segment), segments_.last(segment));
    });
    return first_largest(best_.data(), segments_.count()).value;
  }

  void share(const float* logits, const Thresholds& thresholds, Probs& out) {
    segments_.each([&](int segment) {
      const int first = segments_.first(segment), last = segments_.last(segment);
      out.sums[segment] = thresholds.most > -INFINITY ? exp_segment(logits, first, last, thresholds, out.values) : 0;
      if (thresholds.most == -INFINITY) std::fill(out.values + first, out.values + last, 0.0f);
    });
  }

  template <class Draw>
  int32_t draw(const Draw& draw) {
    segments_.each([&](int segment) { best_[segment] = draw(segments_.first(segment), segments_.last(segment)); });
    return first_largest(best_.data(), segments_.count()).token;
  }

  // Return whether the child is accepted; if not, reduce `remaining_` to the residual.
  bool try_child(int row, int child, uint32_t rank) {
    const int32_t token = drafts_.tokens[child];
    const double p = remaining_.values[token] / remaining_.total();
    const double coin_of_child = coin(key_of(sampling_, row, kAccept, sampling_.epoch(row)), rank);
    if (!(drafts_.logits && drafts_.drawn[child])) {
      if (p > 0 && coin_of_child <= p) return true;
      remove(token);
      return false;
    }
    find_draft_probs(child, sampling_.temperature[row]);
    const double whole = draft_probs_.total(), q = whole > 0 ? draft_probs_.values[token] / whole : 0;
    if (p > 0 && coin_of_child * q <= p) return true;
    if (!with_replacement_) rejected_tokens_.push_back(token);
    if (!(whole > 0)) return false;
    const float scale = float(remaining_.total() / whole);
    segments_.each([&](int segment) {
      next_remaining_.sums[segment] = subtract(remaining_.values, draft_probs_.values, scale, segments_.first(segment),
                                               segments_.last(segment), next_remaining_.values);
    });
    if (next_remaining_.total() > 0)
      std::swap(remaining_, next_remaining_);  // else the residual was rounded to zero: keep p
    return false;
  }

  // Remove a rejected one-hot draft token, unless nothing else remains.
  void remove(int32_t token) {
    const int segment = token / kSegment, first = segments_.first(segment), last = segments_.last(segment);
    const float before = remaining_.values[token];
    const double sum = remaining_.sums[segment];
    remaining_.values[token] = 0;
    remaining_.sums[segment] = subtract(remaining_.values, remaining_.values, 0, first, last, remaining_.values);
    if (remaining_.total() > 0) return;
    remaining_.values[token] = before;
    remaining_.sums[segment] = sum;
  }

  // Compute the distribution that the child's token was sampled from.
  void find_draft_probs(int child, float temperature) {
    const float* logits = draft_.row(child);
    float* scores = draft_probs_.values;
    segments_.each([&](int segment) {
      const int first = segments_.first(segment), last = segments_.last(segment);
      std::copy(logits + first, logits + last, scores + first);
      for (int32_t token : rejected_tokens_)
        if (token >= first && token < last) scores[token] = -INFINITY;
    });
    share(scores, Thresholds(temperature, largest_of(scores), 0), draft_probs_);
  }

  const VerifyInputs& drafts_;
  const SamplingMetadata& sampling_;
  const std::vector<uint8_t>& ignored_;  // [R]
  const bool with_replacement_;
  const Table target_, draft_;
  const Segments segments_;
  std::vector<Best> best_;                          // [segments]
  Probs remaining_, next_remaining_, draft_probs_;  // residual of p; buffer for the next residual; draft distribution q
  std::vector<int> children_;                       // children of the row that are tried
  std::vector<int32_t> rejected_tokens_;  // tokens of rejected siblings, excluded when sampled without replacement
};

}  // namespace

void verify_rejection_trees(const float* logits, int vocabulary, const VerifyInputs& drafts,
                            const SamplingMetadata& sampling, bool with_replacement, const std::vector<int>& requests,
                            const std::vector<uint8_t>& ignored, const VerifyOutput& output) {
  const bool spread = int(requests.size()) < thread_count();
  const auto verify_request = [&](int at) {
    TreeVerifier(logits, vocabulary, drafts, sampling, with_replacement, ignored, spread).run(requests[at], output);
  };
  if (!spread) return each_row(int(requests.size()), verify_request);
  for (size_t at = 0; at < requests.size(); ++at) verify_request(int(at));
}

}  // namespace outrider::LEVEL
