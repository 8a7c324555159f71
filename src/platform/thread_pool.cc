// Persistent workers that share one task counter.
//
// One word, the gate, says which call is open and how many workers are inside it. A worker enters
// by raising the count while the gate is open; the caller closes the gate when the tasks are handed
// out and waits only for those inside. So a worker that is still asleep costs the caller nothing,
// and nobody can read the call's data after run() has returned. Test:
// tests/platform/thread_pool_test.cc.
#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "argosy/thread_pool.h"
#include "base/error.h"
#include "platform/float_env.h"
#include "platform/wait.h"

namespace argosy {
namespace {

constexpr int kMaxThreads = 1024;

// Gate: bits 0..15 workers inside, bit 16 open, bits 17..63 number of the call.
constexpr uint64_t kInsideMask = 0xFFFF;
constexpr uint64_t kOpenBit = uint64_t{1} << 16;
constexpr int kCallShift = 17;

}  // namespace

struct ThreadPool::State {
  int num_threads = 1;
  platform::WaitPolicy policy;

  // The open call. Written by the caller while the gate is closed and empty; published by the gate.
  Call call = nullptr;
  void* object = nullptr;
  int64_t num_tasks = 0;

  alignas(64) std::atomic<int64_t> next_task{0};
  alignas(64) std::atomic<uint64_t> gate{0};
  std::atomic<bool> stopping{false};
  platform::Doorbell worker_bell;
  platform::Doorbell caller_bell;
  std::vector<std::thread> workers;

  void start_worker(int thread) {
    workers.emplace_back([this, thread] { worker_loop(thread); });
  }

  void stop() {
    // Release, pairs with the acquire in worker_loop: workers see everything the owner did before.
    stopping.store(true, std::memory_order_release);
    worker_bell.ring();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }

  void run_tasks(int thread) {
    // Relaxed: the counter only hands out numbers; the call's data is published by the gate.
    for (int64_t task = next_task.fetch_add(1, std::memory_order_relaxed); task < num_tasks;
         task = next_task.fetch_add(1, std::memory_order_relaxed)) {
      const platform::ScopedFloatEnv float_env(platform::Denormals::kKeep);
      call(object, task, thread);
    }
  }

  // Enters the open call unless it is the one numbered `last_call`.
  bool try_enter(uint64_t* last_call) {
    // Acquire, pairs with the release store that opens the gate in run().
    uint64_t seen = gate.load(std::memory_order_acquire);
    while ((seen & kOpenBit) != 0 && (seen >> kCallShift) != *last_call) {
      // Acquire on success: as above. Releases nothing, but as a read-modify-write it keeps the
      // release sequence of the workers that have left before.
      if (gate.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
        *last_call = seen >> kCallShift;
        return true;
      }
    }
    return false;
  }

  void leave() {
    // Release, pairs with the acquire loads of the caller in run(): publishes what the tasks wrote.
    const uint64_t before = gate.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kInsideMask) == 1 && (before & kOpenBit) == 0) caller_bell.ring();
  }

  void worker_loop(int thread) {
    uint64_t last_call = 0;
    while (true) {
      bool entered = false;
      platform::wait_until(worker_bell, policy, platform::Deadline::never(), [&] {
        entered = try_enter(&last_call);
        // Acquire, pairs with the release in stop().
        return entered || stopping.load(std::memory_order_acquire);
      });
      if (!entered) return;
      run_tasks(thread);
      leave();
    }
  }
};

ThreadPool::ThreadPool(std::unique_ptr<State> state) : state_(std::move(state)) {}

ThreadPool::~ThreadPool() { state_->stop(); }

int ThreadPool::num_threads() const { return state_->num_threads; }

Result<std::unique_ptr<ThreadPool>> ThreadPool::create(int num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    return base::invalid("a pool of {} threads; it can have 1 to {}", num_threads, kMaxThreads);
  }
  auto state = std::make_unique<State>();
  state->num_threads = num_threads;
  state->policy = platform::WaitPolicy::for_threads(num_threads);
  state->workers.reserve(static_cast<size_t>(num_threads - 1));
  std::unique_ptr<ThreadPool> pool(new ThreadPool(std::move(state)));
  for (int thread = 1; thread < num_threads; ++thread) {
    try {
      pool->state_->start_worker(thread);
    } catch (const std::exception& failure) {  // the pool's destructor joins those that started
      return base::error(StatusCode::kOutOfMemory, "cannot start thread {} of {}: {}", thread,
                         num_threads, failure.what());
    }
  }
  return pool;
}

void ThreadPool::run(int64_t num_tasks, Call call, void* object) {
  if (num_tasks <= 0) return;
  if (num_tasks == 1) {
    const platform::ScopedFloatEnv float_env(platform::Denormals::kKeep);
    return call(object, 0, 0);
  }
  State& state = *state_;
  state.call = call;
  state.object = object;
  state.num_tasks = num_tasks;
  // Relaxed: nobody is inside; the gate publishes it.
  state.next_task.store(0, std::memory_order_relaxed);
  if (state.num_threads == 1) {
    state.run_tasks(0);
    return;
  }
  // Relaxed: only this thread opens and closes the gate, and it is closed and empty.
  const uint64_t number = (state.gate.load(std::memory_order_relaxed) >> kCallShift) + 1;
  // Release, pairs with the acquire in try_enter(): publishes the call's data.
  state.gate.store((number << kCallShift) | kOpenBit, std::memory_order_release);
  const int64_t num_wanted = std::min<int64_t>(num_tasks, state.num_threads) - 1;
  state.worker_bell.ring(static_cast<int>(num_wanted));
  state.run_tasks(0);
  // Acquire, pairs with the release in leave() of workers that are out already.
  state.gate.fetch_and(~kOpenBit, std::memory_order_acq_rel);
  platform::wait_until(state.caller_bell, state.policy, platform::Deadline::never(), [&] {
    // Acquire, pairs with the release in leave().
    return (state.gate.load(std::memory_order_acquire) & kInsideMask) == 0;
  });
}

}  // namespace argosy
