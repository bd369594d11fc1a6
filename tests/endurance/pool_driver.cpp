// The thread pool alone, used as hard as its header allows, for ThreadSanitizer to watch. Everything that threads hand
// each other here is plain memory: an edge that the pool does not make shows as a race.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "threads.h"

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "the pool broke its word: %s\n", what);
  std::exit(2);
}

// Each part writes a cell of its own, the caller reads them all, and writes them before the next job.
void sums(int rounds) {
  std::vector<long> cells(256);
  for (int round = 0; round < rounds; ++round) {
    std::fill(cells.begin(), cells.end(), -1);
    int seen = 0;
    outrider::parallel([&](int part, int parts) {
      cells[part] = part + round;
      if (part == 0) seen = parts;
    });
    for (int part = 0; part < seen; ++part) require(cells[part] == part + round, "each part runs once");
    require(cells[seen] == -1, "no part beyond the last");
  }
}

// Work handed out by a queue, in memory of each thread's own.
void queues(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int count = 100 + round % 50;
    std::vector<int> done(count);
    outrider::Queue queue(count, 1 + round % 7);
    outrider::parallel([&](int part, int) {
      auto* own = static_cast<unsigned char*>(outrider::scratch(round % outrider::kScratchSlots, 64 + 100 * (round % 9)));
      std::memset(own, part, 64);
      for (int first, last; queue.take(first, last);)
        for (int at = first; at < last; ++at) ++done[at];
      require(own[0] == part && own[63] == part, "scratch is a thread's own");
    });
    for (int times : done) require(times == 1, "a queue hands everything out once");
  }
}

// What a body throws comes back once, and the pool goes on.
void failures(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    bool caught = false;
    try {
      outrider::parallel([&](int part, int parts) {
        if (part == round % parts) throw std::runtime_error("meant");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    require(caught, "what a body throws is thrown");
  }
}

// Longer than the workers spin: they sleep and are woken.
void naps(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(50 + 40 * (round % 5)));
    sums(1);
  }
}

void restarts(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    outrider::set_thread_count(1 + round % 5);
    require(outrider::thread_count() >= 1, "there is a thread");
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
}

// A child has no workers: it starts its own.
void forks(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    sums(1);
    pid_t child = fork();
    if (child == 0) {
      sums(3);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child can use the pool");
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 200;
  outrider::set_thread_count(4);
  sums(rounds);
  naps(rounds);
  failures(rounds);
  forks(rounds / 20);
  std::vector<std::thread> callers;
  for (auto* work : {sums, queues, failures, naps, restarts}) callers.emplace_back(work, rounds);
  for (auto& caller : callers) caller.join();
  std::puts("held");
  return 0;
}
