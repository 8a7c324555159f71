// A crew runs bodies on every rank at once, in the order given, and ends when one fails.
#include "tools/bench/rank_crew.h"

#include <gtest/gtest.h>

#include <atomic>

#include "tools/bench/runner.h"

namespace argosy::tools::bench {
namespace {

BenchContext context() { return *make_context(std::nullopt, DotOrder::kAuto); }

TEST(RankCrew, RunsEveryBodyOnceOnEveryRank) {
  for (const int num_ranks : {1, 2, 5}) {
    const Result<std::unique_ptr<RankCrew>> crew = RankCrew::create(context(), num_ranks, 2);
    ASSERT_TRUE(crew.has_value()) << crew.error().to_string();
    for (int body = 0; body < 20; ++body) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(num_ranks));
      const Result<double> seconds = (*crew)->run([&](Group& group) {
        ++calls[static_cast<size_t>(group.rank())];
        EXPECT_EQ(group.num_ranks(), num_ranks);
        return group.barrier();
      });
      ASSERT_TRUE(seconds.has_value()) << seconds.error().to_string();
      EXPECT_GE(*seconds, 0.0);
      for (const std::atomic<int>& count : calls) EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(RankCrew, OneFailureEndsTheOthersAndIsNamed) {
  const Result<std::unique_ptr<RankCrew>> crew = RankCrew::create(context(), 3, 1);
  ASSERT_TRUE(crew.has_value());
  const Result<double> seconds = (*crew)->run([](Group& group) {
    if (group.rank() == 1) return Status(StatusCode::kCapacity, "no berth left");
    return group.barrier();
  });
  ASSERT_FALSE(seconds.has_value());
  EXPECT_EQ(seconds.error().code(), StatusCode::kCapacity);
  EXPECT_NE(seconds.error().message().find("no berth left"), std::string::npos);
}

TEST(RankCrew, NeverRunIsFine) { EXPECT_TRUE(RankCrew::create(context(), 2, 1).has_value()); }

TEST(RankCrew, BadNumbersAreErrors) {
  EXPECT_EQ(RankCrew::create(context(), 0, 1).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(RankCrew::create(context(), 2, 0).error().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace argosy::tools::bench
