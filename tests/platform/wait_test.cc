// The waiting policy: wakes, deadlines, and the lost wake-up of many senders on one doorbell.
#include "platform/wait.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "platform/cpu_detect.h"
#include "support/rank_threads.h"

namespace argosy::platform {
namespace {

using std::chrono::milliseconds;

// Sleeps at once, and so long that a lost wake-up cannot hide behind the cap.
constexpr WaitPolicy kSleepAtOnce{
    .spin = false, .max_yields = 0, .max_sleep = milliseconds(30'000)};

TEST(WaitPolicy, SpinsOnlyWhenEveryThreadHasACore) {
  EXPECT_TRUE(WaitPolicy::for_threads(usable_cores()).spin);
  EXPECT_FALSE(WaitPolicy::for_threads(usable_cores() + 1).spin);
  EXPECT_LE(WaitPolicy::for_threads(1).max_sleep, milliseconds(20));
}

TEST(WaitUntil, ReturnsAtOnceWhenReadyEvenAfterTheDeadline) {
  Doorbell bell;
  EXPECT_TRUE(
      wait_until(bell, kSleepAtOnce, Deadline::after(milliseconds(0)), [] { return true; }));
  EXPECT_FALSE(
      wait_until(bell, kSleepAtOnce, Deadline::after(milliseconds(0)), [] { return false; }));
}

TEST(WaitUntil, GivesUpAtTheDeadline) {
  Doorbell bell;
  for (const WaitPolicy& policy : {kSleepAtOnce, WaitPolicy{.spin = true}, WaitPolicy{}}) {
    const Deadline deadline = Deadline::after(milliseconds(50));
    EXPECT_FALSE(wait_until(bell, policy, deadline, [] { return false; }));
    EXPECT_GE(Clock::now(), deadline.at());
    EXPECT_LT(Clock::now(), deadline.at() + milliseconds(2000));
  }
}

TEST(WaitUntil, SeesAConditionThatRingsNoBellWithinTheCap) {
  Doorbell bell;
  std::atomic<bool> flag{false};
  std::thread setter([&] {
    testing::sleep_ms(30);
    flag.store(true);
  });
  EXPECT_TRUE(wait_until(bell, WaitPolicy{}, Deadline::after(milliseconds(20'000)),
                         [&] { return flag.load(); }));
  setter.join();
}

TEST(WaitUntil, SeesASignalBetweenItsCheckAndItsMark) {
  Doorbell bell;
  int num_checks = 0;
  const Clock::time_point start = Clock::now();
  EXPECT_TRUE(wait_until(bell, kSleepAtOnce, Deadline::after(milliseconds(4'000)), [&] {
    // The signal comes right after the first check.
    if (num_checks++ == 0) bell.ring();
    return num_checks > 1;
  }));
  EXPECT_LT(Clock::now() - start, milliseconds(3'000));
}

TEST(WaitUntil, WakesOneSleeperOrAll) {
  Doorbell bell;
  std::atomic<int> num_awake{0};
  std::atomic<int> open{0};
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 4; ++i) {
    sleepers.emplace_back([&] {
      wait_until(bell, kSleepAtOnce, Deadline::after(milliseconds(20'000)),
                 [&] { return open.load() == 1; });
      num_awake.fetch_add(1);
    });
  }
  testing::sleep_ms(50);
  open.store(1);
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < 4; ++i) bell.ring(1);
  for (std::thread& sleeper : sleepers) sleeper.join();
  EXPECT_EQ(num_awake.load(), 4);
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
}

// All-to-all rounds of flags, as ranks do it, with a policy that always sleeps. When a sender
// clears the sleeper's mark, or the waiter does not check again after marking itself, a wake-up is
// lost and a wait lasts until its deadline.
class LostWakeUp : public ::testing::TestWithParam<int> {};

TEST_P(LostWakeUp, EveryRoundEndsSoon) {
  const int num_ranks = GetParam();
  const int num_rounds = testing::kUnderSanitizer ? 1500 : 4000;
  const auto num = static_cast<size_t>(num_ranks);
  std::vector<Doorbell> bells(num);
  std::vector<std::atomic<int>> flags(num * num);
  std::atomic<int64_t> longest_ms{0};
  testing::run_ranks(num_ranks, [&](int rank) {
    const auto self = static_cast<size_t>(rank);
    for (int round = 1; round <= num_rounds; ++round) {
      for (size_t peer = 0; peer < num; ++peer) {
        flags[peer * num + self].store(round, std::memory_order_release);
        bells[peer].ring();
      }
      const Clock::time_point start = Clock::now();
      const bool is_reached =
          wait_until(bells[self], kSleepAtOnce, Deadline::after(milliseconds(10'000)), [&] {
            for (size_t peer = 0; peer < num; ++peer) {
              if (flags[self * num + peer].load(std::memory_order_acquire) < round) return false;
            }
            return true;
          });
      const auto span = std::chrono::duration_cast<milliseconds>(Clock::now() - start).count();
      if (span > longest_ms.load()) longest_ms.store(span);
      if (!is_reached || span > 8000) return;
    }
  });
  EXPECT_LT(longest_ms.load(), 8000);
}

INSTANTIATE_TEST_SUITE_P(Ranks, LostWakeUp, ::testing::Values(2, 8, 16));

}  // namespace
}  // namespace argosy::platform
