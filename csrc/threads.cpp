#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace outrider {
namespace {

constexpr int kMostThreads = 256;
// Longer than the host work between two steps, and than a time slice of the scheduler: a thread that sleeps is late at
// the next job, which lets the others fall asleep too. 2 % of a decode step of SmolLM2-135M on two Neoverse-N1 cores
// against 80 us, 26 % beside another process that keeps one of the cores busy.
constexpr auto kSpin = std::chrono::milliseconds(10);

void pause_core() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` has no effect on the cores we target
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spin until `done` or the time is up; return whether it is done. Yield in between: on a busy machine the thread we
// wait for may need this core.
template <class Done>
bool spin(const Done& done) {
  auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 256; ++i) {
      if (done()) return true;
      pause_core();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

class Pool {
 public:
  explicit Pool(int parts) : parts_(parts) {
    try {
      for (int part = 1; part < parts; ++part) workers_.emplace_back([this, part] { work(part); });
    } catch (const std::system_error& error) {
      end();  // a running thread that is destroyed without a join ends the process
      throw std::runtime_error("cannot start " + std::to_string(parts) + " threads (" + error.code().message() +
                               "): lower `threads`, or `OUTRIDER_THREADS`");
    } catch (...) {
      end();
      throw;
    }
  }

  ~Pool() { end(); }

  void run(void (*body)(void*, int, int), void* context) {
    body_ = body;
    context_ = context;
    pending_.store(parts_ - 1, std::memory_order_relaxed);
    post();
    call(0);
    while (!spin([this] { return pending_.load(std::memory_order_acquire) == 0; })) {
    }
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false);
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

 private:
  // Sequentially consistent on both sides: either the worker sees the new job, or we see that it sleeps.
  void post() {
    jobs_.fetch_add(1);
    if (sleepers_.load() > 0) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }
      wake_.notify_all();
    }
  }

  void end() {
    stop_.store(true);
    post();
    for (auto& worker : workers_) worker.join();
  }

  void work(int part) {
    for (unsigned seen = 0;;) {
      if (!spin([&] { return jobs_.load(std::memory_order_acquire) != seen; })) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return jobs_.load() != seen; });
        sleepers_.fetch_sub(1);
      }
      ++seen;
      if (stop_.load()) return;
      call(part);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  void call(int part) {
    try {
      body_(context_, part, parts_);
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
  }

  const int parts_;
  void (*body_)(void*, int, int) = nullptr;
  void* context_ = nullptr;
  std::exception_ptr failure_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false}, failed_{false};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<unsigned> jobs_{0};
  alignas(64) std::atomic<int> pending_{0};
  std::vector<std::thread> workers_;  // last member: the threads read the members above
};

int default_count() {
  if (const char* text = std::getenv("OUTRIDER_THREADS"); text && *text) {
    char* end = nullptr;
    long count = std::strtol(text, &end, 10);
    if (*end || count < 1 || count > kMostThreads)
      throw std::invalid_argument("`OUTRIDER_THREADS` is `" + std::string(text) + "`: it must lie between 1 and " +
                                  std::to_string(kMostThreads));
    return int(count);
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, std::min(kMostThreads, CPU_COUNT(&cores)));
}

// `pool_mutex` protects `pool` and is held while a job runs, so a fork cannot happen inside one.
std::mutex pool_mutex;
std::unique_ptr<Pool> pool;
std::atomic<int> count{0};  // 0: not decided yet

// A forked child has no workers: drop the pool without joining and start a new one.
struct Lifetime {
  Lifetime() {
    pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
                   [] {
                     (void)pool.release();
                     pool_mutex.unlock();
                   });
  }
  ~Lifetime() {
    std::lock_guard<std::mutex> lock(pool_mutex);
    pool.reset();
  }
} lifetime;

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { ::operator delete(data, std::align_val_t(64)); }
};

}  // namespace

int thread_count() {
  int now = count.load(std::memory_order_relaxed);
  if (now == 0) {
    int none = 0;
    now = default_count();
    if (!count.compare_exchange_strong(none, now)) now = none;
  }
  return now;
}

void set_thread_count(int wanted) {
  if (wanted < 1 || wanted > kMostThreads)
    throw std::invalid_argument("the number of threads is " + std::to_string(wanted) + ": it must lie between 1 and " +
                                std::to_string(kMostThreads));
  std::lock_guard<std::mutex> lock(pool_mutex);
  pool.reset();
  count.store(wanted);
}

void run_parts(void (*body)(void*, int, int), void* context) {
  std::lock_guard<std::mutex> lock(pool_mutex);
  int parts = thread_count();
  if (parts == 1) return body(context, 0, 1);
  if (!pool) pool = std::make_unique<Pool>(parts);
  pool->run(body, context);
}

void* scratch(int slot, size_t bytes) {
  thread_local Buffer buffers[kScratchSlots];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    size_t grown = std::max(bytes, buffer.bytes * 3 / 2);
    void* fresh = ::operator new(grown, std::align_val_t(64));
    ::operator delete(buffer.data, std::align_val_t(64));
    buffer.data = fresh;
    buffer.bytes = grown;
  }
  return buffer.data;
}

}  // namespace outrider
