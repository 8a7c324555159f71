// route(): the named small inputs that broke other systems, each by hand-written values, and the
// refusals. The properties behind them are in route_property_test.cc.
#include <gtest/gtest.h>
#include <immintrin.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "router/router_testing.h"

namespace argosy::test {
namespace {

constexpr const void* kNoData = nullptr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<int32_t> iota_ids(int32_t first, int32_t count, int32_t step = 1) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back(first + i * step);
  return ids;
}

// C001, C004: rows of NaN and Inf among ordinary ones.
TEST(RouteNonfinite, UniformRowsRouteAsZerosAndAreCounted) {
  for (const char* preset : {"softmax_pre", "mixtral", "sigmoid", "sqrt_softplus", "gpt_oss"}) {
    SCOPED_TRACE(preset);
    Batch batch = {spec_of(preset, 8, 4), std::vector<float>(5 * 8), {}, {}};
    const float fills[] = {kNan, 0.0f, -kInf, 0.0f, kInf};
    for (size_t i = 0; i < 40; ++i) {
      const float ordinary = static_cast<float>((i * 29) % 13) * 0.37f - 2.0f;
      batch.logits[i] = i / 8 % 2 == 0 ? fills[i / 8] : ordinary;
    }
    batch.spec.on_nonfinite = OnNonfinite::kUniform;
    const Routing routing = route_ok(batch);
    EXPECT_EQ(routing.num_nonfinite_rows, 3);
    EXPECT_EQ(routing.num_valid_tokens, 5);
    const Batch zeros = {batch.spec, std::vector<float>(8, 0.0f), {}, {}};
    const Routing of_zeros = route_ok(zeros);
    for (const int64_t token : {0, 2, 4}) {
      EXPECT_EQ(ids_of(routing, token), iota_ids(0, 4));
      EXPECT_TRUE(same_bits(weights_of(routing, token), weights_of(of_zeros, 0)));
    }
    for (const int64_t token : {1, 3}) {
      const auto row = batch.row(token);
      const Routing alone = route_ok({batch.spec, {row.begin(), row.end()}, {}, {}});
      EXPECT_EQ(ids_of(routing, token), ids_of(alone, 0));
      EXPECT_TRUE(same_bits(weights_of(routing, token), weights_of(alone, 0)));
    }
  }
}

TEST(RouteNonfinite, ErrorNamesTheFirstSuchTokenAndWritesNothing) {
  for (const float bad : {kNan, kInf, -kInf}) {
    Batch batch = {spec_of("sigmoid", 4, 2), std::vector<float>(400 * 4, 0.5f), {}, {}};
    Routing routing = route_ok(batch);
    const Routing before = routing;
    batch.logits[4 * 333 + 1] = bad;
    batch.logits[4 * 71 + 2] = bad;
    for (const int threads : {1, 4}) {
      const auto pool = make_pool(threads);
      const Status status = route_batch(batch, pool.get(), &routing);
      EXPECT_EQ(status.code(), StatusCode::kNonFinite);
      EXPECT_NE(status.message().find("logits[71, 2]"), std::string::npos) << status.message();
      EXPECT_EQ(routing.topk_idx, before.topk_idx);
      EXPECT_EQ(routing.counts, before.counts);
      EXPECT_EQ(routing.num_nonfinite_rows, 0);
    }
  }
}

// "As if all logits were 0": bias and group limit act as usual.
TEST(RouteNonfinite, UniformRowObeysBiasAndGroups) {
  Batch batch = {spec_of("deepseek_v3", 8, 2), std::vector<float>(8, kNan), {}, {}};
  batch.bias = {0.0f, 0.0f, 0.3f, 0.0f, 0.2f, 0.2f, 0.0f, 0.0f};
  batch.spec.num_groups = 4;
  batch.spec.on_nonfinite = OnNonfinite::kUniform;
  const Routing routing = route_ok(batch);
  EXPECT_EQ(ids_of(routing, 0), (std::vector<int32_t>{4, 5}));
  EXPECT_EQ(weights_of(routing, 0)[0], 0.5f);
}

// C002: masked rows of NaN are never read, routed or counted.
TEST(RouteMask, MaskedRowsAreNeverRead) {
  Batch batch = {spec_of("mixtral", 4, 2), std::vector<float>(5 * 4, kNan), {}, {0, 1, 0, 1, 0}};
  const std::vector<float> real = {0.1f, 0.7f, 0.3f, -2.0f, 5.0f, 1.0f, 2.0f, 3.0f};
  std::copy_n(real.begin(), 4, batch.logits.begin() + 4);
  std::copy_n(real.begin() + 4, 4, batch.logits.begin() + 12);
  const Routing routing = route_ok(batch);
  const Routing plain = route_ok({batch.spec, real, {}, {}});
  EXPECT_EQ(routing.counts, plain.counts);
  EXPECT_EQ(routing.num_valid_tokens, 2);
  EXPECT_EQ(routing.num_nonfinite_rows, 0);
  for (int64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(ids_of(routing, 1 + 2 * i), ids_of(plain, i));
    EXPECT_TRUE(same_bits(weights_of(routing, 1 + 2 * i), weights_of(plain, i)));
  }
  for (const int64_t token : {0, 2, 4}) {
    EXPECT_EQ(ids_of(routing, token), (std::vector<int32_t>{-1, -1}));
    EXPECT_EQ(weights_of(routing, token), (std::vector<float>{0.0f, 0.0f}));
  }
}

// C006.
TEST(RouteTies, EqualLogitsTakeTheLowestIds) {
  for (const char* preset : {"mixtral", "sigmoid", "sqrt_softplus", "softmax_post"}) {
    const Routing routing =
        route_ok({spec_of(preset, 384, 8), std::vector<float>(384, 0.0f), {}, {}});
    EXPECT_EQ(ids_of(routing, 0), iota_ids(0, 8)) << preset;
    for (const float weight : weights_of(routing, 0)) EXPECT_EQ(weight, 0.125f) << preset;
  }
}

// C007.
TEST(RouteTies, TheLowestIdWins) {
  for (const char* preset : {"mixtral", "sigmoid", "gpt_oss"}) {
    const Routing routing = route_ok({spec_of(preset, 6, 2), {1, 3, 2, 2, 0, 2}, {}, {}});
    EXPECT_EQ(ids_of(routing, 0), (std::vector<int32_t>{1, 2})) << preset;
  }
}

// Zeros of either sign, and denormals, compare as numbers.
TEST(RouteTies, SignedZerosAreEqualAndDenormalsAreNot) {
  const Routing zeros = route_ok({spec_of("gpt_oss", 4, 3), {-0.0f, 0.0f, -0.0f, 0.0f}, {}, {}});
  EXPECT_EQ(ids_of(zeros, 0), iota_ids(0, 3));
  const Routing tiny =
      route_ok({spec_of("gpt_oss", 4, 3), {0.0f, 0x1p-149f, -0x1p-149f, 0x1p-148f}, {}, {}});
  EXPECT_EQ(ids_of(tiny, 0), (std::vector<int32_t>{3, 1, 0}));
}

// The comparison is made on the fp32 score: sigmoids that saturate tie although their logits
// differ.
TEST(RouteTies, ScoresThatRoundToOneFp32ValueTie) {
  const Routing routing = route_ok({spec_of("sigmoid", 3, 2), {20.0f, 30.0f, 25.0f}, {}, {}});
  EXPECT_EQ(ids_of(routing, 0), (std::vector<int32_t>{0, 1}));
}

// C013.
TEST(RouteGroups, TheRuleIsAField) {
  Batch batch = {spec_of("deepseek_v3", 4, 1), std::vector<float>(4, 0.0f), {}, {}};
  batch.bias = {0.4f, -0.5f, 0.0f, 0.0f};  // selection scores .9, 0, .5, .5
  batch.spec.num_groups = 2;
  EXPECT_EQ(ids_of(route_ok(batch), 0)[0], 2);
  batch.spec.group_score = GroupScore::kMax;
  EXPECT_EQ(ids_of(route_ok(batch), 0)[0], 0);
  batch.spec.group_score = GroupScore::kSumOfBestKPerGroup;  // K/Kg = 1
  EXPECT_EQ(ids_of(route_ok(batch), 0)[0], 0);
  batch.spec.top_k = 2;
  EXPECT_EQ(ids_of(route_ok(batch), 0)[0], 2);
}

// C014.
TEST(RouteBias, ChoosesButDoesNotWeigh) {
  const Batch batch = {spec_of("deepseek_v3", 3, 2),
                       {logit_of(0.6), logit_of(0.5), logit_of(0.2)},
                       {0.0f, 0.0f, 1.0f},
                       {}};
  const Routing routing = route_ok(batch);
  EXPECT_EQ(ids_of(routing, 0), (std::vector<int32_t>{2, 0}));
  EXPECT_NEAR(weights_of(routing, 0)[0], 0.25f, 1e-7);
  EXPECT_NEAR(weights_of(routing, 0)[1], 0.75f, 1e-7);
}

// C017: in bf16 these biases collapse to 8 values.
TEST(RouteBias, StaysFp32) {
  Batch batch = {spec_of("deepseek_v3", 64, 8), std::vector<float>(64, 0.3f), {}, {}};
  for (int i = 0; i < 64; ++i) {
    batch.bias.push_back(6.817f + static_cast<float>(i) * (0.246f / 63.0f));
  }
  EXPECT_EQ(ids_of(route_ok(batch), 0), iota_ids(63, 8, -1));
}

// C021: refused experts lie below every real score, underflowed ones too.
TEST(RouteGroups, RefusedExpertsLoseToUnderflowedOnes) {
  Batch batch = {spec_of("deepseek_v3", 4, 2), {-120.0f, -121.0f, 5.0f, 6.0f}, {}, {}};
  batch.bias = {0.0f, 0.0f, -8.0f, -8.0f};
  batch.spec.num_groups = 2;
  Routing routing = route_ok(batch);
  EXPECT_EQ(ids_of(routing, 0), (std::vector<int32_t>{0, 1}));
  EXPECT_NEAR(weights_of(routing, 0)[0], 1.0 / (1.0 + std::exp(-1.0)), 1e-7);
  batch.bias = {-3.0f, -3.0f, -8.0f, -8.0f};  // and negative ones
  EXPECT_EQ(ids_of(route_ok(batch), 0), (std::vector<int32_t>{0, 1}));
}

// C022, C024: one group, kept, is no limit.
TEST(RouteGroups, OneKeptGroupIsBitIdenticalToNone) {
  for (const int64_t top_k : {3, 8}) {
    for (const bool with_bias : {false, true}) {
      std::mt19937_64 random(51);
      Batch batch = {spec_of("sigmoid", 256, top_k), normal_logits(random, 256 * 20, 2.0f), {}, {}};
      batch.spec.routed_scaling_factor = 2.5f;
      if (with_bias) {
        batch.spec.selection_bias = Choice::kYes;
        batch.bias = normal_logits(random, 256, 0.1f);
      }
      batch.spec.group_score = GroupScore::kUnset;
      const Routing ungrouped = route_ok(batch);
      for (const GroupScore rule :
           {GroupScore::kMax, GroupScore::kSumOfBestTwo, GroupScore::kSumOfBestKPerGroup}) {
        batch.spec.group_score = rule;
        const Routing grouped = route_ok(batch);
        EXPECT_EQ(grouped.topk_idx, ungrouped.topk_idx);
        EXPECT_TRUE(same_bits(grouped.topk_weights.values, ungrouped.topk_weights.values));
      }
    }
  }
}

// C023: a group of one expert has the score of that expert, and rows never mix.
TEST(RouteGroups, GroupsOfOneExpertAreTheExperts) {
  std::mt19937_64 random(52);
  Batch batch = {spec_of("deepseek_v3", 12, 3), normal_logits(random, 12 * 50, 1.0f), {}, {}};
  batch.bias = normal_logits(random, 12, 0.2f);
  const Routing plain = route_ok(batch);
  batch.spec.num_groups = 12;
  batch.spec.keep_groups = 3;
  EXPECT_EQ(route_ok(batch).topk_idx, plain.topk_idx);
}

// C026.
TEST(RouteWeights, EqualLogitsGiveOneOverKAtAnyMagnitude) {
  for (const char* preset : {"sigmoid", "sqrt_softplus", "deepseek_v3", "mixtral", "gpt_oss"}) {
    for (const float logit : {-50.0f, -100.0f, -1e8f, -3e38f, 0.0f, 60.0f, 3e38f}) {
      Batch batch = {spec_of(preset, 16, 8), std::vector<float>(16, logit), {}, {}};
      if (batch.spec.selection_bias == Choice::kYes) batch.bias.assign(16, 0.0f);
      ASSERT_EQ(batch.spec.weight_norm, WeightNorm::kExact);
      for (const float weight : weights_of(route_ok(batch), 0)) {
        EXPECT_EQ(weight, 0.125f) << preset << " " << logit;
      }
    }
  }
  Batch reference = {spec_of("sigmoid", 16, 8), std::vector<float>(16, -50.0f), {}, {}};
  reference.spec.weight_norm = WeightNorm::kReference;
  const Routing routing = route_ok(reference);
  const auto weights = weights_of(routing, 0);
  EXPECT_NEAR(std::accumulate(weights.begin(), weights.end(), 0.0), 0.133674, 1e-6);
  reference.logits.assign(16, 0.0f);
  for (const float weight : weights_of(route_ok(reference), 0)) EXPECT_EQ(weight, 0.125f);
}

// C029: never normalised over tokens.
TEST(RouteWeights, SingleExpert) {
  const std::vector<double> raw = {0.2, 0.3, 0.5};
  Batch batch = {spec_of("mixtral", 2, 1), {}, {}, {}};
  for (const double p : raw) {
    batch.logits.push_back(logit_of(p));
    batch.logits.push_back(-30.0f);
  }
  for (const Choice single : {Choice::kNo, Choice::kYes, Choice::kUnset}) {
    batch.spec.normalise_single = single;
    EXPECT_EQ(route_ok(batch).topk_weights.values, (std::vector<float>{1.0f, 1.0f, 1.0f}));
  }
  batch.spec = spec_of("sigmoid", 2, 1);
  Routing routing = route_ok(batch);
  ASSERT_EQ(routing.topk_weights.values.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(routing.topk_weights.values[i], raw[i], 1e-7);
  EXPECT_FALSE(routing.topk_weights.normalised);
  batch.spec.normalise_single = Choice::kYes;
  routing = route_ok(batch);
  EXPECT_EQ(routing.topk_weights.values, (std::vector<float>{1.0f, 1.0f, 1.0f}));
  EXPECT_TRUE(routing.topk_weights.normalised);
}

// C034, C035 (router part): the factor acts once.
TEST(RouteWeights, FactorActsExactlyOnce) {
  Batch one = {spec_of("mixtral", 1, 1), {0.7f}, {}, {}};
  one.spec.routed_scaling_factor = 1.5f;
  const Routing routing = route_ok(one);
  EXPECT_EQ(routing.topk_weights.values[0], 1.5f);
  EXPECT_TRUE(routing.topk_weights.scaled);
  EXPECT_FALSE(routing.topk_weights.applied);
  std::mt19937_64 random(53);
  for (const std::string& preset : router_preset_names()) {
    Batch batch = {spec_of(preset, 32, 4), normal_logits(random, 32 * 64, 3.0f), {}, {}};
    if (batch.spec.selection_bias == Choice::kYes) batch.bias.assign(32, 0.01f);
    const Routing plain = route_ok(batch);
    batch.spec.routed_scaling_factor = 2.5f;
    const Routing scaled = route_ok(batch);
    EXPECT_EQ(scaled.topk_idx, plain.topk_idx);
    for (size_t i = 0; i < plain.topk_weights.values.size(); ++i) {
      EXPECT_EQ(scaled.topk_weights.values[i], plain.topk_weights.values[i] * 2.5f) << preset;
    }
  }
}

// C037.
TEST(RouteWeights, SoftmaxThenTopKRenormalisedEqualsTopKThenSoftmax) {
  constexpr uint64_t kSeed = 54;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (const float spread : {1.0f, 100.0f, 1e4f}) {
    std::uniform_real_distribution<float> uniform(-spread, spread);
    Batch pre = {spec_of("mixtral", 64, 6), std::vector<float>(64 * 200), {}, {}};
    for (float& logit : pre.logits) logit = uniform(random);
    std::fill_n(pre.logits.begin(), 64, -1e4f);
    pre.logits[17] = 1e4f;  // a single huge logit
    Batch post = pre;
    post.spec = spec_of("softmax_post", 64, 6);
    const Routing a = route_ok(pre);
    const Routing b = route_ok(post);
    EXPECT_EQ(ids_of(a, 0)[0], 17);
    for (int64_t token = 0; token < 200; ++token) {
      // Probabilities that underflow to equal values tie to the lowest id: compare by expert.
      for (size_t i = 0; i < 6; ++i) {
        const auto ids = ids_of(b, token);
        const auto at = std::find(ids.begin(), ids.end(), ids_of(a, token)[i]);
        const float want =
            at == ids.end() ? 0.0f : weights_of(b, token)[static_cast<size_t>(at - ids.begin())];
        ASSERT_TRUE(std::isfinite(weights_of(a, token)[i]));
        ASSERT_NEAR(weights_of(a, token)[i], want, 1e-6) << token << " " << spread;
      }
    }
  }
}

TEST(RouteInput, RefusesByNameAndValue) {
  const std::vector<float> data(64, 0.0f);
  const RouterSpec spec = spec_of("deepseek_v3", 4, 2);
  RouterInput good;
  good.logits = ConstTensorView(data.data(), DType::kF32, {3, 4});
  good.selection_bias = ConstTensorView(data.data(), DType::kF32, {4});
  Routing routing;
  ASSERT_TRUE(route(spec, good, nullptr, &routing).ok());
  const auto message = [&](const RouterSpec& s, const RouterInput& input) {
    const Status status = route(s, input, nullptr, &routing);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  RouterInput bad = good;
  bad.logits = ConstTensorView(data.data(), DType::kF32, {3, 5});
  EXPECT_NE(message(spec, bad).find("F32 [3, 5], expected F32 [tokens, 4]"), std::string::npos);
  bad.logits = ConstTensorView(data.data(), DType::kBF16, {3, 4});
  EXPECT_NE(message(spec, bad).find("BF16"), std::string::npos);
  bad.logits = good.logits;
  bad.logits.strides = {1, 3};
  EXPECT_NE(message(spec, bad).find("strides [1, 3]"), std::string::npos);
  bad.logits = ConstTensorView(kNoData, DType::kF32, {3, 4});
  EXPECT_NE(message(spec, bad).find("no data"), std::string::npos);
  bad = good;
  bad.selection_bias = {};
  EXPECT_NE(message(spec, bad).find("selection_bias"), std::string::npos);
  bad.selection_bias = ConstTensorView(data.data(), DType::kF32, {5});
  EXPECT_NE(message(spec, bad).find("[5]"), std::string::npos);
  EXPECT_NE(message(spec_of("sigmoid", 4, 2), good).find("the spec has none"), std::string::npos);
  for (const float value : {kNan, kInf, -kInf}) {
    const std::vector<float> bias = {0.0f, 0.0f, value, 0.0f};
    bad.selection_bias = ConstTensorView(bias.data(), DType::kF32, {4});
    EXPECT_NE(message(spec, bad).find("expert 2"), std::string::npos);
  }
  EXPECT_EQ(route(spec, good, nullptr, nullptr).code(), StatusCode::kInvalidArgument);
}

TEST(RouteInput, MoreTokensThanMemoryIsAnError) {
  const std::vector<float> row(4, 0.0f);
  RouterInput input;
  input.logits = ConstTensorView(row.data(), DType::kF32, {int64_t{1} << 60, 4});
  input.logits.strides[0] = 0;
  RouterSpec spec = spec_of("mixtral", 4, 2);
  spec.on_nonfinite = OnNonfinite::kUniform;
  Routing routing;
  EXPECT_EQ(route(spec, input, nullptr, &routing).code(), StatusCode::kOutOfMemory);
}

TEST(RouteInput, NoTokensAndStridedRows) {
  Routing routing = route_ok({spec_of("mixtral", 4, 2), {}, {}, {}});
  EXPECT_EQ(routing.num_tokens, 0);
  EXPECT_EQ(routing.counts, (std::vector<int64_t>{0, 0, 0, 0}));
  const std::vector<float> wide = {1, 2, 3, kNan, 3, 2, 1, kNan};
  RouterInput input;
  input.logits = ConstTensorView(wide.data(), DType::kF32, {2, 3});
  input.logits.strides[0] = 4;
  ASSERT_TRUE(route(spec_of("mixtral", 3, 1), input, nullptr, &routing).ok());
  EXPECT_EQ(routing.topk_idx, (std::vector<int32_t>{2, 0}));
}

TEST(RouteInput, KeepsDenormalsAndRestoresMxcsr) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1F80 | 0x8040 | 0x6000);  // as inside XLA:CPU: FTZ, DAZ; and a rounding mode
  Batch batch = {spec_of("softmax_pre", 2, 2), {0.0f, -100.0f}, {}, {}};
  Routing routing;
  const Status status = route_batch(batch, nullptr, &routing);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(after & 0xFFC0u, (0x1F80u | 0x8040u | 0x6000u) & 0xFFC0u);
  EXPECT_EQ(routing.topk_weights.values[0], 1.0f);
  EXPECT_EQ(routing.topk_weights.values[1], 0x1.b4p-145f);  // e^-100, a denormal
}

}  // namespace
}  // namespace argosy::test
