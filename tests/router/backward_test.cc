// route_backward() against dual numbers and finite differences, for every score function,
// normalisation and K; masks, replaced rows, threads, errors.
#include "argosy/router_backward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "router/router_testing.h"
#include "support/router_dual.h"

namespace argosy::test {
namespace {

using Random = std::mt19937_64;

struct Case {
  Batch batch;
  Routing routing;
  std::vector<float> d_weights;  // [T, K]

  ConstTensorView logits_view() const {
    return ConstTensorView(batch.logits.data(), DType::kF32,
                           {batch.num_tokens(), batch.spec.num_experts});
  }
  RouterInput input() const {
    RouterInput input;
    input.logits = logits_view();
    input.mask = batch.mask.empty() ? nullptr : batch.mask.data();
    return input;
  }
  Status run(GradientMode mode, ThreadPool* pool, std::vector<float>* d_logits) const {
    const TensorView out(d_logits->data(), DType::kF32,
                         {batch.num_tokens(), batch.spec.num_experts});
    const ConstTensorView d_topk(d_weights.data(), DType::kF32,
                                 {batch.num_tokens(), batch.spec.top_k});
    return route_backward(batch.spec, input(), routing, d_topk, mode, pool, out);
  }
  std::vector<float> run_ok(ThreadPool* pool = nullptr) const {
    std::vector<float> d_logits(batch.logits.size(), std::numeric_limits<float>::quiet_NaN());
    const Status status = run(GradientMode::kWrite, pool, &d_logits);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return d_logits;
  }
};

Case make_case(Random& random, const RouterSpec& spec, int64_t num_tokens, float spread) {
  Case made;
  made.batch.spec = spec;
  made.batch.logits =
      normal_logits(random, static_cast<size_t>(num_tokens * spec.num_experts), spread);
  if (spec.selection_bias == Choice::kYes) {
    made.batch.bias = normal_logits(random, static_cast<size_t>(spec.num_experts), 0.3f);
  }
  made.routing = route_ok(made.batch);
  made.d_weights = normal_logits(random, static_cast<size_t>(num_tokens * spec.top_k), 1.0f);
  return made;
}

// Every score function x normalisation x single x K, bias and group limit where they are legal.
std::vector<RouterSpec> all_specs() {
  std::vector<RouterSpec> specs;
  for (int function = 1; function <= 4; ++function) {
    for (const WeightNorm norm : {WeightNorm::kExact, WeightNorm::kReference}) {
      for (const Choice normalise : {Choice::kNo, Choice::kYes}) {
        for (const Choice single : {Choice::kNo, Choice::kYes}) {
          for (const int64_t top_k : {1, 2, 6, 16}) {
            RouterSpec spec;
            spec.num_experts = 16;
            spec.top_k = top_k;
            spec.score_function = static_cast<ScoreFunction>(function);
            spec.selection_bias = top_k == 2 ? Choice::kNo : Choice::kYes;
            spec.normalise = normalise;
            spec.normalise_single = single;
            spec.weight_norm = norm;
            spec.routed_scaling_factor = top_k == 1 ? 1.0f : 2.5f;
            if (top_k == 6) {
              spec.num_groups = 4;
              spec.keep_groups = 2;
              spec.group_score = GroupScore::kSumOfBestTwo;
            }
            specs.push_back(spec);
          }
        }
      }
    }
  }
  return specs;
}

auto loss_of(const Case& made, int64_t token) {
  return [&made, token](std::span<const Dual> row) {
    const std::vector<Dual> weights =
        dual_weights(made.batch.spec, row, ids_of(made.routing, token));
    Dual loss;
    for (size_t k = 0; k < weights.size(); ++k) {
      const auto at = static_cast<size_t>(token) * weights.size() + k;
      loss = loss + weights[k] * constant(made.d_weights[at]);
    }
    return loss;
  };
}

void expect_gradients(const Case& made, const std::vector<float>& d_logits) {
  const auto num_experts = static_cast<size_t>(made.batch.spec.num_experts);
  long double largest = 0;
  for (const float d : made.d_weights) largest = std::max<long double>(largest, std::fabs(d));
  largest *= made.batch.spec.routed_scaling_factor;
  for (int64_t token = 0; token < made.batch.num_tokens(); ++token) {
    const auto want = dual_gradient(made.batch.row(token), loss_of(made, token));
    for (size_t e = 0; e < num_experts; ++e) {
      const float got = d_logits[static_cast<size_t>(token) * num_experts + e];
      const long double allowed = 1e-7L * std::fabs(want[e]) + 1e-14L * largest + 0x1p-149L;
      ASSERT_LE(std::fabs(static_cast<long double>(got) - want[e]), allowed)
          << "token " << token << " expert " << e << " got " << got << " want "
          << static_cast<double>(want[e]) << "\n"
          << to_string(made.batch.spec);
    }
  }
}

TEST(RouteBackward, EqualsDualNumbersForEverySpec) {
  constexpr uint64_t kSeed = 601;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const RouterSpec& spec : all_specs()) {
    for (const float spread : {0.1f, 2.0f, 30.0f, 600.0f}) {
      const Case made = make_case(random, spec, 9, spread);
      expect_gradients(made, made.run_ok());
    }
  }
}

// The yardstick itself, and with it the backward, against differences of the forward.
TEST(RouteBackward, EqualsFiniteDifferences) {
  constexpr uint64_t kSeed = 602;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const RouterSpec& spec : all_specs()) {
    const Case made = make_case(random, spec, 3, 2.0f);
    const std::vector<float> got = made.run_ok();
    for (int64_t token = 0; token < 3; ++token) {
      const auto want = difference_gradient(made.batch.row(token), loss_of(made, token));
      for (size_t e = 0; e < 16; ++e) {
        ASSERT_NEAR(got[static_cast<size_t>(token) * 16 + e], static_cast<double>(want[e]), 2e-6)
            << to_string(spec);
      }
    }
  }
}

