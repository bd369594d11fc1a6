// Attention over paged keys and values.
//
// A row's result does not depend on its neighbours: a token adds its keys in position order, in blocks of 16 and chunks
// of 64 that are aligned to absolute positions, with one softmax per chunk and the chunks folded in ascending order.
// The bits are the same alone, in a batch, in any chunk of the prompt and with any number of threads.
#include <algorithm>
#include <new>

#include "attention_chunk.h"

namespace outrider::LEVEL {
namespace {

constexpr int kFew = 4;  // up to this number of queries, converting keys and values to f32 first does not pay
constexpr size_t kMostPartial = size_t(1) << 24;  // limit of the partial states kept for folding, in floats

// Keep one copy of this code: two inlined copies could contract multiply-adds differently and give other bits.
#define OUTRIDER_ONE_COPY __attribute__((noinline))

// Bound the scores of a chunk softly, whole blocks of them.
OUTRIDER_ONE_COPY void cap_scores(float* scores, int first, int last, float cap) {
  const f32x16 factor = splat(cap), inverse = splat(1 / cap);
  for (int i = first / kBlock * kBlock; i < last; i += kBlock)
    store(scores + i, factor * tanh(load(scores + i) * inverse));
}

// Turn scores [first, last) of a chunk into softmax weights. Exponents are clamped at -87, where e^x is nearly 0.
OUTRIDER_ONE_COPY void weigh(float* scores, int first, int last, State state) {
  const int start = first / kBlock * kBlock, end = (last + kBlock - 1) / kBlock * kBlock;
  std::fill(scores + start, scores + first, -INFINITY);
  std::fill(scores + last, scores + end, -INFINITY);
  f32x16 top = splat(-INFINITY), sums = splat(0.0f);
  for (int i = start; i < end; i += kBlock) top = max(load(scores + i), top);
  const float largest = largest_lane(top);
  for (int i = start; i < end; i += kBlock) {
    const f32x16 weights = exp_within(max(load(scores + i) - splat(largest), splat(-87.0f)));
    sums = sums + weights;
    store(scores + i, weights);
  }
  state.largest = largest;
  state.total = sum(sums);
}

// Multiply the scores or weights of a chunk by the scales of its keys or values, whole blocks of them.
OUTRIDER_ONE_COPY void scale_scores(float* scores, int first, int last, const float* scales) {
  for (int i = first / kBlock * kBlock; i < last; i += kBlock) store(scores + i, load(scores + i) * load(scales + i));
}

// Load the queries of a task, scaled and padded: [tokens][group][width].
void load_queries(const View& view, const Task& task, float* to) {
  const int width = view.layer.head_dim;
  const f32x16 scale = splat(view.layer.scale);
  const bool divided = view.pages.dtype == KvType::i8 && view.layer.key_factors;  // the keys in the pages
  const float* factors = divided ? view.layer.key_factors + size_t(task.head) * width : nullptr;
  for (int token = task.first; token < task.last; ++token)
    for (int member = 0; member < view.group; ++member, to += view.width) {
      const size_t head = size_t(token) * view.layer.heads + size_t(task.head) * view.group + member;
      for (int i = 0; i < width; i += 16) {
        const f32x16 query = load_some(view.q + head * width + i, width - i) * scale;
        store(to + i, divided ? query * load_some(factors + i, width - i) : query);
      }
    }
}

// Call body(query, queries, first, last) for each run of tokens with the same attention range in a chunk below `until`,
// rounded outwards to multiples of `grain`.
template <class Body>
OUTRIDER_INLINE void over_runs(const View& view, const Task& task, int start, int until, int grain, const Body& body) {
  const auto first_of = [&](int token) { return view.first(token, start) / grain * grain; };
  const auto last_of = [&](int token) {
    return (std::min(view.last(token, start), until) + grain - 1) / grain * grain;
  };
  for (int token = task.first, next; token < task.last; token = next) {
    const int first = first_of(token), last = last_of(token);
    for (next = token + 1; next < task.last && first_of(next) == first && last_of(next) == last;) ++next;
    if (first < last) body((token - task.first) * view.group, (next - token) * view.group, first, last);
  }
}

// Score the keys of sixteen tree tokens at a time; each query takes the scores of its ancestors and of itself.
template <class Format, class Loaded>
void score_tree(const View& view, const Task& task, const TreeRange& tree_range, const ColumnPanel<Loaded>& panel,
                const Workspace& workspace) {
  over_tokens(view, task, tree_range, [&](int first, int last) {
    const TokenRows keys(view, task, view.pages.keys, first, last);
    load_keys<Format, Loaded>(view, 0, last - first, keys.at, workspace);
    const Gemm gemm{workspace.queries, view.width, 0, view.layer.head_dim, workspace.tree_range, kBlock};
    multiply(gemm, (task.last - task.first) * view.group, panel, 0, 1);
    const float* found = workspace.tree_range;
    float *scores = workspace.scores, scales[kBlock];
    if constexpr (Format::kScaled)
      for (int i = 0; i < last - first; ++i) scales[i] = view.pages.key_scales[keys.index[i]] * Format::kUnit;
    for (int token = task.first; token < task.last; ++token)
      for (int member = 0; member < view.group; ++member, found += kBlock, scores += kChunk)
        over_path(view, token, first, last, tree_range, [&](int ancestor, int i) {
          scores[i] = found[ancestor - first];
          if constexpr (Format::kScaled) scores[i] *= scales[ancestor - first];
        });
  });
}

// Add the values of sixteen tree tokens at a time; along every path ancestors come first.
template <class Format>
void add_tree_values(const View& view, const Task& task, const TreeRange& tree_range, const char* const* ahead,
                     int lines, const Workspace& workspace, float* states) {
  over_tokens(view, task, tree_range, [&](int first, int last) {
    const TokenRows values(view, task, view.pages.values, first, last);
    const float *loaded[kBlock], *own[kChunk];
    load_values<Format, F32>(view, 0, last - first, values.at, workspace, loaded);
    for (int token = task.first; token < task.last; ++token) {
      const size_t query = size_t(token - task.first) * view.group;
      int from = kChunk, to = 0;
      over_path(view, token, first, last, tree_range, [&](int ancestor, int i) {
        own[i] = loaded[ancestor - first];
        from = i;
        to = std::max(to, i + 1);
        if constexpr (Format::kScaled)
          for (int member = 0; member < view.group; ++member)
            workspace.scores[(query + member) * kChunk + i] *=
                view.pages.value_scales[values.index[ancestor - first]] * Format::kUnit;
      });
      from = std::max(from, view.first(token, tree_range.start));
      float* out = states + query * view.stride;
      const Gemm gemm{workspace.scores + query * kChunk, kChunk, from, to, out, view.stride};
      if (from < to) multiply<F32, true>(gemm, view.group, {own, 16, ahead, lines}, 0, view.width / 16);
    }
  });
}

// Attend to positions [from, to) of the chunk at `start`, with keys and values loaded as `Loaded`: first the positions
// that all tokens share, for all queries together, then those where the branches of a tree differ.
template <class Format, class Loaded>
void attend_rows(const View& view, const Task& task, int start, int from, int to, const Workspace& workspace,
                 float* states) {
  using Element = typename Loaded::Element;
  const int shared = view.shared_until(task.row), width = view.width;
  const int next = std::min(std::min(view.last(task.last - 1), shared) - start - kChunk, kChunk);
  const TreeRange tree_range{start, std::clamp(shared - start, from, to), to};
  const ChunkRows keys(view, task, view.pages.keys, start, from, tree_range.from);
  const ChunkRows values(view, task, view.pages.values, start, from, tree_range.from);
  const ChunkRows next_keys(view, task, view.pages.keys, start + kChunk, 0, next);
  const int lines = (width * int(sizeof(typename Format::Element)) + 63) / 64;
  const Element** dimensions = reinterpret_cast<const Element**>(workspace.dimensions);
  for (int i = 0; i < width; ++i) dimensions[i] = reinterpret_cast<const Element*>(workspace.keys) + kBlock * i;
  const ColumnPanel<Loaded> panel{dimensions, kBlock * width, values.at, lines};
  load_keys<Format, Loaded>(view, from, tree_range.from, keys.at, workspace);
  over_runs(view, task, start, tree_range.from, kBlock, [&](int query, int queries, int first, int last) {
    float* scores = workspace.scores + size_t(query) * kChunk;
    const Gemm gemm{workspace.queries + size_t(query) * width, width, 0, view.layer.head_dim, scores, kChunk};
    multiply(gemm, queries, panel, first / kBlock, last / kBlock);
  });
  if (tree_range.from < to) {
    clear(view, (task.last - task.first) * view.group, states);  // add_tree_values adds to the states
    score_tree<Format>(view, task, tree_range, panel, workspace);
  }
  const auto weigh_scores = [&](const float* key_scales, const float* value_scales) {
    over_runs(view, task, start, to, 1, [&](int query, int queries, int first, int last) {
      for (int i = query; i < query + queries; ++i) {
        float* scores = workspace.scores + size_t(i) * kChunk;
        if (key_scales) scale_scores(scores, first, last, key_scales);
        if (view.layer.soft_cap > 0) cap_scores(scores, first, last, view.layer.soft_cap);
        weigh(scores, first, last, State(states + size_t(i) * view.stride, width));
        if (value_scales) scale_scores(scores, first, last, value_scales);
      }
    });
  };
  if constexpr (Format::kScaled) {
    const ChunkScales key_scales(view, task, view.pages.key_scales, Format::kUnit, start, from, tree_range.from);
    const ChunkScales value_scales(view, task, view.pages.value_scales, Format::kUnit, start, from, tree_range.from);
    weigh_scores(key_scales.at, value_scales.at);
  } else {
    weigh_scores(nullptr, nullptr);
  }
  const Element* loaded[kChunk];
  load_values<Format, Loaded>(view, from, tree_range.from, values.at, workspace, loaded);
  over_runs(view, task, start, tree_range.from, 1, [&](int query, int queries, int first, int last) {
    float* out = states + size_t(query) * view.stride;
    const Gemm gemm{workspace.scores + size_t(query) * kChunk, kChunk, first, last, out, view.stride};
    multiply<Loaded>(gemm, queries, {loaded, 16, next_keys.at, lines}, 0, width / 16);
  });
  if (tree_range.from < to) add_tree_values<Format>(view, task, tree_range, next_keys.at, lines, workspace, states);
}

// Few queries read keys and values in the storage type, many convert them to f32 first.
template <class Format>
void attend_format(const View& view, const Task& task, int start, int from, int to, const Workspace& workspace,
                   float* states) {
  if ((task.last - task.first) * view.group <= kFew)
    attend_rows<Format, Format>(view, task, start, from, to, workspace, states);
  else
    attend_rows<Format, F32>(view, task, start, from, to, workspace, states);
}

OUTRIDER_INLINE float exp_one(float x) { return exp(splat(x)).part[0][0]; }

// Attend to one chunk of positions for all queries of a task, into fresh states [tokens][group][stride].
void attend_chunk(const View& view, const Task& task, int chunk, const Workspace& workspace, float* states) {
  const int count = (task.last - task.first) * view.group, start = chunk * kChunk;
  for (int i = 0; i < count; ++i) State(states + size_t(i) * view.stride, view.width).largest = -INFINITY;
  int from = kChunk, to = 0;
  for (int token = task.first; token < task.last; ++token) {
    from = std::min(from, view.first(token, start));
    to = std::max(to, view.last(token, start));
  }
  if (from >= to) return;
  const KvType dtype = view.pages.dtype;
  const auto attend_as = dtype == KvType::f16    ? attend_format<F16>
                         : dtype == KvType::bf16 ? attend_format<BF16>
                         : dtype == KvType::i8   ? attend_format<I8>
                         : dtype == KvType::fp8  ? attend_format<FP8>
                                                 : attend_format<F32>;
  attend_as(view, task, start, from, to, workspace, states);
}

// Fold the state of a chunk into the running state. A chunk outside a query's range leaves its state unchanged.
OUTRIDER_ONE_COPY void fold(const View& view, int count, float* whole, float* chunk) {
  for (int i = 0; i < count; ++i, whole += view.stride, chunk += view.stride) {
    State left(whole, view.width), right(chunk, view.width);
    if (right.largest == -INFINITY) continue;
    // One of the two exponents is 0: skip its exp.
    const float before = left.largest < right.largest ? exp_one(left.largest - right.largest) : 1.0f;
    const float now = right.largest < left.largest ? exp_one(right.largest - left.largest) : 1.0f;
    for (int at = 0; at < view.width; at += 16) {
      const f32x16 added = load(right.sums + at) * splat(now);
      store(left.sums + at, fma(load(left.sums + at), splat(before), added));
    }
    left.total = left.total * before + right.total * now;
    left.largest = std::max(left.largest, right.largest);
  }
}

// Add a key with this score and the value 0 to the state of one query.
void add_sink(const View& view, float score, float* whole) {
  State state(whole, view.width);
  const float largest = std::max(state.largest, score), before = exp_one(state.largest - largest);
  for (int at = 0; at < view.width; at += 16) store(state.sums + at, load(state.sums + at) * splat(before));
  state.total = state.total * before + exp_one(score - largest);
  state.largest = largest;
}

void finish(const View& view, const Task& task, float* whole) {
  const int width = view.layer.head_dim;
  for (int token = task.first; token < task.last; ++token)
    for (int member = 0; member < view.group; ++member, whole += view.stride) {
      const int of_token = task.head * view.group + member;
      if (view.layer.sinks) add_sink(view, view.layer.sinks[of_token], whole);
      const State state(whole, view.width);
      const size_t head = size_t(token) * view.layer.heads + of_token;
      const f32x16 total = splat(state.total > 0 ? state.total : 1.0f);  // an empty range gives zeros
      for (int i = 0; i < width; i += 16)
        store_some(view.out + head * width + i, load(state.sums + i) / total, width - i);
    }
}

struct Chunks {
  int first, last;
};
// Return the chunks of a task, at least one even if it is empty: the thread that ends the last chunk finishes the task.
Chunks chunks_of(const View& view, const Task& task) {
  Chunks out{view.first(task.first) / kChunk, (view.last(task.first) - 1) / kChunk + 1};
  for (int token = task.first + 1; token < task.last; ++token) {
    out.first = std::min(out.first, view.first(token) / kChunk);
    out.last = std::max(out.last, (view.last(token) - 1) / kChunk + 1);
  }
  out.last = std::max(out.last, out.first + 1);
  return out;
}

void attend_task(const View& view, const Task& task) {
  const Workspace workspace(view);
  const int count = (task.last - task.first) * view.group;
  load_queries(view, task, workspace.queries);
  clear(view, count, workspace.whole);
  const Chunks chunks = chunks_of(view, task);
  for (int chunk = chunks.first; chunk < chunks.last; ++chunk) {
    attend_chunk(view, task, chunk, workspace, workspace.chunk);
    fold(view, count, workspace.whole, workspace.chunk);
  }
  finish(view, task, workspace.whole);
}

// A task split into its chunks; the thread that ends the last one folds them.
struct Split {
  Task task;
  Chunks chunks;
  int unit;      // index of its first chunk among all chunks
  size_t state;  // offset of the states of its first chunk
  std::atomic<int> left;
};

void attend_split(const View& view, Split& split, int chunk, const Workspace& workspace, float* states) {
  const int count = (split.task.last - split.task.first) * view.group;
  const size_t states_of_chunk = size_t(count) * view.stride;
  float* base = states + split.state;
  attend_chunk(view, split.task, chunk, workspace, base + size_t(chunk - split.chunks.first) * states_of_chunk);
  if (split.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  clear(view, count, workspace.whole);
  for (int done = 0; done < split.chunks.last - split.chunks.first; ++done)
    fold(view, count, workspace.whole, base + size_t(done) * states_of_chunk);
  finish(view, split.task, workspace.whole);
}

// Split each row into tasks of up to `most` tokens; return the number of tasks.
int plan(const Batch& batch, int kv_heads, int most, Task* tasks) {
  int count = 0;
  for (int row = 0; row < batch.rows; ++row)
    for (int first = batch.query_starts[row]; first < batch.query_starts[row + 1]; first += most)
      for (int head = 0; head < kv_heads; ++head)
        tasks[count++] = {row, first, std::min(first + most, batch.query_starts[row + 1]), head};
  return count;
}

// Refuse page tables that lead outside the storage for positions that this step reads.
void check_tables(const View& view) {
  const Batch& batch = view.batch;
  for (int row = 0; row < batch.rows; ++row) {
    int first = INT_MAX, last = 0;
    for (int token = batch.query_starts[row]; token < batch.query_starts[row + 1]; ++token) {
      if (view.first(token) >= view.last(token)) continue;
      first = std::min(first, view.first(token));
      last = std::max(last, view.last(token));
    }
    check_table(batch, view.pages, row, first, std::min(last, view.shared_until(row)));
  }
}

// Distribute the chunks of all tasks over the threads. Return false if the partial states would exceed kMostPartial.
bool run_split(const View& view, const Task* tasks, int count) {
  Split* splits = static_cast<Split*>(scratch(kFirst, size_t(count) * sizeof(Split)));
  int units = 0;
  size_t partial = 0;
  for (int i = 0; i < count; ++i) {
    const Chunks chunks = chunks_of(view, tasks[i]);
    const int length = chunks.last - chunks.first;
    new (splits + i) Split{tasks[i], chunks, units, partial, {length}};
    units += length;
    partial += size_t(length) * (tasks[i].last - tasks[i].first) * view.group * view.stride;
  }
  if (partial > kMostPartial) return false;
  float* states = floats(kPartial, partial);
  Queue queue(units, units / (4 * thread_count()));
  parallel([&](int, int) {
    const Workspace workspace(view);
    for (int unit, end, i = 0, loaded = -1; queue.take(unit, end);)
      for (; unit < end; ++unit) {
        while (i + 1 < count && splits[i + 1].unit <= unit) ++i;
        if (loaded != i) load_queries(view, splits[i].task, workspace.queries);
        loaded = i;
        attend_split(view, splits[i], splits[i].chunks.first + unit - splits[i].unit, workspace, states);
      }
  });
  return true;
}

// Run whole tasks; the last tasks of a prompt have the longest ranges and go first.
void run_whole(const View& view, const Task* tasks, int count) {
  Queue queue(count, 1);
  parallel([&](int, int) {
    for (int i, end; queue.take(i, end);) attend_task(view, tasks[count - 1 - i]);
  });
}

// out *= sigmoid(gate(norm(x))): [T][H * D].
void apply_gate(const Attention& layer, const float* x, int tokens, float* out) {
  const int width = layer.gate->rows;
  float* gates = floats(kSecond, size_t(tokens) * width);  // [T][H * D]
  const Projection projection{layer.gate.get(), gates, nullptr};
  const float* states = x;
  if (layer.norm) {  // not by `project`, whose normed rows would take the place of `out`
    float* normed = floats(kFirst, size_t(tokens) * layer.gate->cols);
    rms_norm(x, layer.norm, layer.eps, tokens, layer.gate->cols, normed);
    states = normed;
  }
  project(&projection, 1, {states, nullptr, layer.eps, tokens, layer.gate->cols, Activations::none}, nullptr);
  over_rows(tokens, [&](int first, int last) {
    for (int i = first * width; i < last * width; i += 16) {
      const int count = last * width - i;
      const f32x16 gate = splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - load_some(gates + i, count)));
      store_some(out + i, load_some(out + i, count) * gate, count);
    }
  });
}

}  // namespace

