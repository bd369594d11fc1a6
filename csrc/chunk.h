// What attention works on: the tasks of a step, the room of a thread, and the keys and values of a chunk of positions.
#pragma once
#include <algorithm>
#include <climits>

#include "panel.h"
#include "rows.h"

namespace outrider::LEVEL {
namespace {

constexpr int kBlock = 16, kChunk = 64;
constexpr int kTokens = 16;  // tokens of one row that share the loads of a chunk

struct View {
  const Attention& layer;
  const Batch& batch;
  const Pages& pages;
  const float* q;        // [T][H * D]
  float* out;            // [T][H * D]
  int group;             // query heads of one key/value head
  int width;             // D padded to 16
  int stride;            // floats of one query's state
  const int* shared;     // [B], see find_trees; null: all rows are chains
  const int32_t* reach;   // [T], the last position that each token sees
  const int32_t* origin;  // [T], the position that its window counts back from
  // The positions first .. last that a token sees; none if it stands before those that anyone sees.
  int first(int token) const {
    return std::max(layer.window > 0 ? origin[token] - layer.window + 1 : 0, layer.skip);
  }
  int last(int token) const { return reach[token] + 1; }
  // The same within the chunk that starts at `start`.
  int first(int token, int start) const { return std::max(first(token) - start, 0); }
  int last(int token, int start) const { return std::min(last(token) - start, kChunk); }
  int shared_until(int row) const { return shared ? shared[row] : INT_MAX; }
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
};

void clear(const View& view, int count, float* states) {
  memset(states, 0, size_t(count) * view.stride * sizeof(float));
  for (int i = 0; i < count; ++i) State(states + size_t(i) * view.stride, view.width).largest = -INFINITY;
}

struct Room {  // of the calling thread
  float *queries, *lines, *keys, *values, *scores, *apart, *chunk, *whole;
  const void** dimensions;
  explicit Room(const View& view) {
    const size_t count = size_t(kTokens) * view.group, width = view.width;
    const size_t each = width + kChunk + kBlock + 2 * view.stride;  // floats of a query
    const size_t total = count * each + (kBlock + 2 * kChunk + 2) * width;
    queries = floats(kOfThread, total);
    lines = queries + count * width;   // [width][16]
    keys = lines + kBlock * width;     // [4][width][16]
    values = keys + kChunk * width;    // [64][width]
    scores = values + kChunk * width;  // [tokens][group][64]
    apart = scores + count * kChunk;   // [tokens][group][16], of sixteen tokens' keys
    chunk = apart + count * kBlock;
    whole = chunk + count * view.stride;
    dimensions = reinterpret_cast<const void**>(whole + count * view.stride);  // [width]
  }
};

OUTRIDER_INLINE size_t bytes_of_row(const View& view) {
  return size_t(view.layer.head_dim) * (view.pages.dtype == Half::f32 ? 4 : 2);
}
OUTRIDER_INLINE const char* row_at(const View& view, const Task& task, const void* pages, int page, int line) {
  const size_t head = size_t(page) * view.layer.kv_heads + task.head;
  return static_cast<const char*>(pages) + (head * view.pages.page_size + line) * bytes_of_row(view);
}

// Where the rows of positions from .. to of the chunk at `start` lie, which all tokens share; the others repeat one of
// them.
struct RowsOfChunk {
  const char* at[kChunk];
  RowsOfChunk(const View& view, const Task& task, const void* pages, int start, int from, int to) {
    const int32_t* table = view.batch.page_tables + size_t(task.row) * view.batch.table_width;
    const int size = view.pages.page_size;
    const size_t bytes = bytes_of_row(view);
    for (int i = from; i < to;) {
      const int line = (start + i) % size, end = std::min(i - line + size, to);
      const char* row = row_at(view, task, pages, table[(start + i) / size], line);
      for (; i < end; ++i, row += bytes) at[i] = row;
    }
    const char* some = from < to ? at[from] : static_cast<const char*>(pages);
    std::fill(at, at + from, some);
    std::fill(at + std::max(from, to), at + kChunk, some);
  }
};

// Where the rows of up to sixteen tokens lie; the others repeat the first.
struct RowsOfTokens {
  const char* at[kBlock];
  RowsOfTokens(const View& view, const Task& task, const void* pages, int first, int last) {
    const Batch& batch = view.batch;
    const int32_t* table = batch.page_tables + size_t(task.row) * batch.table_width;
    const int size = view.pages.page_size;
    for (int token = first; token < last; ++token) {
      const int slot = batch.slots[token], position = batch.positions[token];
      const int page = slot < 0 ? table[position / size] : slot / size;
      at[token - first] = row_at(view, task, pages, page, (slot < 0 ? position : slot) % size);
    }
    std::fill(at + (last - first), at + kBlock, at[0]);
  }
};

// Positions from .. to of the chunk at `start`: the branches of a tree have parted, and each token sees its ancestors'
// keys and its own.
struct Apart {
  int start, from, to;
  bool has(int position) const { return position >= start + from && position < start + to; }
};

// Calls body(first, last) for sixteen tokens of the row at a time, up to the task's last, if any stands apart.
template <class Body>
OUTRIDER_INLINE void over_tokens(const View& view, const Task& task, const Apart& apart, const Body& body) {
  const int32_t* positions = view.batch.positions;
  for (int first = view.batch.query_starts[task.row], last; first < task.last; first = last) {
    last = std::min(first + kBlock, task.last);
    if (std::any_of(positions + first, positions + last, [&](int position) { return apart.has(position); }))
      body(first, last);
  }
}

// Calls body(ancestor, i) for those of a token and its ancestors that are among first .. last and stand apart, at
// position i of the chunk, the highest first.
template <class Body>
OUTRIDER_INLINE void over_path(const View& view, int token, int first, int last, const Apart& apart, const Body& body) {
  for (; token >= first; token = view.batch.parents[token])
    if (token < last && apart.has(view.batch.positions[token])) body(token, view.batch.positions[token] - apart.start);
}

// The row as elements that are readable up to the padded width: where it lies if that is its width, else in `padded`.
template <class Element>
OUTRIDER_INLINE const Element* pad(const View& view, const char* row, Element* padded) {
  if (view.width == view.layer.head_dim) return reinterpret_cast<const Element*>(row);
  memset(padded, 0, size_t(view.width) * sizeof(Element));
  return static_cast<const Element*>(memcpy(padded, row, size_t(view.layer.head_dim) * sizeof(Element)));
}

template <class Format>
OUTRIDER_INLINE const float* widen(const typename Format::Element* from, int count, float* to) {
  for (int i = 0; i < count; i += 16) store(to + i, Format::widen(from + i));
  return to;
}

// The keys of a chunk, block by block, one dimension after the other: as they are in pages, or as floats. Those that no
// query sees are scored, and the score is thrown away.
template <class Format, class Shown>
void load_keys(const View& view, int from, int to, const char* const* rows, const Room& room) {
  using Element = typename Format::Element;
  Element *padded = reinterpret_cast<Element*>(room.values), *lines = reinterpret_cast<Element*>(room.lines);
  for (int block = from / kBlock * kBlock; block < to; block += kBlock) {
    const Element* keys[kBlock];
    for (int i = 0; i < kBlock; ++i) keys[i] = pad(view, rows[block + i], padded + size_t(i) * view.width);
    auto* out = reinterpret_cast<typename Shown::Element*>(room.keys) + size_t(block) * view.width;
    if constexpr (std::is_same_v<Format, Shown>) {
      transpose(keys, view.width, out);
    } else {
      transpose(keys, view.width, lines);
      widen<Format>(lines, kBlock * view.width, out);
    }
  }
}

template <class Format, class Shown>
void load_values(const View& view, int from, int to, const char* const* rows, const Room& room,
                 const typename Shown::Element** values) {
  using Element = typename Format::Element;
  for (int i = from; i < to; ++i) {
    const size_t at = size_t(i) * view.width;
    if constexpr (std::is_same_v<Format, Shown>) {
      values[i] = pad(view, rows[i], reinterpret_cast<Element*>(room.values) + at);
    } else {
      const Element* row = pad(view, rows[i], reinterpret_cast<Element*>(room.lines));
      values[i] = widen<Format>(row, view.width, room.values + at);
    }
  }
}

}  // namespace
}  // namespace outrider::LEVEL
