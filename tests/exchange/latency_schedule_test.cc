// Latency mode under every order of messages and ranks that the transport allows, by seeds: no stale byte is read, nobody
// hangs; and the schedules find faults that are planted.
//
// ARGOSY_SCHEDULES=N runs N schedules (make soak: a million), ARGOSY_SCHEDULE_SEED=S starts with seed S. A failure
// prints the seed, the last steps and the command that has it again.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "base/env.h"
#include "exchange/latency_schedule.h"
#include "support/rank_threads.h"

namespace argosy {
namespace {

using testing::kUnderSanitizer;
using testing::LatencySchedule;
using testing::PlantedFault;
using testing::ScheduleRules;

uint64_t number_of(const char* name, uint64_t otherwise) {
  const std::optional<std::string> text = base::env(name);
  return text.has_value() ? std::stoull(*text) : otherwise;
}

testing::ScheduleCoverage expect_all_end_well(const ScheduleRules& rules, uint64_t count) {
  const uint64_t first = number_of("ARGOSY_SCHEDULE_SEED", 1);
  count = number_of("ARGOSY_SCHEDULES", count);
  LatencySchedule schedule;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const std::string failure = schedule.run(seed, rules);
    const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
    EXPECT_EQ(failure, "") << "Again with: ARGOSY_SCHEDULE_SEED=" << seed
                           << " ARGOSY_SCHEDULES=1 argosy_test_exchange --gtest_filter="
                           << test->test_suite_name() << "." << test->name();
    if (!failure.empty()) break;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{} schedules from seed {} in {:.1f} s, {:.0f} a second\n", count, first,
             seconds.count(), static_cast<double>(count) / seconds.count());
  return schedule.coverage();
}

// K11: two to four ranks, one or two exchanges, one to five calls in flight, sizes, payloads and ways home drawn.
TEST(LatencySchedules, EndWell) {
  const testing::ScheduleCoverage met = expect_all_end_well({}, kUnderSanitizer ? 1500 : 6000);
  if (HasFailure() || number_of("ARGOSY_SCHEDULES", 1000) < 1000) return;  // a few meet less
  EXPECT_EQ(met.most_in_flight, 5);
  for (const int64_t count :
       {met.failed_calls, met.declined_calls, met.pull, met.push_by_stores, met.push_by_puts,
        met.quantised, met.two_exchanges, met.training, met.differing_calls}) {
    EXPECT_GT(count, 100);
  }
}

// C102: two ranks, a slow reader on rank 1, calls that reuse its slots.
TEST(LatencySchedules, SlowReader) {
  expect_all_end_well({.num_ranks = 2, .num_in_flight = 2, .num_calls = 3, .rank_1_is_slow = true},
                      1000);
}

// C105: a ring of two slots, five messages, payloads delivered as late as they may be.
TEST(LatencySchedules, LatePayloadsInARingOfTwo) {
  expect_all_end_well(
      {.num_ranks = 2, .num_in_flight = 2, .num_calls = 5, .payloads_are_slow = true}, 1000);
}

// C106: a thousand random orders of puts and flags give the right sums.
TEST(LatencySchedules, RandomOrders) {
  expect_all_end_well({.num_ranks = 3, .num_in_flight = 1, .num_calls = 4}, 1000);
}

// C107: several payloads are on their way between the same two ranks and overtake each other; a flag promises those before it
// and no others. Every byte is checked; faults planted below show that a broken promise is seen.
TEST(LatencySchedules, PayloadsOvertakeEachOther) {
  expect_all_end_well({.num_ranks = 2, .num_in_flight = 5, .num_calls = 8}, 1000);
}

// The same seed is the same schedule, whatever ran before.
TEST(LatencySchedules, SeedReproducesAFailure) {
  const ScheduleRules rules{.fault = PlantedFault::kSlotAfterFlag};
  LatencySchedule schedule;
  uint64_t seed = 1;
  while (seed < 1000 && schedule.run(seed, rules).empty()) ++seed;
  const std::string failure = schedule.run(seed, rules);
  ASSERT_NE(failure, "");
  for (uint64_t other = 1; other < 20; ++other) EXPECT_EQ(schedule.run(seed + other, {}), "");
  EXPECT_EQ(schedule.run(seed, rules), failure);
  LatencySchedule another;
  EXPECT_EQ(another.run(seed, rules), failure);
  EXPECT_NE(failure.find("last of "), std::string::npos);
}

struct Planted {
  PlantedFault fault;
  const char* name;
};
class LatencyScheduleFaults : public ::testing::TestWithParam<Planted> {};

// A checker that finds nothing proves nothing: each of these must show within the schedules that every build runs.
TEST_P(LatencyScheduleFaults, AreFound) {
  const ScheduleRules rules{.fault = GetParam().fault};
  LatencySchedule schedule;
  constexpr uint64_t kCount = 2000;
  uint64_t first = 0, found = 0;
  std::string example;
  for (uint64_t seed = 1; seed <= (kUnderSanitizer ? kCount / 4 : kCount); ++seed) {
    const std::string failure = schedule.run(seed, rules);
    if (failure.empty()) continue;
    if (found++ == 0) {
      first = seed;
      example = failure.substr(0, failure.find('\n'));
    }
  }
  fmt::print("found in {} schedules, first by seed {}: {}\n", found, first, example);
  EXPECT_GT(found, 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Planted, LatencyScheduleFaults,
    ::testing::Values(Planted{PlantedFault::kFlagWithoutEpoch, "FlagWithoutEpoch"},
                      Planted{PlantedFault::kFlagOfOldEpoch, "FlagOfOldEpoch"},
                      Planted{PlantedFault::kEpochNotCompared, "EpochNotCompared"},
                      Planted{PlantedFault::kSlotAfterFlag, "SlotAfterFlag"},
                      Planted{PlantedFault::kResultAfterFlag, "ResultAfterFlag"},
                      Planted{PlantedFault::kNoticeAfterFlag, "NoticeAfterFlag"},
                      Planted{PlantedFault::kReuseWithoutDone, "ReuseWithoutDone"},
                      Planted{PlantedFault::kSumWithoutDone, "SumWithoutDone"}),
    [](const auto& planted) { return std::string(planted.param.name); });

}  // namespace
}  // namespace argosy
