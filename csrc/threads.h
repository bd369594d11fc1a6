// A thread pool: threads spin for a while after each job, then sleep.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace outrider {

int thread_count();
void set_thread_count(int count);  // 1 .. 256; restarts the pool

// Call body(context, part, parts) once for each part in 0 .. parts - 1, parts = thread_count(), and wait. The calling
// thread runs part 0. Not re-entrant: a body must not call run_parts. Calls from several Python threads are serialized.
// An exception of a body is rethrown here once all parts have ended.
void run_parts(void (*body)(void* context, int part, int parts), void* context);

template <class Body>
void parallel(const Body& body) {
  run_parts([](void* context, int part, int parts) { (*static_cast<const Body*>(context))(part, parts); },
            const_cast<void*>(static_cast<const void*>(&body)));
}

// Part `part` of `count` items split into `parts` runs of nearly equal length.
struct Share {
  int first, last;
  Share(int64_t count, int part, int parts) : first(int(count * part / parts)), last(int(count * (part + 1) / parts)) {}
};

// `count` items handed out in runs of `grain` on demand: a delayed thread does not delay the others.
class Queue {
 public:
  Queue(int count, int grain) : count_(count), grain_(grain < 1 ? 1 : grain) {}
  bool take(int& first, int& last) {
    first = next_.fetch_add(grain_, std::memory_order_relaxed);
    last = count_ - first < grain_ ? count_ : first + grain_;
    return first < count_;
  }

 private:
  const int count_, grain_;
  std::atomic<int> next_{0};
};

// Grow-only memory of the calling thread, 64-byte aligned; `slot` names one of kScratchSlots buffers. It caches
// allocations, not values: nothing is read that the same call did not write.
constexpr int kScratchSlots = 19;
void* scratch(int slot, size_t bytes);

}  // namespace outrider
