// How a thread waits for another: a short spin if there is a core for it, some yields, then a
// futex.
//
// The one place of the waiting policy. No fixed policy is right: a pure spin costs a scheduler tick
// per wait when threads outnumber cores, a futex at once costs about 35 us on a virtual machine,
// and endless yields lose against foreign load. Invariant: only a waiter touches its own sleep
// mark; a sender that cleared it could erase the mark of a later sleep and then wake nobody. Test:
// tests/platform/wait_test.cc.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

#include "platform/clock.h"

namespace argosy::platform {

struct WaitPolicy {
  bool spin = false;
  int max_yields = 50;
  // Also the longest that a waiter is blind to what does not ring its doorbell.
  std::chrono::milliseconds max_sleep{20};

  // Spins only if every one of `num_threads` threads that wait for each other can have its own
  // core.
  static WaitPolicy for_threads(int num_threads);
};

// What a waiter sleeps on. Whoever changes a condition that somebody may wait for stores it first
// (release) and rings then. Any number of threads may ring, and any number may sleep.
class alignas(64) Doorbell {
 public:
  // Who may ring and sleep: threads of one process, or of any process that has mapped the memory.
  enum class Scope : uint32_t { kThreads, kProcesses };
  explicit Doorbell(Scope scope = Scope::kThreads) : scope_(scope) {}

  // Wakes at most `max_wake` sleepers.
  void ring(int max_wake = std::numeric_limits<int>::max()) {
    // seq_cst, pairs with Sleeper(): either the sleeper reads this count, and with it everything
    // stored before, or it marks itself later than this and the futex call refuses to sleep on the
    // old count.
    num_rings_.fetch_add(1, std::memory_order_seq_cst);
    // seq_cst, pairs with the mark in Sleeper(): a mark that precedes the count above is seen here.
    if (num_sleepers_.load(std::memory_order_seq_cst) != 0) wake(max_wake);
  }

  // The same for a condition that is stored and loaded with seq_cst only: then a load here is enough, and the bell's
  // cache line moves only when somebody sleeps. 0.1 us a signal of 4 ranks on 2 cores.
  void ring_sleepers(int max_wake = std::numeric_limits<int>::max()) {
    // seq_cst, after the store of the condition: either this sees the sleeper's mark, or the sleeper, whose check comes
    // after its mark, sees the condition.
    if (num_sleepers_.load(std::memory_order_seq_cst) != 0) ring(max_wake);
  }

  // Marks the calling thread as about to sleep, for the scope. The condition must be checked again
  // after the mark and before sleep_until().
  class Sleeper {
   public:
    explicit Sleeper(Doorbell& bell)
        // seq_cst, pairs with the count in ring(): acquires what the ringer stored before it.
        : bell_(bell), seen_(bell.num_rings_.load(std::memory_order_seq_cst)) {
      // seq_cst, pairs with the load in ring(). After the load of the count, or a ring between the
      // two would be missed.
      bell_.num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    }
    // seq_cst, pairs with the load in ring(); a ring that still sees the mark wakes nobody,
    // harmlessly.
    ~Sleeper() { bell_.num_sleepers_.fetch_sub(1, std::memory_order_seq_cst); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

    // Returns at the latest at `end`, and at once if the bell rang since the mark.
    void sleep_until(Clock::time_point end) const;

   private:
    Doorbell& bell_;
    const uint32_t seen_;
  };

 private:
  void wake(int max_wake);

  std::atomic<uint32_t> num_rings_{0};     // the futex word
  std::atomic<uint32_t> num_sleepers_{0};  // each sleeper adds and takes away its own one
  const Scope scope_;
};

// Gives the core to another thread that can run.
void yield_core();

// About the time in which a peer on another core answers.
inline constexpr std::chrono::microseconds kSpinTime{1};

// Some yields share one look at the clock: it takes as long as what is waited for.
inline constexpr int kYieldsPerClock = 8;

// Waits until ready() is true; false when the deadline passed before. ready() must be cheap: it is
// called at every turn.
template <typename Ready>
bool wait_until(Doorbell& bell, const WaitPolicy& policy, const Deadline& deadline, Ready&& ready) {
  if (ready()) return true;
  if (policy.spin) {
    const Clock::time_point end = Clock::now() + kSpinTime;
    while (Clock::now() < end) {
      _mm_pause();
      if (ready()) return true;
    }
  }
  for (int i = 0; i < policy.max_yields; ++i) {
    if (i % kYieldsPerClock == kYieldsPerClock - 1 && deadline.passed()) break;
    yield_core();
    if (ready()) return true;
  }
  while (!deadline.passed()) {
    const Doorbell::Sleeper sleeper(bell);
    if (ready()) return true;
    sleeper.sleep_until(std::min(deadline.at(), Clock::now() + policy.max_sleep));
    if (ready()) return true;
  }
  return ready();
}

}  // namespace argosy::platform
