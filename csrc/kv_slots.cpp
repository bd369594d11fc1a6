// KV slots of a step's tokens: checks of trees (Batch.parents), attention ranges, copies between slots.
#include <algorithm>
#include <climits>
#include <cstring>

#include "outrider.h"
#include "threads.h"

namespace outrider {
namespace {

void check_token(const Batch& batch, const Pages& pages, int row, int token) {
  const int begin = batch.query_starts[row];
  const int parent = batch.parents[token], position = batch.positions[token], slot = batch.slots[token];
  const std::string name = "token " + std::to_string(token);
  if (parent != -1 && (parent < begin || parent >= token))
    refuse(name + " follows token " + std::to_string(parent) + ", which does not come before it in its row");
  const int expected = parent == -1 ? batch.positions[begin] : batch.positions[parent] + 1;
  if (position != expected || position < 0)
    refuse(name + " stands at position " + std::to_string(position) + ": expected " + std::to_string(expected));
  if (slot < -1 || slot >= pages.slots())
    refuse(name + " has its key at slot " + std::to_string(slot) + ", outside the storage");
  if (slot == -1) check_table(batch, pages, row, position, position + 1);
}

// Return the position below which all tokens of a row see the same keys; from there on each sees its ancestors and
// itself. A chain shares everything if its keys lie where the page table says; so does the chain at the start of a
// tree.
int shared_until(const Batch& batch, const Pages& pages, int row) {
  const int32_t* table = batch.page_tables + size_t(row) * batch.table_width;
  const int begin = batch.query_starts[row], end = batch.query_starts[row + 1], size = pages.page_size;
  int token = begin;
  for (; token < end; ++token) {
    const int slot = batch.slots[token], position = batch.positions[token];
    if ((token > begin && batch.parents[token] != token - 1) || position / size >= batch.table_width) break;
    if (slot != -1 && slot != int64_t(table[position / size]) * size + position % size) break;
  }
  return token == end ? INT_MAX : *std::min_element(batch.positions + token, batch.positions + end);
}

void check_slots(const Pages& pages, const int32_t* slots, int count) {
  for (int i = 0; i < count; ++i)
    if (slots[i] < 0 || slots[i] >= pages.slots())
      refuse("slot " + std::to_string(slots[i]) + " lies outside the storage of " + std::to_string(pages.slots()) +
             " slots");
}

void copy_slot(const Pages& pages, int source, int target) {
  const int size = pages.page_size;
  const size_t bytes = size_t(pages.head_dim) * bytes_of(pages.dtype);
  const auto row = [&](int slot, int head) {
    return (size_t(slot / size) * pages.kv_heads + head) * size + slot % size;
  };
  for (int head = 0; head < pages.kv_heads; ++head) {
    const size_t from = row(source, head), to = row(target, head);
    for (void* storage : {pages.keys, pages.values}) {
      char* base = static_cast<char*>(storage);
      memmove(base + to * bytes, base + from * bytes, bytes);
    }
    for (float* scales : {pages.key_scales, pages.value_scales})
      if (scales) scales[to] = scales[from];
  }
}

}  // namespace

void check_rows(const Batch& batch) {
  const int32_t* starts = batch.query_starts;
  bool sound = starts[0] >= 0 && starts[batch.rows] <= batch.tokens;
  for (int row = 0; row < batch.rows; ++row) sound &= starts[row] <= starts[row + 1];
  if (!sound) refuse("`query_starts` must rise from 0 to at most " + std::to_string(batch.tokens) + " tokens");
}

void check_batch(const Attention& layer, const Batch& batch, const Pages& pages, bool queries) {
  check_rows(batch);
  const int positions = layer.cos ? layer.rope_positions : INT_MAX, slots = pages.slots();
  for (int token = 0; token < batch.tokens; ++token) {
    const int position = batch.positions[token], slot = batch.slots[token];
    if ((queries || slot != -1) && (position < 0 || position >= positions))
      refuse("token " + std::to_string(token) + " has position " + std::to_string(position) +
             ", outside the rope tables of " + std::to_string(positions) + " positions");
    if (slot < -1 || slot >= slots)
      refuse("token " + std::to_string(token) + " has its key at slot " + std::to_string(slot) +
             ", outside the storage of " + std::to_string(slots) + " slots");
  }
}

void check_table(const Batch& batch, const Pages& pages, int row, int first, int last) {
  if (first >= last) return;
  const int size = pages.page_size, end = (last - 1) / size + 1;
  if (first < 0 || end > batch.table_width)
    refuse("row " + std::to_string(row) + " reads position " + std::to_string(first < 0 ? first : last - 1) +
           ", outside its page table of " + std::to_string(batch.table_width) + " pages");
  const int32_t* table = batch.page_tables + size_t(row) * batch.table_width;
  bool sound = true;
  for (int i = first / size; i < end; ++i) sound &= uint32_t(table[i]) < uint32_t(pages.pages);
  if (!sound)
    refuse("the page table of row " + std::to_string(row) + " leads outside the storage of " +
           std::to_string(pages.pages) + " pages");
}

void find_last_visible(const Batch& batch, int32_t* reach) {
  if (batch.parents) refuse("a layer that is not causal sees no trees: the batch must have no `parents`");
  for (int row = 0; row < batch.rows; ++row) {
    const int begin = batch.query_starts[row], end = batch.query_starts[row + 1];
    if (begin < end)
      std::fill(reach + begin, reach + end, *std::max_element(batch.positions + begin, batch.positions + end));
  }
}

void find_origins(const Batch& batch, int32_t* origins) {
  for (int row = 0; row < batch.rows; ++row) {
    const int begin = batch.query_starts[row], end = batch.query_starts[row + 1];
    if (begin < end) std::fill(origins + begin, origins + end, batch.positions[begin] - 1);
  }
}

bool find_trees(const Batch& batch, const Pages& pages, int* shared) {
  bool found = false;
  for (int row = 0; row < batch.rows; ++row) {
    const int begin = batch.query_starts[row], end = batch.query_starts[row + 1];
    for (int token = begin; token < end; ++token) check_token(batch, pages, row, token);
    shared[row] = shared_until(batch, pages, row);
    found = found || shared[row] < INT_MAX;
  }
  return found;
}

void copy_slots(const std::vector<Pages>& layers, const int32_t* sources, const int32_t* targets, int count) {
  for (const Pages& pages : layers) {
    check_slots(pages, sources, count);
    check_slots(pages, targets, count);
  }
  parallel([&](int part, int parts) {
    const Share share(int64_t(layers.size()), part, parts);
    for (int layer = share.first; layer < share.last; ++layer)
      for (int i = 0; i < count; ++i) copy_slot(layers[layer], sources[i], targets[i]);
  });
}

void copy_inputs(const std::vector<States>& layers, const int32_t* sources, const int32_t* targets, int count) {
  for (const States& layer : layers) {
    const int lines = layer.slots * layer.lines;
    for (int i = 0; i < count; ++i)
      if (std::min(sources[i], targets[i]) < 0 || std::max(sources[i], targets[i]) >= lines)
        refuse("lines " + std::to_string(sources[i]) + " and " + std::to_string(targets[i]) +
               " lie outside the storage of " + std::to_string(lines) + " lines");
    for (int i = 0; i < count; ++i)
      memmove(layer.inputs + targets[i] * layer.width, layer.inputs + sources[i] * layer.width,
              layer.width * sizeof(float));
  }
}

}  // namespace outrider