// K04 with gradients: equal logits at any magnitude, and rows whose scores underflow.
TEST(RouteBackward, KeepsRelativeAccuracyWhereScoresUnderflow) {
  Random random(603);
  for (const std::string_view preset : {"sigmoid", "sqrt_softplus", "deepseek_v3"}) {
    const RouterSpec spec = spec_of(preset, 16, 4);
    for (const float base : {-50.0f, -100.0f, -300.0f, -600.0f}) {
      Case made = make_case(random, spec, 8, 1.0f);
      for (float& logit : made.batch.logits) logit += base;
      made.routing = route_ok(made.batch);
      const std::vector<float> d_logits = made.run_ok();
      expect_gradients(made, d_logits);
      float largest = 0;
      for (const float d : d_logits) largest = std::max(largest, std::fabs(d));
      EXPECT_GT(largest, 0.01f) << preset << " at " << base;
    }
  }
}

// C030: softmax, K = 1. Normalised: exactly zero. Else, and sigmoid without normalise_single: not.
TEST(RouteBackward, SingleChoiceGradientIsZeroOnlyWhenTheWeightIsConstant) {
  Random random(604);
  const auto all_zero = [&](std::string_view preset, Choice normalise, Choice single) {
    RouterSpec spec = spec_of(preset, 4, 1);
    spec.normalise = normalise;
    spec.normalise_single = single;
    const Case made = make_case(random, spec, 20, 2.0f);
    int64_t zeros = 0;
    for (const float d : made.run_ok()) zeros += d == 0.0f ? 1 : 0;
    return zeros == 80;
  };
  EXPECT_TRUE(all_zero("softmax_pre", Choice::kYes, Choice::kUnset));
  EXPECT_TRUE(all_zero("softmax_post", Choice::kNo, Choice::kUnset));
  EXPECT_FALSE(all_zero("softmax_pre", Choice::kNo, Choice::kUnset));
  EXPECT_TRUE(all_zero("sigmoid", Choice::kYes, Choice::kYes));
  EXPECT_FALSE(all_zero("sigmoid", Choice::kYes, Choice::kNo));
  EXPECT_FALSE(all_zero("sqrt_softplus", Choice::kYes, Choice::kNo));
}

// Normalised weights: equal gradients of all K give exactly zero, also huge ones.
TEST(RouteBackward, EqualGradientsOfNormalisedWeightsGiveExactlyZero) {
  Random random(605);
  for (const std::string_view preset : {"mixtral", "deepseek_v3", "gpt_oss", "sqrt_softplus"}) {
    Case made = make_case(random, spec_of(preset, 16, 4), 8, 3.0f);
    std::fill(made.d_weights.begin(), made.d_weights.end(), 1e30f);
    for (const float d : made.run_ok()) ASSERT_EQ(d, 0.0f) << preset;
  }
}

