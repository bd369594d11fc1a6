#include "recording.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "outrider.h"

namespace outrider {

Recording*& current_recording() {
  static thread_local Recording* recording = nullptr;
  return recording;
}

namespace {

double acceptance(const DepthEnd& depth, bool shared_noise) {
  if (!depth.is_logprob) return *depth.estimate;
  const double probability = std::exp(double(std::min(*depth.estimate, 0.0f)));
  return shared_noise ? 1 - (1 - probability) / 2 : probability;
}

}  // namespace

int replay(const Recording& recording, int limit, double least, bool shared_noise) {
  size_t next = 0;
  double path = 1;
  int reached = 0;
  for (const DepthEnd& depth : recording.depths) {
    for (; next < depth.calls; ++next) recording.calls[next]();
    path *= acceptance(depth, shared_noise);
    if (++reached == limit || path < least) return reached;
  }
  for (; next < recording.calls.size(); ++next) recording.calls[next]();
  return reached;
}

void StridedCopy::operator()() const {
  const bool whole = target_strides[3] == item && source_strides[3] == item;
  for (int64_t a = 0; a < sizes[0]; ++a)
    for (int64_t b = 0; b < sizes[1]; ++b)
      for (int64_t c = 0; c < sizes[2]; ++c) {
        char* to = target + a * target_strides[0] + b * target_strides[1] + c * target_strides[2];
        const char* from = source + a * source_strides[0] + b * source_strides[1] + c * source_strides[2];
        if (whole) {
          memcpy(to, from, size_t(sizes[3]) * item);
          continue;
        }
        for (int64_t d = 0; d < sizes[3]; ++d) memcpy(to + d * target_strides[3], from + d * source_strides[3], item);
      }
}

int64_t IntegerOperand::get(int64_t i, int64_t j) const {
  if (!data) return value;
  const char* from = data + i * row + j * column;
  if (item == 1) return *reinterpret_cast<const uint8_t*>(from);
  return item == 4 ? *reinterpret_cast<const int32_t*>(from) : *reinterpret_cast<const int64_t*>(from);
}

namespace {

int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

int64_t compute(IntegerOperation::Op op, int64_t a, int64_t b) {
  switch (op) {
    case IntegerOperation::add: return a + b;
    case IntegerOperation::subtract: return a - b;
    case IntegerOperation::both: return a & b;
    case IntegerOperation::divide: return floor_divide(a, b);
    case IntegerOperation::remainder: return a - b * floor_divide(a, b);
    case IntegerOperation::equal: return a == b;
    case IntegerOperation::at_least: return a >= b;
    case IntegerOperation::above: return a > b;
    case IntegerOperation::at_most: return a <= b;
    case IntegerOperation::larger: return std::max(a, b);
    case IntegerOperation::smaller: return std::min(a, b);
    case IntegerOperation::select: break;
  }
  return 0;
}

}  // namespace

void IntegerOperation::operator()() const {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t first = a.get(i, j);
      const int64_t found = op != select ? compute(op, first, b.get(i, j)) : first ? b.get(i, j) : c.get(i, j);
      char* to = const_cast<char*>(out.data) + i * out.row + j * out.column;
      if (out.item == 1)
        *reinterpret_cast<uint8_t*>(to) = uint8_t(found);
      else if (out.item == 4)
        *reinterpret_cast<int32_t*>(to) = int32_t(found);
      else
        *reinterpret_cast<int64_t*>(to) = found;
    }
}

void RowPut::operator()() const {
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= limit) refuse("an index lies outside the rows of a tensor");
    memcpy(target + indices[i] * bytes, source + i * bytes, size_t(bytes));
  }
}

void RowCopy::operator()() const {
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= limit) refuse("an index lies outside the rows of a tensor");
    memcpy(target + i * bytes, source + indices[i] * bytes, size_t(bytes));
  }
}

}  // namespace outrider
