// Helpers shared by the binding files.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>

#include "outrider.h"
#include "recording.h"

namespace nb = nanobind;

namespace outrider {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Counts the time spent inside kernels; the rest of a step is Python.
struct Busy {
  using Clock = std::chrono::steady_clock;
  static inline std::atomic<int64_t> nanoseconds{0};
  const Clock::time_point start = Clock::now();
  Busy() {
    if (Recording* recording = current_recording()) ++recording->missing;
  }
  ~Busy() { nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count(); }
};

using Unlocked = nb::call_guard<nb::gil_scoped_release, Busy>;

void bind_speculation(nb::module_& module);  // bind_speculation.cpp
void bind_recording(nb::module_& module);    // bind_recording.cpp

}  // namespace outrider