// A gradient flows by validity, not by the weight: sigmoids rounded to 0 still move.
TEST(RouteBackward, FlowsThroughAWeightOfZero) {
  RouterSpec spec = spec_of("softmax_pre", 2, 2);
  Case made;
  made.batch.spec = spec;
  made.batch.logits = {0.0f, -104.5f};  // e^-104.5 is below half the smallest denormal
  made.routing = route_ok(made.batch);
  ASSERT_EQ(weights_of(made.routing, 0)[1], 0.0f);
  made.d_weights = {0.0f, 1e30f};
  const std::vector<float> d_logits = made.run_ok();
  EXPECT_NEAR(d_logits[1] / (1e30f * std::exp(-104.5)), 1.0, 1e-6);
  EXPECT_EQ(d_logits[0], -d_logits[1]);
}

TEST(RouteBackward, MaskedAndReplacedRowsAreZeroAndNeverRead) {
  Random random(606);
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const std::string_view preset : {"softmax_pre", "mixtral", "deepseek_v3"}) {
    Case clean = make_case(random, spec_of(preset, 16, 4), 70, 2.0f);
    clean.batch.spec.on_nonfinite = OnNonfinite::kUniform;
    const std::vector<float> want = clean.run_ok();
    Case spoilt = clean;
    spoilt.batch.mask.assign(70, 1);
    for (const size_t token : {0, 33, 69}) {
      spoilt.batch.mask[token] = 0;
      for (size_t e = 0; e < 16; ++e) spoilt.batch.logits[token * 16 + e] = kNaN;
      for (size_t k = 0; k < 4; ++k) spoilt.d_weights[token * 4 + k] = kNaN;
    }
    spoilt.batch.logits[5 * 16 + 3] = std::numeric_limits<float>::infinity();
    spoilt.routing = route_ok(spoilt.batch);
    const std::vector<float> got = spoilt.run_ok();
    std::vector<float> added(want.size(), 1.0f);
    ASSERT_TRUE(spoilt.run(GradientMode::kAdd, nullptr, &added).ok());
    for (size_t i = 0; i < got.size(); ++i) {
      const size_t token = i / 16;
      const bool has_none = token == 0 || token == 5 || token == 33 || token == 69;
      ASSERT_EQ(got[i], has_none ? 0.0f : want[i]);
      if (has_none) {
        ASSERT_EQ(added[i], 1.0f);
      } else {
        ASSERT_NEAR(added[i], 1.0f + want[i], 5e-7);
      }
    }
    spoilt.batch.spec.on_nonfinite = OnNonfinite::kError;
    std::vector<float> untouched(want.size(), 7.0f);
    const Status status = spoilt.run(GradientMode::kWrite, nullptr, &untouched);
    EXPECT_EQ(status.code(), StatusCode::kNonFinite);
    EXPECT_NE(status.message().find("logits[5, 3] is inf"), std::string::npos);
    EXPECT_EQ(untouched, std::vector<float>(want.size(), 7.0f));
  }
}

TEST(RouteBackward, AddsWithOneRounding) {
  Random random(607);
  const Case made = make_case(random, spec_of("softmax_pre", 16, 4), 40, 2.0f);
  const std::vector<float> gradient = made.run_ok();
  std::vector<float> base = normal_logits(random, gradient.size(), 1.0f);
  std::vector<float> sum = base;
  ASSERT_TRUE(made.run(GradientMode::kAdd, nullptr, &sum).ok());
  for (size_t i = 0; i < sum.size(); ++i) ASSERT_NEAR(sum[i], base[i] + gradient[i], 4e-7);
  EXPECT_NE(sum, base);
}

