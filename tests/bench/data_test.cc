// Random data is what the benchmarks say it is; the fp64 checks see a wrong value; floors combine
// their parts.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <utility>

#include "tools/bench/floor.h"
#include "tools/bench/random_data.h"
#include "tools/bench/runner.h"

namespace argosy::tools::bench {
namespace {

TEST(RandomData, NormalValuesHaveTheDeviationAndNoRuns) {
  const Result<Tensor> made = normal_tensor({100, 1003}, 0.5, 3);
  ASSERT_TRUE(made.has_value());
  const ConstTensorView view = std::as_const(*made).view();
  const auto* const values = view.as<BFloat16>();
  double sum = 0, squares = 0;
  int64_t zeros = 0;
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    const auto value = static_cast<double>(values[i].to_float());
    sum += value;
    squares += value * value;
    zeros += value == 0 ? 1 : 0;
  }
  const auto count = static_cast<double>(view.num_elements());
  EXPECT_NEAR(sum / count, 0.0, 0.02);
  EXPECT_NEAR(std::sqrt(squares / count), 0.5, 0.02);
  EXPECT_LT(zeros, view.num_elements() / 100);
}

TEST(RandomData, SeedsAreRepeatedAndDiffer) {
  const Result<Tensor> a = normal_tensor({64, 64}, 1, 3), b = normal_tensor({64, 64}, 1, 3),
                       c = normal_tensor({64, 64}, 1, 4);
  const auto same = [](const Result<Tensor>& x, const Result<Tensor>& y) {
    return std::equal(x->bytes().begin(), x->bytes().end(), y->bytes().begin());
  };
  EXPECT_TRUE(same(a, b));
  EXPECT_FALSE(same(a, c));
}

TEST(RandomData, RoutingsAreDistinctInRangeAndNormalised) {
  constexpr int64_t kTokens = 500, kExperts = 9, kTopK = 9;
  const Result<RandomRouting> routing = random_routing(kTokens, kExperts, kTopK, 11);
  ASSERT_TRUE(routing.has_value());
  const auto* const experts = routing->topk_idx.view().as<int32_t>();
  const auto* const weights = routing->topk_weights.view().as<float>();
  std::set<int32_t> firsts;
  for (int64_t token = 0; token < kTokens; ++token) {
    std::set<int32_t> own(experts + token * kTopK, experts + (token + 1) * kTopK);
    EXPECT_EQ(own.size(), static_cast<size_t>(kTopK));
    EXPECT_GE(*own.begin(), 0);
    EXPECT_LT(*own.rbegin(), kExperts);
    firsts.insert(experts[token * kTopK]);
    float sum = 0;
    for (int64_t k = 0; k < kTopK; ++k) {
      EXPECT_GT(weights[token * kTopK + k], 0.0f);
      sum += weights[token * kTopK + k];
    }
    EXPECT_NEAR(sum, 1.0f, 1e-5f);
  }
  EXPECT_EQ(firsts.size(), static_cast<size_t>(kExperts));
}

TEST(RandomData, TouchedExpertsAreCountedOnce) {
  int32_t experts[] = {3, 1, 3, 0};
  EXPECT_EQ(num_experts_touched(ConstTensorView(experts, DType::kI32, {2, 2}), 5), 3);
  EXPECT_EQ(num_experts_touched(ConstTensorView(experts, DType::kI32, {0, 2}), 5), 0);
}

TEST(RandomData, ChecksSeeWrongValuesOfBothSigns) {
  EXPECT_TRUE(check_near(1.01, 1.0, "x").ok());
  for (const double wrong : {1.1, 0.9, -1.0, 0.0, std::nan("")}) {
    const Status status = check_near(wrong, 1.0, "x");
    EXPECT_EQ(status.code(), StatusCode::kInternal) << wrong;
  }
  const BFloat16 x[] = {BFloat16::from_float(2), BFloat16::from_float(-3)};
  EXPECT_EQ(exact_dot(x, x, 2), 13.0);
}

TEST(Floor, IsTheGreaterOfItsParts) {
  Result<BenchContext> context = make_context(std::nullopt, DotOrder::kAuto);
  ASSERT_TRUE(context.has_value()) << context.error().to_string();
  context->probe_bytes = 1 << 20;
  context->peak_seconds = 1e-4;
  Result<Floor> peak = Floor::create(*context, 1, Floor::Of::kPeak);
  Result<Floor> read = Floor::create(*context, 1, Floor::Of::kRead);
  Result<Floor> both = Floor::create(*context, 1, Floor::Of::kBoth);
  ASSERT_TRUE(peak.has_value() && read.has_value() && both.has_value());
  // Amounts so far apart that no noise turns the order round.
  constexpr double kMuch = 1e15, kLittle = 1;
  EXPECT_GT(*peak->seconds(kMuch, kLittle), 1.0);
  EXPECT_LT(*peak->seconds(kLittle, kMuch), 1.0);
  EXPECT_GT(*read->seconds(kLittle, kMuch), 1.0);
  EXPECT_LT(*read->seconds(kMuch, kLittle), 1.0);
  EXPECT_GT(*both->seconds(kMuch, kLittle), 1.0);
  EXPECT_GT(*both->seconds(kLittle, kMuch), 1.0);
  EXPECT_LT(*both->seconds(kLittle, kLittle), 1.0);
}

}  // namespace
}  // namespace argosy::tools::bench
