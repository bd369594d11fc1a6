// Rejection of trees: the children of a node are tried in turn, each against what those before it left of p.
//
// Only rows on the path that is walked are read. A node whose children are tried has its distribution written out,
// since what several rejections leave of it has no short form; its guesses' distributions pass through one buffer. Few
// requests share the threads segment by segment, many one by one: the same sums in the same order either way.
#include "level.h"
#include "siblings.h"

namespace outrider::LEVEL {
namespace {

class Walk {
 public:
  Walk(const float* logits, int vocabulary, const Drafts& drafts, const Choice& choice, bool again, bool spread)
      : drafts_(drafts), choice_(choice), again_(again), target_(logits, drafts.rows, vocabulary),
        draft_(drafts.logits, drafts.rows, vocabulary), segments_(vocabulary, spread), best_(segments_.count()) {
    // The buffers of chains are free by now.
    float* room = static_cast<float*>(scratch(kSegments, 3 * size_t(vocabulary) * sizeof(float)));
    for (Shares* shares : {&left_, &rest_, &guess_}) {
      *shares = {room, std::vector<double>(segments_.count())};
      room += vocabulary;
    }
  }

  void run(int request, const Kept& kept) {
    const int first = drafts_.starts[request], end = drafts_.starts[request + 1];
    const size_t columns = size_t(drafts_.width) + 1;
    int32_t *tokens = kept.tokens + request * columns, *places = kept.rows + request * columns;
    std::fill(tokens, tokens + columns, -1);
    std::fill(places, places + columns, -1);
    int row = first, depth = 0;
    for (int child = first;; row = child, ++depth) {
      places[depth] = row - first;
      child = follow(row, first, end, tokens[depth]);
      if (child < 0) break;
    }
    kept.counts[request] = depth + 1;
  }

 private:
  bool is_token(int32_t id) const { return id >= 0 && id < target_.vocabulary; }

  // The child of a row that is kept, or -1; and the token that the row gives.
  int follow(int row, int first, int end, int32_t& token) {
    children_.clear();
    for (int child = row + 1; child < end; ++child) {
      if (drafts_.parents[child] != row - first) continue;
      if (!is_token(drafts_.tokens[child])) break;
      children_.push_back(child);
    }
    const float* logits = target_.row(row);
    const float most = largest_of(logits);
    if (!(choice_.temperature[row] > 0)) {
      token = find(logits, 0, target_.vocabulary, most);
      for (int child : children_)
        if (drafts_.tokens[child] == token) return child;
      return -1;
    }
    Cut cut(choice_.temperature[row], most, choice_.min_p[row]);
    if (truncates(choice_, row, target_.vocabulary))
      narrow(cut, logits, target_.vocabulary, choice_.top_k[row], choice_.top_p[row]);
    if (children_.empty()) {
      const Key key = key_of(choice_, row, kTarget, 0);
      token = draw([&](int first, int last) { return noisy(logits, first, last, key, cut, Unchanged{}); });
      return -1;
    }
    share(logits, cut, left_);
    taken_.clear();
    for (size_t turn = 0; turn < children_.size(); ++turn) {
      token = drafts_.tokens[children_[turn]];
      if (try_child(row, children_[turn], uint32_t(turn))) return children_[turn];
    }
    const Key key = key_of(choice_, row, kResidual, choice_.epoch(row));
    token = draw([&](int first, int last) { return noisy_share(left_.values, first, last, key); });
    return -1;
  }

  float largest_of(const float* logits) {
    segments_.each([&](int segment) {
      best_[segment].value = largest(logits, segments_.first(segment), segments_.last(segment));
    });
    return first_largest(best_.data(), segments_.count()).value;
  }

  void share(const float* logits, const Cut& cut, Shares& out) {
    segments_.each([&](int segment) {
      const int first = segments_.first(segment), last = segments_.last(segment);
      out.sums[segment] = cut.most > -INFINITY ? share_out(logits, first, last, cut, out.values) : 0;
      if (cut.most == -INFINITY) std::fill(out.values + first, out.values + last, 0.0f);
    });
  }

  template <class Draw>
  int32_t draw(const Draw& draw) {
    segments_.each([&](int segment) { best_[segment] = draw(segments_.first(segment), segments_.last(segment)); });
    return first_largest(best_.data(), segments_.count()).token;
  }

  // Whether the child is kept; if not, what it leaves of `left_`.
  bool try_child(int row, int child, uint32_t turn) {
    const int32_t token = drafts_.tokens[child];
    const double p = left_.values[token] / left_.total();
    const double coin_of_child = coin(key_of(choice_, row, kAccept, choice_.epoch(row)), turn);
    if (!(drafts_.logits && drafts_.drawn[child])) {
      if (p > 0 && coin_of_child <= p) return true;
      remove(token);
      return false;
    }
    find_guess(child, choice_.temperature[row]);
    const double whole = guess_.total(), q = whole > 0 ? guess_.values[token] / whole : 0;
    if (p > 0 && coin_of_child * q <= p) return true;
    if (!again_) taken_.push_back(token);
    if (!(whole > 0)) return false;
    const float scale = float(left_.total() / whole);
    segments_.each([&](int segment) {
      rest_.sums[segment] = take_away(left_.values, guess_.values, scale, segments_.first(segment),
                                      segments_.last(segment), rest_.values);
    });
    if (rest_.total() > 0) std::swap(left_, rest_);  // else it was rounded away, and p stays
    return false;
  }

  // A guess that was certain, and wrong: everything else is left, if there is anything.
  void remove(int32_t token) {
    const int segment = token / kSegment, first = segments_.first(segment), last = segments_.last(segment);
    const float before = left_.values[token];
    const double sum = left_.sums[segment];
    left_.values[token] = 0;
    left_.sums[segment] = take_away(left_.values, left_.values, 0, first, last, left_.values);
    if (left_.total() > 0) return;
    left_.values[token] = before;
    left_.sums[segment] = sum;
  }

  // What the child's token was drawn from, its scores in the buffer before they become shares.
  void find_guess(int child, float temperature) {
    const float* logits = draft_.row(child);
    float* scores = guess_.values;
    segments_.each([&](int segment) {
      const int first = segments_.first(segment), last = segments_.last(segment);
      std::copy(logits + first, logits + last, scores + first);
      for (int32_t token : taken_)
        if (token >= first && token < last) scores[token] = -INFINITY;
    });
    share(scores, Cut(temperature, largest_of(scores), 0), guess_);
  }

  const Drafts& drafts_;
  const Choice& choice_;
  const bool again_;
  const Table target_, draft_;
  const Segments segments_;
  std::vector<Best> best_;       // [segments]
  Shares left_, rest_, guess_;   // of p; room for its successor; of q
  std::vector<int> children_;    // of the row, up to the first placeholder
  std::vector<int32_t> taken_;   // tokens that its drawn children have used up
};

}  // namespace

void reject_trees(const float* logits, int vocabulary, const Drafts& drafts, const Choice& choice, bool again,
                  const std::vector<int>& requests, const Kept& kept) {
  const bool spread = int(requests.size()) < thread_count();
  const auto walk = [&](int at) {
    Walk(logits, vocabulary, drafts, choice, again, spread).run(requests[at], kept);
  };
  if (!spread) return each_row(int(requests.size()), walk);
  for (size_t at = 0; at < requests.size(); ++at) walk(int(at));
}

}  // namespace outrider::LEVEL
