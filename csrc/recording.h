// Recordings: kernel calls with their arguments, to be run again by one call, without Python between them.
//
// While a recording is current on a thread, every bound kernel that runs through `recorded` is also added to it, with
// copies of its arguments. Weights are shared with the recording; tensors must stay where they are.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace outrider {

// The end of a drafted depth: whether the next one is drafted depends on the probability of the tokens so far.
struct DepthEnd {
  size_t calls;          // calls before it
  const float* estimate;  // of the token that was sampled at this depth
  bool is_logprob;        // the estimate is a log-probability of the drafter, else the probability of acceptance
};

struct Recording {
  std::vector<std::function<void()>> calls;
  std::vector<DepthEnd> depths;
  int missing = 0;  // kernels that ran meanwhile and cannot be recorded
};

Recording*& current_recording();  // of this thread; null: calls are only run

template <class Call>
void recorded(const Call& call) {
  if (Recording* recording = current_recording()) {
    recording->calls.emplace_back(call);
    --recording->missing;  // `Busy` has counted it
  }
  call();
}

// Run all calls, or those of the first `limit` depths (0: all), up to the first after which the probability of all
// tokens so far is below `least`. Return the number of depths. shared_noise: tokens are sampled with the target's noise,
// which halves the probability of rejection.
int replay(const Recording& recording, int limit, double least, bool shared_noise);

// Tensor operations that stand between kernels. Each copies or computes a few numbers on the calling thread.
struct StridedCopy {
  char* target;
  const char* source;
  int64_t sizes[4], target_strides[4], source_strides[4];  // in bytes, the innermost last
  int item;                                                // bytes
  void operator()() const;
};

// Arithmetic on small matrices of integers and flags, such as positions and slots: out = op(a, b), or a ? b : c.
struct IntegerOperand {
  const char* data;  // null: `value` is every element
  int64_t value;
  int item;                // bytes of an element: 1, 4 or 8
  int64_t row, column;  // strides in bytes; 0: broadcast
  int64_t get(int64_t i, int64_t j) const;
};

struct IntegerOperation {
  enum Op { add, subtract, both, divide, remainder, equal, at_least, above, at_most, larger, smaller, select };
  Op op;
  IntegerOperand out;  // written
  int64_t rows, columns;
  IntegerOperand a, b, c;
  void operator()() const;
};

struct RowPut {  // target[indices[i]] = source[i]
  char* target;
  const char* source;
  const int64_t* indices;
  int64_t count, limit, bytes;  // indices, rows of the target, bytes of a row
  void operator()() const;
};

struct RowCopy {  // target[i] = source[indices[i]]
  char* target;
  const char* source;
  const int32_t* indices;
  int64_t count, limit, bytes;  // indices, rows of the source, bytes of a row
  void operator()() const;
};

}  // namespace outrider
