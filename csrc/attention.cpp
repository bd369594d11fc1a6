// Attention over paged keys and values.
//
// A token's sum is fixed by the positions it sees: keys in position order, blocks of 16 and chunks of 64 aligned to
// absolute positions, a softmax of its own in each chunk, chunks folded in ascending order. So a token gets the same
// bits alone, in a batch, in any chunk of its prompt, with any number of threads.
#include <algorithm>
#include <new>

#include "chunk.h"

namespace outrider::LEVEL {
namespace {

constexpr int kFew = 4;  // queries that gain nothing from keys and values being turned into floats once for all
constexpr size_t kMostPartial = size_t(1) << 24;  // floats of states that may wait to be folded

// One copy of the arithmetic for all callers: inlined twice, it could be contracted twice in different ways.
#define OUTRIDER_ONE_COPY __attribute__((noinline))

// Scores first .. last of a chunk become weights; those that e^-87 bounds from below are as good as 0.
OUTRIDER_ONE_COPY void weigh(float* scores, int first, int last, State state) {
  const int start = first / kBlock * kBlock, end = (last + kBlock - 1) / kBlock * kBlock;
  std::fill(scores + start, scores + first, -INFINITY);
  std::fill(scores + last, scores + end, -INFINITY);
  f32x16 top = splat(-INFINITY), sums = splat(0.0f);
  for (int i = start; i < end; i += kBlock) {
    const f32x16 lanes = load(scores + i);
    top = where_greater(lanes, top, lanes, top);
  }
  const float largest = largest_lane(top);
  for (int i = start; i < end; i += kBlock) {
    const f32x16 weights = exp_within(max(load(scores + i) - splat(largest), splat(-87.0f)));
    sums = sums + weights;
    store(scores + i, weights);
  }
  state.largest = largest;
  state.total = sum(sums);
}

// The queries of a task, scaled and padded: [tokens][group][width].
void load_queries(const View& view, const Task& task, float* to) {
  const int width = view.layer.head_dim;
  const f32x16 scale = splat(view.layer.scale);
  for (int token = task.first; token < task.last; ++token)
    for (int member = 0; member < view.group; ++member, to += view.width) {
      const size_t head = size_t(token) * view.layer.heads + size_t(task.head) * view.group + member;
      for (int i = 0; i < width; i += 16)
        store(to + i, load_some(view.q + head * width + i, width - i) * scale);
    }
}

// Calls body(query, queries, first, last) for each run of tokens that see the same positions of a chunk below `until`,
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

// All queries meet the keys of sixteen tokens at a time, and each takes the scores of its ancestors and its own.
template <class Format, class Shown>
void score_apart(const View& view, const Task& task, const Apart& apart, const Panel<Shown>& panel, const Room& room) {
  over_tokens(view, task, apart, [&](int first, int last) {
    const RowsOfTokens keys(view, task, view.pages.keys, first, last);
    load_keys<Format, Shown>(view, 0, last - first, keys.at, room);
    const Product product{room.queries, view.width, 0, view.layer.head_dim, room.apart, kBlock};
    multiply(product, (task.last - task.first) * view.group, panel, 0, 1);
    const float* found = room.apart;
    float* scores = room.scores;
    for (int token = task.first; token < task.last; ++token)
      for (int member = 0; member < view.group; ++member, found += kBlock, scores += kChunk)
        over_path(view, token, first, last, apart, [&](int ancestor, int i) { scores[i] = found[ancestor - first]; });
  });
}

// The values of sixteen tokens at a time: on every path, those that come first stand first.
template <class Format>
void add_apart(const View& view, const Task& task, const Apart& apart, const char* const* ahead, int lines,
               const Room& room, float* states) {
  over_tokens(view, task, apart, [&](int first, int last) {
    const RowsOfTokens values(view, task, view.pages.values, first, last);
    const float *shown[kBlock], *own[kChunk];
    load_values<Format, F32>(view, 0, last - first, values.at, room, shown);
    for (int token = task.first; token < task.last; ++token) {
      int from = kChunk, to = 0;
      over_path(view, token, first, last, apart, [&](int ancestor, int i) {
        own[i] = shown[ancestor - first];
        from = i;
        to = std::max(to, i + 1);
      });
      from = std::max(from, view.first(token, apart.start));
      const size_t query = size_t(token - task.first) * view.group;
      float* out = states + query * view.stride;
      const Product product{room.scores + query * kChunk, kChunk, from, to, out, view.stride};
      if (from < to) multiply<F32, true>(product, view.group, {own, 16, ahead, lines}, 0, view.width / 16);
    }
  });
}

// Positions from .. to of the chunk that starts at `start`, keys and values being shown to the queries as `Shown`:
// those that all tokens share for all queries together, then those where they stand apart.
template <class Format, class Shown>
void attend_rows(const View& view, const Task& task, int start, int from, int to, const Room& room, float* states) {
  using Element = typename Shown::Element;
  const int shared = view.shared_until(task.row), width = view.width;
  const int next = std::min(std::min(view.last(task.last - 1), shared) - start - kChunk, kChunk);
  const Apart apart{start, std::clamp(shared - start, from, to), to};
  const RowsOfChunk keys(view, task, view.pages.keys, start, from, apart.from);
  const RowsOfChunk values(view, task, view.pages.values, start, from, apart.from);
  const RowsOfChunk next_keys(view, task, view.pages.keys, start + kChunk, 0, next);
  const int lines = (width * int(sizeof(typename Format::Element)) + 63) / 64;
  const Element** dimensions = reinterpret_cast<const Element**>(room.dimensions);
  for (int i = 0; i < width; ++i) dimensions[i] = reinterpret_cast<const Element*>(room.keys) + kBlock * i;
  const Panel<Shown> panel{dimensions, kBlock * width, values.at, lines};
  load_keys<Format, Shown>(view, from, apart.from, keys.at, room);
  over_runs(view, task, start, apart.from, kBlock, [&](int query, int queries, int first, int last) {
    float* scores = room.scores + size_t(query) * kChunk;
    const Product product{room.queries + size_t(query) * width, width, 0, view.layer.head_dim, scores, kChunk};
    multiply(product, queries, panel, first / kBlock, last / kBlock);
  });
  if (apart.from < to) {
    clear(view, (task.last - task.first) * view.group, states);  // add_apart goes on from what it finds
    score_apart<Format>(view, task, apart, panel, room);
  }
  over_runs(view, task, start, to, 1, [&](int query, int queries, int first, int last) {
    for (int i = query; i < query + queries; ++i)
      weigh(room.scores + size_t(i) * kChunk, first, last, State(states + size_t(i) * view.stride, width));
  });
  const Element* shown[kChunk];
  load_values<Format, Shown>(view, from, apart.from, values.at, room, shown);
  over_runs(view, task, start, apart.from, 1, [&](int query, int queries, int first, int last) {
    float* out = states + size_t(query) * view.stride;
    const Product product{room.scores + size_t(query) * kChunk, kChunk, first, last, out, view.stride};
    multiply<Shown>(product, queries, {shown, 16, next_keys.at, lines}, 0, width / 16);
  });
  if (apart.from < to) add_apart<Format>(view, task, apart, next_keys.at, lines, room, states);
}

// Few queries take keys and values as they are, many have them turned into floats first.
template <class Format>
void attend_format(const View& view, const Task& task, int start, int from, int to, const Room& room, float* states) {
  if ((task.last - task.first) * view.group <= kFew)
    attend_rows<Format, Format>(view, task, start, from, to, room, states);
  else
    attend_rows<Format, F32>(view, task, start, from, to, room, states);
}

OUTRIDER_INLINE float exp_one(float x) { return exp(splat(x)).part[0][0]; }

// One chunk of positions for all queries of a task, into fresh states [tokens][group][stride].
void attend_chunk(const View& view, const Task& task, int chunk, const Room& room, float* states) {
  const int count = (task.last - task.first) * view.group, start = chunk * kChunk;
  for (int i = 0; i < count; ++i) State(states + size_t(i) * view.stride, view.width).largest = -INFINITY;
  int from = kChunk, to = 0;
  for (int token = task.first; token < task.last; ++token) {
    from = std::min(from, view.first(token, start));
    to = std::max(to, view.last(token, start));
  }
  if (from >= to) return;
  const Half dtype = view.pages.dtype;
  const auto attend_as = dtype == Half::f16    ? attend_format<F16>
                         : dtype == Half::bf16 ? attend_format<BF16>
                                               : attend_format<F32>;
  attend_as(view, task, start, from, to, room, states);
}

// A chunk in which a query saw nothing leaves its state as it was.
OUTRIDER_ONE_COPY void fold(const View& view, int count, float* whole, float* chunk) {
  for (int i = 0; i < count; ++i, whole += view.stride, chunk += view.stride) {
    State left(whole, view.width), right(chunk, view.width);
    if (right.largest == -INFINITY) continue;
    // One of both exponents is 0, and not worth its exp.
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

void finish(const View& view, const Task& task, float* whole) {
  const int width = view.layer.head_dim;
  for (int token = task.first; token < task.last; ++token)
    for (int member = 0; member < view.group; ++member, whole += view.stride) {
      const State state(whole, view.width);
      const size_t head = size_t(token) * view.layer.heads + size_t(task.head) * view.group + member;
      const f32x16 total = splat(state.total > 0 ? state.total : 1.0f);  // who sees nothing gets nothing
      for (int i = 0; i < width; i += 16)
        store_some(view.out + head * width + i, load(state.sums + i) / total, width - i);
    }
}

struct Chunks {
  int first, last;
};
// At least one, be it that nobody sees anything in it: whoever ends the last chunk finishes the task.
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
  const Room room(view);
  const int count = (task.last - task.first) * view.group;
  load_queries(view, task, room.queries);
  clear(view, count, room.whole);
  const Chunks chunks = chunks_of(view, task);
  for (int chunk = chunks.first; chunk < chunks.last; ++chunk) {
    attend_chunk(view, task, chunk, room, room.chunk);
    fold(view, count, room.whole, room.chunk);
  }
  finish(view, task, room.whole);
}

// One task, cut into its chunks; whoever ends last folds them.
struct Split {
  Task task;
  Chunks chunks;
  int unit;      // the number of its first chunk among all chunks
  size_t state;  // where the states of its first chunk begin
  std::atomic<int> left;
};

void attend_split(const View& view, Split& split, int chunk, const Room& room, float* states) {
  const int count = (split.task.last - split.task.first) * view.group;
  const size_t states_of_chunk = size_t(count) * view.stride;
  float* base = states + split.state;
  attend_chunk(view, split.task, chunk, room, base + size_t(chunk - split.chunks.first) * states_of_chunk);
  if (split.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  clear(view, count, room.whole);
  for (int done = 0; done < split.chunks.last - split.chunks.first; ++done)
    fold(view, count, room.whole, base + size_t(done) * states_of_chunk);
  finish(view, split.task, room.whole);
}

// Tasks of up to `most` tokens of one row each. Returns how many there are.
int plan(const Batch& batch, int kv_heads, int most, Task* tasks) {
  int count = 0;
  for (int row = 0; row < batch.rows; ++row)
    for (int first = batch.query_starts[row]; first < batch.query_starts[row + 1]; first += most)
      for (int head = 0; head < kv_heads; ++head)
        tasks[count++] = {row, first, std::min(first + most, batch.query_starts[row + 1]), head};
  return count;
}

// Shares out the chunks of all tasks, unless too many states would wait to be folded.
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
    const Room room(view);
    for (int unit, end, i = 0, loaded = -1; queue.take(unit, end);)
      for (; unit < end; ++unit) {
        while (i + 1 < count && splits[i + 1].unit <= unit) ++i;
        if (loaded != i) load_queries(view, splits[i].task, room.queries);
        loaded = i;
        attend_split(view, splits[i], splits[i].chunks.first + unit - splits[i].unit, room, states);
      }
  });
  return true;
}

// The last tasks of a prompt see most: they go first.
void run_whole(const View& view, const Task* tasks, int count) {
  Queue queue(count, 1);
  parallel([&](int, int) {
    for (int i, end; queue.take(i, end);) attend_task(view, tasks[count - 1 - i]);
  });
}

}  // namespace

