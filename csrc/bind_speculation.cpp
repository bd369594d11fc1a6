// Python bindings of the speculation kernels: sampling metadata, verification, draft inputs.
#include "bind.h"

using namespace nb::literals;

namespace outrider {
namespace {

// Inputs of `sample` and the verifiers; an address of 0 means absent.
void bind_sampling(nb::module_& module) {
  nb::class_<SamplingMetadata>(module, "SamplingMetadata", "How each row of logits becomes a token.")
      .def(nb::new_([](Address temperature, Address top_k, Address top_p, Address min_p, Address seeds,
                       Address positions, Address epochs, int stream) {
             return SamplingMetadata{at<const float>(temperature), at<const float>(top_p),
                                     at<const float>(min_p),       at<const int32_t>(top_k),
                                     at<const int32_t>(positions), at<const int64_t>(seeds),
                                     at<const int32_t>(epochs),    uint32_t(stream)};
           }),
           nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seeds"_a, "positions"_a, "epochs"_a,
           "stream"_a);
  nb::class_<VerifyInputs>(module, "VerifyInputs", "The drafts that a step verifies.")
      .def(
          nb::new_([](Address starts, Address tokens, Address parents, int requests, int rows, int width,
                      Address logits, Address drawn) {
            return VerifyInputs{
                at<const int32_t>(starts), at<const int32_t>(tokens), at<const int32_t>(parents), requests, rows, width,
                at<const float>(logits),   at<const uint8_t>(drawn)};
          }),
          nb::kw_only(), "starts"_a, "tokens"_a, "parents"_a, "requests"_a, "rows"_a, "width"_a, "logits"_a, "drawn"_a);
}

void sample_children(Address logits, int rows, int vocabulary, const SamplingMetadata& sampling, int count,
                     Address tokens, Address logprobs) {
  recorded([=] {
    level().sample_children(at<const float>(logits), rows, vocabulary, sampling, count, at<int32_t>(tokens),
                            at<float>(logprobs));
  });
}

void expand_sampling(const SamplingMetadata& sampling, const VerifyInputs& drafts, Address temperature, Address top_k,
                     Address top_p, Address min_p, Address seeds, Address positions, Address epochs) {
  const ExpandedSampling out{at<float>(temperature), at<float>(top_p),    at<float>(min_p),  at<int32_t>(top_k),
                             at<int32_t>(positions), at<int32_t>(epochs), at<int64_t>(seeds)};
  recorded([=] { level().expand_sampling(sampling, drafts, out); });
}

VerifyOutput output_at(Address tokens, Address rows, Address counts) {
  return {at<int32_t>(tokens), at<int32_t>(rows), at<int32_t>(counts)};
}

void verify_exact(Address sampled, const VerifyInputs& drafts, Address tokens, Address rows, Address counts) {
  recorded([=] { level().verify_exact(at<const int32_t>(sampled), drafts, output_at(tokens, rows, counts)); });
}

void verify_synthetic(Address sampled, const VerifyInputs& drafts, Address rates, const SamplingMetadata& sampling,
                      Address tokens, Address rows, Address counts) {
  level().verify_synthetic(at<const int32_t>(sampled), drafts, at<const float>(rates), sampling,
                           output_at(tokens, rows, counts));
}

void verify_rejection(Address logits, int vocabulary, const VerifyInputs& drafts, const SamplingMetadata& sampling,
                      bool block, bool with_replacement, Address tokens, Address rows, Address counts,
                      Address nonfinite) {
  VerifyOutput output = output_at(tokens, rows, counts);
  output.nonfinite = at<int32_t>(nonfinite);
  level().verify_rejection(at<const float>(logits), vocabulary, drafts, sampling, block, with_replacement, output);
}

void bind_verification(nb::module_& module) {
  const Unlocked unlocked;
  module.def("sample_children", &sample_children, unlocked);
  module.def("expand_sampling", &expand_sampling, unlocked);
  module.def("verify_exact", &verify_exact, unlocked);
  module.def("verify_synthetic", &verify_synthetic, unlocked);
  module.def("verify_rejection", &verify_rejection, unlocked);
}

void bind_next_tokens(Address chosen, int rows, int columns, Address drafted, Address query_starts, Address backup,
                 Address discard, int vocabulary, Address tokens, Address counts, Address rejected, Address ends) {
  recorded([=] {
    next_tokens(at<const int32_t>(chosen), rows, columns, at<const int32_t>(drafted), at<const int32_t>(query_starts),
                at<const int32_t>(backup), at<const uint8_t>(discard), vocabulary,
                {at<int32_t>(tokens), at<int32_t>(counts), at<int32_t>(rejected), at<int32_t>(ends)});
  });
}

void bind_draft_inputs(Address tokens, Address positions, Address query_starts, Address ends, Address newest, int rows,
                       int count, int extra, bool shift, int mask, Address out_tokens, Address out_positions,
                       Address out_query_starts, Address samples, Address sources, Address rejected) {
  recorded([=] {
    draft_inputs({at<const int32_t>(tokens), at<const int32_t>(positions), at<const int32_t>(query_starts),
                  at<const int32_t>(ends), at<const int32_t>(newest)},
                 rows, count, extra, shift, mask,
                 {at<int32_t>(out_tokens), at<int32_t>(out_positions), at<int32_t>(out_query_starts),
                  at<int32_t>(samples), at<int32_t>(sources), at<uint8_t>(rejected)});
  });
}

void bind_block_inputs(Address positions, Address query_starts, Address ends, Address newest, int rows, int count,
                       Address page_tables, int table_width, int page_size, int limit, int masks, int mask,
                       Address context_slots, Address tokens, Address out_positions, Address slots,
                       Address out_query_starts) {
  recorded([=] {
    block_inputs({nullptr, at<const int32_t>(positions), at<const int32_t>(query_starts), at<const int32_t>(ends),
                  at<const int32_t>(newest)},
                 rows, count, {at<const int32_t>(page_tables), table_width, page_size, limit}, masks, mask,
                 {at<int32_t>(context_slots), at<int32_t>(tokens), at<int32_t>(out_positions), at<int32_t>(slots),
                  at<int32_t>(out_query_starts)});
  });
}

void bind_next_slots(Address positions, Address page_tables, int rows, int table_width, int page_size, int limit,
                  int count, Address next, Address slots) {
  const PageTables tables{at<const int32_t>(page_tables), table_width, page_size, limit};
  recorded(
      [=] { next_slots(at<const int32_t>(positions), tables, rows, count, at<int32_t>(next), at<int32_t>(slots)); });
}

void bind_preparation(nb::module_& module) {
  const Unlocked unlocked;
  module.def("next_tokens", &bind_next_tokens, unlocked);
  module.def("draft_inputs", &bind_draft_inputs, unlocked);
  module.def("block_inputs", &bind_block_inputs, unlocked);
  module.def("next_slots", &bind_next_slots, unlocked);
}

}  // namespace

void bind_speculation(nb::module_& module) {
  bind_sampling(module);
  bind_verification(module);
  bind_preparation(module);
}

}  // namespace outrider
