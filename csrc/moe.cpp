// Mixtures of experts. Rows are grouped by expert, so that a step reads each expert once for all its rows. A thread
// computes a contiguous run of tiles over all groups. An output adds its terms in the order of K, and a row its experts in
// the order of their scores: the bits of a row depend on that row alone.
#include <algorithm>

#include "activations.h"

namespace outrider::LEVEL {
namespace {

// Cost of a tile beside that of one of its rows: reading the weights. With few rows memory decides, with many the rows.
constexpr int kReadCost = 4;

// The rows of one expert: [first, last) in the order of experts. `tokens` names them; null: all, in order.
struct Group {
  const Mlp* expert;
  int first, last;
  const int32_t* tokens;
  size_t hidden;  // offset of its hidden states [rows][N]
  int rows() const { return last - first; }
};

// Call body(group, first, last) on all threads for runs of the tiles of each group.
template <class TilesOf, class Body>
void over_groups(const std::vector<Group>& groups, const TilesOf& tiles_of, const Body& body) {
  int64_t total = 0;
  for (const Group& group : groups) total += int64_t(tiles_of(group)) * (kReadCost + group.rows());
  parallel([&](int part, int parts) {
    const int64_t from = total * part / parts, to = total * (part + 1) / parts;
    int64_t base = 0;
    for (const Group& group : groups) {
      const int64_t cost = kReadCost + group.rows(), tiles = tiles_of(group);
      const auto index = [&](int64_t at) { return int(std::clamp<int64_t>((at - base + cost - 1) / cost, 0, tiles)); };
      const int first = index(from), last = index(to);
      if (first < last) body(group, first, last);
      base += cost * tiles;
    }
  });
}

// The experts of each token and their scores, the best first, then the shared one.
struct Routes {
  int slots;  // experts of a token
  float* logits;      // [T][router rows]
  float* scores;      // [T][slots]
  int32_t* experts;   // [T][slots]
  int32_t* indices;    // [T][slots]: row in the order of experts
  int32_t* tokens;    // [T * slots]: token of each row in the order of experts
  Routes(const Moe& layer, int count) : slots(layer.top_k + int(layer.has_shared())) {
    const size_t pairs = size_t(count) * slots, rows = size_t(count) * layer.router->rows;
    logits = floats(kPlan, rows + 4 * pairs);
    scores = logits + rows;
    experts = reinterpret_cast<int32_t*>(scores + pairs);
    indices = experts + pairs;
    tokens = indices + pairs;
  }
};

void choose(const Moe& layer, float* logits, float* scores, int32_t* experts) {
  float most = -INFINITY, total = 0, chosen = 0;
  for (int i = 0; i < layer.count; ++i) {
    if (layer.router_bias) logits[i] += layer.router_bias[i];
    most = std::max(most, logits[i]);
  }
  for (int i = 0; i < layer.count; ++i) total += std::exp(logits[i] - most);
  for (int slot = 0; slot < layer.top_k; ++slot) {
    int best = -1;  // also if all that are left are not numbers
    for (int i = 0; i < layer.count; ++i) {
      if (std::find(experts, experts + slot, i) != experts + slot) continue;
      if (best < 0 || logits[i] > logits[best]) best = i;
    }
    experts[slot] = best;
    scores[slot] = std::exp(logits[best] - most) / total;
    chosen += scores[slot];
  }
  if (layer.normalized)
    for (int slot = 0; slot < layer.top_k; ++slot) scores[slot] /= chosen;
  if (layer.has_shared()) {
    experts[layer.top_k] = layer.count;
    scores[layer.top_k] = 1.0f / (1.0f + std::exp(-logits[layer.count]));
  }
}

Routes route(const Moe& layer, const float* states, int tokens) {
  const Routes routes(layer, tokens);
  const Matrix& router = *layer.router;
  parallel([&](int part, int parts) {
    const Share share(router.tiles(), part, parts);
    linear_tiles(router, {states, tokens, router.cols, {}}, share.first, share.last, routes.logits, router.rows);
  });
  over_rows(tokens, [&](int first, int last) {
    for (int token = first; token < last; ++token) {
      const size_t at = size_t(token) * routes.slots;
      choose(layer, routes.logits + size_t(token) * router.rows, routes.scores + at, routes.experts + at);
    }
  });
  return routes;
}

// Sort the rows by expert; the rows of an expert keep their order.
std::vector<Group> group(const Moe& layer, const Routes& routes, int tokens) {
  const int pairs = tokens * routes.slots;
  std::vector<int> ends(layer.experts.size() + 1);
  for (int i = 0; i < pairs; ++i) ++ends[size_t(routes.experts[i]) + 1];
  std::vector<Group> groups;
  size_t hidden = 0;
  for (size_t i = 0; i < layer.experts.size(); ++i) {
    const int first = ends[i], last = ends[i + 1] += first;
    const Mlp* const expert = layer.experts[i].get();
    const bool is_shared = int(i) == layer.count;
    if (first < last) groups.push_back({expert, first, last, is_shared ? nullptr : routes.tokens + first, hidden});
    hidden += size_t(last - first) * expert->gate->rows;
  }
  for (int i = 0; i < pairs; ++i) {
    const int index = routes.indices[i] = ends[size_t(routes.experts[i])]++;  // `ends` becomes the ends of the groups
    routes.tokens[index] = i / routes.slots;
  }
  return groups;
}

// The states [rows][E] of a group, copied side by side unless they are.
const float* gather(const Group& group, const float* states, int width) {
  if (!group.tokens) return states;
  if (group.rows() == 1) return states + size_t(group.tokens[0]) * width;
  float* rows = floats(kOfThread, size_t(group.rows()) * width);
  for (int row = 0; row < group.rows(); ++row)
    memcpy(rows + size_t(row) * width, states + size_t(group.tokens[row]) * width, size_t(width) * sizeof(float));
  return rows;
}

}  // namespace

void moe(const Moe& layer, float* x, int tokens) {
  if (tokens == 0) return;
  const int width = layer.router->cols;
  const float* states = x;
  if (layer.norm) {
    float* normed = floats(kNormed, size_t(tokens) * width);  // [T][E]
    rms_norm(x, layer.norm, layer.eps, tokens, width, normed);
    states = normed;
  }
  const Routes routes = route(layer, states, tokens);
  const std::vector<Group> groups = group(layer, routes, tokens);
  const Group& end = groups.back();
  const size_t size = end.hidden + size_t(end.rows()) * end.expert->gate->rows;
  float* hidden = floats(kFirst, size);
  float* up = floats(kSecond, size);
  const auto inner_tiles = [](const Group& group) { return group.expert->gate->tiles(); };
  over_groups(groups, inner_tiles, [&](const Group& group, int first, int last) {
    const Mlp& expert = *group.expert;
    const Activations activations = std::max(expert.gate->activations, expert.up->activations);
    const Rows rows = prepare(gather(group, states, width), group.rows(), width, activations, kPrepared, true);
    const int inner = expert.gate->rows;
    linear_tiles(*expert.gate, rows, first, last, hidden + group.hidden, inner);
    linear_tiles(*expert.up, rows, first, last, up + group.hidden, inner);
    const int from = first * kLanes, to = std::min(last * kLanes, inner);
    activate_columns(expert, hidden + group.hidden, up + group.hidden, group.rows(), from, to);
  });
  float* product = floats(kProduct, size_t(tokens) * routes.slots * width);  // [T * slots][E], in the order of experts
  const auto outer_tiles = [](const Group& group) { return group.expert->down->tiles(); };
  over_groups(groups, outer_tiles, [&](const Group& group, int first, int last) {
    const Mlp& expert = *group.expert;
    const int inner = expert.gate->rows;
    const Rows rows = prepare(hidden + group.hidden, group.rows(), inner, expert.down->activations, kPrepared, true);
    float* out = product + size_t(group.first) * width;
    linear_tiles(*expert.down, rows, first, last, out, width);
    const int from = first * kLanes, to = std::min(last * kLanes, width);
    if (expert.down_bias)
      for (int row = 0; row < group.rows(); ++row)
        for (int i = from; i < to; ++i) out[size_t(row) * width + i] += expert.down_bias[i];
  });
  // Add up columns [from, to) of one token, in place of the first product.
  const auto add_up = [&](int token, int from, int to) {
    const float* const scores = routes.scores + size_t(token) * routes.slots;
    const int32_t* const indices = routes.indices + size_t(token) * routes.slots;
    float* const total = product + size_t(indices[0]) * width;
    for (int i = from; i < to; ++i) total[i] *= scores[0];
    for (int slot = 1; slot < routes.slots; ++slot) {
      const float* const row = product + size_t(indices[slot]) * width;
      for (int i = from; i < to; ++i) total[i] += scores[slot] * row[i];
    }
    if (!layer.post_norm) add_row(x + size_t(token) * width + from, total + from, nullptr, to - from);
  };
  if (tokens <= kFewRows)
    parallel([&](int part, int parts) {
      const Share share(width, part, parts);
      for (int token = 0; token < tokens; ++token) add_up(token, share.first, share.last);
    });
  else
    over_rows(tokens, [&](int first, int last) {
      for (int token = first; token < last; ++token) add_up(token, 0, width);
    });
  if (!layer.post_norm) return;
  over_rows(tokens, [&](int first, int last) {
    for (int token = first; token < last; ++token) {
      float* const total = product + size_t(routes.indices[size_t(token) * routes.slots]) * width;
      norm_row(total, layer.post_norm, layer.eps, width, total);
      add_row(x + size_t(token) * width, total, nullptr, width);
    }
  });
}

}  // namespace outrider::LEVEL