void attend(const Attention& layer, const float* q, const Batch& batch, const Pages& pages, float* x) {
  const int tokens = batch.tokens, width = (layer.head_dim + 15) / 16 * 16, threads = thread_count();
  float* out = floats(kNormed, size_t(tokens) * layer.heads * layer.head_dim);  // [T][H * D]
  const int pairs = tokens * layer.kv_heads, enough = threads > 1 ? 4 * threads : 1;
  const size_t numbers = layer.causal ? batch.rows : tokens, more = layer.anchored ? tokens : 0;
  Task* tasks = static_cast<Task*>(scratch(kPlan, size_t(pairs) * sizeof(Task) + (numbers + more) * sizeof(int)));
  int* found = reinterpret_cast<int*>(tasks + pairs);  // [B], or [T] if the layer is not causal
  int* origins = found + numbers;                      // [T], if windows are anchored
  check_rows(batch);
  if (!layer.causal) find_last_visible(batch, found);
  if (layer.anchored) find_origins(batch, origins);
  const bool trees = layer.causal && batch.parents && find_trees(batch, pages, found);
  const View view{layer,
                  batch,
                  pages,
                  q,
                  out,
                  layer.heads / layer.kv_heads,
                  width,
                  width + 16,
                  trees ? found : nullptr,
                  layer.causal ? batch.positions : found,
                  layer.anchored ? origins : batch.positions};
  check_tables(view);
  int count = plan(batch, layer.kv_heads, kTokens, tasks);
  if (count >= enough || !run_split(view, tasks, count)) {
    if (count < enough) count = plan(batch, layer.kv_heads, std::min(std::max(pairs / enough, 1), kTokens), tasks);
    run_whole(view, tasks, count);
  }
  if (layer.gate) apply_gate(layer, x, tokens, out);
  project_back(*layer.output, layer.output_lora.get(), batch.adapters, out, layer.output_bias, layer.post_norm, layer.eps, x, tokens);
}

}  // namespace outrider::LEVEL
