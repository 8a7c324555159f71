// The comparators must see every kind of difference: otherwise a green check means nothing.
#include "tools/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "tools/check.h"
#include "tools/run_report.h"
#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename T>
Tensor tensor_of(DType dtype, std::initializer_list<int64_t> shape, const std::vector<T>& values) {
  Tensor tensor = std::move(Tensor::zeros(dtype, shape)).value();
  std::copy(values.begin(), values.end(), tensor.view().template as<T>());
  return tensor;
}

// Three tokens, four experts, top-2. Token 1 has a tie between experts 1 and 2 at the border.
struct Fixture {
  RouterSpec router;
  Captures captures;
  Tensor logits;
  Tensor output;
  Tensor topk_idx;
  Tensor topk_weights;
};

Fixture fixture() {
  Fixture f;
  f.router.num_experts = 4;
  f.router.top_k = 2;
  f.router.score_function = ScoreFunction::kSoftmax;
  f.router.selection_bias = Choice::kNo;
  f.router.normalise = Choice::kYes;
  f.captures.router_logits =
      tensor_of<float>(DType::kF32, {3, 4}, {4, 3, 2, 1, 4, 3, 3, 1, 1, 2, 3, 4});
  f.logits = tensor_of<float>(DType::kF32, {3, 4}, {4, 3, 2, 1, 4, 3, 3, 1, 1, 2, 3, 4});
  f.captures.topk_idx = tensor_of<int32_t>(DType::kI32, {3, 2}, {1, 0, 0, 1, 3, 2});
  f.captures.topk_weights =
      tensor_of<float>(DType::kF32, {3, 2}, {0.25f, 0.75f, 0.5f, 0.5f, 0.75f, 0.25f});
  f.captures.moe_output = tensor_of<float>(DType::kF32, {3, 2}, {1, -8, 2, 3, 4, 5});
  f.output = tensor_of<float>(DType::kF32, {3, 2}, {1, -8, 2, 3, 4, 5});
  f.topk_idx = tensor_of<int32_t>(DType::kI32, {3, 2}, {0, 1, 0, 2, 3, 2});
  f.topk_weights = tensor_of<float>(DType::kF32, {3, 2}, {0.75f, 0.25f, 0.6f, 0.4f, 0.75f, 0.25f});
  return f;
}

CompareResult compare(const Fixture& f, const Tensor& bias = Tensor()) {
  return compare(f.captures, f.router, bias, f.logits, f.output.view(), f.topk_idx.view(),
                 f.topk_weights.view());
}

// A tie by captured logits hides a token: so those logits are held against the layer's own.
TEST(Compare, OtherLogitsAreSeenOnEveryToken) {
  EXPECT_EQ(compare(fixture()).logits.relative(), 0);
  for (int64_t at = 0; at < 12; ++at) {
    Fixture f = fixture();
    f.captures.router_logits.view().as<float>()[at] -= 1;
    EXPECT_GE(compare(f).logits.relative(), 0.25) << at;
  }
}

TEST(Compare, EqualSetsInAnotherOrderAreEqualAndTiesAreLeftOut) {
  const CompareResult result = compare(fixture());
  EXPECT_EQ(result.experts_equal, 2);
  EXPECT_EQ(result.experts_differ, 0);
  EXPECT_EQ(result.ties, 1);
  EXPECT_EQ(result.weights_max_rel, 0);
  EXPECT_EQ(result.output.relative(), 0);
}

TEST(Compare, ADifferentExpertIsSeen) {
  Fixture f = fixture();
  f.topk_idx.view().as<int32_t>()[4] = 0;
  const CompareResult result = compare(f);
  EXPECT_EQ(result.experts_differ, 1);
  EXPECT_EQ(result.experts_equal, 1);
  EXPECT_EQ(result.first_differing_token, 2);
}

TEST(Compare, AMissingExpertIsSeen) {
  Fixture f = fixture();
  f.topk_idx.view().as<int32_t>()[5] = -1;
  EXPECT_EQ(compare(f).experts_differ, 1);
}

