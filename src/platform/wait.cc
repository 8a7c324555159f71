// The system calls behind wait.h. Test: tests/platform/wait_test.cc.
#include "platform/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "platform/cpu_detect.h"

namespace argosy::platform {

WaitPolicy WaitPolicy::for_threads(int num_threads) {
  WaitPolicy policy;
  policy.spin = num_threads <= usable_cores();
  return policy;
}

void Doorbell::Sleeper::sleep_until(Clock::time_point end) const {
  using std::chrono::nanoseconds;
  const int64_t span = std::chrono::duration_cast<nanoseconds>(end - Clock::now()).count();
  if (span <= 0) return;
  constexpr int64_t kSecond = 1'000'000'000;
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(span / kSecond);
  timeout.tv_nsec = static_cast<long>(span % kSecond);  // NOLINT(google-runtime-int): POSIX type
  // Every way out is fine: rung, other count, interrupted, timed out. The caller checks its
  // condition.
  const int operation = bell_.scope_ == Scope::kThreads ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
  syscall(SYS_futex, &bell_.num_rings_, operation, seen_, &timeout, nullptr, 0);
}

void Doorbell::wake(int max_wake) {
  const int operation = scope_ == Scope::kThreads ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
  syscall(SYS_futex, &num_rings_, operation, max_wake, nullptr, nullptr, 0);
}

void yield_core() { sched_yield(); }

}  // namespace argosy::platform
