// What bind.cpp, the kernels and the instruction-set levels share. No Python, no torch.
//
// Each kernel file is compiled once per level into namespace LEVEL (portable, neon, avx2, avx512, amx); levels.cpp
// picks a table of functions at import. Letters as in kernels/__init__.py: T tokens, N outputs, K inputs, ...
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace outrider {

// For numbers that make no sense: Python sees a ValueError. Static, since files of different levels include this.
[[noreturn]] static inline void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

// Weights are stored in tiles of 16 outputs, so that the 16 lanes of a vector are 16 outputs and every output adds
// its terms in the order of K, whatever the number of rows: batch invariance by layout.
//   f32, f16:       [N/16][K][16]
//   bf16:           [N/16][K/2][16][2], K padded with zeros to a multiple of 32: pairs of inputs, as AMX wants them
//   q4, q8:         [N/16][K/group] blocks of { quants, 16 f16 scales, 16 f16 minima (if has_min) }
//     quants of q8: [group/4][16][4] int8: vector j holds inputs 4j..4j+3 of 16 outputs (the VNNI and AMX layout)
//     quants of q4: the same 32 inputs as nibbles: byte vector j has quad j low and quad j + 4 high
//   w = scale * (quant - zero) + minimum
constexpr int kLanes = 16;

enum class Kind : int { f32, f16, bf16, q4, q8 };

struct Matrix {
  Kind kind;
  int rows, cols;     // N, K
  int group = 0;      // 32, or 16 for q6_k; q4 is always 32
  int zero = 0;       // 8 for q4_0, else 0
  bool has_min = false;
  std::shared_ptr<uint8_t> data;  // 64-byte aligned
  size_t bytes = 0;
  int tiles() const { return (rows + kLanes - 1) / kLanes; }
  size_t tile_bytes() const;  // bytes of one [16][K] tile
};

// Repack one checkpoint matrix. `format` is a key of blocks.FORMATS; `source` is its row-major bytes.
// Refuses an unknown format, and a width that is no multiple of the block.
std::shared_ptr<Matrix> pack(const std::string& format, int rows, int cols, const void* source);
void unpack_row(const Matrix& matrix, int row, float scale, float* out);  // dequantise one row, for embeddings

enum class Half : int { f32, f16, bf16 };  // element type of the key/value pages

struct Attention {
  std::shared_ptr<Matrix> query, key, value, output;
  int heads, kv_heads, head_dim, window, skip;
  bool causal;    // else a token sees its row's keys up to the highest position of the row
  bool anchored;  // the window counts back from before the row's first token, for all of the row
  float scale, eps;
  const float *norm, *post_norm, *query_norm, *key_norm;  // null when absent; the caller keeps them alive
  const float *query_bias, *key_bias, *value_bias, *output_bias;
  const float *cos, *sin;  // [positions][D / 2], null: no rotary
};

struct Mlp {
  std::shared_ptr<Matrix> gate, up, down;
  int activation;  // 0 silu, 1 gelu_tanh
  float eps;
  const float *norm, *post_norm, *gate_bias, *up_bias, *down_bias;
};

struct Batch {
  const int32_t *positions, *slots, *query_starts, *page_tables;
  const int32_t* parents;  // null: chains
  int tokens, rows, table_width;
};

struct Pages {
  void *keys, *values;  // [pages][G][S][D]
  Half dtype;
  int pages, kv_heads, page_size, head_dim;
  int slots() const { return pages * page_size; }
};

// places.cpp. For each row, the position below which all its tokens see the keys that its page table names; from there
// on each sees its ancestors' and its own. INT_MAX for chains; returns whether any row is none. Refuses parents,
// positions or slots that make no tree.
bool find_trees(const Batch& batch, const Pages& pages, int* shared);
// For each token the highest position of its row: what it sees where a layer is not causal. Padding stands at position
// 0. Refuses trees.
void find_reach(const Batch& batch, int32_t* reach);
// For each token the position before the first of its row: what its window counts back from where it is anchored.
void find_origins(const Batch& batch, int32_t* origins);
// Copies slots to slots, in order, in every layer; refuses a slot that does not exist.
void move_slots(const std::vector<Pages>& layers, const int32_t* sources, const int32_t* targets, int count);

struct Choice {
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *positions;
  const int64_t* seeds;
  const int32_t* epochs;  // null: 0
  uint32_t stream;
  uint32_t epoch(int row) const { return epochs ? uint32_t(epochs[row]) : 0; }
};

// Room for a choice for each logit row; `epochs` null where the requests have none.
struct WideChoice {
  float *temperature, *top_p, *min_p;
  int32_t *top_k, *positions, *epochs;
  int64_t* seeds;
};

struct Drafts {
  const int32_t *starts, *tokens, *parents;
  int requests, rows, width;  // B, R
  const float* logits;        // [R][V], what the drawn tokens were drawn from; null: none was
  const uint8_t* drawn;       // [R]
};

struct Kept {
  int32_t *tokens, *rows, *counts;  // [B][width + 1], [B][width + 1], [B]
};

struct Edits {
  const int32_t *starts, *tokens;
  const float *scale, *bias;
  const uint8_t* only;
};

// prepare.cpp: what a drafter reads after a step. Numbers that make no sense are refused.
struct SettledRows {
  int32_t *tokens, *counts, *rejected, *ends;  // [B]
};

struct DraftStep {
  const int32_t *tokens, *positions;              // [T]; block_inputs reads no tokens
  const int32_t *query_starts, *ends, *newest;    // [B + 1], [B], [B]
};

struct DraftPlaces {
  int32_t *tokens, *positions;                 // [X], X = T + B * (extra - shift)
  int32_t *query_starts, *samples, *sources;   // [B + 1], [B * extra], [T]
  uint8_t* rejected;                           // [X]
};

// Where positions lie: the page tables of a step's rows, and the position from which on there is nothing.
struct Paging {
  const int32_t* tables;  // [B][width]; less than 0: no page
  int width, page_size, limit;
};

struct BlockPlaces {
  int32_t* context_slots;               // [T]
  int32_t *tokens, *positions, *slots;  // [B * (masks + 1)]
  int32_t* query_starts;                // [B + 1]
};

void settle(const int32_t* chosen, int rows, int columns, const int32_t* drafted, const int32_t* query_starts,
            const int32_t* backup, const uint8_t* discard, int vocabulary, const SettledRows& out);
void draft_inputs(const DraftStep& step, int rows, int tokens, int extra, bool shift, int mask, const DraftPlaces& out);
void block_inputs(const DraftStep& step, int rows, int tokens, const Paging& paging, int masks, int mask,
                  const BlockPlaces& out);
void advance(const int32_t* positions, const Paging& paging, int rows, int count, int32_t* next, int32_t* slots);

// The functions of one level. All run on the pool of threads.h and return when the work is done.
struct Level {
  const char* name;
  // linear.cpp. out[t * stride + n] = sum_k x[t][k] * w[n][k]
  void (*linear)(const Matrix& matrix, const float* x, int tokens, float* out, int stride);
  // pointwise.cpp
  void (*rms_norm)(const float* x, const float* weight, float eps, int tokens, int width, float* out);
  void (*mlp)(const Mlp& layer, float* x, int tokens);
  void (*project_qkv)(const Attention& layer, const float* x, const Batch& batch, const Pages& pages, float* q);
  void (*project_kv)(const Attention& layer, const float* x, const Batch& batch, const Pages& pages);
  // attention.cpp
  void (*attend)(const Attention& layer, const float* q, const Batch& batch, const Pages& pages, float* x);
  // sample.cpp
  void (*edit_logits)(float* logits, int rows, int vocabulary, const Edits& edits);
  void (*mask_logits)(float* logits, int rows, int vocabulary, const int32_t* masks, const int32_t* places, int count);
  void (*sample)(const float* logits, int rows, int vocabulary, const Choice& choice, int32_t* tokens);
  void (*branch)(const float* logits, int rows, int vocabulary, const Choice& choice, int count, int32_t* tokens,
                 float* logprobs);
  void (*top_logprobs)(const float* logits, int rows, int vocabulary, const int32_t* tokens, int count, float* chosen,
                       int32_t* rank, float* values, int32_t* ids);
  // speculate.cpp. They refuse starts and parents that make no forest.
  void (*expand)(const Choice& choice, const Drafts& drafts, const WideChoice& out);
  void (*match)(const int32_t* sampled, const Drafts& drafts, const Kept& kept);
  void (*force)(const int32_t* sampled, const Drafts& drafts, const float* rates, const Choice& choice,
                const Kept& kept);
  void (*reject)(const float* logits, int vocabulary, const Drafts& drafts, const Choice& choice, bool block,
                 bool again, const Kept& kept);
};
// The same functions, in their order. OUTRIDER_DECLARE declares one with the type that it has there.
#define OUTRIDER_FUNCTIONS(of)                                                                               \
  of(linear) of(rms_norm) of(mlp) of(project_qkv) of(project_kv) of(attend) of(edit_logits) of(mask_logits) \
  of(sample) of(branch) of(top_logprobs) of(expand) of(match) of(force) of(reject)
#define OUTRIDER_DECLARE(function) std::remove_pointer_t<decltype(Level::function)> function;

const Level& level();                           // the level in force
std::vector<std::string> available_levels();    // best last
void choose_level(const std::string& name);     // refuses one that this CPU lacks

}  // namespace outrider
