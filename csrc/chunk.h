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
  float *queries, *lines, *keys, *values, *scores, *chunk, *whole;
  const void** dimensions;
  explicit Room(const View& view) {
    const size_t count = size_t(kTokens) * view.group, width = view.width;
    const size_t total = count * width + (kBlock + 2 * kChunk + 2) * width + count * (kChunk + 2 * view.stride);
    queries = floats(kOfThread, total);
    lines = queries + count * width;   // [width][16]
    keys = lines + kBlock * width;     // [4][width][16]
    values = keys + kChunk * width;    // [64][width]
    scores = values + kChunk * width;  // [tokens][group][64]
    chunk = scores + count * kChunk;
    whole = chunk + count * view.stride;
    dimensions = reinterpret_cast<const void**>(whole + count * view.stride);  // [width]
  }
};

// Where the rows of positions from .. to of the chunk at `start` lie; the others repeat one of them. Those that are not
// shared are the last token's and its ancestors'.
struct RowsOfChunk {
  const char* at[kChunk];
  RowsOfChunk(const View& view, const Task& task, const void* pages, int start, int from, int to) {
    const int32_t* table = view.batch.page_tables + size_t(task.row) * view.batch.table_width;
    const int size = view.pages.page_size, shared = view.shared_until(task.row);
    const size_t bytes = size_t(view.layer.head_dim) * (view.pages.dtype == Half::f32 ? 4 : 2);
    const auto row_at = [&](int page, int line) {
      const size_t head = size_t(page) * view.layer.kv_heads + task.head;
      return static_cast<const char*>(pages) + (head * size + line) * bytes;
    };
    for (int i = from, limit = std::min(to, shared - start); i < limit;) {
      const int line = (start + i) % size, end = std::min(i - line + size, limit);
      const char* row = row_at(table[(start + i) / size], line);
      for (; i < end; ++i, row += bytes) at[i] = row;
    }
    const Batch& batch = view.batch;
    for (int token = task.last - 1; shared - start < to && token >= 0 && batch.positions[token] >= shared;
         token = batch.parents[token]) {
      const int i = batch.positions[token] - start, slot = batch.slots[token];
      if (i < from || i >= to) continue;
      at[i] = slot < 0 ? row_at(table[(start + i) / size], (start + i) % size) : row_at(slot / size, slot % size);
    }
    const char* some = from < to ? at[from] : static_cast<const char*>(pages);
    std::fill(at, at + from, some);
    std::fill(at + std::max(from, to), at + kChunk, some);
  }
};

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
void load_keys(const View& view, int from, int to, const RowsOfChunk& rows, const Room& room) {
  using Element = typename Format::Element;
  Element *padded = reinterpret_cast<Element*>(room.values), *lines = reinterpret_cast<Element*>(room.lines);
  for (int block = from / kBlock * kBlock; block < to; block += kBlock) {
    const Element* keys[kBlock];
    for (int i = 0; i < kBlock; ++i) keys[i] = pad(view, rows.at[block + i], padded + size_t(i) * view.width);
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
void load_values(const View& view, int from, int to, const RowsOfChunk& rows, const Room& room,
                 const typename Shown::Element** values) {
  using Element = typename Format::Element;
  for (int i = from; i < to; ++i) {
    const size_t at = size_t(i) * view.width;
    if constexpr (std::is_same_v<Format, Shown>) {
      values[i] = pad(view, rows.at[i], reinterpret_cast<Element*>(room.values) + at);
    } else {
      const Element* row = pad(view, rows.at[i], reinterpret_cast<Element*>(room.lines));
      values[i] = widen<Format>(row, view.width, room.values + at);
    }
  }
}

}  // namespace
}  // namespace outrider::LEVEL
