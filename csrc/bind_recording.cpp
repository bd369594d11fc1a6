// Python bindings of recordings (recording.h). kernels/cpu/recording.py makes them.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bind.h"

namespace outrider {
namespace {

StridedCopy strided_copy(Address target, Address source, const std::vector<int64_t>& sizes,
                         const std::vector<int64_t>& target_strides, const std::vector<int64_t>& source_strides,
                         int item) {
  if (sizes.size() > 4 || target_strides.size() != sizes.size() || source_strides.size() != sizes.size())
    refuse("a recorded copy has at most 4 dimensions, each with its strides");
  StridedCopy copy{at<char>(target), at<const char>(source), {1, 1, 1, 1}, {}, {}, item};
  const size_t first = 4 - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    copy.sizes[first + i] = sizes[i];
    copy.target_strides[first + i] = target_strides[i] * item;
    copy.source_strides[first + i] = source_strides[i] * item;
  }
  if (sizes.empty()) copy.target_strides[3] = copy.source_strides[3] = item;
  return copy;
}

// Address, value, bytes of an element, strides of rows and columns in bytes.
using Operand = std::tuple<Address, int64_t, int, int64_t, int64_t>;

IntegerOperand integer_operand(const Operand& from) {
  const auto [address, value, item, row, column] = from;
  return {at<const char>(address), value, item, row, column};
}

IntegerOperation::Op operation_of(const std::string& name) {
  static const char* const names[] = {"add", "subtract", "both",    "divide", "remainder", "equal",
                                      "at_least", "above", "at_most", "larger", "smaller",   "select"};
  for (int i = 0; i <= IntegerOperation::select; ++i)
    if (name == names[i]) return IntegerOperation::Op(i);
  refuse("no integer operation is called `" + name + "`");
}

}  // namespace

void bind_recording(nb::module_& module) {
  nb::class_<Recording>(module, "Recording", "Kernel calls with their arguments.")
      .def(nb::init<>())
      .def("start", [](Recording& recording) { current_recording() = &recording; })
      .def("stop", [](Recording&) { current_recording() = nullptr; })
      .def("copy",
           [](Recording& recording, Address target, Address source, const std::vector<int64_t>& sizes,
              const std::vector<int64_t>& target_strides, const std::vector<int64_t>& source_strides, int item) {
             recording.calls.emplace_back(strided_copy(target, source, sizes, target_strides, source_strides, item));
           })
      .def("copy_rows",
           [](Recording& recording, Address target, Address source, Address indices, int64_t count, int64_t limit,
              int64_t bytes) {
             recording.calls.emplace_back(
                 RowCopy{at<char>(target), at<const char>(source), at<const int32_t>(indices), count, limit, bytes});
           })
      .def("scatter",
           [](Recording& recording, Address target, Address source, Address columns, int64_t rows, int64_t count,
              int64_t width) {
             for (int64_t i = 0; i < count; ++i)  // they are weights: later runs find the same
               if (at<const int64_t>(columns)[i] < 0 || at<const int64_t>(columns)[i] >= width)
                 refuse("column " + std::to_string(at<const int64_t>(columns)[i]) + " lies outside a matrix of " +
                        std::to_string(width) + " columns");
             recording.calls.emplace_back([=] {
               for (int64_t row = 0; row < rows; ++row)
                 for (int64_t i = 0; i < count; ++i)
                   at<float>(target)[row * width + at<const int64_t>(columns)[i]] =
                       at<const float>(source)[row * count + i];
             });
           })
      .def("fill",
           [](Recording& recording, Address target, float value, int64_t count) {
             recording.calls.emplace_back([=] { std::fill_n(at<float>(target), count, value); });
           })
      .def("sigmoid",
           [](Recording& recording, Address target, Address source, int64_t count) {
             recording.calls.emplace_back([=] {
               for (int64_t i = 0; i < count; ++i)
                 at<float>(target)[i] = 1 / (1 + std::exp(-at<const float>(source)[i]));
             });
           })
      .def("clear", [](Recording& recording, Address target,
                       size_t bytes) { recording.calls.emplace_back([=] { memset(at<void>(target), 0, bytes); }); })
      .def("add",
           [](Recording& recording, Address target, Address left, Address right, int64_t rows, int64_t columns,
              int64_t right_rows) {
             recording.calls.emplace_back([=] {
               for (int64_t row = 0; row < rows; ++row) {
                 const float* to_add = at<const float>(right) + (right_rows == 1 ? 0 : row * columns);
                 for (int64_t i = 0; i < columns; ++i)
                   at<float>(target)[row * columns + i] = at<const float>(left)[row * columns + i] + to_add[i];
               }
             });
           })
      .def("scale",
           [](Recording& recording, Address target, Address source, float factor, int64_t count) {
             recording.calls.emplace_back([=] {
               for (int64_t i = 0; i < count; ++i) at<float>(target)[i] = at<const float>(source)[i] * factor;
             });
           })
      .def("integers",
           [](Recording& recording, const std::string& name, int64_t rows, int64_t columns, const Operand& out,
              const Operand& a, const Operand& b, const Operand& c) {
             recording.calls.emplace_back(IntegerOperation{operation_of(name), integer_operand(out), rows, columns,
                                                           integer_operand(a), integer_operand(b), integer_operand(c)});
           })
      .def("put_rows",
           [](Recording& recording, Address target, Address source, Address indices, int64_t count, int64_t limit,
              int64_t bytes) {
             recording.calls.emplace_back(
                 RowPut{at<char>(target), at<const char>(source), at<const int64_t>(indices), count, limit, bytes});
           })
      .def("choose_rows",
           [](Recording& recording, Address target, Address flags, Address chosen, Address other, int64_t rows,
              int64_t columns) {
             recording.calls.emplace_back([=] {
               for (int64_t i = 0; i < rows; ++i) {
                 const float* from = at<const uint8_t>(flags)[i] ? at<const float>(chosen)
                                                                 : at<const float>(other) + i * columns;
                 memcpy(at<float>(target) + i * columns, from, size_t(columns) * sizeof(float));
               }
             });
           })
      .def_ro("missing", &Recording::missing)
      .def("end_depth",
           [](Recording& recording, Address estimate, bool is_logprob) {
             recording.depths.push_back({recording.calls.size(), at<const float>(estimate), is_logprob});
           })
      .def("replay", &replay, Unlocked());
  module.def("copy_bytes", [](Address target, Address source, size_t bytes) {
    memcpy(at<void>(target), at<const void>(source), bytes);
  });
}

}  // namespace outrider