TEST(RouteBackward, ThreadsSplitsAndOrderChangeNoBit) {
  constexpr uint64_t kSeed = 608;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const RouterSpec& spec : all_specs()) {
    const Case made = make_case(random, spec, 101, 5.0f);
    const std::vector<float> want = made.run_ok();
    const auto pool = make_pool(4);
    ASSERT_TRUE(same_bits(made.run_ok(pool.get()), want));
    // A rank holds tokens [first, last).
    const auto cut = std::uniform_int_distribution<int64_t>(0, 101)(random);
    std::vector<float> joined;
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, cut}, {cut, 101}}) {
      Case part = made;
      part.batch.logits = {made.batch.logits.begin() + first * 16,
                           made.batch.logits.begin() + last * 16};
      part.d_weights = {made.d_weights.begin() + first * spec.top_k,
                        made.d_weights.begin() + last * spec.top_k};
      part.routing = route_ok(part.batch);
      const std::vector<float> d_part = part.run_ok();
      joined.insert(joined.end(), d_part.begin(), d_part.end());
    }
    ASSERT_TRUE(same_bits(joined, want));
  }
}

TEST(RouteBackward, ReadsStridedLogits) {
  Random random(611);
  const Case made = make_case(random, spec_of("softmax_pre", 16, 4), 9, 2.0f);
  const std::vector<float> want = made.run_ok();
  std::vector<float> wide(9 * 20, std::numeric_limits<float>::quiet_NaN());
  for (size_t i = 0; i < want.size(); ++i) wide[i / 16 * 20 + i % 16] = made.batch.logits[i];
  RouterInput input;
  input.logits = ConstTensorView(wide.data(), DType::kF32, {9, 16});
  input.logits.strides[0] = 20;
  std::vector<float> got(want.size());
  const ConstTensorView d_topk(made.d_weights.data(), DType::kF32, {9, 4});
  ASSERT_TRUE(route_backward(made.batch.spec, input, made.routing, d_topk, GradientMode::kWrite,
                             nullptr, TensorView(got.data(), DType::kF32, {9, 16}))
                  .ok());
  EXPECT_TRUE(same_bits(got, want));
}

TEST(RouteBackward, WritesTheOneNaN) {
  Random random(609);
  Case made = make_case(random, spec_of("mixtral", 8, 2), 1, 1.0f);
  made.d_weights[0] = -std::numeric_limits<float>::quiet_NaN();
  const auto expert = static_cast<size_t>(ids_of(made.routing, 0)[0]);
  EXPECT_EQ(std::bit_cast<uint32_t>(made.run_ok()[expert]), 0x7FC00000u);
}

TEST(RouteBackward, NoTokensIsLegal) {
  Case made;
  made.batch.spec = spec_of("mixtral", 8, 2);
  made.routing = route_ok(made.batch);
  EXPECT_TRUE(made.run_ok().empty());
}

TEST(RouteBackward, RefusesWhatDoesNotFit) {
  Random random(610);
  const Case good = make_case(random, spec_of("mixtral", 8, 2), 4, 1.0f);
  std::vector<float> d_logits(32, 7.0f);
  const auto expect_refused = [&](const Case& bad, std::string_view text) {
    const Status status = bad.run(GradientMode::kWrite, nullptr, &d_logits);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    EXPECT_EQ(d_logits, std::vector<float>(32, 7.0f));
  };
  Case bad = good;
  bad.routing.topk_idx[5] = -1;
  expect_refused(bad, "topk_idx[2, 1] is -1, but token 2 is valid");
  bad = good;
  bad.routing.topk_idx[2] = 8;
  expect_refused(bad, "topk_idx[1, 0] is 8");
  bad = good;
  bad.routing.topk_idx[3] = bad.routing.topk_idx[2];
  expect_refused(bad, "a second time in the row of token 1");
  bad = good;
  bad.routing.num_tokens = 3;
  expect_refused(bad, "routing has 3 tokens");
  bad = good;
  bad.batch.spec.top_k = 9;
  expect_refused(bad, "top_k is 9");
  bad = good;
  bad.batch.spec.top_k = 1;
  expect_refused(bad, "top_k 2");
  const TensorView narrow(d_logits.data(), DType::kF32, {4, 7});
  const ConstTensorView d_topk(good.d_weights.data(), DType::kF32, {4, 2});
  EXPECT_NE(route_backward(good.batch.spec, good.input(), good.routing, d_topk,
                           GradientMode::kWrite, nullptr, narrow)
                .message()
                .find("F32 [4, 7], expected dense F32 [4, 8]"),
            std::string::npos);
}

}  // namespace
}  // namespace argosy::test
