// What a drafter reads after a step: the newest tokens, its first inputs, its block, the next position of each row.
//
// A few hundred integers a step: plain loops, one build for all levels. The caller sizes the outputs; shapes as in
// kernels/__init__.py. Everything that is used as an index is checked first, and what is malformed is named.

#include "outrider.h"

namespace outrider {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

// Each row owns at least one token, the first row from token 0 on.
void check_starts(const int32_t* starts, int rows) {
  if (starts[0] != 0) refuse("`query_starts` begins at " + text(starts[0]) + ", not at 0");
  for (int row = 0; row < rows; ++row)
    if (starts[row + 1] <= starts[row]) refuse("`query_starts` gives row " + text(row) + " no tokens");
}

// The tokens before the first id that is none.
int count_valid(const int32_t* chosen, int columns, int vocabulary) {
  int count = 0;
  while (count < columns && chosen[count] >= 0 && chosen[count] < vocabulary) ++count;
  return count;
}

// Tokens that a row had drafted and did not keep. A row that chose nothing keeps all its tokens.
int64_t count_rejected(int row, int drafted, int count, int tokens) {
  if (drafted < 0) refuse("row " + text(row) + " cannot have drafted " + text(drafted) + " tokens");
  if (count > int64_t(drafted) + 1)
    refuse("row " + text(row) + " chose " + text(count) + " tokens after drafting " + text(drafted));
  const int64_t rejected = count > 0 ? int64_t(drafted) + 1 - count : 0;
  if (rejected >= tokens)
    refuse("row " + text(row) + " rejects " + text(rejected) + " tokens but has only " + text(tokens));
  return rejected;
}

void check_page_size(int page_size) {
  if (page_size < 1) refuse("`page_size` is " + text(page_size) + ": a page has at least one slot");
}

// The slot of a position; -1 where there is none.
int32_t slot_of(const Paging& paging, int row, int64_t position) {
  const int64_t index = position / paging.page_size;
  if (position < 0 || position >= paging.limit || index >= paging.width) return -1;
  const int32_t page = paging.tables[size_t(row) * paging.width + index];
  const int64_t slot = int64_t(page) * paging.page_size + position % paging.page_size;
  if (slot > INT32_MAX) refuse("page " + text(page) + " of row " + text(row) + " has slots beyond 32 bits");
  return page < 0 ? -1 : int32_t(slot);
}

void check_draft_inputs(const DraftStep& step, int rows, int tokens, int extra, int mask) {
  check_starts(step.query_starts, rows);
  if (step.query_starts[rows] != tokens)
    refuse("`query_starts` ends at " + text(step.query_starts[rows]) + ", but there are " + text(tokens) + " tokens");
  if (extra > 1 && mask < 0) refuse("the mask token " + text(mask) + " is no token");
  for (int row = 0; row < rows; ++row) {
    const int first = step.query_starts[row], next = step.query_starts[row + 1];
    if (step.ends[row] < first || step.ends[row] >= next)
      refuse("the end " + text(step.ends[row]) + " of row " + text(row) + " lies outside its tokens " + text(first) +
             " .. " + text(next - 1));
    if (step.newest[row] < 0)
      refuse("the newest token " + text(step.newest[row]) + " of row " + text(row) + " is no token");
  }
}

}  // namespace

void settle(const int32_t* chosen, int rows, int columns, const int32_t* drafted, const int32_t* query_starts,
            const int32_t* backup, const uint8_t* discard, int vocabulary, const SettledRows& out) {
  check_starts(query_starts, rows);
  for (int row = 0; row < rows; ++row) {
    const int32_t* choice = chosen + size_t(row) * columns;
    const int count = discard[row] ? 0 : count_valid(choice, columns, vocabulary);
    const int64_t rejected = count_rejected(row, drafted[row], count, query_starts[row + 1] - query_starts[row]);
    const int32_t token = count > 0 ? choice[count - 1] : backup[row];
    if (token < 0 || token >= vocabulary)
      refuse("the backup token " + text(token) + " of row " + text(row) + " lies outside the vocabulary of " +
             text(vocabulary));
    out.tokens[row] = token;
    out.counts[row] = count;
    out.rejected[row] = int32_t(rejected);
    out.ends[row] = int32_t(query_starts[row + 1] - 1 - rejected);
  }
}

// Row b of the output has one place for each token of the row, and for `extra` new ones; with `shift` the row's first
// token gives up its place. Kept tokens come first, then newest and masks, then rejected ones as padding.
void draft_inputs(const DraftStep& step, int rows, int tokens, int extra, bool shift, int mask,
                  const DraftPlaces& out) {
  check_draft_inputs(step, rows, tokens, extra, mask);
  const int added = extra - int(shift);
  out.query_starts[0] = 0;
  for (int row = 0; row < rows; ++row) {
    const int first = step.query_starts[row], length = step.query_starts[row + 1] - first;
    const int kept = step.ends[row] - first + 1 - int(shift);
    const int start = out.query_starts[row], places = length + added;
    const int32_t* source = step.tokens + first + int(shift);
    for (int j = 0; j < places; ++j) {
      const bool rejected = j >= kept + extra;
      out.tokens[start + j] = rejected ? 0 : j < kept ? source[j] : j == kept ? step.newest[row] : mask;
      out.positions[start + j] = rejected ? 0 : int32_t(int64_t(step.positions[first]) + j);
      out.rejected[start + j] = rejected;
    }
    for (int i = 0; i < extra; ++i) out.samples[size_t(row) * extra + i] = start + kept + i;
    for (int i = 0; i < length; ++i) out.sources[first + i] = shift || i < kept ? start + i : -1;
    out.query_starts[row + 1] = start + places;
  }
}

// What was rejected gets no slot: a block that is narrower, or cut off by the limit, would leave its keys behind.
void block_inputs(const DraftStep& step, int rows, int tokens, const Paging& paging, int masks, int mask,
                  const BlockPlaces& out) {
  check_draft_inputs(step, rows, tokens, masks + 1, mask);
  check_page_size(paging.page_size);
  out.query_starts[0] = 0;
  for (int row = 0; row < rows; ++row) {
    const int end = step.ends[row], start = out.query_starts[row];
    for (int token = step.query_starts[row]; token < step.query_starts[row + 1]; ++token)
      out.context_slots[token] = token > end ? -1 : slot_of(paging, row, step.positions[token]);
    for (int i = 0; i <= masks; ++i) {
      const int64_t position = int64_t(step.positions[end]) + 1 + i;
      const int32_t slot = slot_of(paging, row, position);
      out.tokens[start + i] = i == 0 ? step.newest[row] : mask;
      out.positions[start + i] = slot < 0 ? 0 : int32_t(position);
      out.slots[start + i] = slot;
    }
    out.query_starts[row + 1] = start + masks + 1;
  }
}

void advance(const int32_t* positions, const Paging& paging, int rows, int count, int32_t* next, int32_t* slots) {
  check_page_size(paging.page_size);
  for (int row = 0; row < rows; ++row)
    for (int step = 0; step < count; ++step) {
      const size_t place = size_t(row) * count + step;
      const int64_t position = int64_t(positions[row]) + 1 + step;
      slots[place] = slot_of(paging, row, position);
      next[place] = slots[place] < 0 ? 0 : int32_t(position);
    }
}

}  // namespace outrider