void attend(const Attention& layer, const float* q, const Batch& batch, const Pages& pages, float* x) {
  const int tokens = batch.tokens, width = (layer.head_dim + 15) / 16 * 16, threads = thread_count();
  float* out = floats(kNormed, size_t(tokens) * layer.heads * layer.head_dim);  // [T][H * D]
  const int pairs = tokens * layer.kv_heads, enough = threads > 1 ? 4 * threads : 1;
  const size_t numbers = layer.causal ? batch.rows : tokens, more = layer.anchored ? tokens : 0;
  Task* tasks = static_cast<Task*>(scratch(kPlan, size_t(pairs) * sizeof(Task) + (numbers + more) * sizeof(int)));
  int* found = reinterpret_cast<int*>(tasks + pairs);  // [B], or [T] where the layer is not causal
  int* origins = found + numbers;                      // [T] where windows are anchored
  if (!layer.causal) find_reach(batch, found);
  if (layer.anchored) find_origins(batch, origins);
  const bool trees = layer.causal && batch.parents && find_trees(batch, pages, found);
  const View view{layer, batch, pages, q, out, layer.heads / layer.kv_heads, width, width + 16,
                  trees ? found : nullptr, layer.causal ? batch.positions : found,
                  layer.anchored ? origins : batch.positions};
  int count = plan(batch, layer.kv_heads, kTokens, tasks);
  if (count >= enough || !run_split(view, tasks, count)) {
    if (count < enough) count = plan(batch, layer.kv_heads, std::min(std::max(pairs / enough, 1), kTokens), tasks);
    run_whole(view, tasks, count);
  }
  project_back(*layer.output, out, layer.output_bias, layer.post_norm, layer.eps, x, tokens);
}

}  // namespace outrider::LEVEL
