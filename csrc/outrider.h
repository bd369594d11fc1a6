// Types and functions shared by the bindings, the kernels and the instruction-set levels. No Python, no torch.
//
// Each kernel file is compiled once per level into namespace LEVEL (portable, neon, i8mm, avx2, avx512, amx);
// levels.cpp picks a table of functions at import. Letters as in kernels/protocol.py: T tokens, N outputs, K inputs, ...
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace outrider {

// Reject malformed arguments: Python sees a ValueError. Static, since files of different levels include this.
[[noreturn]] static inline void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

// Weights are stored in tiles of 16 outputs, so that the 16 lanes of a vector are 16 outputs and every output adds
// its terms in the order of K, whatever the number of rows: batch invariance by layout.
//   f32, f16:       [N/16][K][16]
//   bf16:           [N/16][K/2][16][2], K padded with zeros to a multiple of 32: pairs of inputs, as AMX wants them
//   fp8:            [N/16][K/32] blocks of { [32][16] e4m3 bytes, 16 f32 scales }
//   q4, q8:         [N/16][K/group] blocks of { quants, 16 f16 scales, 16 f16 minima (if has_min) }
//     quants of q8: [group/4][16][4] int8: vector j holds inputs 4j..4j+3 of 16 outputs (the VNNI and AMX layout)
//     quants of q4: the same 32 inputs as nibbles: byte vector j has quad j low and quad j + 4 high; they are indices of
//     int8 values if the matrix has a table
//   w = scale * (quant - zero) + minimum; if the minima are zero points: w = scale * (quant - zero point)
constexpr int kLanes = 16;

enum class Kind : int { f32, f16, bf16, fp8, q4, q8 };

// Tables of the sixteen int8 values of a nibble, as in kernels/quantization.py.
enum class Table : int { none, iq4_nl, mxfp4 };
alignas(16) constexpr int8_t kTables[][16] = {{},
                                              {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
                                              {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

// Scales of fp8 are stored times 2^8, see fp8_to_half in half.h.
constexpr int kFp8Group = 32, kFp8Quants = kFp8Group * kLanes, kFp8Block = kFp8Quants + kLanes * 4;  // bytes

// Quantization of the activations that a quantized matrix multiplies. If several matrices read the same rows, the most
// precise of theirs applies: the last in this list. high: 14 bits (12 at level amx) with a scale for every 32 inputs.
// fast: 8 bits, and the bits of `high` in those groups of 32 inputs whose values are large.
enum class Activations : int { none, fast, high };

struct Matrix {
  Kind kind;
  int rows, cols;  // N, K
  int group = 0;   // 32, or 16 for q6_k; q4 is always 32
  int zero = 0;    // 8 for q4_0, else 0
  bool has_min = false, zero_points = false;
  Table table = Table::none;
  Activations activations = Activations::none;  // none for float weights
  std::shared_ptr<uint8_t> data;  // 64-byte aligned
  size_t bytes = 0;
  std::vector<int32_t> order;  // [K]: the input that each packed column multiplies; empty: in order
  const int32_t* input_order() const { return order.empty() ? nullptr : order.data(); }
  int tiles() const { return (rows + kLanes - 1) / kLanes; }
  size_t tile_bytes() const;  // bytes of one [16][K] tile
};

// Repack one checkpoint matrix. `format` is a key of FORMATS; `source` is its row-major bytes. An unknown format or a
// width that is not a multiple of the block is refused. `order` [K] or null: the input of each column.
std::shared_ptr<Matrix> pack(const std::string& format, int rows, int cols, const void* source, bool fast_activations,
                             const int32_t* order = nullptr);
void unpack_row(const Matrix& matrix, int row, float scale, float* out);  // dequantize one row, for embeddings
// Quantize f32, f16 or bf16 weights, a multiple of 32, into blocks of q8_0, q5_1 or q4_1; see quantize.cpp.
void quantize(const std::string& from, const std::string& to, int64_t weights, const void* source, void* target);

enum class KvType : int { f32, f16, bf16, i8, fp8 };  // element type of the key/value pages
constexpr size_t bytes_of(KvType dtype) {
  return dtype == KvType::f32 ? 4 : dtype == KvType::i8 || dtype == KvType::fp8 ? 1 : 2;
}

// Low-rank adapters over one matrix [N, K], by slot. Slots are filled and emptied between steps.
struct LoraSlots {
  struct Pair {
    std::shared_ptr<Matrix> a, b;  // [R, K] and [N, R] f32, the scale in b; null: this slot changes nothing
  };
  int rows, cols;  // N, K
  int rank = 0;    // the largest of all slots
  std::vector<Pair> pairs;
};

struct Attention {
  std::shared_ptr<Matrix> query, key, value, output;
  int heads, kv_heads, head_dim, window, skip;
  bool causal;    // else a token attends up to the highest position of its row
  bool anchored;  // the window of all tokens of a row counts back from before the row's first token
  bool whole_norms;  // the norms of queries and keys are over all heads together
  float scale, soft_cap, eps;  // scores s become soft_cap * tanh(s / soft_cap); 0: no cap
  const float *norm, *post_norm, *query_norm, *key_norm;  // null when absent; the caller keeps them alive
  const float *query_bias, *key_bias, *value_bias, *output_bias;
  const float* key_factors;  // [G][D] powers of two, null: 1; i8 keys are stored divided by these
  const float* sinks;  // [H], null: none; the score of one more key of each head, whose value is 0
  const float *cos, *sin;  // [rope_positions][D / 2], null: no rotary
  int rope_positions;
  std::shared_ptr<const LoraSlots> query_lora{}, key_lora{}, value_lora{}, output_lora{};  // null: adapters are off
  std::shared_ptr<Matrix> gate{};  // [H * D, E]: outputs of heads are multiplied by its sigmoid; null: they are not
};

struct Mlp {
  std::shared_ptr<Matrix> gate, up, down;
  int activation;  // 0 silu, 1 gelu_tanh, 2 swiglu_oai
  float eps;
  const float *norm, *post_norm, *gate_bias, *up_bias, *down_bias;
  std::shared_ptr<const LoraSlots> gate_lora{}, up_lora{}, down_lora{};  // null: adapters are off
};

// A mixture of experts: `top_k` of `count` experts for each row, and the shared one for all.
struct Moe {
  std::shared_ptr<Matrix> router;             // f32 [count, E], and the gate of the shared expert if there is one
  std::vector<std::shared_ptr<Mlp>> experts;  // `count`, and the shared one
  int count, top_k;
  bool normalized;  // scores of the chosen experts are divided by their sum
  float eps;
  const float *norm, *post_norm, *router_bias;
  bool has_shared() const { return experts.size() > size_t(count); }
};

// A recurrent layer, see kernels/recurrence.py for its letters and formulas.
struct Recurrent {
  std::shared_ptr<Matrix> channels, controls, gate, output;
  int heads, key_heads, head_dim, state_dim, conv_size;
  bool delta;  // Gated DeltaNet, else Mamba-2
  float eps, out_eps;
  const float *norm, *out_norm, *decay, *step_bias, *skip;  // norm and skip are null when absent
  const float *conv, *conv_bias;                            // [W][C], [C] or null
  int num_channels() const { return channels->rows; }
};
constexpr float kUnitEps = 1e-6f;  // UNIT_EPS of kernels/recurrence.py

// The states of a recurrent layer, and the inputs of recent tokens: position p is in line p % lines.
struct States {
  float *states, *inputs;  // [slots][H][P][N], [slots][lines][width]
  int32_t* lengths;        // [slots]: tokens that a state has read
  int slots, lines;
  size_t size, width;  // H * P * N, C + X
  float* state(int slot, size_t row, int row_size) const { return states + slot * size + row * row_size; }
  float* line(int slot, int position) const { return inputs + (size_t(slot) * lines + position % lines) * width; }
};

struct Batch {
  const int32_t *positions, *slots, *query_starts, *page_tables;
  const int32_t* parents;   // null: chains
  const int32_t* adapters;  // [T]: slot of each token's adapter, -1: none; null: no token has one
  const int32_t* states;    // [B][3]: slots that a row's state is read from and written to, tokens that it reads; or null
  int tokens, rows, table_width;
};

struct Pages {
  void *keys, *values;                // [pages][G][S][D]
  float *key_scales, *value_scales;  // [pages][G][S], of i8 and fp8: the value of 1 in a token's head; else null
  KvType dtype;
  int pages, kv_heads, page_size, head_dim;
  int slots() const { return pages * page_size; }
};

// kv_slots.cpp. Refuse tokens, positions and slots of a batch that lie outside its rows, the layer's rope tables or the
// storage. Page tables are checked by `attend`, which knows the positions that it reads. queries: all tokens are rotated,
// else those with a slot.
void check_batch(const Attention& layer, const Batch& batch, const Pages& pages, bool queries);
// Refuse rows that overlap or end after the last token.
void check_rows(const Batch& batch);
// Refuse a page table of a row that leads outside the storage for positions [first, last).
void check_table(const Batch& batch, const Pages& pages, int row, int first, int last);
// For each row, find the position below which all its tokens see the keys of its page table; from there
// on each token sees its ancestors and itself. INT_MAX for chains. Return whether any row is a tree. Malformed trees
// are refused.
bool find_trees(const Batch& batch, const Pages& pages, int* shared);
// For each token, find the highest position of its row: its attention range in a layer that is not causal. Padding has
// position 0. Trees are refused.
void find_last_visible(const Batch& batch, int32_t* reach);
// For each token, find the position before the first of its row: the origin of anchored windows.
void find_origins(const Batch& batch, int32_t* origins);
// Copy slots to slots, in order, in every layer; an invalid slot is refused.
void copy_slots(const std::vector<Pages>& layers, const int32_t* sources, const int32_t* targets, int count);
// Copy kept inputs to other lines (slot * lines + position % lines), in order, in every layer.
void copy_inputs(const std::vector<States>& layers, const int32_t* sources, const int32_t* targets, int count);

struct SamplingMetadata {
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *positions;
  const int64_t* seeds;
  const int32_t* epochs;  // null: 0
  uint32_t stream;
  uint32_t epoch(int row) const { return epochs ? uint32_t(epochs[row]) : 0; }
};

// Output of expand_sampling: one entry per logit row; `epochs` is null if the requests have none.
struct ExpandedSampling {
  float *temperature, *top_p, *min_p;
  int32_t *top_k, *positions, *epochs;
  int64_t* seeds;
};

struct VerifyInputs {
  const int32_t *starts, *tokens, *parents;
  int requests, rows, width;  // B, R
  const float* logits;        // [R][V], logits that the sampled draft tokens come from; null: none was sampled
  const uint8_t* drawn;       // [R]
};

struct VerifyOutput {
  int32_t *tokens, *rows, *counts;  // [B][width + 1], [B][width + 1], [B]
  int32_t* nonfinite = nullptr;     // [B], written by verify_rejection
};

struct LogitsProcessors {
  const int32_t *starts, *tokens;
  const float *scale, *bias;
  const uint8_t* only;
};

// draft_inputs.cpp: inputs of a drafter after a step. Malformed values are refused.
struct NextTokens {
  int32_t *tokens, *counts, *rejected, *ends;  // [B]
};

struct StepRows {
  const int32_t *tokens, *positions;            // [T]; block_inputs reads no tokens
  const int32_t *query_starts, *ends, *newest;  // [B + 1], [B], [B]
};

struct DraftInputs {
  int32_t *tokens, *positions;                // [X], X = T + B * (extra - shift)
  int32_t *query_starts, *samples, *sources;  // [B + 1], [B * extra], [T]
  uint8_t* rejected;                          // [X]
};

// Page tables of a step's rows, and the first position that has no slot.
struct PageTables {
  const int32_t* tables;  // [B][width]; less than 0: no page
  int width, page_size, limit;
};

struct BlockInputs {
  int32_t* context_slots;               // [T]
  int32_t *tokens, *positions, *slots;  // [B * (masks + 1)]
  int32_t* query_starts;                // [B + 1]
};

void next_tokens(const int32_t* chosen, int rows, int columns, const int32_t* drafted, const int32_t* query_starts,
                 const int32_t* backup, const uint8_t* discard, int vocabulary, const NextTokens& out);
void draft_inputs(const StepRows& step, int rows, int tokens, int extra, bool shift, int mask, const DraftInputs& out);
void block_inputs(const StepRows& step, int rows, int tokens, const PageTables& tables, int masks, int mask,
                  const BlockInputs& out);
void next_slots(const int32_t* positions, const PageTables& tables, int rows, int count, int32_t* next, int32_t* slots);

// The functions of one level. All run on the thread pool and return when the work is done.
struct Level {
  const char* name;
  // linear.cpp. out[t * stride + n] = sum_k x[t][k] * w[n][k]
  void (*linear)(const Matrix& matrix, const float* x, int tokens, float* out, int stride);
  // pointwise.cpp
  void (*rms_norm)(const float* x, const float* weight, float eps, int tokens, int width, float* out);
  void (*soft_cap)(float* x, float cap, int rows, int width);  // x = cap * tanh(x / cap)
  void (*mlp)(const Mlp& layer, float* x, int tokens, const int32_t* adapters);
  void (*moe)(const Moe& layer, float* x, int tokens);  // moe.cpp
  void (*recurrent)(const Recurrent& layer, const Batch& batch, const States& states, float* x);  // recurrent.cpp
  void (*project_qkv)(const Attention& layer, const float* x, const Batch& batch, const Pages& pages, float* q);
  void (*project_kv)(const Attention& layer, const float* x, const Batch& batch, const Pages& pages);
  // attention.cpp
  void (*attend)(const Attention& layer, const float* q, const Batch& batch, const Pages& pages, float* x);
  // sample.cpp
  void (*process_logits)(float* logits, int rows, int vocabulary, const LogitsProcessors& processors);
  void (*mask_logits)(float* logits, int rows, int vocabulary, const int32_t* masks, const int32_t* row_ids, int count);
  void (*sample)(const float* logits, int rows, int vocabulary, const SamplingMetadata& sampling, int32_t* tokens);
  void (*sample_children)(const float* logits, int rows, int vocabulary, const SamplingMetadata& sampling, int count,
                          int32_t* tokens, float* logprobs);
  void (*top_logprobs)(const float* logits, int rows, int vocabulary, const int32_t* tokens, int count, float* chosen,
                       int32_t* rank, float* values, int32_t* ids);
  // verify.cpp. Malformed starts and parents are refused.
  void (*expand_sampling)(const SamplingMetadata& sampling, const VerifyInputs& drafts, const ExpandedSampling& out);
  void (*verify_exact)(const int32_t* sampled, const VerifyInputs& drafts, const VerifyOutput& output);
  void (*verify_synthetic)(const int32_t* sampled, const VerifyInputs& drafts, const float* rates,
                           const SamplingMetadata& sampling, const VerifyOutput& output);
  void (*verify_rejection)(const float* logits, int vocabulary, const VerifyInputs& drafts,
                           const SamplingMetadata& sampling, bool block, bool with_replacement,
                           const VerifyOutput& output);
};
// The same functions, in the same order. OUTRIDER_DECLARE declares one with its type in Level.
#define OUTRIDER_FUNCTIONS(of)                                                                                  \
  of(linear) of(rms_norm) of(soft_cap) of(mlp) of(moe) of(recurrent) of(project_qkv) of(project_kv) of(attend)             \
      of(process_logits) of(mask_logits) of(sample) of(sample_children) of(top_logprobs) of(expand_sampling)    \
          of(verify_exact) of(verify_synthetic) of(verify_rejection)
#define OUTRIDER_DECLARE(function) std::remove_pointer_t<decltype(Level::function)> function;

const Level& level();                         // the selected level
std::vector<std::string> available_levels();  // best last
void choose_level(const std::string& name);   // refuses a level that this CPU lacks

}  // namespace outrider