TEST(Compare, WeightsAreComparedByExpert) {
  Fixture f = fixture();
  std::swap(f.topk_weights.view().as<float>()[0], f.topk_weights.view().as<float>()[1]);
  EXPECT_DOUBLE_EQ(compare(f).weights_max_rel, 2.0);  // 0.75 where 0.25 was captured
  f.topk_weights.view().as<float>()[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(compare(f).weights_max_rel, kInfinity);
}

TEST(Compare, EveryWrongOutputOutsideTiesIsSeenRelativeToThePeak) {
  for (const int at : {0, 1, 4, 5}) {
    for (const float sign : {1.0f, -1.0f}) {
      Fixture f = fixture();
      f.output.view().as<float>()[at] += sign;
      EXPECT_DOUBLE_EQ(compare(f).output.relative(), 1.0 / 8.0) << at;
    }
  }
  for (const int at : {2, 3}) {  // the tie's row
    Fixture f = fixture();
    f.output.view().as<float>()[at] += 1;
    EXPECT_EQ(compare(f).output.relative(), 0) << at;
  }
}

TEST(Compare, NanAndInfInTheOutputAreInfinitelyFar) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Fixture f = fixture();
    f.output.view().as<float>()[0] = bad;  // first, so that a later max() could lose it
    EXPECT_EQ(compare(f).output.relative(), kInfinity);
  }
}

TEST(Compare, TheSelectionBiasDecidesWhatIsATie) {
  Fixture f = fixture();
  f.router.score_function = ScoreFunction::kSigmoid;
  f.router.selection_bias = Choice::kYes;
  const Tensor bias = tensor_of<float>(DType::kF32, {4}, {0, 0, 0.5f, 0});
  EXPECT_EQ(compare(f, bias).ties, 0);  // expert 2 now beats expert 1
}

TEST(Compare, SaturatedSigmoidsThatFp32CannotTellApartAreTies) {
  Fixture f = fixture();
  f.router.score_function = ScoreFunction::kSigmoid;
  f.captures.router_logits =
      tensor_of<float>(DType::kF32, {3, 4}, {30, 29, 28, 1, 4, 3, 3, 1, 1, 2, 3, 4});
  EXPECT_EQ(compare(f).ties, 2);
}

TEST(Compare, EqualGroupScoresAtTheLimitAreTies) {
  Fixture f = fixture();
  f.router.num_groups = 2;
  f.router.keep_groups = 1;
  f.router.group_score = GroupScore::kMax;
  f.captures.router_logits =
      tensor_of<float>(DType::kF32, {3, 4}, {4, 3, 2, 1, 4, 3, 4, 1, 1, 2, 3, 4});
  EXPECT_EQ(compare(f).ties, 1);
}

TEST(PeakError, ZeroPeakWithZeroErrorIsZero) {
  PeakError error;
  EXPECT_EQ(error.relative(), 0);
  error.add(0, 0);
  EXPECT_EQ(error.relative(), 0);
}

TEST(PeakError, PeaksBelowTwoToMinus100CountAsThat) {
  PeakError flushed;
  flushed.add(0, 0x1p-140);
  EXPECT_EQ(flushed.relative(), 0x1p-40);
  PeakError small;
  small.add(0x1p-101, 0);
  EXPECT_EQ(small.relative(), 0.5);
  PeakError larger;
  larger.add(0x1.8p-99, 0x1p-99);
  EXPECT_EQ(larger.relative(), 0.5);
}

TEST(PeakError, NanStaysWhateverFollows) {
  PeakError error;
  error.add(std::nan(""), 1);
  error.add(1, 1);
  EXPECT_EQ(error.relative(), kInfinity);
}

