// See pinning.h. Test: tests/platform/measure_test.cc.
#include "argosy/pinning.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "platform/clock.h"
#include "platform/cpu_detect.h"

namespace argosy {
namespace {

struct CpuSet {
  struct Free {
    void operator()(cpu_set_t* cpus) const { CPU_FREE(cpus); }
  };
  std::unique_ptr<cpu_set_t, Free> set;
  size_t bytes = 0;
};

// Machines may have more CPUs than a cpu_set_t holds.
CpuSet make_set(int num_cpus) {
  CpuSet made;
  made.set.reset(CPU_ALLOC(static_cast<size_t>(num_cpus)));
  made.bytes = CPU_ALLOC_SIZE(static_cast<size_t>(num_cpus));
  if (made.set != nullptr) CPU_ZERO_S(made.bytes, made.set.get());
  return made;
}

constexpr int kMostCpus = 1 << 15;

std::vector<int> read_allowed_cpus() {
  for (int most = 1024; most <= kMostCpus; most *= 2) {
    const CpuSet allowed = make_set(most);
    if (allowed.set == nullptr) break;
    if (sched_getaffinity(0, allowed.bytes, allowed.set.get()) != 0) continue;
    std::vector<int> cpus;
    for (int cpu = 0; cpu < most; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), allowed.bytes, allowed.set.get())) {
        cpus.push_back(cpu);
      }
    }
    return cpus;
  }
  return {};
}

// A mask that the system refuses leaves the thread where it is: speed, never results.
bool bind_to(const std::vector<int>& cpus) {
  if (cpus.empty()) return false;
  const CpuSet mask = make_set(cpus.back() + 1);
  if (mask.set == nullptr) return false;
  for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), mask.bytes, mask.set.get());
  return sched_setaffinity(0, mask.bytes, mask.set.get()) == 0;
}

// The CPU, or -1 where the thread is not bound.
int bind_to_index(int index) {
  const std::vector<int>& cpus = usable_cpus();
  if (cpus.empty()) return -1;
  const int cpu = cpus[static_cast<size_t>(index) % cpus.size()];
  return bind_to({cpu}) ? cpu : -1;
}

thread_local int pinned_index = -1;

}  // namespace

const std::vector<int>& usable_cpus() {
  static const std::vector<int> cpus = read_allowed_cpus();
  return cpus;
}

ScopedPin::ScopedPin(int index) : previous_(pinned_index) {
  bind_to_index(index);
  pinned_index = index;
}

ScopedPin::~ScopedPin() {
  pinned_index = previous_;
  if (previous_ >= 0) {
    bind_to_index(previous_);
  } else {
    bind_to(usable_cpus());
  }
}

std::vector<int> pin_threads(ThreadPool& pool, int first) {
  const int num_threads = pool.num_threads();
  std::vector<int> cpus(static_cast<size_t>(num_threads), -1);
  std::atomic<int> arrived{0};
  const auto deadline = platform::Deadline::after(std::chrono::seconds(1));
  // One task each: nobody ends before all have come. The count only makes them wait for each other
  // (relaxed); nothing is published by it.
  pool.parallel_for(num_threads, [&](int64_t, int thread) {
    cpus[static_cast<size_t>(thread)] = bind_to_index(first + thread);
    pinned_index = first + thread;
    arrived.fetch_add(1, std::memory_order_relaxed);
    while (arrived.load(std::memory_order_relaxed) < num_threads && !deadline.passed()) {
      sched_yield();
    }
  });
  return cpus;
}

}  // namespace argosy
