// Data structures of attention: the tasks of a step, the workspace of a thread, the keys and values of a chunk.
#pragma once
#include <algorithm>
#include <climits>

#include "attention_gemm.h"
#include "activations.h"

namespace outrider::LEVEL {
namespace {

constexpr int kBlock = 16, kChunk = 64;
constexpr int kTokens = 16;  // tokens of one row that share the loads of a chunk

struct View {
  const Attention& layer;
  const Batch& batch;
  const Pages& pages;
  const float* q;         // [T][H * D]
  float* out;             // [T][H * D]
  int group;              // query heads of one key/value head
  int width;              // D padded to 16
  int stride;             // floats of one query's state
  const int* shared;      // [B], see find_trees; null: all rows are chains
  const int32_t* reach;   // [T], last position in the token's attention range
  const int32_t* origin;  // [T], position from which the token's window counts back
  // Attention range [first, last) of a token; empty if it ends before the first visible position.
  int first(int token) const { return std::max(layer.window > 0 ? origin[token] - layer.window + 1 : 0, layer.skip); }
  int last(int token) const { return reach[token] + 1; }
  // The same range within the chunk that starts at `start`.
  int first(int token, int start) const { return std::max(first(token) - start, 0); }
  int last(int token, int start) const { return std::min(last(token) - start, kChunk); }
  int shared_until(int row) const { return shared ? shared[row] : INT_MAX; }
};

// Tokens [first, last) of one row, for one key/value head.
struct Task {
  int row, first, last, head;
};

// Running softmax state of one query: `width` weighted sums, the largest score, the sum of weights.
struct State {
  float* sums;
  float &largest, &total;
  State(float* at, int width) : sums(at), largest(at[width]), total(at[width + 1]) {}
};

void clear(const View& view, int count, float* states) {
  memset(states, 0, size_t(count) * view.stride * sizeof(float));
  for (int i = 0; i < count; ++i) State(states + size_t(i) * view.stride, view.width).largest = -INFINITY;
}

struct Workspace {  // buffers of the calling thread
  float *queries, *lines, *keys, *values, *scores, *tree_range, *chunk, *whole;
  const void** dimensions;
  explicit Workspace(const View& view) {
    const size_t count = size_t(kTokens) * view.group, width = view.width;
    const size_t each = width + kChunk + kBlock + 2 * view.stride;  // floats per query
    const size_t total = count * each + (kBlock + 2 * kChunk + 2) * width;
    queries = floats(kOfThread, total);
    lines = queries + count * width;       // [width][16]
    keys = lines + kBlock * width;         // [4][width][16]
    values = keys + kChunk * width;        // [64][width]
    scores = values + kChunk * width;      // [tokens][group][64]
    tree_range = scores + count * kChunk;  // [tokens][group][16]: scores against the keys of sixteen tree tokens
    chunk = tree_range + count * kBlock;
    whole = chunk + count * view.stride;
    dimensions = reinterpret_cast<const void**>(whole + count * view.stride);  // [width]
  }
};

OUTRIDER_INLINE size_t bytes_of_row(const View& view) {
  return size_t(view.layer.head_dim) * bytes_of(view.pages.dtype);
}
// Index of a token's head in the pages.
OUTRIDER_INLINE size_t row_index(const View& view, const Task& task, int page, int line) {
  return (size_t(page) * view.layer.kv_heads + task.head) * view.pages.page_size + line;
}
OUTRIDER_INLINE const char* row_at(const View& view, const Task& task, const void* pages, int page, int line) {
  return static_cast<const char*>(pages) + row_index(view, task, page, line) * bytes_of_row(view);
}

// Addresses of the rows of positions [from, to) of the chunk at `start`, which all tokens share; the other entries
// repeat one of them.
struct ChunkRows {
  const char* at[kChunk];
  ChunkRows(const View& view, const Task& task, const void* pages, int start, int from, int to) {
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

// Scales of the rows of positions [from, to) of the chunk at `start`; 1 for the other positions.
struct ChunkScales {
  alignas(64) float at[kChunk];
  ChunkScales(const View& view, const Task& task, const float* scales, float unit, int start, int from, int to) {
    const int32_t* table = view.batch.page_tables + size_t(task.row) * view.batch.table_width;
    const int size = view.pages.page_size;
    std::fill(at, at + kChunk, 1.0f);
    for (int i = from; i < to;) {
      const int line = (start + i) % size, end = std::min(i - line + size, to);
      const float* row = scales + row_index(view, task, table[(start + i) / size], line);
      for (; i < end; ++i) at[i] = *row++ * unit;
    }
  }
};

// Addresses of the rows of up to sixteen tokens, and their indices; the other entries repeat the first.
struct TokenRows {
  const char* at[kBlock];
  size_t index[kBlock];
  TokenRows(const View& view, const Task& task, const void* pages, int first, int last) {
    const Batch& batch = view.batch;
    const int32_t* table = batch.page_tables + size_t(task.row) * batch.table_width;
    const int size = view.pages.page_size;
    for (int token = first; token < last; ++token) {
      const int slot = batch.slots[token], position = batch.positions[token];
      const int page = slot < 0 ? table[position / size] : slot / size;
      index[token - first] = row_index(view, task, page, (slot < 0 ? position : slot) % size);
      at[token - first] = static_cast<const char*>(pages) + index[token - first] * bytes_of_row(view);
    }
    std::fill(at + (last - first), at + kBlock, at[0]);
  }
};

// Positions [from, to) of the chunk at `start` where the branches of a tree differ: each token sees the keys of its
// ancestors and its own.
struct TreeRange {
  int start, from, to;
  bool has(int position) const { return position >= start + from && position < start + to; }
};

// Call body(first, last) for sixteen tokens of the row at a time, up to the task's last, if any lies in the tree range.
template <class Body>
OUTRIDER_INLINE void over_tokens(const View& view, const Task& task, const TreeRange& tree_range, const Body& body) {
  const int32_t* positions = view.batch.positions;
  for (int first = view.batch.query_starts[task.row], last; first < task.last; first = last) {
    last = std::min(first + kBlock, task.last);
    if (std::any_of(positions + first, positions + last, [&](int position) { return tree_range.has(position); }))
      body(first, last);
  }
}

// Call body(ancestor, i) for a token and its ancestors among [first, last) that lie in the tree range, at position i of
// the chunk, deepest first.
template <class Body>
OUTRIDER_INLINE void over_path(const View& view, int token, int first, int last, const TreeRange& tree_range,
                               const Body& body) {
  for (; token >= first; token = view.batch.parents[token])
    if (token < last && tree_range.has(view.batch.positions[token]))
      body(token, view.batch.positions[token] - tree_range.start);
}

// Return the row, readable up to the padded width: in its storage if it is that wide, else copied to `padded`.
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

// Load the keys of a chunk transposed, block by block, in the storage type or as f32. Keys outside a query's range are
// scored too; their scores are ignored.
template <class Format, class Loaded>
void load_keys(const View& view, int from, int to, const char* const* rows, const Workspace& workspace) {
  using Element = typename Format::Element;
  Element *padded = reinterpret_cast<Element*>(workspace.values), *lines = reinterpret_cast<Element*>(workspace.lines);
  for (int block = from / kBlock * kBlock; block < to; block += kBlock) {
    const Element* keys[kBlock];
    for (int i = 0; i < kBlock; ++i) keys[i] = pad(view, rows[block + i], padded + size_t(i) * view.width);
    auto* out = reinterpret_cast<typename Loaded::Element*>(workspace.keys) + size_t(block) * view.width;
    if constexpr (std::is_same_v<Format, Loaded>) {
      transpose(keys, view.width, out);
    } else {
      transpose(keys, view.width, lines);
      widen<Format>(lines, kBlock * view.width, out);
    }
  }
}

template <class Format, class Loaded>
void load_values(const View& view, int from, int to, const char* const* rows, const Workspace& workspace,
                 const typename Loaded::Element** values) {
  using Element = typename Format::Element;
  for (int i = from; i < to; ++i) {
    const size_t at = size_t(i) * view.width;
    if constexpr (std::is_same_v<Format, Loaded>) {
      values[i] = pad(view, rows[i], reinterpret_cast<Element*>(workspace.values) + at);
    } else {
      const Element* row = pad(view, rows[i], reinterpret_cast<Element*>(workspace.lines));
      values[i] = widen<Format>(row, view.width, workspace.values + at);
    }
  }
}

}  // namespace
}  // namespace outrider::LEVEL
