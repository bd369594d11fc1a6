// Repack checkpoint matrices into tiles of sixteen outputs (layouts in outrider.h), and unpack single rows.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#include "half.h"
#include "outrider.h"
#include "threads.h"

namespace outrider {
namespace {

constexpr int kLongest = 256;  // elements of the longest checkpoint block

// One decoded checkpoint block of one row: a quant per element, a scale and perhaps a minimum per group.
struct Block {
  int8_t quants[kLongest];
  uint16_t scales[kLongest / 16], minima[kLongest / 16];  // f16 bits
};

struct Format {
  const char* name;
  Kind kind;
  int elements, bytes;  // of one checkpoint block
  int group, zero;
  bool has_min;
  void (*decode)(const uint8_t* from, Block& to);  // null for floats
  int verbatim = 0;  // offset of the quants if their bytes need no decoding; scale and minimum precede them
  bool zero_points = false;  // in the place of the minima
  Table table = Table::none;
};

uint16_t read_half(const uint8_t* from) {
  uint16_t bits;
  memcpy(&bits, from, 2);
  return bits;
}

// Byte j holds element j in its low half and element j + 16 in its high half.
void decode_nibbles(const uint8_t* from, int8_t* quants) {
  for (int j = 0; j < 16; ++j) {
    quants[j] = int8_t(from[j] & 15);
    quants[j + 16] = int8_t(from[j] >> 4);
  }
}

void decode_q4_0(const uint8_t* from, Block& to) {
  to.scales[0] = read_half(from);
  decode_nibbles(from + 2, to.quants);
}

void decode_q4_1(const uint8_t* from, Block& to) {
  to.scales[0] = read_half(from);
  to.minima[0] = read_half(from + 2);
  decode_nibbles(from + 4, to.quants);
}

void add_fifth_bits(const uint8_t* from, int centre, int8_t* quants) {
  for (int i = 0; i < 32; ++i) quants[i] = int8_t(quants[i] + ((from[i / 8] >> (i % 8) & 1) << 4) - centre);
}

void decode_q5_0(const uint8_t* from, Block& to) {
  to.scales[0] = read_half(from);
  decode_nibbles(from + 6, to.quants);
  add_fifth_bits(from + 2, 16, to.quants);
}

void decode_q5_1(const uint8_t* from, Block& to) {
  to.scales[0] = read_half(from);
  to.minima[0] = read_half(from + 2);
  decode_nibbles(from + 8, to.quants);
  add_fifth_bits(from + 4, 0, to.quants);
}

void decode_q8_0(const uint8_t* from, Block& to) {
  to.scales[0] = read_half(from);
  memcpy(to.quants, from + 2, 32);
}

void decode_q8_z(const uint8_t* from, Block& to) {
  to.scales[0] = read_half(from);
  to.minima[0] = read_half(from + 2);
  memcpy(to.quants, from + 4, 32);
}

// Decode the header of q4_k and q5_k: d, dmin and twelve bytes with eight 6-bit scales and eight 6-bit minima.
void decode_k_scales(const uint8_t* from, Block& to) {
  const float d = half_to_float(read_half(from)), dmin = half_to_float(read_half(from + 2));
  const uint8_t* packed = from + 4;
  for (int g = 0; g < 8; ++g) {
    int scale = packed[g % 4] & 63, minimum = packed[g % 4 + 4] & 63;
    if (g >= 4) {
      scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
      minimum = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
    }
    to.scales[g] = float_to_half(d * float(scale));
    to.minima[g] = float_to_half(-dmin * float(minimum));
  }
}

void decode_q4_k(const uint8_t* from, Block& to) {
  decode_k_scales(from, to);
  for (int i = 0; i < 256; ++i) to.quants[i] = int8_t(from[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15);
}

void decode_q5_k(const uint8_t* from, Block& to) {
  decode_k_scales(from, to);
  for (int i = 0; i < 256; ++i) {
    const int low = from[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
    to.quants[i] = int8_t(low | (from[16 + i % 32] >> (i / 32) & 1) << 4);
  }
}

void decode_q6_k(const uint8_t* from, Block& to) {
  const uint8_t *low = from, *high = from + 128, *scales = from + 192;
  const float d = half_to_float(read_half(from + 208));
  for (int g = 0; g < 16; ++g) to.scales[g] = float_to_half(d * float(int8_t(scales[g])));
  for (int i = 0; i < 256; ++i) {
    const int nibble = low[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
    const int pair = high[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    to.quants[i] = int8_t((nibble | pair << 4) - 32);
  }
}

// The scale is a power of two, halved because the values are doubled. Half precision holds 2^-24 .. 2^15; beyond that
// the largest power is used, and below that 0: weights of such sizes do not occur.
void decode_mxfp4(const uint8_t* from, Block& to) {
  to.scales[0] = float_to_half(std::ldexp(1.0f, std::min(int(from[0]) - 128, 15)));
  decode_nibbles(from + 1, to.quants);
}

const Format kFormats[] = {
    {"f32", Kind::f32, 1, 4, 0, 0, false, nullptr},          {"f16", Kind::f16, 1, 2, 0, 0, false, nullptr},
    {"bf16", Kind::bf16, 1, 2, 0, 0, false, nullptr},        {"q4_0", Kind::q4, 32, 18, 32, 8, false, decode_q4_0, 2},
    {"q4_1", Kind::q4, 32, 20, 32, 0, true, decode_q4_1, 4}, {"q5_0", Kind::q8, 32, 22, 32, 0, false, decode_q5_0},
    {"q5_1", Kind::q8, 32, 24, 32, 0, true, decode_q5_1},    {"q8_0", Kind::q8, 32, 34, 32, 0, false, decode_q8_0, 2},
    {"q4_k", Kind::q4, 256, 144, 32, 0, true, decode_q4_k},  {"q5_k", Kind::q8, 256, 176, 32, 0, true, decode_q5_k},
    {"q6_k", Kind::q8, 256, 210, 16, 0, false, decode_q6_k}, {"q4_z", Kind::q4, 32, 20, 32, 0, true, decode_q4_1, 4, true},
    {"iq4_nl", Kind::q4, 32, 18, 32, 0, false, decode_q4_0, 2, false, Table::iq4_nl},
    {"mxfp4", Kind::q4, 32, 17, 32, 0, false, decode_mxfp4, 0, false, Table::mxfp4},
    {"q8_z", Kind::q8, 32, 36, 32, 0, true, decode_q8_z, 4, true}, {"fp8", Kind::fp8, 32, 36, 0, 0, false, nullptr},
};

const Format& find_format(const std::string& name) {
  for (const Format& format : kFormats)
    if (name == format.name) return format;
  refuse("cannot pack weights of format `" + name + "`");
}

size_t quant_bytes(const Matrix& m) { return m.kind == Kind::q4 ? size_t(m.group) * 8 : size_t(m.group) * 16; }

size_t block_bytes(const Matrix& m) { return quant_bytes(m) + (m.has_min ? 64 : 32); }

std::shared_ptr<uint8_t> allocate(size_t bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return std::shared_ptr<uint8_t>(static_cast<uint8_t*>(memory), std::free);
}

// Scatter the groups of one decoded block into lane `lane` of the tile's blocks, which start at `to`.
void scatter_block(const Matrix& m, const Block& block, int groups, int lane, uint8_t* to) {
  for (int g = 0; g < groups; ++g, to += block_bytes(m)) {
    const int8_t* quants = block.quants + g * m.group;
    if (m.kind == Kind::q4) {
      for (int j = 0; j < 4; ++j)
        for (int b = 0; b < 4; ++b)
          to[j * 64 + lane * 4 + b] = uint8_t(quants[4 * j + b] | quants[4 * j + b + 16] << 4);
    } else {
      for (int j = 0; j < m.group / 4; ++j) memcpy(to + j * 64 + lane * 4, quants + 4 * j, 4);
    }
    memcpy(to + quant_bytes(m) + lane * 2, &block.scales[g], 2);
    if (m.has_min) memcpy(to + quant_bytes(m) + 32 + lane * 2, &block.minima[g], 2);
  }
}

// Return the index of input k of output `lane` in a tile of floats.
size_t float_index(const Matrix& m, int lane, int k) {
  if (m.kind == Kind::bf16) return size_t(k / 2) * 2 * kLanes + lane * 2 + k % 2;
  return size_t(k) * kLanes + lane;
}

template <class Element>
void pack_floats(const Matrix& m, const uint8_t* source, int tile, Element* to) {
  const int lanes = std::min(kLanes, m.rows - tile * kLanes);
  const uint8_t* from = source + size_t(tile) * kLanes * m.cols * sizeof(Element);  // may be unaligned
  for (int lane = 0; lane < lanes; ++lane)
    for (int k = 0; k < m.cols; ++k)
      memcpy(to + float_index(m, lane, k), from + (size_t(lane) * m.cols + k) * sizeof(Element), sizeof(Element));
}

void pack_fp8(const Matrix& m, const uint8_t* source, int tile, uint8_t* to) {
  const int lanes = std::min(kLanes, m.rows - tile * kLanes), blocks = m.cols / kFp8Group;
  constexpr int stored = 4 + kFp8Group;  // bytes of a checkpoint block
  const uint8_t* from = source + size_t(tile) * kLanes * blocks * stored;
  for (int b = 0; b < blocks; ++b, to += kFp8Block)
    for (int lane = 0; lane < lanes; ++lane) {
      const uint8_t* block = from + (size_t(lane) * blocks + b) * stored;
      float scale;
      memcpy(&scale, block, 4);
      scale *= 256;
      memcpy(to + kFp8Quants + lane * 4, &scale, 4);
      for (int k = 0; k < kFp8Group; ++k) to[k * kLanes + lane] = block[4 + k];
    }
}

void pack_blocks(const Matrix& m, const Format& format, const uint8_t* source, int tile, uint8_t* to) {
  const int lanes = std::min(kLanes, m.rows - tile * kLanes);
  const int blocks = m.cols / format.elements, groups = format.elements / m.group;
  const uint8_t* from = source + size_t(tile) * kLanes * blocks * format.bytes;
  for (int b = 0; b < blocks; ++b, to += groups * block_bytes(m))
    for (int lane = 0; lane < lanes; ++lane) {
      Block block;
      format.decode(from + (size_t(lane) * blocks + b) * format.bytes, block);
      scatter_block(m, block, groups, lane, to);
    }
}

// Copy sixteen rows of blocks whose quants need no decoding, four bytes per lane at a time.
template <int quads>
void deal_blocks(const Matrix& m, const Format& format, const uint8_t* source, int tile, uint8_t* to) {
  const int blocks = m.cols / format.elements, halves = format.verbatim / 2;
  const size_t row = size_t(blocks) * format.bytes;
  const uint8_t* from = source + size_t(tile) * kLanes * row;
  for (int b = 0; b < blocks; ++b, from += format.bytes, to += block_bytes(m))
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint8_t* block = from + lane * row;
      for (int j = 0; j < quads; ++j) memcpy(to + j * 64 + lane * 4, block + format.verbatim + j * 4, 4);
      for (int h = 0; h < halves; ++h) memcpy(to + quads * 64 + h * 32 + lane * 2, block + h * 2, 2);
    }
}

void pack_tile(const Matrix& m, const Format& format, const uint8_t* source, int tile) {
  uint8_t* to = m.data.get() + tile * m.tile_bytes();
  if ((tile + 1) * kLanes > m.rows || m.kind == Kind::bf16) memset(to, 0, m.tile_bytes());
  if (format.verbatim && (tile + 1) * kLanes <= m.rows) {
    const auto deal = m.kind == Kind::q4 ? deal_blocks<4> : deal_blocks<8>;
    return deal(m, format, source, tile, to);
  }
  if (format.decode) return pack_blocks(m, format, source, tile, to);
  if (m.kind == Kind::fp8) return pack_fp8(m, source, tile, to);
  if (m.kind == Kind::f32) return pack_floats(m, source, tile, reinterpret_cast<uint32_t*>(to));
  pack_floats(m, source, tile, reinterpret_cast<uint16_t*>(to));
}

float element(const Matrix& m, const uint8_t* tile, int lane, int k) {
  if (m.kind == Kind::fp8) {
    const uint8_t* block = tile + size_t(k / kFp8Group) * kFp8Block;
    float scale;
    memcpy(&scale, block + kFp8Quants + lane * 4, 4);
    return half_to_float(fp8_to_half(block[k % kFp8Group * kLanes + lane])) * scale;
  }
  const size_t at = float_index(m, lane, k);
  if (m.kind == Kind::f32) return bits_to_float(reinterpret_cast<const uint32_t*>(tile)[at]);
  if (m.kind == Kind::f16) return half_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
  return bf16_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
}

}  // namespace

size_t Matrix::tile_bytes() const {
  if (group) return size_t(cols / group) * block_bytes(*this);
  if (kind == Kind::fp8) return size_t(cols / kFp8Group) * kFp8Block;
  const size_t inputs = kind == Kind::bf16 ? size_t(cols + 31) / 32 * 32 : size_t(cols);
  return inputs * kLanes * (kind == Kind::f32 ? 4 : 2);
}

std::shared_ptr<Matrix> pack(const std::string& name, int rows, int cols, const void* source, bool fast_activations,
                             const int32_t* order) {
  const Format& format = find_format(name);
  if (rows <= 0 || cols <= 0) refuse("cannot pack an empty matrix");
  if (cols % format.elements)
    refuse("a `" + name + "` matrix needs a width that is a multiple of " + std::to_string(format.elements) + ", not " +
           std::to_string(cols));
  auto matrix = std::make_shared<Matrix>();
  matrix->kind = format.kind;
  matrix->rows = rows;
  matrix->cols = cols;
  matrix->group = format.group;
  matrix->zero = format.zero;
  matrix->has_min = format.has_min;
  matrix->zero_points = format.zero_points;
  matrix->table = format.table;
  if (format.group) matrix->activations = fast_activations ? Activations::fast : Activations::high;
  if (order) {
    matrix->order.assign(order, order + cols);
    std::vector<bool> seen(size_t(cols), false);
    for (int32_t input : matrix->order) {
      if (input < 0 || input >= cols || seen[input]) refuse("the order of a matrix's inputs is no permutation");
      seen[input] = true;
    }
  }
  matrix->bytes = matrix->tile_bytes() * matrix->tiles();
  matrix->data = allocate(matrix->bytes);
  const uint8_t* from = static_cast<const uint8_t*>(source);
  parallel([&](int part, int parts) {
    const Share share(matrix->tiles(), part, parts);
    for (int tile = share.first; tile < share.last; ++tile) pack_tile(*matrix, format, from, tile);
  });
  return matrix;
}

void unpack_row(const Matrix& m, int row, float scale, float* out) {
  const uint8_t* block = m.data.get() + row / kLanes * m.tile_bytes();
  const int lane = row % kLanes;
  if (!m.group) {
    for (int k = 0; k < m.cols; ++k) out[m.order.empty() ? k : m.order[k]] = element(m, block, lane, k) * scale;
    return;
  }
  for (int start = 0; start < m.cols; start += m.group, block += block_bytes(m)) {
    const float d = half_to_float(read_half(block + quant_bytes(m) + lane * 2));
    const float stored = m.has_min ? half_to_float(read_half(block + quant_bytes(m) + 32 + lane * 2)) : 0.0f;
    const float minimum = m.zero_points ? -(d * stored) : stored;
    for (int i = 0; i < m.group; ++i) {
      const int quad = m.kind == Kind::q4 ? i / 4 % 4 : i / 4;
      const uint8_t byte = block[quad * 64 + lane * 4 + i % 4];
      int quant = m.kind == Kind::q4 ? (i < 16 ? byte & 15 : byte >> 4) : int8_t(byte);
      if (m.table != Table::none) quant = kTables[int(m.table)][quant];
      out[m.order.empty() ? start + i : m.order[start + i]] = (d * float(quant - m.zero) + minimum) * scale;
    }
  }
}

}  // namespace outrider
