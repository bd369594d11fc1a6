// Verification of drafts: exact match, synthetic acceptance, rejection sampling of chains.
//
// Rejection reads the logits twice: largest values, then sums of exponentials, one number per row and segment. The
// final token is sampled segment by segment in log space, so probabilities are never stored. Threads share segments as
// in sample.cpp.
#include <vector>

#include "level.h"
#include "segments.h"

namespace outrider::LEVEL {
// ---- distributions of the target and the draft in log space, and their residual ----

// The softmax of the scores within the thresholds. A score becomes a log-probability in two subtractions, which keeps
// the precision of each.
struct Distribution {
  bool used;
  Thresholds thresholds;
  float base;  // log of the sum of exp(score - most)
  float of(float score) const { return (score - thresholds.most) - base; }
  f32x16 of(const f32x16& scores) const { return (scores - splat(thresholds.most)) - splat(base); }
};

// Return the sum of exp(score - most) over the tokens of [first, last) within the thresholds.
static inline double weigh(const float* row, int first, int last, const Thresholds& thresholds) {
  double total = 0;
  float scores[kNoiseBlock];
  int start = first;
  if (thresholds.threshold == -INFINITY && thresholds.floor == -INFINITY)  // no thresholds
    for (; start + 4 * kNoiseBlock <= last; start += 4 * kNoiseBlock) {
      f32x16 lanes = splat(0.0f);
      for (int i = 0; i < 4 * kNoiseBlock; i += 16)
        lanes = lanes + exp(scores_of(thresholds, load(row + start + i)) - splat(thresholds.most));
      total += sum(lanes);
    }
  for (; start < last; start += kNoiseBlock) {
    if (kept_scores(row, start, std::min(last - start, kNoiseBlock), thresholds, scores) == -INFINITY) continue;
    f32x16 lanes = splat(0.0f);
    for (int i = 0; i < kNoiseBlock; i += 16) lanes = lanes + exp(load(scores + i) - splat(thresholds.most));
    total += sum(lanes);
  }
  return total;
}

// Return 1 - exp(x) for x below 0, by its series near 0.
OUTRIDER_INLINE f32x16 complement(const f32x16& x) {
  const f32x16 near = (splat(0.0f) - x) * fma(x, splat(0.5f), splat(1.0f));
  return where_greater(x, splat(-1e-3f), near, splat(1.0f) - exp(x));
}

// The residual max(weight * p - q, 0) relative to weight * p. `row` holds q's logits.
struct Residual {
  const float* row;
  const Distribution &p, &q;
  float log_weight;
  // Return log(q / (weight * p)) of sixteen tokens; 0 or more means no residual.
  f32x16 ratio(const f32x16& scores, int start, int count) const {
    return q.of(scores_of(q.thresholds, load_logits(row, start, count))) - p.of(scores) - splat(log_weight);
  }
  void operator()(float* scores, int start, int count) const {
    for (int i = 0; i < kNoiseBlock; i += 16) {
      const f32x16 score = load(scores + i), x = ratio(score, start + i, count - i);
      // Clamp to a normal number, as log requires.
      const f32x16 left = max(complement(x), splat(FLT_MIN));
      store(scores + i, where_greater(splat(0.0f), x, score + log(left), splat(-INFINITY)));
    }
  }
};

// Return the sum of max(weight * p - q, 0) over [first, last).
static inline double weigh_residual(const float* row, int first, int last, const Residual& residual) {
  double total = 0;
  float scores[kNoiseBlock];
  for (int start = first; start < last; start += kNoiseBlock) {
    const int count = std::min(last - start, kNoiseBlock);
    if (kept_scores(row, start, count, residual.p.thresholds, scores) == -INFINITY) continue;
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

// The residual of a draft token without probabilities (one-hot): all other tokens.
struct Without {
  int token;
  void operator()(float* scores, int start, int count) const {
    if (token >= start && token < start + count) scores[token - start] = -INFINITY;
  }
};

// Properties of some logits.
struct Finite {
  bool bounded;  // none is NaN or +inf
  bool some;     // one is above -inf
};

static inline Finite finite_in(const float* row, int first, int last) {
  const f32x16 high = splat(INFINITY), zero = splat(0.0f), one = splat(1.0f);
  f32x16 wrong = zero, above = zero;
  int i = first;
  for (; i + 16 <= last; i += 16) {
    const f32x16 logits = load(row + i);
    wrong = max(where_greater(high, logits, zero, one), wrong);  // a comparison with NaN is false
    above = max(where_greater(logits, splat(-INFINITY), one, zero), above);
  }
  Finite found{largest_lane(wrong) == 0, largest_lane(above) > 0};
  for (; i < last; ++i) {
    found.bounded &= row[i] < INFINITY;
    found.some |= row[i] > -INFINITY;
  }
  return found;
}

namespace {

// ---- verification ----

// Check that each request has at least one row and each row but its first follows an earlier one.
void check_forest(const VerifyInputs& drafts) {
  if (drafts.starts[0] != 0 || drafts.starts[drafts.requests] != drafts.rows)
    refuse("`starts` runs from " + std::to_string(drafts.starts[0]) + " to " +
           std::to_string(drafts.starts[drafts.requests]) + ", but there are " + std::to_string(drafts.rows) + " rows");
  for (int request = 0; request < drafts.requests; ++request) {
    const int64_t first = drafts.starts[request], rows = drafts.starts[request + 1] - first;
    if (rows < 1 || rows > int64_t(drafts.width) + 1 || first + rows > drafts.rows)
      refuse("`starts` gives request " + std::to_string(request) + " " + std::to_string(rows) +
             " rows: expected 1 to " + std::to_string(drafts.width + 1));
    const int32_t* parents = drafts.parents + first;
    bool sound = parents[0] == -1;
    for (int row = 1; row < rows; ++row) sound &= parents[row] >= 0 && parents[row] < row;
    if (!sound) refuse("a parent in request " + std::to_string(request) + " does not lie before its child");
  }
}

// Return for each row whether its token is ignored: it was sampled from logits that are no distribution, because some
// are NaN or +inf or all are -inf. Write their number for each request.
std::vector<uint8_t> find_nonfinite(const VerifyInputs& drafts, const SamplingMetadata& sampling, int vocabulary,
                                    int32_t* counts) {
  check_forest(drafts);
  std::vector<uint8_t> ignored(size_t(drafts.rows), 0);
  std::fill(counts, counts + drafts.requests, 0);
  if (!drafts.logits) return ignored;
  const auto is_sampled = [&](int row) {
    const int32_t token = drafts.tokens[row];
    return drafts.drawn[row] && drafts.parents[row] >= 0 && token >= 0 && token < vocabulary &&
           sampling.temperature[row] > 0;
  };
  const Table table(drafts.logits, drafts.rows, vocabulary);
  std::vector<Finite> found(size_t(drafts.rows) * table.segments);
  over_segments(table, [&](int row, int segment) {
    if (is_sampled(row))
      found[table.cell(row, segment)] = finite_in(table.row(row), segment * kSegment, table.end_of(segment));
  });
  for (int request = 0; request < drafts.requests; ++request)
    for (int row = drafts.starts[request]; row < drafts.starts[request + 1]; ++row) {
      if (!is_sampled(row)) continue;
      Finite all{true, false};
      for (int segment = 0; segment < table.segments; ++segment) {
        all.bounded &= found[table.cell(row, segment)].bounded;
        all.some |= found[table.cell(row, segment)].some;
      }
      ignored[row] = !(all.bounded && all.some);
      counts[request] += ignored[row];
    }
  return ignored;
}

enum class Decision { accept, next, stop };

// Follow the accepted path of each request: decide(row, child, depth) accepts a child of the current row, tries the
// next one, or stops.
template <class Decide>
void follow_tree(const int32_t* sampled, const VerifyInputs& drafts, const VerifyOutput& output, const Decide& decide) {
  check_forest(drafts);
  const size_t columns = size_t(drafts.width) + 1;
  std::fill(output.tokens, output.tokens + drafts.requests * columns, -1);
  std::fill(output.rows, output.rows + drafts.requests * columns, -1);
  for (int request = 0; request < drafts.requests; ++request) {
    const int first = drafts.starts[request], rows = drafts.starts[request + 1] - first;
    int32_t *tokens = output.tokens + request * columns, *path = output.rows + request * columns;
    int row = 0, depth = 0;
    path[0] = 0;
    for (int child = 1; child < rows; ++child) {
      if (drafts.parents[first + child] != row) continue;
      const Decision decision = decide(first + row, first + child, depth);
      if (decision == Decision::stop) break;
      if (decision == Decision::next) continue;
      tokens[depth++] = drafts.tokens[first + child];
      path[depth] = row = child;
    }
    tokens[depth] = sampled[first + row];
    output.counts[request] = depth + 1;
  }
}

struct Chain {
  int first, length;  // logit row of its newest token; draft tokens before the first that is none or ignored
  bool greedy, block;
  bool tree = false;  // handled by verify_trees.cpp
  int accepted = 0;
  std::vector<double> weights;  // block verification: log w_0 .. w_length
};

class ChainVerifier {
 public:
  ChainVerifier(const float* logits, int vocabulary, const VerifyInputs& drafts, const SamplingMetadata& sampling,
                const std::vector<uint8_t>& ignored)
      : drafts_(drafts),
        sampling_(sampling),
        ignored_(ignored),
        target_(logits, drafts.rows, vocabulary),
        draft_(drafts.logits, drafts.rows, vocabulary) {
    const size_t cells = size_t(drafts.rows) * target_.segments;
    most_ = static_cast<float*>(scratch(kSegments, 2 * cells * sizeof(float)));
    sums_ = static_cast<double*>(scratch(kSums, 2 * cells * sizeof(double)));
    p_ = static_cast<Distribution*>(scratch(kThresholds, 2 * size_t(drafts.rows) * sizeof(Distribution)));
    q_ = p_ + drafts.rows;
  }

  // Verify all chains; return the requests that are trees, which are not handled here.
  const std::vector<int>& run(bool block, const VerifyOutput& output) {
    find_chains(block);
    find_largest();
    find_thresholds();
    find_sums();
    accept_tokens();
    if (block) accept_blocks();
    draw(output);
    return trees_;
  }

 private:
  int end_of(int segment) const { return target_.end_of(segment); }
  size_t cell(int row, int segment) const { return 2 * target_.cell(row, segment); }
  bool is_token(int32_t id) const { return id >= 0 && id < target_.vocabulary; }

  void find_chains(bool block) {
    for (int row = 0; row < drafts_.rows; ++row) p_[row].used = q_[row].used = false;
    for (int request = 0; request < drafts_.requests; ++request) {
      const int first = drafts_.starts[request], rows = drafts_.starts[request + 1] - first;
      Chain chain{first, 0, !(sampling_.temperature[first] > 0), false, false, 0, {}};
      for (int row = 1; row < rows; ++row) chain.tree |= drafts_.parents[first + row] != row - 1;
      if (chain.tree && block)
        refuse("the draft in rows " + std::to_string(first) + " .. " + std::to_string(first + rows - 1) +
               " is no chain: `block` takes chains alone");
      if (chain.tree) trees_.push_back(request);
      chain.length = chain.tree ? -1 : 0;  // rows of trees are skipped here
      const int32_t* tokens = drafts_.tokens + first;
      while (!chain.tree && chain.length + 1 < rows && is_token(tokens[chain.length + 1]) &&
             !ignored_[first + chain.length + 1])
        ++chain.length;
      for (int row = first; row <= first + chain.length; ++row) {
        p_[row].used = true;
        q_[row].used = row > first && drafts_.logits && drafts_.drawn[row] && !chain.greedy;
        chain.block |= block && q_[row].used;
      }
      chains_.push_back(std::move(chain));
    }
  }

  void find_largest() {
    over_segments(target_, [&](int row, int segment) {
      float* most = most_ + cell(row, segment);
      const int first = segment * kSegment, last = end_of(segment);
      if (p_[row].used) most[0] = largest(target_.row(row), first, last);
      if (q_[row].used) most[1] = largest(draft_.row(row), first, last);
    });
  }

  float largest_of(int row, int which) const {
    float most = -INFINITY;
    for (int segment = 0; segment < target_.segments; ++segment)
      most = std::max(most_[cell(row, segment) + which], most);
    return most;
  }

  int32_t best_of(int row) const {
    const float most = largest_of(row, 0);
    int segment = 0;
    while (segment + 1 < target_.segments && most_[cell(row, segment)] != most) ++segment;
    if (most_[cell(row, segment)] != most || most == -INFINITY) segment = 0;
    return find(target_.row(row), segment * kSegment, end_of(segment), most);
  }

  void find_thresholds() {
    bool truncated = false;
    for (const Chain& chain : chains_)
      for (int row = chain.first; row <= chain.first + chain.length && !chain.greedy; ++row) {
        p_[row].thresholds = Thresholds(sampling_.temperature[row], largest_of(row, 0), sampling_.min_p[row]);
        // A row's token was sampled at the temperature of the row before it; both belong to the same request.
        if (q_[row].used) q_[row].thresholds = Thresholds(sampling_.temperature[row - 1], largest_of(row, 1), 0);
        truncated |= truncates(sampling_, row, target_.vocabulary);
      }
    if (!truncated) return;
    each_row(drafts_.rows, [&](int row) {
      if (p_[row].used && sampling_.temperature[row] > 0 && truncates(sampling_, row, target_.vocabulary))
        narrow(p_[row].thresholds, target_.row(row), target_.vocabulary, sampling_.top_k[row], sampling_.top_p[row]);
    });
  }

  void find_sums() {
    over_segments(target_, [&](int row, int segment) {
      double* sums = sums_ + cell(row, segment);
      const int first = segment * kSegment, last = end_of(segment);
      if (p_[row].used && sampling_.temperature[row] > 0)
        sums[0] = weigh(target_.row(row), first, last, p_[row].thresholds);
      if (q_[row].used) sums[1] = weigh(draft_.row(row), first, last, q_[row].thresholds);
    });
    for (const Chain& chain : chains_)
      for (int row = chain.first; row <= chain.first + chain.length && !chain.greedy; ++row) {
        p_[row].base = float(std::log(sum_of(row, 0)));
        if (q_[row].used) q_[row].base = float(std::log(sum_of(row, 1)));
      }
  }

  double sum_of(int row, int which) const {
    double total = 0;
    for (int segment = 0; segment < target_.segments; ++segment) total += sums_[cell(row, segment) + which];
    return total;
  }

  // Return log p of a token at a row; -inf if it is outside the thresholds.
  double log_p(int row, int token) const {
    const float score = p_[row].thresholds.kept_score(target_.row(row)[token], token);
    return score > -INFINITY ? double(p_[row].of(score)) : -INFINITY;
  }

  // Return log q of the row's draft token.
  double log_q(int row) const {
    if (!q_[row].used) return 0;
    const float score = q_[row].thresholds.score(draft_.row(row)[drafts_.tokens[row]]);
    return score > -INFINITY ? double(q_[row].of(score)) : -INFINITY;
  }

  double log_coin(int row) const { return std::log(coin(key_of(sampling_, row, kAccept, sampling_.epoch(row)))); }

  bool accepts(const Chain& chain, int row) const {
    const int32_t token = drafts_.tokens[row + 1];
    if (chain.greedy) return best_of(row) == token;
    const double p = log_p(row, token);
    return p > -INFINITY && log_coin(row) <= p - log_q(row + 1);
  }

  void accept_tokens() {
    for (Chain& chain : chains_)
      while (!chain.block && chain.accepted < chain.length && accepts(chain, chain.first + chain.accepted))
        ++chain.accepted;
  }

  // Return the residual at the given depth of the chain.
  Residual residual(const Chain& chain, int depth) const {
    const int row = chain.first + depth;
    return {draft_.row(row + 1), p_[row], q_[row + 1], chain.block ? float(chain.weights[depth]) : 0.0f};
  }

  void accept_blocks() {
    std::vector<const Chain*> owners(size_t(drafts_.rows), nullptr);  // chains of the rows whose residual is summed
    for (Chain& chain : chains_) {
      if (!chain.block) continue;
      chain.weights.assign(1, 0.0);
      for (int row = chain.first; row < chain.first + chain.length; ++row) {
        const double p = log_p(row, drafts_.tokens[row + 1]) + chain.weights.back();
        chain.weights.push_back(p > -INFINITY ? std::min(p - log_q(row + 1), 0.0) : -INFINITY);
        if (row > chain.first && q_[row + 1].used) owners[row] = &chain;
      }
    }
    over_segments(target_, [&](int row, int segment) {
      if (!owners[row]) return;
      const int depth = row - owners[row]->first;
      sums_[cell(row, segment)] =
          owners[row]->weights[depth] > -INFINITY
              ? weigh_residual(target_.row(row), segment * kSegment, end_of(segment), residual(*owners[row], depth))
              : 0;
    });
    for (Chain& chain : chains_)
      for (int depth = 1; chain.block && depth <= chain.length; ++depth)
        if (log_coin(chain.first + depth - 1) <= log_threshold(chain, depth)) chain.accepted = depth;
  }

  // Return log h of the token at this depth, counted from 1 (block verification).
  double log_threshold(const Chain& chain, int depth) const {
    const int row = chain.first + depth;
    if (depth == chain.length) return chain.weights[depth];
    const double weight = std::exp(chain.weights[depth]);
    const double left =
        q_[row + 1].used ? sum_of(row, 0) : weight * (1 - std::exp(log_p(row, drafts_.tokens[row + 1])));
    const double whole = left + 1 - weight;
    return whole > 0 ? std::log(left / whole) : 0;
  }

  Best draw_segment(const Chain& chain, int segment, bool fresh) const {
    const int row = chain.first + chain.accepted, first = segment * kSegment, last = end_of(segment);
    const Thresholds& thresholds = p_[row].thresholds;
    const float* logits = target_.row(row);
    if (chain.accepted == chain.length)
      return noisy(logits, first, last, key_of(sampling_, row, kTarget, 0), thresholds, Unchanged{});
    const Key key = key_of(sampling_, row, kResidual, sampling_.epoch(row));
    if (fresh) return noisy(logits, first, last, key, thresholds, Unchanged{});
    if (q_[row + 1].used) return noisy(logits, first, last, key, thresholds, residual(chain, chain.accepted));
    return noisy(logits, first, last, key, thresholds, Without{drafts_.tokens[row + 1]});
  }

  void draw(const VerifyOutput& output) {
    const Table drawn(nullptr, drafts_.requests, target_.vocabulary);
    std::vector<Best> segments(size_t(drafts_.requests) * drawn.segments);
    over_segments(drawn, [&](int request, int segment) {
      if (!chains_[request].greedy && !chains_[request].tree)
        segments[drawn.cell(request, segment)] = draw_segment(chains_[request], segment, false);
    });
    const size_t columns = size_t(drafts_.width) + 1;
    for (int request = 0; request < drafts_.requests; ++request) {
      const Chain& chain = chains_[request];
      if (chain.tree) continue;
      Best* own = &segments[drawn.cell(request)];
      // A residual rounded to zero: sample from p instead.
      const bool none = !chain.greedy && first_largest(own, drawn.segments).value == -INFINITY;
      for (int segment = 0; none && segment < drawn.segments; ++segment)
        own[segment] = draw_segment(chain, segment, true);
      const int32_t last =
          chain.greedy ? best_of(chain.first + chain.accepted) : first_largest(own, drawn.segments).token;
      for (int i = 0; i < int(columns); ++i) {
        output.tokens[request * columns + i] = i < chain.accepted    ? drafts_.tokens[chain.first + i + 1]
                                               : i == chain.accepted ? last
                                                                     : -1;
        output.rows[request * columns + i] = i <= chain.accepted ? i : -1;
      }
      output.counts[request] = chain.accepted + 1;
    }
  }

  const VerifyInputs& drafts_;
  const SamplingMetadata& sampling_;
  const std::vector<uint8_t>& ignored_;  // [R]
  const Table target_, draft_;
  float* most_;                // [R][segments][2]: largest logits of target and draft
  double* sums_;               // the same for sums of exponentials, later for residual masses
  Distribution *p_, *q_;       // [R]
  std::vector<Chain> chains_;  // [B]
  std::vector<int> trees_;     // requests whose drafts are trees
};

}  // namespace

void expand_sampling(const SamplingMetadata& sampling, const VerifyInputs& drafts, const ExpandedSampling& out) {
  check_forest(drafts);
  for (int request = 0; request < drafts.requests; ++request)
    for (int first = drafts.starts[request], row = first; row < drafts.starts[request + 1]; ++row) {
      out.temperature[row] = sampling.temperature[request];
      out.top_k[row] = sampling.top_k[request];
      out.top_p[row] = sampling.top_p[request];
      out.min_p[row] = sampling.min_p[request];
      out.seeds[row] = sampling.seeds[request];
      out.positions[row] = row == first ? sampling.positions[request] : out.positions[first + drafts.parents[row]] + 1;
      if (sampling.epochs) out.epochs[row] = sampling.epochs[request];
    }
}

void verify_exact(const int32_t* sampled, const VerifyInputs& drafts, const VerifyOutput& output) {
  follow_tree(sampled, drafts, output, [&](int row, int child, int) {
    return drafts.tokens[child] >= 0 && drafts.tokens[child] == sampled[row] ? Decision::accept : Decision::next;
  });
}

void verify_synthetic(const int32_t* sampled, const VerifyInputs& drafts, const float* rates,
                      const SamplingMetadata& sampling, const VerifyOutput& output) {
  follow_tree(sampled, drafts, output, [&](int row, int child, int depth) {
    const Key key = key_of(sampling, row, kAccept, sampling.epoch(row));
    return drafts.tokens[child] >= 0 && coin(key) < double(rates[depth]) ? Decision::accept : Decision::stop;
  });
}

void verify_rejection(const float* logits, int vocabulary, const VerifyInputs& drafts, const SamplingMetadata& sampling,
                      bool block, bool with_replacement, const VerifyOutput& output) {
  const std::vector<uint8_t> ignored = find_nonfinite(drafts, sampling, vocabulary, output.nonfinite);
  ChainVerifier chains(logits, vocabulary, drafts, sampling, ignored);
  const std::vector<int>& trees = chains.run(block, output);
  if (!trees.empty())
    verify_rejection_trees(logits, vocabulary, drafts, sampling, with_replacement, trees, ignored, output);
}

}  // namespace outrider::LEVEL
