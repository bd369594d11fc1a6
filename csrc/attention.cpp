// Attention over paged keys and values.
//
// A token's sum is fixed by its position alone: keys in position order, blocks of 16 and chunks of 64 aligned to
// absolute positions, a fresh online softmax in each chunk, chunks folded in ascending order. So a token gets the same
// bits alone, in a batch, in any chunk of its prompt, with any number of threads.
#include <algorithm>
#include <new>

#include "maths.h"
#include "rows.h"

namespace outrider::LEVEL {
namespace {

constexpr int kBlock = 16, kChunk = 64;
constexpr int kTokens = 8;  // tokens of one row that share the loads of a block

struct View {
  const Attention& layer;
  const Batch& batch;
  const Pages& pages;
  const float* q;  // [T][H * D]
  float* out;      // [T][H * D]
  int group;       // query heads of one key/value head
  int width;       // D padded to 16
  int stride;      // floats of one query's state
  int first(int token) const {
    return layer.window > 0 ? std::max(batch.positions[token] - layer.window + 1, 0) : 0;
  }
  int last(int token) const { return batch.positions[token] + 1; }
};

// Tokens [first, last) of one row, for one key/value head.
struct Task {
  int row, first, last, head;
};

// What one query has seen so far: width weighted sums, then the largest score, then the sum of weights.
struct State {
  float* sums;
  float &largest, &total;
  State(float* at, int width) : sums(at), largest(at[width]), total(at[width + 1]) {}
  void clear(int width) {
    memset(sums, 0, size_t(width) * sizeof(float));
    largest = -INFINITY;
    total = 0;
  }
};

// The keys and values of sixteen positions as floats, each `width` long. Positions that no query of the task sees
// repeat one that is seen: they are scored, and the score is thrown away.
struct Block {
  const float *keys[kBlock], *values[kBlock];
};

OUTRIDER_INLINE float exp_one(float x) { return exp(splat(x)).part[0][0]; }

template <class LoadHalves>
OUTRIDER_INLINE void widen_halves(const uint16_t* from, int width, float* to, const LoadHalves& load_halves) {
  int i = 0;
  for (; i + 16 <= width; i += 16) store(to + i, load_halves(from + i));
  if (i == width) return;
  uint16_t some[16] = {};
  memcpy(some, from + i, size_t(width - i) * sizeof *from);
  store(to + i, load_halves(some));
}

// A row of a page as floats, padded to sixteen: where it lies if it is that already, else in `to`.
OUTRIDER_INLINE const float* widen(const void* pages, Half dtype, size_t offset, int width, float* to) {
  const uint16_t* halves = static_cast<const uint16_t*>(pages) + offset;
  const float* floats = static_cast<const float*>(pages) + offset;
  if (dtype == Half::f16) {
    widen_halves(halves, width, to, [](const uint16_t* from) { return load_f16(from); });
  } else if (dtype == Half::bf16) {
    widen_halves(halves, width, to, [](const uint16_t* from) { return load_bf16(from); });
  } else {
    if (width % 16 == 0) return floats;
    for (int i = 0; i < width; i += 16) store(to + i, load_some(floats + i, width - i));
  }
  return to;
}

// Positions [first, last) of the block that starts at `start`.
void load_block(const View& view, const Task& task, int start, int first, int last, float* room, Block& block) {
  const Pages& pages = view.pages;
  const int32_t* table = view.batch.page_tables + size_t(task.row) * view.batch.table_width;
  const int width = view.layer.head_dim;
  for (int position = first; position < last; ++position, room += 2 * view.width) {
    const size_t page = size_t(table[position / pages.page_size]);
    const size_t line = (page * view.layer.kv_heads + task.head) * pages.page_size + position % pages.page_size;
    block.keys[position - start] = widen(pages.keys, pages.dtype, line * width, width, room);
    block.values[position - start] = widen(pages.values, pages.dtype, line * width, width, room + view.width);
  }
  for (int i = 0; i < first - start; ++i) block.keys[i] = block.keys[first - start];
  for (int i = last - start; i < kBlock; ++i) block.keys[i] = block.keys[first - start];
}

// Four sums by name: an array of them would live in memory.
OUTRIDER_INLINE f32x4 score_four(const float* q, const float* a, const float* b, const float* c, const float* d,
                                 int width) {
  f32x16 sum_a = splat(0.0f), sum_b = sum_a, sum_c = sum_a, sum_d = sum_a;
  for (int i = 0; i < width; i += 16) {
    const f32x16 lanes = load(q + i);
    sum_a = fma(lanes, load(a + i), sum_a);
    sum_b = fma(lanes, load(b + i), sum_b);
    sum_c = fma(lanes, load(c + i), sum_c);
    sum_d = fma(lanes, load(d + i), sum_d);
  }
  return sum_four(sum_a, sum_b, sum_c, sum_d);
}

// The lanes outside first .. last are -inf.
OUTRIDER_INLINE f32x16 score_block(const float* q, const Block& block, int first, int last, int width) {
  f32x4 scores[4];
  for (int i = 0; i < 4; ++i) {
    const float* const* keys = block.keys + 4 * i;
    scores[i] = score_four(q, keys[0], keys[1], keys[2], keys[3], width);
  }
  if (first > 0 || last < kBlock)
    for (int i = 0; i < kBlock; ++i)
      if (i < first || i >= last) scores[i / 4][i % 4] = -INFINITY;
  return join(scores);
}

// sums := sums * correction + weights * values
template <int registers>
OUTRIDER_INLINE void add_values(const Block& block, const float* weights, int first, int last, float correction,
                                float* sums, int at) {
  f32x16 acc[registers];
  for (int r = 0; r < registers; ++r) acc[r] = load(sums + at + 16 * r) * splat(correction);
  for (int i = first; i < last; ++i) {
    const f32x16 weight = splat(weights[i]);
    for (int r = 0; r < registers; ++r) acc[r] = fma(weight, load(block.values[i] + at + 16 * r), acc[r]);
  }
  for (int r = 0; r < registers; ++r) store(sums + at + 16 * r, acc[r]);
}

void attend_block(const float* q, const Block& block, int first, int last, int width, State state) {
  const f32x16 scores = score_block(q, block, first, last, width);
  const float largest = std::max(state.largest, largest_lane(scores));
  const float correction = largest > state.largest ? exp_one(state.largest - largest) : 1.0f;
  const f32x16 scaled = exp(scores - splat(largest));
  float weights[kBlock];
  store(weights, scaled);
  state.largest = largest;
  state.total = state.total * correction + sum(scaled);
  int at = 0;
  for (; at + 32 <= width; at += 32) add_values<2>(block, weights, first, last, correction, state.sums, at);
  if (at < width) add_values<1>(block, weights, first, last, correction, state.sums, at);
}

// The queries of a task, scaled and padded: [tokens][group][width].
void load_queries(const View& view, const Task& task, float* to) {
  const int width = view.layer.head_dim;
  for (int token = task.first; token < task.last; ++token)
    for (int member = 0; member < view.group; ++member, to += view.width) {
      const size_t head = size_t(token) * view.layer.heads + size_t(task.head) * view.group + member;
      for (int i = 0; i < width; i += 16)
        store(to + i, load_some(view.q + head * width + i, width - i) * splat(view.layer.scale));
    }
}

struct Room {  // of the calling thread
  float *queries, *block, *chunk, *whole;
  explicit Room(const View& view) {
    const size_t count = size_t(kTokens) * view.group;
    queries = floats(kOfThread, count * view.width + size_t(2) * kBlock * view.width + 2 * count * view.stride);
    block = queries + count * view.width;
    chunk = block + size_t(2) * kBlock * view.width;
    whole = chunk + count * view.stride;
  }
};

// One copy of the arithmetic for all callers: inlined twice, it could be contracted twice in different ways.
#define OUTRIDER_ONE_COPY __attribute__((noinline))

// One chunk of positions for all queries of a task, into fresh states [tokens][group][stride].
OUTRIDER_ONE_COPY void attend_chunk(const View& view, const Task& task, int chunk, const Room& room, float* states) {
  const int count = (task.last - task.first) * view.group;
  for (int i = 0; i < count; ++i) State(states + size_t(i) * view.stride, view.width).clear(view.width);
  int lowest = view.first(task.first), highest = view.last(task.first);
  for (int token = task.first + 1; token < task.last; ++token) {
    lowest = std::min(lowest, view.first(token));
    highest = std::max(highest, view.last(token));
  }
  for (int start = chunk * kChunk; start < (chunk + 1) * kChunk; start += kBlock) {
    const int from = std::max(start, lowest), to = std::min(start + kBlock, highest);
    if (from >= to) continue;
    Block block;
    load_block(view, task, start, from, to, room.block, block);
    for (int token = task.first; token < task.last; ++token) {
      const int first = std::max(view.first(token) - start, 0), last = std::min(view.last(token) - start, kBlock);
      for (int i = (token - task.first) * view.group, end = i + view.group; first < last && i < end; ++i)
        attend_block(room.queries + size_t(i) * view.width, block, first, last, view.width,
                     State(states + size_t(i) * view.stride, view.width));
    }
  }
}

// A chunk in which a query saw nothing leaves its state as it was.
OUTRIDER_ONE_COPY void fold(const View& view, int count, float* whole, float* chunk) {
  for (int i = 0; i < count; ++i, whole += view.stride, chunk += view.stride) {
    State left(whole, view.width), right(chunk, view.width);
    if (right.largest == -INFINITY) continue;
    const float largest = std::max(left.largest, right.largest);
    const float before = exp_one(left.largest - largest), now = exp_one(right.largest - largest);
    for (int at = 0; at < view.width; at += 16) {
      const f32x16 added = load(right.sums + at) * splat(now);
      store(left.sums + at, fma(load(left.sums + at), splat(before), added));
    }
    left.total = left.total * before + right.total * now;
    left.largest = largest;
  }
}

void finish(const View& view, const Task& task, float* whole) {
  const int width = view.layer.head_dim;
  for (int token = task.first; token < task.last; ++token)
    for (int member = 0; member < view.group; ++member, whole += view.stride) {
      const State state(whole, view.width);
      const size_t head = size_t(token) * view.layer.heads + size_t(task.head) * view.group + member;
      const f32x16 total = splat(state.total);
      for (int i = 0; i < width; i += 16)
        store_some(view.out + head * width + i, load(state.sums + i) / total, width - i);
    }
}

struct Chunks {
  int first, last;
};
Chunks chunks_of(const View& view, const Task& task) {
  Chunks out{view.first(task.first) / kChunk, (view.last(task.first) - 1) / kChunk + 1};
  for (int token = task.first + 1; token < task.last; ++token) {
    out.first = std::min(out.first, view.first(token) / kChunk);
    out.last = std::max(out.last, (view.last(token) - 1) / kChunk + 1);
  }
  return out;
}

void attend_task(const View& view, const Task& task) {
  const Room room(view);
  const int count = (task.last - task.first) * view.group;
  load_queries(view, task, room.queries);
  for (int i = 0; i < count; ++i) State(room.whole + size_t(i) * view.stride, view.width).clear(view.width);
  const Chunks chunks = chunks_of(view, task);
  for (int chunk = chunks.first; chunk < chunks.last; ++chunk) {
    attend_chunk(view, task, chunk, room, room.chunk);
    fold(view, count, room.whole, room.chunk);
  }
  finish(view, task, room.whole);
}

// One task of one token, cut into its chunks; whoever ends last folds them.
struct Split {
  Task task;
  Chunks chunks;
  int unit;  // the number of its first chunk among all chunks
  std::atomic<int> left;
};

void attend_split(const View& view, Split& split, int chunk, float* states) {
  const Room room(view);
  const size_t states_of_chunk = size_t(view.group) * view.stride;
  float* base = states + size_t(split.unit) * states_of_chunk;
  load_queries(view, split.task, room.queries);
  attend_chunk(view, split.task, chunk, room, base + size_t(chunk - split.chunks.first) * states_of_chunk);
  if (split.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (int i = 0; i < view.group; ++i) State(room.whole + size_t(i) * view.stride, view.width).clear(view.width);
  for (int done = 0; done < split.chunks.last - split.chunks.first; ++done)
    fold(view, view.group, room.whole, base + size_t(done) * states_of_chunk);
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

void run_split(const View& view, const Task* tasks, int count) {
  Split* splits = static_cast<Split*>(scratch(kFirst, size_t(count) * sizeof(Split)));
  int units = 0;
  for (int i = 0; i < count; ++i) {
    const Chunks chunks = chunks_of(view, tasks[i]);
    new (splits + i) Split{tasks[i], chunks, units, {chunks.last - chunks.first}};
    units += chunks.last - chunks.first;
  }
  float* states = floats(kPartial, size_t(units) * view.group * view.stride);
  Queue queue(units, 1);
  parallel([&](int, int) {
    for (int unit, end, i = 0; queue.take(unit, end);) {
      while (i + 1 < count && splits[i + 1].unit <= unit) ++i;
      attend_split(view, splits[i], splits[i].chunks.first + unit - splits[i].unit, states);
    }
  });
}

}  // namespace

void attend(const Attention& layer, const float* q, const Batch& batch, const Pages& pages, float* x) {
  const int tokens = batch.tokens, width = (layer.head_dim + 15) / 16 * 16, threads = thread_count();
  float* out = floats(kNormed, size_t(tokens) * layer.heads * layer.head_dim);  // [T][H * D]
  const View view{layer, batch, pages, q, out, layer.heads / layer.kv_heads, width, width + 16};
  const int pairs = tokens * layer.kv_heads;
  const int most = std::min(std::max(pairs / (4 * threads), 1), kTokens);
  Task* tasks = static_cast<Task*>(scratch(kPlan, size_t(pairs) * sizeof(Task)));
  const int count = plan(batch, layer.kv_heads, most, tasks);
  if (threads > 1 && pairs < 4 * threads) {
    run_split(view, tasks, count);
  } else {
    Queue queue(count, 1);
    parallel([&](int, int) {
      for (int i, end; queue.take(i, end);) attend_task(view, tasks[i]);
    });
  }
  project_back(*layer.output, out, layer.output_bias, layer.post_norm, layer.eps, x, tokens);
}

}  // namespace outrider::LEVEL
