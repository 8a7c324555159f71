// Medians, ratios, number of samples, errors of cases, filters.
#include "tools/bench/runner.h"

#include <gtest/gtest.h>

namespace argosy::tools::bench {
namespace {

// Samples come from a list, round and round.
class ListBench : public Bench {
 public:
  ListBench(std::vector<Sample> samples, int64_t* num_taken)
      : samples_(std::move(samples)), num_taken_(num_taken) {}
  Result<Sample> sample() override {
    return samples_[static_cast<size_t>((*num_taken_)++) % samples_.size()];
  }

 private:
  std::vector<Sample> samples_;
  int64_t* num_taken_;
};

BenchCase case_of(std::vector<Sample> samples, int64_t* num_taken) {
  return {"list",
          {{"T", 8}, {"threads", 1}},
          "a limit",
          {0.1, 0.2, 0.3},
          [=](const BenchContext&) -> Result<std::unique_ptr<Bench>> {
            return std::unique_ptr<Bench>(new ListBench(samples, num_taken));
          }};
}

TEST(Runner, SummarisesByMedians) {
  int64_t unused = 0;
  const std::vector<Sample> samples = {{5, 1}, {2, 3}, {4, 8}, {1, 2}};
  const BenchCase list = case_of(samples, &unused);
  const BenchResult even = summarise(list, CpuKind::kAvx512Bf16, samples);
  EXPECT_EQ(even.median_seconds, 3.0);
  EXPECT_EQ(even.min_seconds, 1.0);
  EXPECT_EQ(even.max_seconds, 5.0);
  EXPECT_EQ(even.limit_seconds, 2.5);
  EXPECT_DOUBLE_EQ(even.reached, 2.5 / 3.0);
  EXPECT_EQ(even.num_samples, 4);
  EXPECT_EQ(even.goal, 0.2);
  const BenchResult odd = summarise(list, CpuKind::kAmx, std::span(samples).first(3));
  EXPECT_EQ(odd.median_seconds, 4.0);
  EXPECT_EQ(odd.limit_seconds, 3.0);
  EXPECT_EQ(odd.goal, 0.1);
  EXPECT_EQ(summarise(list, CpuKind::kFma, samples).goal, 0.3);
}

TEST(Runner, TakesWarmUpAndTheSamplesAskedFor) {
  int64_t num_taken = 0;
  const BenchCase list = case_of({{1, 1}}, &num_taken);
  RunLimits limits;
  limits.num_samples = 7;
  ASSERT_EQ(run_case(list, {}, limits)->num_samples, 7);
  EXPECT_EQ(num_taken, 8);
  // No time at all is still enough samples for a median; no end of time is not without end.
  limits = {0, 0};
  EXPECT_EQ(run_case(list, {}, limits)->num_samples, kLeastSamples);
  limits = {3600, 0};
  EXPECT_EQ(run_case(list, {}, limits)->num_samples, kMostSamples);
}

TEST(Runner, ErrorsOfACaseCarryItsLabel) {
  BenchCase broken = {
      "broken", {{"T", 2}}, "none", {}, [](const BenchContext&) {
        return Result<std::unique_ptr<Bench>>(Status(StatusCode::kInternal, "wrong result"));
      }};
  const Status status = run_case(broken, {}, {}).error();
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_EQ(status.message(), "broken T=2: wrong result");
}

TEST(Runner, FilterOfNothingListsAll) {
  int64_t unused = 0;
  const std::vector<BenchCase> cases = {case_of({}, &unused)};
  EXPECT_EQ(matching(cases, "")->size(), 1u);
  EXPECT_EQ(matching(cases, "T=8")->size(), 1u);
  const Status status = matching(cases, "T=9").error();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("list T=8 threads=1"), std::string::npos);
}

TEST(Runner, KindFollowsTheFastestInstruction) {
  const Result<BenchContext> generic = make_context(Level::kGeneric, DotOrder::kAmx);
  ASSERT_TRUE(generic.has_value());
  EXPECT_EQ(generic->kind, CpuKind::kFma);
  EXPECT_EQ(generic->peak.level, Level::kGeneric);
  EXPECT_EQ(generic->dot_order, DotOrder::kAmx);
  const Result<BenchContext> best = make_context(std::nullopt, DotOrder::kAuto);
  ASSERT_TRUE(best.has_value());
  EXPECT_NE(best->dot_order, DotOrder::kAuto);
  EXPECT_EQ(best->kind == CpuKind::kAmx, best->peak.level == Level::kAmx);
}

}  // namespace
}  // namespace argosy::tools::bench
