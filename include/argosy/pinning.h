// Threads bound to CPUs: what keeps times steady and a rank's memory near it.
//
// CPUs are counted by index into usable_cpus(), round and round, so that any index names one.
// Binding is best effort: where the system refuses, a thread stays where it is and only speed
// suffers. Threads made by a bound thread are bound like it; waiting policies look at the mask when
// a group or a pool is made: make them first, bind then. Test: tests/platform/measure_test.cc.
#pragma once

#include <vector>

#include "argosy/thread_pool.h"

namespace argosy {

// The CPUs this process may use, rising: the mask of the thread that asked first, before anything
// was bound. Empty when the system does not say; then nothing is bound.
const std::vector<int>& usable_cpus();

// Binds the calling thread to the CPU of an index for the scope. They nest.
class ScopedPin {
 public:
  explicit ScopedPin(int index);
  ~ScopedPin();
  ScopedPin(const ScopedPin&) = delete;
  ScopedPin& operator=(const ScopedPin&) = delete;

 private:
  int previous_ = -1;  // index of the pin around this one; -1 = none
};

// Binds thread t of the pool to the CPU of index first + t, for good; thread 0 is the caller.
// Returns each thread's CPU, -1 for one that is not bound: the system refused, or it did not come
// within a second.
std::vector<int> pin_threads(ThreadPool& pool, int first);

}  // namespace argosy
