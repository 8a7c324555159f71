// Monotonic time and deadlines. Test: tests/platform/clock_test.cc.
#pragma once

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
  static Deadline after(std::chrono::milliseconds span) { return Deadline(Clock::now() + span, span); }

  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }
  // The span it was made with, for messages.
  std::chrono::milliseconds span() const { return span_; }

 private:
  Deadline(Clock::time_point at, std::chrono::milliseconds span) : at_(at), span_(span) {}
  Clock::time_point at_;
  std::chrono::milliseconds span_;
};

}  // namespace argosy::platform
