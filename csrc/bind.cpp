// Python bindings of the kernels. Tensors arrive as addresses: kernels/cpu checks them and keeps them alive.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bind.h"
#include "threads.h"

using namespace nb::literals;

namespace outrider {
namespace {

using MatrixPointer = std::shared_ptr<Matrix>;

const char* kind_name(const Matrix& matrix) {
  static const char* const names[] = {"f32", "f16", "bf16", "fp8", "q4", "q8"};
  return names[int(matrix.kind)];
}

void check_ids(const int32_t* ids, int count, int limit) {
  for (int i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= limit)
      refuse("token " + std::to_string(ids[i]) + " lies outside the vocabulary of " + std::to_string(limit));
}

void embed(const Matrix& matrix, Address tokens, int count, float scale, Address out) {
  recorded([=] {
    const int32_t* ids = at<const int32_t>(tokens);
    check_ids(ids, count, matrix.rows);
    for (int i = 0; i < count; ++i) unpack_row(matrix, ids[i], scale, at<float>(out) + size_t(i) * matrix.cols);
  });
}

// Read memory at full bandwidth: 64-bit xor over four streams per thread, folded into one number.
uint64_t stream_read(Address address, size_t bytes) {
  const uint64_t* words = at<const uint64_t>(address);
  const int64_t blocks = int64_t(bytes / 256);
  std::atomic<uint64_t> total{0};
  parallel([&](int part, int parts) {
    typedef uint64_t u64x8 __attribute__((vector_size(64)));
    u64x8 sums[4] = {};
    const int64_t first = blocks * part / parts, last = blocks * (part + 1) / parts;
    for (int64_t block = first; block < last; ++block)
      for (int i = 0; i < 4; ++i) {
        u64x8 lanes;
        memcpy(&lanes, words + block * 32 + i * 8, sizeof lanes);
        sums[i] ^= lanes;
      }
    const u64x8 all = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
    for (int i = 0; i < 8; ++i) total ^= all[i];
  });
  return total;
}

void bind_matrix(nb::module_& module) {
  nb::class_<Matrix>(module, "Matrix", "A weight matrix, repacked for the kernels.")
      .def(nb::new_([](const std::string& format, int rows, int cols, Address source, bool fast_activations,
                       Address order) {
             nb::gil_scoped_release release;
             return pack(format, rows, cols, at<const void>(source), fast_activations, at<const int32_t>(order));
           }),
           "format"_a, "rows"_a, "cols"_a, "source"_a, "fast_activations"_a = false, "order"_a = 0)
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_ro("bytes", &Matrix::bytes)
      .def_prop_ro("kind", &kind_name);
  module.def(
      "quantize",
      [](const std::string& from, const std::string& to, int64_t weights, Address source, Address target) {
        quantize(from, to, weights, at<const void>(source), at<void>(target));
      },
      "from_"_a, "to"_a, "weights"_a, "source"_a, "target"_a, Unlocked());
}

void check_shape(const MatrixPointer& matrix, const char* name, int rows, int cols) {
  if (!matrix || matrix->rows != rows || matrix->cols != cols)
    refuse("the `" + std::string(name) + "` matrix must be [" + std::to_string(rows) + ", " + std::to_string(cols) +
           "]");
}

// Matrices that read the same rows read them in one order.
void check_order(const Matrix& first, const Matrix& second) {
  if (first.order != second.order) refuse("matrices of one input have different orders of their columns");
}

std::shared_ptr<Attention> make_attention(MatrixPointer query, MatrixPointer key, MatrixPointer value,
                                          MatrixPointer output, int heads, int kv_heads, int head_dim, int window,
                                          int skip, bool causal, bool anchored, bool whole_norms, float scale,
                                          float soft_cap, float eps, Address norm, Address post_norm,
                                          Address query_norm, Address key_norm, Address query_bias, Address key_bias,
                                          Address value_bias, Address output_bias, Address key_factors, Address sinks,
                                          Address cos, Address sin, int rope_positions, MatrixPointer gate) {
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0 || head_dim < 2 || head_dim % 2 != 0)
    refuse("attention needs a multiple of `kv_heads` as `heads` and an even `head_dim`");
  if (!(soft_cap >= 0)) refuse("`soft_cap` is a bound of scores: 0 or more");
  if (window < 0 || skip < 0) refuse("`window` and `skip` are counts of positions: 0 or more");
  const int width = query ? query->cols : 0;  // input width; the residual stream may have another
  check_shape(query, "query", heads * head_dim, width);
  check_shape(key, "key", kv_heads * head_dim, width);
  check_shape(value, "value", kv_heads * head_dim, width);
  check_shape(output, "output", output ? output->rows : 0, heads * head_dim);
  check_order(*query, *key);
  check_order(*query, *value);
  if (gate) check_shape(gate, "gate", heads * head_dim, width);
  auto f = [](Address address) { return at<const float>(address); };
  return std::make_shared<Attention>(
      Attention{query,         key,           value,         output,       heads,       kv_heads,
                head_dim,      window,        skip,          causal,       anchored,    whole_norms,
                scale,         soft_cap,      eps,           f(norm),      f(post_norm), f(query_norm),
                f(key_norm),   f(query_bias), f(key_bias),   f(value_bias), f(output_bias), f(key_factors),
                f(sinks),
                f(cos),        f(sin),        rope_positions, {},           {},          {},
                {},            gate});
}

std::shared_ptr<Mlp> make_mlp(MatrixPointer gate, MatrixPointer up, MatrixPointer down, int activation, float eps,
                              Address norm, Address post_norm, Address gate_bias, Address up_bias, Address down_bias) {
  const int width = gate ? gate->cols : 0, hidden = gate ? gate->rows : 0;
  check_shape(gate, "gate", hidden, width);
  check_shape(up, "up", hidden, width);
  check_shape(down, "down", width, hidden);
  check_order(*gate, *up);
  auto f = [](Address address) { return at<const float>(address); };
  return std::make_shared<Mlp>(
      Mlp{gate, up, down, activation, eps, f(norm), f(post_norm), f(gate_bias), f(up_bias), f(down_bias)});
}

using LoraPointer = std::shared_ptr<LoraSlots>;

LoraPointer checked(LoraPointer slots, const Matrix& matrix) {
  if (slots->rows != matrix.rows || slots->cols != matrix.cols)
    refuse("the slots of adapters have another shape than their matrix");
  return slots;
}

// Fill a slot, or empty it if both matrices are null.
void set_lora(LoraSlots& slots, int slot, MatrixPointer a, MatrixPointer b) {
  if (slot < 0 || size_t(slot) >= slots.pairs.size()) refuse("no slot " + std::to_string(slot) + " for an adapter");
  if (!a != !b) refuse("an adapter has two matrices");
  if (a) {
    check_shape(a, "A", a->rows, slots.cols);
    check_shape(b, "B", slots.rows, a->rows);
    if (a->kind != Kind::f32 || b->kind != Kind::f32) refuse("the matrices of an adapter must be f32");
  }
  slots.pairs[slot] = {a, b};
  slots.rank = 0;
  for (const auto& pair : slots.pairs) slots.rank = std::max(slots.rank, pair.a ? pair.a->rows : 0);
}

void check_adapters(const int32_t* adapters, int tokens, const LoraSlots* slots) {
  if (!adapters || !slots) return;
  for (int i = 0; i < tokens; ++i)
    if (adapters[i] >= int(slots->pairs.size())) refuse("no slot " + std::to_string(adapters[i]) + " for an adapter");
}

void bind_lora(nb::module_& module) {
  nb::class_<LoraSlots>(module, "LoraSlots", "Low-rank adapters over one matrix.")
      .def(nb::new_([](int slots, int rows, int cols) {
             return LoraSlots{rows, cols, 0, std::vector<LoraSlots::Pair>(size_t(slots))};
           }),
           "slots"_a, "rows"_a, "cols"_a)
      .def("set", &set_lora, "slot"_a, "a"_a.none(), "b"_a.none());
}

std::shared_ptr<Moe> make_moe(MatrixPointer router, std::vector<std::shared_ptr<Mlp>> experts, int count, int top_k,
                              bool normalized, float eps, Address norm, Address post_norm, Address router_bias) {
  const int width = router ? router->cols : 0;
  if (count < 1 || top_k < 1 || top_k > count || size_t(count) > experts.size() || size_t(count) + 1 < experts.size())
    refuse("a mixture needs `count` experts, of which it chooses `top_k`, and at most one shared expert");
  check_shape(router, "router", int(experts.size()), width);
  if (router->kind != Kind::f32) refuse("the `router` matrix must be f32");
  for (const auto& expert : experts)
    if (!expert || expert->gate->cols != width) refuse("an expert must have the width of the router");
  auto f = [](Address address) { return at<const float>(address); };
  return std::make_shared<Moe>(
      Moe{router, std::move(experts), count, top_k, normalized, eps, f(norm), f(post_norm), f(router_bias)});
}

std::shared_ptr<Recurrent> make_recurrent(MatrixPointer channels, MatrixPointer controls, MatrixPointer gate,
                                          MatrixPointer output, int heads, int key_heads, int head_dim, int state_dim,
                                          int conv_size, bool delta, float eps, float out_eps, Address norm,
                                          Address out_norm, Address decay, Address step_bias, Address skip,
                                          Address conv, Address conv_bias) {
  if (heads < 1 || key_heads < 1 || heads % key_heads != 0 || head_dim < 1 || state_dim < 1 || conv_size < 1)
    refuse("a recurrent layer needs a multiple of `key_heads` as `heads`, and sizes of at least 1");
  const int width = channels ? channels->cols : 0;
  check_shape(channels, "channels", 2 * key_heads * state_dim + heads * head_dim, width);
  check_shape(controls, "controls", heads * (delta ? 2 : 1), width);
  check_shape(gate, "gate", heads * head_dim, width);
  check_shape(output, "output", width, heads * head_dim);
  check_order(*channels, *controls);
  check_order(*channels, *gate);
  auto f = [](Address address) { return at<const float>(address); };
  return std::make_shared<Recurrent>(Recurrent{channels, controls, gate, output, heads, key_heads, head_dim, state_dim,
                                               conv_size, delta, eps, out_eps, f(norm), f(out_norm), f(decay), f(step_bias),
                                               f(skip), f(conv), f(conv_bias)});
}

void bind_layers(nb::module_& module) {
  nb::class_<Attention>(module, "Attention", "The weights of one attention block; an address of 0 means absent.")
      .def(nb::new_(&make_attention), nb::kw_only(), "query"_a, "key"_a, "value"_a, "output"_a, "heads"_a, "kv_heads"_a,
           "head_dim"_a, "window"_a, "skip"_a, "causal"_a, "anchored"_a, "whole_norms"_a, "scale"_a, "soft_cap"_a,
           "eps"_a, "norm"_a = 0, "post_norm"_a = 0, "query_norm"_a = 0, "key_norm"_a = 0, "query_bias"_a = 0,
           "key_bias"_a = 0, "value_bias"_a = 0, "output_bias"_a = 0, "key_factors"_a = 0, "sinks"_a = 0, "cos"_a = 0,
           "sin"_a = 0, "rope_positions"_a = 0, "gate"_a.none() = nullptr)
      .def(
          "set_lora",
          [](Attention& layer, LoraPointer query, LoraPointer key, LoraPointer value, LoraPointer output) {
            layer.query_lora = checked(query, *layer.query);
            layer.key_lora = checked(key, *layer.key);
            layer.value_lora = checked(value, *layer.value);
            layer.output_lora = checked(output, *layer.output);
          },
          "query"_a, "key"_a, "value"_a, "output"_a);
  nb::class_<Mlp>(module, "Mlp", "The weights of one gated MLP; an address of 0 means absent.")
      .def(nb::new_(&make_mlp), nb::kw_only(), "gate"_a, "up"_a, "down"_a, "activation"_a, "eps"_a, "norm"_a = 0,
           "post_norm"_a = 0, "gate_bias"_a = 0, "up_bias"_a = 0, "down_bias"_a = 0)
      .def(
          "set_lora",
          [](Mlp& layer, LoraPointer gate, LoraPointer up, LoraPointer down) {
            layer.gate_lora = checked(gate, *layer.gate);
            layer.up_lora = checked(up, *layer.up);
            layer.down_lora = checked(down, *layer.down);
          },
          "gate"_a, "up"_a, "down"_a);
  nb::class_<Moe>(module, "Moe", "The weights of one mixture of experts; an address of 0 means absent.")
      .def(nb::new_(&make_moe), nb::kw_only(), "router"_a, "experts"_a, "count"_a, "top_k"_a, "normalized"_a, "eps"_a,
           "norm"_a = 0, "post_norm"_a = 0, "router_bias"_a = 0);
  nb::class_<Recurrent>(module, "Recurrent", "The weights of one recurrent layer; an address of 0 means absent.")
      .def(nb::new_(&make_recurrent), nb::kw_only(), "channels"_a, "controls"_a, "gate"_a, "output"_a, "heads"_a,
           "key_heads"_a, "head_dim"_a, "state_dim"_a, "conv_size"_a, "delta"_a, "eps"_a, "out_eps"_a, "norm"_a = 0,
           "out_norm"_a, "decay"_a, "step_bias"_a, "skip"_a = 0, "conv"_a, "conv_bias"_a = 0);
}

void process_logits(Address logits, int rows, int vocabulary, int entries, Address starts, Address tokens,
                    Address scale, Address bias, Address only) {
  const int32_t* of_row = at<const int32_t>(starts);
  bool sound = of_row[0] >= 0 && of_row[rows] <= entries;
  for (int row = 0; row < rows; ++row) sound &= of_row[row] <= of_row[row + 1];
  if (!sound) refuse("`starts` must rise from 0 to at most " + std::to_string(entries) + " entries");
  level().process_logits(at<float>(logits), rows, vocabulary,
                         {at<const int32_t>(starts), at<const int32_t>(tokens), at<const float>(scale),
                          at<const float>(bias), at<const uint8_t>(only)});
}

void mask_logits(Address logits, int rows, int vocabulary, Address masks, Address row_ids, int count) {
  level().mask_logits(at<float>(logits), rows, vocabulary, at<const int32_t>(masks), at<const int32_t>(row_ids), count);
}

void sample(Address logits, int rows, int vocabulary, const SamplingMetadata& sampling, Address out) {
  recorded([=] { level().sample(at<const float>(logits), rows, vocabulary, sampling, at<int32_t>(out)); });
}

void top_logprobs(Address logits, int rows, int vocabulary, Address tokens, int count, Address chosen, Address rank,
                  Address values, Address ids) {
  level().top_logprobs(at<const float>(logits), rows, vocabulary, at<const int32_t>(tokens), count, at<float>(chosen),
                       at<int32_t>(rank), at<float>(values), at<int32_t>(ids));
}

// Objects that stay fixed over many calls, so that a call passes two objects instead of eleven numbers.
void bind_batch(nb::module_& module) {
  nb::class_<Batch>(module, "Batch", "Where the tokens of a step stand.")
      .def(nb::new_([](Address positions, Address slots, Address query_starts, Address page_tables, Address parents,
                       Address adapters, Address states, int tokens, int rows, int table_width) {
             return Batch{at<const int32_t>(positions),
                          at<const int32_t>(slots),
                          at<const int32_t>(query_starts),
                          at<const int32_t>(page_tables),
                          at<const int32_t>(parents),
                          at<const int32_t>(adapters),
                          at<const int32_t>(states),
                          tokens,
                          rows,
                          table_width};
           }),
           nb::kw_only(), "positions"_a, "slots"_a, "query_starts"_a, "page_tables"_a, "parents"_a, "adapters"_a,
           "states"_a, "tokens"_a, "rows"_a, "table_width"_a)
      .def_ro("tokens", &Batch::tokens);
  nb::class_<Pages>(module, "Pages", "The key/value storage of a layer; dtype 0 is f32, 1 f16, 2 bf16, 3 i8, 4 fp8.")
      .def(nb::new_([](Address keys, Address values, Address key_scales, Address value_scales, int dtype, int pages,
                       int kv_heads, int page_size, int head_dim) {
             return Pages{at<void>(keys),
                          at<void>(values),
                          at<float>(key_scales),
                          at<float>(value_scales),
                          KvType(dtype),
                          pages,
                          kv_heads,
                          page_size,
                          head_dim};
           }),
           nb::kw_only(), "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a, "dtype"_a, "pages"_a, "kv_heads"_a, "page_size"_a, "head_dim"_a);
}

void bind_states(nb::module_& module) {
  nb::class_<States>(module, "States", "The states of a recurrent layer, and the inputs of recent tokens.")
      .def(nb::new_([](Address states, Address inputs, Address lengths, int slots, int lines, size_t size,
                       size_t width) {
             return States{at<float>(states), at<float>(inputs), at<int32_t>(lengths), slots, lines, size, width};
           }),
           nb::kw_only(), "states"_a, "inputs"_a, "lengths"_a, "slots"_a, "lines"_a, "size"_a, "width"_a);
}

// Layers with their storage, run in sequence without returning to Python.
using Mixer = std::variant<std::shared_ptr<Attention>, std::shared_ptr<Recurrent>>;
using Perceptron = std::variant<std::shared_ptr<Mlp>, std::shared_ptr<Moe>>;
using Storage = std::variant<Pages, States>;

struct LayerStack {
  std::vector<Mixer> mixers;
  std::vector<Perceptron> mlps;
  std::vector<Storage> storages;
};

void run_attention(const Attention& layer, float* rows, const Batch& batch, const Pages& pages) {
  const size_t width = size_t(layer.heads) * layer.head_dim;
  float* q = static_cast<float*>(scratch(kScratchSlots - 1, batch.tokens * width * sizeof(float)));  // [T][H * D]
  level().project_qkv(layer, rows, batch, pages, q);
  level().attend(layer, q, batch, pages, rows);
}

void run_stack(const LayerStack& stack, Address x, const Batch& batch) {
  float* rows = at<float>(x);
  for (const Mixer& mixer : stack.mixers)
    if (const auto* attention = std::get_if<std::shared_ptr<Attention>>(&mixer)) {
      check_adapters(batch.adapters, batch.tokens, (*attention)->query_lora.get());  // the same slots in every layer
      break;
    }
  for (size_t i = 0; i < stack.mlps.size(); ++i) {
    if (const auto* attention = std::get_if<std::shared_ptr<Attention>>(&stack.mixers[i]))
      run_attention(**attention, rows, batch, std::get<Pages>(stack.storages[i]));
    else
      level().recurrent(*std::get<std::shared_ptr<Recurrent>>(stack.mixers[i]), batch,
                        std::get<States>(stack.storages[i]), rows);
    if (const auto* mlp = std::get_if<std::shared_ptr<Mlp>>(&stack.mlps[i]))
      level().mlp(**mlp, rows, batch.tokens, batch.adapters);
    else
      level().moe(*std::get<std::shared_ptr<Moe>>(stack.mlps[i]), rows, batch.tokens);
  }
}

void run_layers(const LayerStack& stack, Address x, const Batch& batch) {
  if (!current_recording()) return run_stack(stack, x, batch);  // saves the copy of the stack
  recorded([=] { run_stack(stack, x, batch); });
}

void bind_layer_stack(nb::module_& module) {
  nb::class_<LayerStack>(module, "LayerStack", "Layers that run_layers runs in turn.")
      .def(nb::new_([](std::vector<Mixer> mixers, std::vector<Perceptron> mlps, std::vector<Storage> storages) {
        if (mixers.size() != mlps.size() || mlps.size() != storages.size())
          refuse("a stack needs as many attentions or recurrent layers as MLPs and storages");
        for (size_t i = 0; i < mixers.size(); ++i)
          if (mixers[i].index() != storages[i].index())
            refuse("attention needs pages, and a recurrent layer needs states");
        return LayerStack{std::move(mixers), std::move(mlps), std::move(storages)};
      }));
}

void bind_operations(nb::module_& module) {
  const Unlocked unlocked;
  module.def("run_layers", &run_layers, unlocked);
  module.def("embed", &embed, unlocked);
  module.def(
      "linear",
      [](const Matrix& matrix, Address x, int tokens, Address out) {
        recorded([=] { level().linear(matrix, at<const float>(x), tokens, at<float>(out), matrix.rows); });
      },
      unlocked);
  module.def(
      "rms_norm",
      [](Address x, Address weight, float eps, int tokens, int width, Address out) {
        recorded([=] {
          level().rms_norm(at<const float>(x), at<const float>(weight), eps, tokens, width, at<float>(out));
        });
      },
      unlocked);
  module.def(
      "soft_cap",
      [](Address x, float cap, int rows, int width) {
        recorded([=] { level().soft_cap(at<float>(x), cap, rows, width); });
      },
      unlocked);
  module.def(
      "norm_linear",
      [](const Matrix& matrix, Address x, Address weight, float eps, int tokens, Address out) {
        recorded([=] {
          auto* normed = static_cast<float*>(scratch(kScratchSlots - 1, size_t(tokens) * matrix.cols * sizeof(float)));
          level().rms_norm(at<const float>(x), at<const float>(weight), eps, tokens, matrix.cols, normed);
          level().linear(matrix, normed, tokens, at<float>(out), matrix.rows);
        });
      },
      unlocked);
  module.def(
      "mlp",
      [](const Mlp& layer, Address x, int tokens, Address adapters) {
        recorded([=] {
          check_adapters(at<const int32_t>(adapters), tokens, layer.gate_lora.get());
          level().mlp(layer, at<float>(x), tokens, at<const int32_t>(adapters));
        });
      },
      unlocked);
  module.def(
      "moe",
      [](const Moe& layer, Address x, int tokens) { recorded([=] { level().moe(layer, at<float>(x), tokens); }); },
      unlocked);
  module.def(
      "recurrent",
      [](const Recurrent& layer, Address x, const Batch& batch, const States& states) {
        recorded([=] { level().recurrent(layer, batch, states, at<float>(x)); });
      },
      unlocked);
  module.def(
      "copy_inputs",
      [](const std::vector<States>& layers, Address sources, Address targets, int count) {
        copy_inputs(layers, at<const int32_t>(sources), at<const int32_t>(targets), count);
      },
      unlocked);
  module.def(
      "project_qkv",
      [](const Attention& layer, Address x, const Batch& batch, const Pages& pages, Address q) {
        recorded([=] {
          check_adapters(batch.adapters, batch.tokens, layer.query_lora.get());
          level().project_qkv(layer, at<const float>(x), batch, pages, at<float>(q));
        });
      },
      unlocked);
  module.def(
      "project_kv",
      [](const Attention& layer, Address x, const Batch& batch, const Pages& pages) {
        recorded([=] {
          check_adapters(batch.adapters, batch.tokens, layer.key_lora.get());
          level().project_kv(layer, at<const float>(x), batch, pages);
        });
      },
      unlocked);
  module.def(
      "attend",
      [](const Attention& layer, Address q, const Batch& batch, const Pages& pages, Address x) {
        recorded([=] {
          check_adapters(batch.adapters, batch.tokens, layer.output_lora.get());
          level().attend(layer, at<const float>(q), batch, pages, at<float>(x));
        });
      },
      unlocked);
  module.def(
      "copy_kv",
      [](const std::vector<Pages>& pages, Address sources, Address targets, int count) {
        copy_slots(pages, at<const int32_t>(sources), at<const int32_t>(targets), count);
      },
      unlocked);
  module.def("process_logits", &process_logits, unlocked);
  module.def("mask_logits", &mask_logits, unlocked);
  module.def("sample", &sample, unlocked);
  module.def("top_logprobs", &top_logprobs, unlocked);
  module.def("stream_read", &stream_read, unlocked);
}

}  // namespace
}  // namespace outrider

NB_MODULE(_native, module) {
  using namespace outrider;
  module.doc() = "The native kernels. Addresses are plain integers; see kernels/cpu.";
  nb::set_leak_warnings(false);  // an interpreter that exits by Ctrl-C frees nothing, which is no leak to report
  bind_matrix(module);
  bind_lora(module);
  bind_layers(module);
  bind_batch(module);
  bind_states(module);
  bind_layer_stack(module);
  bind_operations(module);
  bind_speculation(module);
  bind_recording(module);
  module.def("busy_seconds", [] { return Busy::nanoseconds.load() * 1e-9; });
  module.def("level_name", [] { return std::string(level().name); });
  module.def("available_levels", &available_levels);
  module.def("choose_level", &choose_level, "name"_a);
  module.def("thread_count", &thread_count);
  module.def("set_thread_count", &set_thread_count, "count"_a);
}
