// Monotonic time and deadlines. Test: tests/platform/clock_test.cc.
#pragma once

#include <algorithm>
#include <chrono>

namespace argosy::platform {

using Clock = std::chrono::steady_clock;

// Seconds of the monotonic clock, for measuring stages.
inline double now_seconds() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// A point in time after which a wait gives up.
class Deadline {
 public:
  // Spans above a century count as a century: the clock's 64-bit nanoseconds must not overflow.
  static Deadline after(std::chrono::milliseconds span) {
    constexpr std::chrono::milliseconds kCentury = std::chrono::hours(24 * 36525);
    return Deadline(Clock::now() + std::min(span, kCentury), span);
  }
  // For waits that end for another reason, such as idle workers.
  static Deadline never() {
    return Deadline(Clock::time_point::max(), std::chrono::milliseconds::max());
  }

  bool passed() const { return at_ != Clock::time_point::max() && Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }
  // The span it was made with, for messages.
  std::chrono::milliseconds span() const { return span_; }

 private:
  Deadline(Clock::time_point at, std::chrono::milliseconds span) : at_(at), span_(span) {}
  Clock::time_point at_;
  std::chrono::milliseconds span_;
};

}  // namespace argosy::platform
