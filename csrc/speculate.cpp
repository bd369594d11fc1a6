// Verification: what a step keeps of its drafts.
//
// Matching and forcing follow a few hundred integers. Rejection reads the logits twice: largest values, then sums of
// exponentials, a number per row and segment; what is drawn at the end is computed segment by segment in log space, so
// no probabilities are ever stored. Segments are shared by the threads as in sample.cpp.
#include <vector>

#include "level.h"
#include "residual.h"

namespace outrider::LEVEL {
namespace {

// Each request owns at least one row; each row but its first follows an earlier one.
void check_forest(const Drafts& drafts) {
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

enum class Verdict { keep, next, stop };

// From the first row of each request on: judge(row, child, depth) of each child of the row that the walk stands on,
// in turn, keeps it, tries the next child, or stops.
template <class Judge>
void walk(const int32_t* sampled, const Drafts& drafts, const Kept& kept, const Judge& judge) {
  check_forest(drafts);
  const size_t columns = size_t(drafts.width) + 1;
  std::fill(kept.tokens, kept.tokens + drafts.requests * columns, -1);
  std::fill(kept.rows, kept.rows + drafts.requests * columns, -1);
  for (int request = 0; request < drafts.requests; ++request) {
    const int first = drafts.starts[request], rows = drafts.starts[request + 1] - first;
    int32_t *tokens = kept.tokens + request * columns, *places = kept.rows + request * columns;
    int row = 0, depth = 0;
    places[0] = 0;
    for (int child = 1; child < rows; ++child) {
      if (drafts.parents[first + child] != row) continue;
      const Verdict verdict = judge(first + row, first + child, depth);
      if (verdict == Verdict::stop) break;
      if (verdict == Verdict::next) continue;
      tokens[depth++] = drafts.tokens[first + child];
      places[depth] = row = child;
    }
    tokens[depth] = sampled[first + row];
    kept.counts[request] = depth + 1;
  }
}

struct Chain {
  int first, length;  // logit row of its newest token; drafted tokens before the first placeholder
  bool greedy, block;
  bool tree = false;  // no chain: siblings.cpp
  int accepted = 0;
  std::vector<double> weights;  // block: logs of w_0 .. w_length
};

class Verifier {
 public:
  Verifier(const float* logits, int vocabulary, const Drafts& drafts, const Choice& choice)
      : drafts_(drafts), choice_(choice), target_(logits, drafts.rows, vocabulary),
        draft_(drafts.logits, drafts.rows, vocabulary) {
    const size_t cells = size_t(drafts.rows) * target_.segments;
    most_ = static_cast<float*>(scratch(kSegments, 2 * cells * sizeof(float)));
    sums_ = static_cast<double*>(scratch(kSums, 2 * cells * sizeof(double)));
    p_ = static_cast<Law*>(scratch(kCuts, 2 * size_t(drafts.rows) * sizeof(Law)));
    q_ = p_ + drafts.rows;
  }

  // Returns the requests that are no chains, of which nothing was done.
  const std::vector<int>& run(bool block, const Kept& kept) {
    find_chains(block);
    find_largest();
    find_cuts();
    find_sums();
    accept_tokens();
    if (block) accept_blocks();
    draw(kept);
    return trees_;
  }

 private:
  int end_of(int segment) const { return target_.end_of(segment); }
  size_t cell(int row, int segment) const { return 2 * target_.cell(row, segment); }
  bool is_token(int32_t id) const { return id >= 0 && id < target_.vocabulary; }

  void find_chains(bool block) {
    check_forest(drafts_);
    for (int row = 0; row < drafts_.rows; ++row) p_[row].used = q_[row].used = false;
    for (int request = 0; request < drafts_.requests; ++request) {
      const int first = drafts_.starts[request], rows = drafts_.starts[request + 1] - first;
      Chain chain{first, 0, !(choice_.temperature[first] > 0), false, false, 0, {}};
      for (int row = 1; row < rows; ++row) chain.tree |= drafts_.parents[first + row] != row - 1;
      if (chain.tree && block)
        refuse("the draft in rows " + std::to_string(first) + " .. " + std::to_string(first + rows - 1) +
               " is no chain: `block` takes chains alone");
      if (chain.tree) trees_.push_back(request);
      chain.length = chain.tree ? -1 : 0;  // none of a tree's rows is looked at here
      const int32_t* tokens = drafts_.tokens + first;
      while (!chain.tree && chain.length + 1 < rows && is_token(tokens[chain.length + 1])) ++chain.length;
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

  void find_cuts() {
    bool truncated = false;
    for (const Chain& chain : chains_)
      for (int row = chain.first; row <= chain.first + chain.length && !chain.greedy; ++row) {
        p_[row].cut = Cut(choice_.temperature[row], largest_of(row, 0), choice_.min_p[row]);
        // The token of a row is drawn at the temperature of the row before it: both are the request's.
        if (q_[row].used) q_[row].cut = Cut(choice_.temperature[row - 1], largest_of(row, 1), 0);
        truncated |= truncates(choice_, row, target_.vocabulary);
      }
    if (!truncated) return;
    each_row(drafts_.rows, [&](int row) {
      if (p_[row].used && choice_.temperature[row] > 0 && truncates(choice_, row, target_.vocabulary))
        narrow(p_[row].cut, target_.row(row), target_.vocabulary, choice_.top_k[row], choice_.top_p[row]);
    });
  }

  void find_sums() {
    over_segments(target_, [&](int row, int segment) {
      double* sums = sums_ + cell(row, segment);
      const int first = segment * kSegment, last = end_of(segment);
      if (p_[row].used && choice_.temperature[row] > 0) sums[0] = weigh(target_.row(row), first, last, p_[row].cut);
      if (q_[row].used) sums[1] = weigh(draft_.row(row), first, last, q_[row].cut);
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

  // log p of a token at a row; -inf for one that is not kept, and for all where nothing is.
  double log_p(int row, int token) const {
    const float score = p_[row].cut.kept_score(target_.row(row)[token], token);
    return score > -INFINITY ? double(p_[row].of(score)) : -INFINITY;
  }

  // log q of the token that a row carries.
  double log_q(int row) const {
    if (!q_[row].used) return 0;
    const float score = q_[row].cut.score(draft_.row(row)[drafts_.tokens[row]]);
    return score > -INFINITY ? double(q_[row].of(score)) : -INFINITY;
  }

  double log_coin(int row) const { return std::log(coin(key_of(choice_, row, kAccept, choice_.epoch(row)))); }

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

  // What is left of p at the chain's depth, where its next token was drawn.
  Residual residual(const Chain& chain, int depth) const {
    const int row = chain.first + depth;
    return {draft_.row(row + 1), p_[row], q_[row + 1], chain.block ? float(chain.weights[depth]) : 0.0f};
  }

  void accept_blocks() {
    std::vector<const Chain*> owners(size_t(drafts_.rows), nullptr);  // of rows whose residual is to be weighed
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
      sums_[cell(row, segment)] = owners[row]->weights[depth] > -INFINITY
          ? weigh_residual(target_.row(row), segment * kSegment, end_of(segment), residual(*owners[row], depth)) : 0;
    });
    for (Chain& chain : chains_)
      for (int depth = 1; chain.block && depth <= chain.length; ++depth)
        if (log_coin(chain.first + depth - 1) <= log_threshold(chain, depth)) chain.accepted = depth;
  }

  // log h of the token at this depth, counted from 1.
  double log_threshold(const Chain& chain, int depth) const {
    const int row = chain.first + depth;
    if (depth == chain.length) return chain.weights[depth];
    const double weight = std::exp(chain.weights[depth]);
    const double left = q_[row + 1].used ? sum_of(row, 0)
                                         : weight * (1 - std::exp(log_p(row, drafts_.tokens[row + 1])));
    const double whole = left + 1 - weight;
    return whole > 0 ? std::log(left / whole) : 0;
  }

  Best draw_segment(const Chain& chain, int segment, bool fresh) const {
    const int row = chain.first + chain.accepted, first = segment * kSegment, last = end_of(segment);
    const Cut& cut = p_[row].cut;
    const float* logits = target_.row(row);
    if (chain.accepted == chain.length)
      return noisy(logits, first, last, key_of(choice_, row, kTarget, 0), cut, Unchanged{});
    const Key key = key_of(choice_, row, kResidual, choice_.epoch(row));
    if (fresh) return noisy(logits, first, last, key, cut, Unchanged{});
    if (q_[row + 1].used) return noisy(logits, first, last, key, cut, residual(chain, chain.accepted));
    return noisy(logits, first, last, key, cut, Without{drafts_.tokens[row + 1]});
  }

  void draw(const Kept& kept) {
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
      // A residual without mass has been rounded away: p is what is left.
      const bool none = !chain.greedy && first_largest(own, drawn.segments).value == -INFINITY;
      for (int segment = 0; none && segment < drawn.segments; ++segment)
        own[segment] = draw_segment(chain, segment, true);
      const int32_t last =
          chain.greedy ? best_of(chain.first + chain.accepted) : first_largest(own, drawn.segments).token;
      for (int i = 0; i < int(columns); ++i) {
        kept.tokens[request * columns + i] =
            i < chain.accepted ? drafts_.tokens[chain.first + i + 1] : i == chain.accepted ? last : -1;
        kept.rows[request * columns + i] = i <= chain.accepted ? i : -1;
      }
      kept.counts[request] = chain.accepted + 1;
    }
  }

  const Drafts& drafts_;
  const Choice& choice_;
  const Table target_, draft_;
  float* most_;    // [R][segments][2]: of the target's logits, of the draft's
  double* sums_;   // the same for sums of exponentials; then the masses of residuals
  Law *p_, *q_;    // [R]
  std::vector<Chain> chains_;  // [B]
  std::vector<int> trees_;     // the requests that are none
};

}  // namespace

void expand(const Choice& choice, const Drafts& drafts, const WideChoice& out) {
  check_forest(drafts);
  for (int request = 0; request < drafts.requests; ++request)
    for (int first = drafts.starts[request], row = first; row < drafts.starts[request + 1]; ++row) {
      out.temperature[row] = choice.temperature[request];
      out.top_k[row] = choice.top_k[request];
      out.top_p[row] = choice.top_p[request];
      out.min_p[row] = choice.min_p[request];
      out.seeds[row] = choice.seeds[request];
      out.positions[row] = row == first ? choice.positions[request] : out.positions[first + drafts.parents[row]] + 1;
      if (choice.epochs) out.epochs[row] = choice.epochs[request];
    }
}

void match(const int32_t* sampled, const Drafts& drafts, const Kept& kept) {
  walk(sampled, drafts, kept, [&](int row, int child, int) {
    return drafts.tokens[child] >= 0 && drafts.tokens[child] == sampled[row] ? Verdict::keep : Verdict::next;
  });
}

void force(const int32_t* sampled, const Drafts& drafts, const float* rates, const Choice& choice, const Kept& kept) {
  walk(sampled, drafts, kept, [&](int row, int child, int depth) {
    const Key key = key_of(choice, row, kAccept, choice.epoch(row));
    return drafts.tokens[child] >= 0 && coin(key) < double(rates[depth]) ? Verdict::keep : Verdict::stop;
  });
}

void reject(const float* logits, int vocabulary, const Drafts& drafts, const Choice& choice, bool block,
            bool again, const Kept& kept) {
  Verifier chains(logits, vocabulary, drafts, choice);
  const std::vector<int>& trees = chains.run(block, kept);
  if (!trees.empty()) reject_trees(logits, vocabulary, drafts, choice, again, trees, kept);
}

}  // namespace outrider::LEVEL
