// Inputs of a drafter after a step: the newest tokens, its first pass, its block, the next slots of each row.
//
// A few hundred integers per step: plain loops, one build for all levels. The caller sizes the outputs; shapes as in
// kernels/protocol.py. Indices are checked before use, and errors name the malformed value.

#include "outrider.h"

namespace outrider {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

// Check that each row has at least one token and the first row starts at token 0.
void check_starts(const int32_t* starts, int rows) {
  if (starts[0] != 0) refuse("`query_starts` begins at " + text(starts[0]) + ", not at 0");
  for (int row = 0; row < rows; ++row)
    if (starts[row + 1] <= starts[row]) refuse("`query_starts` gives row " + text(row) + " no tokens");
}

// Count the tokens before the first invalid id.
int count_valid(const int32_t* chosen, int columns, int vocabulary) {
  int count = 0;
  while (count < columns && chosen[count] >= 0 && chosen[count] < vocabulary) ++count;
  return count;
}

// Return the number of rejected draft tokens. A row that chose no token rejects none.
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

// Return the slot of a position, or -1.
int32_t slot_of(const PageTables& tables, int row, int64_t position) {
  const int64_t index = position / tables.page_size;
  if (position < 0 || position >= tables.limit || index >= tables.width) return -1;
  const int32_t page = tables.tables[size_t(row) * tables.width + index];
  const int64_t slot = int64_t(page) * tables.page_size + position % tables.page_size;
  if (slot > INT32_MAX) refuse("page " + text(page) + " of row " + text(row) + " has slots beyond 32 bits");
  return page < 0 ? -1 : int32_t(slot);
}

void check_draft_inputs(const StepRows& step, int rows, int tokens, int extra, int mask) {
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

void next_tokens(const int32_t* chosen, int rows, int columns, const int32_t* drafted, const int32_t* query_starts,
                 const int32_t* backup, const uint8_t* discard, int vocabulary, const NextTokens& out) {
  check_starts(query_starts, rows);
  for (int row = 0; row < rows; ++row) {
    const int32_t* sampling = chosen + size_t(row) * columns;
    const int count = discard[row] ? 0 : count_valid(sampling, columns, vocabulary);
    const int64_t rejected = count_rejected(row, drafted[row], count, query_starts[row + 1] - query_starts[row]);
    const int32_t token = count > 0 ? sampling[count - 1] : backup[row];
    if (token < 0 || token >= vocabulary)
      refuse("the backup token " + text(token) + " of row " + text(row) + " lies outside the vocabulary of " +
             text(vocabulary));
    out.tokens[row] = token;
    out.counts[row] = count;
    out.rejected[row] = int32_t(rejected);
    out.ends[row] = int32_t(query_starts[row + 1] - 1 - rejected);
  }
}

// Row b of the output has one entry per token of the row plus `extra` new ones; with `shift` the row's first token is
// dropped. Accepted tokens come first, then the newest token and masks, then rejected ones as padding.
void draft_inputs(const StepRows& step, int rows, int tokens, int extra, bool shift, int mask, const DraftInputs& out) {
  check_draft_inputs(step, rows, tokens, extra, mask);
  const int added = extra - int(shift);
  out.query_starts[0] = 0;
  for (int row = 0; row < rows; ++row) {
    const int first = step.query_starts[row], length = step.query_starts[row + 1] - first;
    const int kept = step.ends[row] - first + 1 - int(shift);
    const int start = out.query_starts[row], length_out = length + added;
    const int32_t* source = step.tokens + first + int(shift);
    for (int j = 0; j < length_out; ++j) {
      const bool rejected = j >= kept + extra;
      out.tokens[start + j] = rejected ? 0 : j < kept ? source[j] : j == kept ? step.newest[row] : mask;
      out.positions[start + j] = rejected ? 0 : int32_t(int64_t(step.positions[first]) + j);
      out.rejected[start + j] = rejected;
    }
    for (int i = 0; i < extra; ++i) out.samples[size_t(row) * extra + i] = start + kept + i;
    for (int i = 0; i < length; ++i) out.sources[first + i] = shift || i < kept ? start + i : -1;
    out.query_starts[row + 1] = start + length_out;
  }
}

// Rejected tokens get no slot: the keys of a block that is shorter, or cut at the limit, would stay behind.
void block_inputs(const StepRows& step, int rows, int tokens, const PageTables& tables, int masks, int mask,
                  const BlockInputs& out) {
  check_draft_inputs(step, rows, tokens, masks + 1, mask);
  check_page_size(tables.page_size);
  out.query_starts[0] = 0;
  for (int row = 0; row < rows; ++row) {
    const int end = step.ends[row], start = out.query_starts[row];
    for (int token = step.query_starts[row]; token < step.query_starts[row + 1]; ++token)
      out.context_slots[token] = token > end ? -1 : slot_of(tables, row, step.positions[token]);
    for (int i = 0; i <= masks; ++i) {
      const int64_t position = int64_t(step.positions[end]) + 1 + i;
      const int32_t slot = slot_of(tables, row, position);
      out.tokens[start + i] = i == 0 ? step.newest[row] : mask;
      out.positions[start + i] = slot < 0 ? 0 : int32_t(position);
      out.slots[start + i] = slot;
    }
    out.query_starts[row + 1] = start + masks + 1;
  }
}

void next_slots(const int32_t* positions, const PageTables& tables, int rows, int count, int32_t* next,
                int32_t* slots) {
  check_page_size(tables.page_size);
  for (int row = 0; row < rows; ++row)
    for (int step = 0; step < count; ++step) {
      const size_t index = size_t(row) * count + step;
      const int64_t position = int64_t(positions[row]) + 1 + step;
      slots[index] = slot_of(tables, row, position);
      next[index] = slots[index] < 0 ? 0 : int32_t(position);
    }
}

}  // namespace outrider
