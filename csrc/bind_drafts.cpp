// Speculation's kernels as Python functions: what is verified, and what a drafter reads after a step.
#include "bind.h"

using namespace nb::literals;

namespace outrider {
namespace {

// What `sample` and the verifiers read; an address of 0 means absent.
void bind_choices(nb::module_& module) {
  nb::class_<Choice>(module, "Choice", "How each row of logits becomes a token.")
      .def(nb::new_([](Address temperature, Address top_k, Address top_p, Address min_p, Address seeds,
                       Address positions, Address epochs, int stream) {
             return Choice{at<const float>(temperature), at<const float>(top_p),     at<const float>(min_p),
                           at<const int32_t>(top_k),     at<const int32_t>(positions), at<const int64_t>(seeds),
                           at<const int32_t>(epochs),    uint32_t(stream)};
           }),
           nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seeds"_a, "positions"_a, "epochs"_a,
           "stream"_a);
  nb::class_<Drafts>(module, "Drafts", "The guesses that a step verifies.")
      .def(nb::new_([](Address starts, Address tokens, Address parents, int requests, int rows, int width,
                       Address logits, Address drawn) {
             return Drafts{at<const int32_t>(starts), at<const int32_t>(tokens), at<const int32_t>(parents), requests,
                           rows, width, at<const float>(logits), at<const uint8_t>(drawn)};
           }),
           nb::kw_only(), "starts"_a, "tokens"_a, "parents"_a, "requests"_a, "rows"_a, "width"_a, "logits"_a,
           "drawn"_a);
}

void branch(Address logits, int rows, int vocabulary, const Choice& choice, int count, Address tokens,
            Address logprobs) {
  level().branch(at<const float>(logits), rows, vocabulary, choice, count, at<int32_t>(tokens), at<float>(logprobs));
}

void expand(const Choice& choice, const Drafts& drafts, Address temperature, Address top_k, Address top_p,
            Address min_p, Address seeds, Address positions, Address epochs) {
  level().expand(choice, drafts,
                 {at<float>(temperature), at<float>(top_p), at<float>(min_p), at<int32_t>(top_k),
                  at<int32_t>(positions), at<int32_t>(epochs), at<int64_t>(seeds)});
}

Kept kept_at(Address tokens, Address rows, Address counts) {
  return {at<int32_t>(tokens), at<int32_t>(rows), at<int32_t>(counts)};
}

void match(Address sampled, const Drafts& drafts, Address tokens, Address rows, Address counts) {
  level().match(at<const int32_t>(sampled), drafts, kept_at(tokens, rows, counts));
}

void force(Address sampled, const Drafts& drafts, Address rates, const Choice& choice, Address tokens, Address rows,
           Address counts) {
  level().force(at<const int32_t>(sampled), drafts, at<const float>(rates), choice, kept_at(tokens, rows, counts));
}

void reject(Address logits, int vocabulary, const Drafts& drafts, const Choice& choice, bool block, bool again,
            Address tokens, Address rows, Address counts) {
  level().reject(at<const float>(logits), vocabulary, drafts, choice, block, again, kept_at(tokens, rows, counts));
}

void bind_verification(nb::module_& module) {
  const Unlocked unlocked;
  module.def("branch", &branch, unlocked);
  module.def("expand", &expand, unlocked);
  module.def("match", &match, unlocked);
  module.def("force", &force, unlocked);
  module.def("reject", &reject, unlocked);
}

void settle_rows(Address chosen, int rows, int columns, Address drafted, Address query_starts, Address backup,
                 Address discard, int vocabulary, Address tokens, Address counts, Address rejected, Address ends) {
  settle(at<const int32_t>(chosen), rows, columns, at<const int32_t>(drafted), at<const int32_t>(query_starts),
         at<const int32_t>(backup), at<const uint8_t>(discard), vocabulary,
         {at<int32_t>(tokens), at<int32_t>(counts), at<int32_t>(rejected), at<int32_t>(ends)});
}

void read_draft_inputs(Address tokens, Address positions, Address query_starts, Address ends, Address newest, int rows,
                       int count, int extra, bool shift, int mask, Address out_tokens, Address out_positions,
                       Address out_query_starts, Address samples, Address sources, Address rejected) {
  draft_inputs({at<const int32_t>(tokens), at<const int32_t>(positions), at<const int32_t>(query_starts),
                at<const int32_t>(ends), at<const int32_t>(newest)},
               rows, count, extra, shift, mask,
               {at<int32_t>(out_tokens), at<int32_t>(out_positions), at<int32_t>(out_query_starts),
                at<int32_t>(samples), at<int32_t>(sources), at<uint8_t>(rejected)});
}

void read_block_inputs(Address positions, Address query_starts, Address ends, Address newest, int rows, int count,
                       Address page_tables, int table_width, int page_size, int limit, int masks, int mask,
                       Address context_slots, Address tokens, Address out_positions, Address slots,
                       Address out_query_starts) {
  block_inputs({nullptr, at<const int32_t>(positions), at<const int32_t>(query_starts), at<const int32_t>(ends),
                at<const int32_t>(newest)},
               rows, count, {at<const int32_t>(page_tables), table_width, page_size, limit}, masks, mask,
               {at<int32_t>(context_slots), at<int32_t>(tokens), at<int32_t>(out_positions), at<int32_t>(slots),
                at<int32_t>(out_query_starts)});
}

void advance_rows(Address positions, Address page_tables, int rows, int table_width, int page_size, int limit,
                  int count, Address next, Address slots) {
  advance(at<const int32_t>(positions), {at<const int32_t>(page_tables), table_width, page_size, limit}, rows, count,
          at<int32_t>(next), at<int32_t>(slots));
}

void bind_preparation(nb::module_& module) {
  const Unlocked unlocked;
  module.def("settle", &settle_rows, unlocked);
  module.def("draft_inputs", &read_draft_inputs, unlocked);
  module.def("block_inputs", &read_block_inputs, unlocked);
  module.def("advance", &advance_rows, unlocked);
}

}  // namespace

void bind_drafts(nb::module_& module) {
  bind_choices(module);
  bind_verification(module);
  bind_preparation(module);
}

}  // namespace outrider
