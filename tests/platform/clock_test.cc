// Deadlines: when they pass, and that no span overflows.
#include "platform/clock.h"

#include <gtest/gtest.h>

#include <thread>

namespace argosy::platform {
namespace {

using std::chrono::milliseconds;

TEST(Deadline, PassesAfterItsSpanAndNotBefore) {
  const Clock::time_point start = Clock::now();
  const Deadline deadline = Deadline::after(milliseconds(20));
  EXPECT_EQ(deadline.span(), milliseconds(20));
  EXPECT_GE(deadline.at(), start + milliseconds(20));
  EXPECT_LE(deadline.at(), Clock::now() + milliseconds(20));
  std::this_thread::sleep_until(deadline.at() + milliseconds(1));
  EXPECT_TRUE(deadline.passed());
  EXPECT_FALSE(Deadline::after(milliseconds(60'000)).passed());
}

TEST(Deadline, ZeroAndNegativeSpansHavePassed) {
  EXPECT_TRUE(Deadline::after(milliseconds(0)).passed());
  EXPECT_TRUE(Deadline::after(milliseconds(-5)).passed());
}

TEST(Deadline, TheLargestSpanDoesNotOverflow) {
  const Deadline deadline = Deadline::after(milliseconds::max());
  EXPECT_GT(deadline.at(), Clock::now());
  EXPECT_FALSE(deadline.passed());
  EXPECT_FALSE(Deadline::never().passed());
}

TEST(Clock, SecondsGrow) {
  const double before = now_seconds();
  std::this_thread::sleep_for(milliseconds(5));
  EXPECT_GE(now_seconds() - before, 0.005);
}

}  // namespace
}  // namespace argosy::platform