TEST(Check, TokensAreEvenlySpreadWithBothEnds) {
  EXPECT_EQ(tokens_to_check("5", 9), (std::vector<int64_t>{0, 2, 4, 6, 8}));
  EXPECT_EQ(tokens_to_check("64", 3), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(tokens_to_check("all", 2), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(tokens_to_check("1", 100), (std::vector<int64_t>{0}));
  EXPECT_TRUE(tokens_to_check("none", 9).empty());
  EXPECT_TRUE(tokens_to_check("0", 9).empty());
  EXPECT_TRUE(tokens_to_check("all", 0).empty());
}

TEST(NonfiniteRows, AreCountedAndTheFirstIsNamed) {
  const float bad = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor clean = tensor_of<float>(DType::kF32, {2, 2}, {1, -2, 0, 3e38f});
  EXPECT_EQ(nonfinite_rows_of(clean.view()).count, 0);
  EXPECT_EQ(nonfinite_rows_of(clean.view()).first, -1);
  const Tensor rows = tensor_of<float>(DType::kF32, {4, 2}, {1, 2, 3, bad, bad, inf, 4, -inf});
  EXPECT_EQ(nonfinite_rows_of(rows.view()).count, 3);
  EXPECT_EQ(nonfinite_rows_of(rows.view()).first, 1);
}

RunReport clean_report() {
  RunReport report;
  report.tokens = 8;
  report.tolerance = report.compare_tolerance = 1e-5;
  report.weights_tolerance = 2e-6;
  report.check = CheckResult();
  report.compare = CompareResult();
  return report;
}

TEST(Warnings, WrongLogitsAndTiesAloneAreNamedAndJudgeNothing) {
  EXPECT_TRUE(warnings_of(clean_report()).empty());
  RunReport logits = clean_report();
  logits.compare->logits.add(1.00002, 1);
  RunReport ties = clean_report();
  ties.compare->ties = ties.tokens;
  for (const RunReport& report : {logits, ties}) {
    EXPECT_EQ(warnings_of(report).size(), 1u);
    EXPECT_TRUE(failures_of(report).empty());
  }
}

TEST(Failures, EachKindIsNamedOnItsOwn) {
  EXPECT_TRUE(failures_of(clean_report()).empty());
  std::vector<RunReport> bad(5, clean_report());
  bad[0].check->experts_differ = 1;
  bad[1].check->error.add(1.00002, 1);
  bad[2].compare->experts_differ = 1;
  bad[3].compare->weights_max_rel = 2.1e-6;
  bad[4].compare->output.add(std::nan(""), 1);
  for (const RunReport& report : bad) EXPECT_EQ(failures_of(report).size(), 1u);
  bad[3].weights_tolerance = kInfinity;  // bf16: weights are shown, not judged
  EXPECT_TRUE(failures_of(bad[3]).empty());
}

TEST(Json, InfiniteErrorsAreText) {
  RunReport report = clean_report();
  report.check->error.add(1, kInfinity);
  report.compare->output.add(std::nan(""), 1);
  report.compare->weights_max_rel = kInfinity;
  const nlohmann::ordered_json json = to_json(report);
  EXPECT_EQ(json["error"]["max_abs"], "inf");
  EXPECT_EQ(json["error"]["max_rel_to_peak"], "inf");
  EXPECT_EQ(json["compare"]["output_max_rel_to_peak"], "inf");
  EXPECT_EQ(json["compare"]["weights_max_rel"], "inf");
  EXPECT_EQ(to_json(clean_report())["error"]["max_abs"], 0.0);
}

TEST(TensorValues, TheFirstNonFiniteElementIsNamed) {
  Tensor tensor = std::move(Tensor::zeros(DType::kF32, {3, 5000})).value();
  EXPECT_TRUE(expect_finite("x", tensor.view()).ok());
  tensor.view().as<float>()[2 * 5000 + 7] = -std::numeric_limits<float>::infinity();
  tensor.view().as<float>()[1 * 5000 + 4999] = std::numeric_limits<float>::infinity();
  const Status status = expect_finite("x", tensor.view());
  EXPECT_EQ(status.code(), StatusCode::kNonFinite);
  EXPECT_EQ(status.message(), "x holds inf at [1, 4999]");
  EXPECT_TRUE(
      expect_finite("x", std::move(Tensor::zeros(DType::kF32, {0, 4})).value().view()).ok());
}

TEST(TensorValues, ShapesSeenAndExpectedAreNamed) {
  const Tensor tensor = tensor_of<int32_t>(DType::kI32, {2, 3}, {1, 2, 3, 4, 5, 6});
  const Status wrong_dtype = expect_float_tensor("x", tensor.view(), {2, 3});
  EXPECT_EQ(wrong_dtype.message(), "x is I32 [2, 3], expected F32 or BF16");
  const Status wrong_shape = expect_shape("x", tensor.view(), {-1, 4});
  EXPECT_EQ(wrong_shape.message(), "x is I32 [2, 3], expected shape [any, 4]");
  EXPECT_TRUE(expect_shape("x", tensor.view(), {-1, 3}).ok());
  EXPECT_FALSE(expect_shape("x", tensor.view(), {6}).ok());
}

}  // namespace
}  // namespace argosy::tools
