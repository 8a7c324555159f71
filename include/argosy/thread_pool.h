// The worker threads of one rank.
//
// Results never depend on the number of threads (contract 4.1): tasks write disjoint outputs. Every
// worker starts from a default MXCSR and restores it (contract 4.5). A waiting worker spins briefly
// only when the process has a core for it, then yields, then sleeps. Test:
// tests/platform/thread_pool_test.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "argosy/status.h"

namespace argosy {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread: 1 starts no thread. Errors: kInvalidArgument when
  // num_threads < 1 or > 1024; kOutOfMemory when the system refuses a thread.
  static Result<std::unique_ptr<ThreadPool>> create(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls body(task, thread) for every task in [0, num_tasks), each once, on the pool's threads and
  // the caller; thread is in [0, num_threads()). Returns when all are done; what they wrote is then
  // visible to the caller. Allocates nothing. One caller at a time; not from inside a task. `body`
  // must not throw.
  template <typename Body>
  void parallel_for(int64_t num_tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(
        num_tasks,
        [](void* object, int64_t task, int thread) {
          (*static_cast<Plain*>(object))(task, thread);
        },
        const_cast<std::remove_const_t<Plain>*>(&body));
  }

 private:
  struct State;
  explicit ThreadPool(std::unique_ptr<State> state);
  using Call = void (*)(void* object, int64_t task, int thread);
  void run(int64_t num_tasks, Call call, void* object);

  std::unique_ptr<State> state_;
};

}  // namespace argosy
