// Recurrent layers: Gated DeltaNet and Mamba-2. A state is updated token by token in fp32. Row j of a head's state
// [P][N] depends on no other row, so that a thread keeps a few rows in its cache for all tokens of a batch row, and the
// states of a tree's nodes are a few rows each. Every token is one call of `update`: its bits do not depend on the step.
#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "vector_math.h"

namespace outrider::LEVEL {
namespace {

constexpr int kRows = 4;   // rows of a state that are updated together: their sums fit into the registers
constexpr int kUnit = 16;  // rows of a state that a thread takes at once: a cache line of a token's values and outputs
constexpr int kItems = 16;  // tokens that these rows read in turn: their keys and the rows fit into the L1 cache

// A token that a row of the batch reads: one that an earlier step kept, or one of this step.
struct Item {
  const float* controls;  // [X]
  int token;              // index in the batch; -1: kept by an earlier step, no output
  int parent;             // item whose state it continues; -1: the stored state
};

struct RowPlan {
  int source, target, start, length, read, begin, end, first;  // first: its first item
  int kept() const { return start - length; }                  // items before those of this step
  int items() const { return kept() + end - begin; }
  int committed() const { return kept() + read; }  // items that the stored state will have read
};

struct Plan {
  std::vector<RowPlan> rows;
  std::vector<Item> items;
  std::vector<const float*> windows;  // [items][W] channels, oldest first; null: before the text
  int widest = 0;                  // the most items of a row that its stored state does not read
};

// Tokens of all rows side by side, after the convolution.
struct Prepared {
  int stride;      // N, padded to 16
  float* keys;     // [G][items][2][stride]: key, then query
  float* values;   // [items][H * P]
  float* factors;  // [items][2][H]: decay, then rate (the time step without the delta rule)
};

RowPlan check_row(const Recurrent& layer, const Batch& batch, const States& states, int row) {
  const int32_t* slots = batch.states + size_t(row) * 3;
  const int begin = batch.query_starts[row], end = batch.query_starts[row + 1];
  RowPlan plan{slots[0], slots[1], batch.positions[begin], 0, slots[2], begin, end, 0};
  const int lines = states.lines - (layer.conv_size - 1);
  const auto is_slot = [&](int slot) { return slot >= 0 && slot < states.slots; };
  if (!is_slot(plan.source) || !is_slot(plan.target))
    refuse("states " + std::to_string(plan.source) + " and " + std::to_string(plan.target) +
           " lie outside the storage of " + std::to_string(states.slots) + " slots");
  if (plan.start != 0) plan.length = states.lengths[plan.source];
  if (plan.length < 0 || plan.start < plan.length || plan.start - plan.length > lines)
    refuse("the state in slot " + std::to_string(plan.source) + " has read " + std::to_string(plan.length) +
           " tokens, and cannot continue at " + std::to_string(plan.start));
  if (plan.read < 0 || plan.read > end - begin || end - begin > plan.read + lines)
    refuse("a row of " + std::to_string(end - begin) + " tokens cannot be kept: " + std::to_string(plan.read) +
           " are read, and " + std::to_string(states.lines) + " lines are left");
  for (int i = 0; i < end - begin && batch.parents; ++i) {
    const int parent = std::max(batch.parents[begin + i] - begin, -1);
    if (i < plan.read ? parent != i - 1 : parent < plan.read - 1 || parent >= i)
      refuse("token " + std::to_string(i) + " of a row follows token " + std::to_string(parent) +
             ", whose state is not kept");
  }
  return plan;
}

Plan make_plan(const Recurrent& layer, const Batch& batch, const States& states, const float* channels,
               const float* controls) {
  if (!batch.states) refuse("a recurrent layer needs the slots of its states: the batch has no `states`");
  check_rows(batch);
  Plan plan;
  const int width = layer.num_channels();
  for (int row = 0; row < batch.rows; ++row) {
    if (batch.query_starts[row] == batch.query_starts[row + 1]) continue;
    RowPlan one = check_row(layer, batch, states, row);
    one.first = int(plan.items.size());
    plan.widest = std::max(plan.widest, one.items() - one.committed());
    const auto line = [&](int position) { return states.line(one.source, position); };
    const auto add = [&](const Item& item, int token, int position) {
      plan.items.push_back(item);
      const size_t at = plan.windows.size();
      plan.windows.resize(at + layer.conv_size, nullptr);
      for (int j = layer.conv_size - 1; j >= 0 && (token >= 0 || position >= 0); --j) {
        plan.windows[at + j] = token >= 0 ? channels + size_t(token) * width : line(position);
        if (token < 0) {
          --position;
        } else {
          const int parent = batch.parents ? batch.parents[token] : token - 1;
          token = parent >= one.begin ? parent : -1;
          position = one.start - 1;
        }
      }
    };
    for (int position = one.length; position < one.start; ++position)
      add({line(position) + width, -1, position - one.length - 1}, -1, position);
    for (int token = one.begin; token < one.end; ++token) {
      const int parent = batch.parents ? batch.parents[token] : token - 1;
      const int item = parent >= one.begin ? one.kept() + parent - one.begin : one.kept() - 1;
      add({controls + size_t(token) * layer.controls->rows, token, item}, token, one.start);
    }
    plan.rows.push_back(one);
  }
  return plan;
}

// Convolve and activate channels [first, first + count) of an item.
void convolve(const Recurrent& layer, const float* const* window, int first, int count, float* out) {
  const int width = layer.num_channels();
  for (int i = 0; i < count; i += 16) {
    const int left = count - i;
    f32x16 total = splat(0.0f);
    for (int j = 0; j < layer.conv_size; ++j)
      if (window[j])
        total = fma(load_some(window[j] + first + i, left),
                    load_some(layer.conv + size_t(j) * width + first + i, left), total);
    if (layer.conv_bias) total = total + load_some(layer.conv_bias + first + i, left);
    store_some(out + i, silu(total), left);
  }
}

// Scale a vector [stride] whose tail is 0 to the length `length`.
void scale_to(float* x, int stride, float length) {
  f32x16 squares = splat(0.0f);
  for (int i = 0; i < stride; i += 16) {
    const f32x16 v = load(x + i);
    squares = fma(v, v, squares);
  }
  const f32x16 factor = splat(length / std::sqrt(sum(squares) + kUnitEps));
  for (int i = 0; i < stride; i += 16) store(x + i, load(x + i) * factor);
}

// Prepare one item for key head `group` and for the heads that share it.
void prepare_item(const Recurrent& layer, const Plan& plan, const Prepared& out, int index, int group) {
  const Item& item = plan.items[size_t(index)];
  const float* const* window = plan.windows.data() + size_t(index) * layer.conv_size;
  const int count = int(plan.items.size()), keys = layer.key_heads * layer.state_dim;
  float* key = out.keys + (size_t(group) * count + index) * 2 * out.stride;
  float* query = key + out.stride;
  std::fill(key, key + 2 * out.stride, 0.0f);
  convolve(layer, window, keys + group * layer.state_dim, layer.state_dim, key);
  convolve(layer, window, group * layer.state_dim, layer.state_dim, query);
  if (layer.delta) {
    scale_to(key, out.stride, 1.0f);
    scale_to(query, out.stride, 1.0f / std::sqrt(float(layer.state_dim)));
  }
  const int heads = layer.heads / layer.key_heads, head = group * heads, values = head * layer.head_dim;
  float* value = out.values + size_t(index) * layer.heads * layer.head_dim + values;
  convolve(layer, window, 2 * keys + values, heads * layer.head_dim, value);
  float* decays = out.factors + size_t(index) * 2 * layer.heads;
  float* rates = decays + layer.heads;
  for (int i = head; i < head + heads; ++i) {
    const float raw = item.controls[i] + layer.step_bias[i];
    const float step = raw > 20.0f ? raw : std::log1p(std::exp(raw));
    decays[i] = std::exp(layer.decay[i] * step);
    rates[i] = layer.delta ? 1.0f / (1.0f + std::exp(-item.controls[layer.heads + i])) : step;
  }
}

// Read one token into `rows` rows of a head's state: [rows][stride]. key: [2][stride], the query follows. value, out:
// [rows]. Not inlined: so every token is read by the same instructions, wherever it comes from.
template <int rows, bool delta>
[[gnu::noinline]] void update(float* state, int stride, const float* key, float decay, float rate, float skip,
                              const float* value, float* out) {
  const float* query = key + stride;
  const f32x16 factor = splat(decay);
  float added[rows];
  if constexpr (delta) {
    f32x16 known[rows];
    for (int r = 0; r < rows; ++r) known[r] = splat(0.0f);
    for (int i = 0; i < stride; i += 16) {
      const f32x16 k = load(key + i);
      for (int r = 0; r < rows; ++r) known[r] = fma(load(state + r * stride + i) * factor, k, known[r]);
    }
    for (int r = 0; r < rows; ++r) added[r] = (value[r] - sum(known[r])) * rate;
  } else {
    for (int r = 0; r < rows; ++r) added[r] = value[r] * rate;
  }
  f32x16 result[rows];
  for (int r = 0; r < rows; ++r) result[r] = splat(0.0f);
  for (int i = 0; i < stride; i += 16) {
    const f32x16 k = load(key + i), q = load(query + i);
    for (int r = 0; r < rows; ++r) {
      const f32x16 s = fma(k, splat(added[r]), load(state + r * stride + i) * factor);
      store(state + r * stride + i, s);
      result[r] = fma(s, q, result[r]);
    }
  }
  for (int r = 0; r < rows; ++r) out[r] = sum(result[r]) + skip * value[r];
}

// Rows [first, first + count) of a head's state, and what the tokens of a batch row need of the head.
struct Unit {
  const RowPlan& row;
  int head, first, count;
  float decay(const Prepared& in, size_t item, int heads) const { return in.factors[item * 2 * heads + head]; }
  float rate(const Prepared& in, size_t item, int heads) const { return in.factors[(item * 2 + 1) * heads + head]; }
};

// Read items [begin, end) of a unit's batch row into its state [count][stride], for good. Values and outputs of a few
// items lie side by side: in memory they are as far apart as tokens, often in the same set of the cache.
template <bool delta>
void read_items(const Recurrent& layer, const Plan& plan, const Unit& unit, const Prepared& in, const float* keys,
                int begin, int end, float* state, float* mixed) {
  float values[kItems][kUnit], outs[kItems][kUnit];
  const size_t width = size_t(layer.heads) * layer.head_dim, at = size_t(unit.head) * layer.head_dim + unit.first;
  const float skip = layer.skip ? layer.skip[unit.head] : 0.0f;
  for (int from = begin; from < end; from += kItems) {
    const int count = std::min(end - from, kItems), index = unit.row.first + from;
    for (int i = 0; i < count; ++i)
      memcpy(values[i], in.values + size_t(index + i) * width + at, size_t(unit.count) * sizeof(float));
    const auto run = [&](auto rows, int r) {
      for (int i = 0; i < count; ++i) {
        const float* key = keys + size_t(index + i) * 2 * in.stride;
        update<rows(), delta>(state + r * in.stride, in.stride, key, unit.decay(in, size_t(index + i), layer.heads),
                              unit.rate(in, size_t(index + i), layer.heads), skip, values[i] + r, outs[i] + r);
      }
    };
    int r = 0;
    for (; r + kRows <= unit.count; r += kRows) run(std::integral_constant<int, kRows>(), r);
    for (; r < unit.count; ++r) run(std::integral_constant<int, 1>(), r);
    for (int i = 0; i < count; ++i) {
      const int token = plan.items[size_t(index + i)].token;
      if (token >= 0) memcpy(mixed + size_t(token) * width + at, outs[i], size_t(unit.count) * sizeof(float));
    }
  }
}

// Run the items that may still be rejected on copies of rows [r, r + rows) of a unit's state. Each node of a tree has a
// copy of its own; a chain needs one.
template <int rows, bool delta>
void run_drafts(const Recurrent& layer, const Plan& plan, const Unit& unit, const Prepared& in, const float* keys,
                bool is_tree, int r, const float* state, float* nodes, float* mixed) {
  const int stride = in.stride, committed = unit.row.committed();
  const size_t width = size_t(layer.heads) * layer.head_dim;
  const size_t at = size_t(unit.head) * layer.head_dim + unit.first + r;
  const float skip = layer.skip ? layer.skip[unit.head] : 0.0f;
  const auto node = [&](int item) { return nodes + size_t(is_tree ? item - committed : 0) * rows * stride; };
  for (int i = committed; i < unit.row.items(); ++i) {
    const int index = unit.row.first + i;
    const Item& item = plan.items[size_t(index)];
    const float* before = item.parent < committed ? state + r * stride : node(item.parent);
    if (before != node(i)) memcpy(node(i), before, size_t(rows) * stride * sizeof(float));
    update<rows, delta>(node(i), stride, keys + size_t(index) * 2 * stride, unit.decay(in, size_t(index), layer.heads),
                        unit.rate(in, size_t(index), layer.heads), skip, in.values + size_t(index) * width + at,
                        mixed + size_t(item.token) * width + at);
  }
}

template <bool delta>
void run_unit(const Recurrent& layer, const Plan& plan, const Unit& unit, const Prepared& in, const States& states,
              bool is_tree, float* state, float* nodes, float* mixed) {
  const int stride = in.stride, size = layer.state_dim;
  const size_t at = size_t(unit.head) * layer.head_dim + unit.first;
  const size_t group = size_t(unit.head / (layer.heads / layer.key_heads));
  const float* keys = in.keys + group * plan.items.size() * 2 * stride;
  const float* source = states.state(unit.row.source, at, size);
  for (int r = 0; r < unit.count; ++r) {
    float* to = state + r * stride;
    std::fill(to + size, to + stride, 0.0f);
    if (unit.row.start != 0) memcpy(to, source + size_t(r) * size, size_t(size) * sizeof(float));
    else std::fill(to, to + size, 0.0f);
  }
  read_items<delta>(layer, plan, unit, in, keys, 0, unit.row.committed(), state, mixed);
  int r = 0;
  for (; r + kRows <= unit.count; r += kRows)
    run_drafts<kRows, delta>(layer, plan, unit, in, keys, is_tree, r, state, nodes, mixed);
  for (; r < unit.count; ++r) run_drafts<1, delta>(layer, plan, unit, in, keys, is_tree, r, state, nodes, mixed);
  float* target = states.state(unit.row.target, at, size);
  for (int r = 0; r < unit.count; ++r)
    memcpy(target + size_t(r) * size, state + r * stride, size_t(size) * sizeof(float));
}

template <bool delta>
void run_states(const Recurrent& layer, const Plan& plan, const Prepared& in, const States& states, bool is_tree,
                float* mixed) {
  const int of_head = (layer.head_dim + kUnit - 1) / kUnit, of_row = layer.heads * of_head;
  parallel([&](int part, int parts) {
    float* state = floats(kOfThread, size_t(kUnit + std::max(plan.widest, 1) * kRows) * in.stride);
    const Share share(int64_t(plan.rows.size()) * of_row, part, parts);
    for (int i = share.first; i < share.last; ++i) {
      const int first = i % of_head * kUnit;
      const Unit unit{plan.rows[size_t(i / of_row)], i % of_row / of_head, first,
                      std::min(layer.head_dim - first, kUnit)};
      run_unit<delta>(layer, plan, unit, in, states, is_tree, state, state + kUnit * in.stride, mixed);
    }
  });
}

// Gate and norm the outputs of a token: [H][P], in place. The norm is of a head, or of the heads that share keys.
void gate_token(const Recurrent& layer, const float* gate, float* out) {
  const int width = layer.heads * layer.head_dim;
  const auto apply = [&] {
    for (int i = 0; i < width; i += 16)
      store_some(out + i, load_some(out + i, width - i) * silu(load_some(gate + i, width - i)), width - i);
  };
  if (!layer.delta) {
    apply();
    const int size = width / layer.key_heads;
    for (int at = 0; at < width; at += size)
      norm_row(out + at, layer.out_norm + at, layer.out_eps, size, out + at);
    return;
  }
  for (int at = 0; at < width; at += layer.head_dim)
    norm_row(out + at, layer.out_norm, layer.out_eps, layer.head_dim, out + at);
  apply();
}

// Keep the inputs that the next step may need: those that the stored state has not read, and what the convolution reads before them.
void keep_inputs(const Recurrent& layer, const States& states, const RowPlan& row, const float* channels,
                 const float* controls) {
  const int width = layer.num_channels(), size = layer.controls->rows, history = layer.conv_size - 1;
  const int end = row.start + row.read;
  if (row.source != row.target)
    for (int position = std::max(end - history, 0); position < row.start; ++position)
      memcpy(states.line(row.target, position), states.line(row.source, position), states.width * sizeof(float));
  for (int token = row.begin + std::max(row.read - history, 0); token < row.end; ++token) {
    float* line = states.line(row.target, row.start + token - row.begin);
    memcpy(line, channels + size_t(token) * width, size_t(width) * sizeof(float));
    memcpy(line + width, controls + size_t(token) * size, size_t(size) * sizeof(float));
  }
  states.lengths[row.target] = end;
}

}  // namespace

void recurrent(const Recurrent& layer, const Batch& batch, const States& states, float* x) {
  const int tokens = batch.tokens, values = layer.heads * layer.head_dim;
  if (tokens == 0) return;
  const size_t width = size_t(layer.num_channels()), size = size_t(layer.controls->rows);
  float* channels = floats(kFirst, tokens * (width + size));  // [T][C]
  float* controls = channels + tokens * width;                // [T][X]
  float* gates = floats(kSecond, size_t(tokens) * values);    // [T][H * P]
  const Projection projections[] = {{layer.channels.get(), channels, nullptr},
                                    {layer.controls.get(), controls, nullptr},
                                    {layer.gate.get(), gates, nullptr}};
  project(projections, 3, {x, layer.norm, layer.eps, tokens, layer.channels->cols, Activations::none}, nullptr);
  const Plan plan = make_plan(layer, batch, states, channels, controls);
  const int items = int(plan.items.size()), stride = (layer.state_dim + 15) / 16 * 16;
  const size_t keys = size_t(layer.key_heads) * items * 2 * stride;
  Prepared prepared{stride, floats(kPartial, keys + size_t(items) * (values + 2 * layer.heads)), nullptr, nullptr};
  prepared.values = prepared.keys + keys;
  prepared.factors = prepared.values + size_t(items) * values;
  parallel([&](int part, int parts) {
    const Share share(int64_t(items) * layer.key_heads, part, parts);
    for (int unit = share.first; unit < share.last; ++unit)
      prepare_item(layer, plan, prepared, unit / layer.key_heads, unit % layer.key_heads);
  });
  float* mixed = floats(kNormed, size_t(tokens) * values);  // [T][H * P]
  const bool is_tree = batch.parents != nullptr;
  if (layer.delta) run_states<true>(layer, plan, prepared, states, is_tree, mixed);
  else run_states<false>(layer, plan, prepared, states, is_tree, mixed);
  for (const RowPlan& row : plan.rows) keep_inputs(layer, states, row, channels, controls);
  over_rows(batch.query_starts[batch.rows], [&](int first, int last) {
    for (int token = first; token < last; ++token)
      gate_token(layer, gates + size_t(token) * values, mixed + size_t(token) * values);
  });
  project_back(*layer.output, nullptr, nullptr, mixed, nullptr, nullptr, layer.eps, x, tokens);
}

}  // namespace outrider::LEVEL
