// Presets field by field, every rule of validate(), the printed form.
#include <gtest/gtest.h>

#include <limits>

#include "router/router_testing.h"

namespace argosy::test {
namespace {

using Score = ScoreFunction;
constexpr auto kNo = Choice::kNo;
constexpr auto kYes = Choice::kYes;

struct PresetRow {
  const char* name;
  Score score_function;
  Choice selection_bias;
  GroupScore group_score;
  Choice normalise;
  Choice normalise_single;
};

constexpr PresetRow kWant[] = {
    {"mixtral", Score::kSoftmax, kNo, GroupScore::kUnset, kYes, kYes},
    {"qwen2_moe", Score::kSoftmax, kNo, GroupScore::kUnset, kNo, kNo},
    {"qwen3_moe", Score::kSoftmax, kNo, GroupScore::kUnset, kYes, kYes},
    {"olmoe", Score::kSoftmax, kNo, GroupScore::kUnset, kNo, kNo},
    {"deepseek_v2", Score::kSoftmax, kNo, GroupScore::kMax, kNo, kNo},
    {"deepseek_v3", Score::kSigmoid, kYes, GroupScore::kSumOfBestTwo, kYes, kYes},
    {"gpt_oss", Score::kSoftmaxTopK, kNo, GroupScore::kUnset, kNo, kNo},
    {"switch", Score::kSoftmax, kNo, GroupScore::kUnset, kNo, kNo},
    {"softmax_pre", Score::kSoftmax, kNo, GroupScore::kSumOfBestKPerGroup, kNo, kNo},
    {"softmax_post", Score::kSoftmaxTopK, kNo, GroupScore::kSumOfBestKPerGroup, kNo, kNo},
    {"sigmoid", Score::kSigmoid, kNo, GroupScore::kSumOfBestKPerGroup, kYes, kNo},
    {"sqrt_softplus", Score::kSqrtSoftplus, kNo, GroupScore::kSumOfBestKPerGroup, kYes, kNo},
};

TEST(RouterPreset, FillsEveryField) {
  ASSERT_EQ(router_preset_names().size(), std::size(kWant));
  for (size_t i = 0; i < std::size(kWant); ++i) {
    const PresetRow& want = kWant[i];
    SCOPED_TRACE(want.name);
    EXPECT_EQ(router_preset_names()[i], want.name);
    const RouterSpec spec = spec_of(want.name, 8, 1);
    EXPECT_TRUE(validate(spec).ok()) << validate(spec).to_string();
    EXPECT_EQ(spec.num_experts, 8);
    EXPECT_EQ(spec.top_k, 1);
    EXPECT_EQ(spec.score_function, want.score_function);
    EXPECT_EQ(spec.selection_bias, want.selection_bias);
    EXPECT_EQ(spec.group_score, want.group_score);
    EXPECT_EQ(spec.normalise, want.normalise);
    EXPECT_EQ(spec.normalise_single, want.normalise_single);
    EXPECT_EQ(spec.num_groups, 1);
    EXPECT_EQ(spec.keep_groups, 1);
    EXPECT_EQ(spec.weight_norm, WeightNorm::kExact);
    EXPECT_EQ(spec.routed_scaling_factor, 1.0f);
    EXPECT_EQ(spec.on_nonfinite, OnNonfinite::kError);
  }
}

TEST(RouterPreset, UnknownNameListsThePresets) {
  const auto result = router_preset("mixtrall", 8, 2);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code(), StatusCode::kNotFound);
  EXPECT_NE(result.error().message().find("mixtrall"), std::string::npos);
  for (const std::string& name : router_preset_names()) {
    EXPECT_NE(result.error().message().find(name), std::string::npos) << name;
  }
}

struct BadSpec {
  const char* what;
  void (*change)(RouterSpec*);
  std::vector<std::string> message;  // all must appear
};

// C023 (a), (b), (c) are the three group rules.
const std::vector<BadSpec> kBadSpecs = {
    {"no experts", [](RouterSpec* s) { s->num_experts = 0; }, {"num_experts is 0"}},
    {"negative experts", [](RouterSpec* s) { s->num_experts = -3; }, {"num_experts is -3"}},
    {"ids beyond int32",
     [](RouterSpec* s) { s->num_experts = int64_t{1} << 31; },
     {"2147483648", "2147483647"}},
    {"no experts per token", [](RouterSpec* s) { s->top_k = 0; }, {"top_k is 0", "8"}},
    {"top_k above E", [](RouterSpec* s) { s->top_k = 9; }, {"top_k is 9", "8"}},
    {"no groups", [](RouterSpec* s) { s->num_groups = 0; }, {"num_groups is 0"}},
    {"E % G (C023 a)",
     [](RouterSpec* s) { s->num_experts = 6, s->num_groups = 4; },
     {"num_experts % num_groups", "6", "4"}},
    {"no group kept", [](RouterSpec* s) { s->keep_groups = 0; }, {"keep_groups is 0"}},
    {"Kg > G",
     [](RouterSpec* s) { s->num_groups = 4, s->keep_groups = 5; },
     {"keep_groups is 5", "4"}},
    {"K > Kg*E/G (C023 b)",
     [](RouterSpec* s) { s->num_groups = 8, s->top_k = 2; },
     {"top_k 2", "1 of 8 groups", "1 of 8 experts"}},
    {"K > Kg*E/G (C023 c)",
     [](RouterSpec* s) { s->num_groups = 4, s->keep_groups = 2, s->top_k = 5; },
     {"top_k 5", "2 of 4 groups", "4 of 8 experts"}},
    {"K % Kg",
     [](RouterSpec* s) {
       s->num_groups = 4, s->keep_groups = 2, s->top_k = 3;
       s->group_score = GroupScore::kSumOfBestKPerGroup;
     },
     {"top_k % keep_groups", "top_k 3", "keep_groups 2"}},
    {"score unset", [](RouterSpec* s) { s->score_function = Score::kUnset; }, {"score_function"}},
    {"bias unset", [](RouterSpec* s) { s->selection_bias = Choice::kUnset; }, {"selection_bias"}},
    {"normalise unset",
     [](RouterSpec* s) { s->normalise = Choice::kUnset; },
     {"normalise is unset"}},
    {"group score unset",
     [](RouterSpec* s) { s->num_groups = 2, s->group_score = GroupScore::kUnset; },
     {"group_score", "num_groups is 2"}},
    {"single unset",
     [](RouterSpec* s) { s->top_k = 1, s->normalise_single = Choice::kUnset; },
     {"normalise_single", "sigmoid"}},
    {"factor zero", [](RouterSpec* s) { s->routed_scaling_factor = 0.0f; }, {"is 0"}},
    {"factor negative", [](RouterSpec* s) { s->routed_scaling_factor = -2.5f; }, {"-2.5"}},
    {"factor NaN", [](RouterSpec* s) { s->routed_scaling_factor = std::nanf(""); }, {"nan"}},
    {"factor Inf",
     [](RouterSpec* s) { s->routed_scaling_factor = std::numeric_limits<float>::infinity(); },
     {"inf"}},
};

TEST(ValidateRouterSpec, NamesTheBrokenRuleAndItsValues) {
  for (const BadSpec& bad : kBadSpecs) {
    SCOPED_TRACE(bad.what);
    RouterSpec spec = spec_of("deepseek_v3", 8, 2);
    ASSERT_TRUE(validate(spec).ok());
    bad.change(&spec);
    const Status status = validate(spec);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    for (const std::string& part : bad.message) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << part << " in: " << status.message();
    }
    Routing routing;
    EXPECT_EQ(route(spec, {}, nullptr, &routing).code(), StatusCode::kInvalidArgument);
  }
}

TEST(ValidateRouterSpec, AcceptsTheEdges) {
  RouterSpec spec = spec_of("softmax_pre", 8, 8);
  EXPECT_TRUE(validate(spec).ok());
  spec.num_groups = spec.keep_groups = 8;  // groups of one expert
  EXPECT_TRUE(validate(spec).ok());
  spec.normalise_single = Choice::kUnset;
  EXPECT_TRUE(validate(spec).ok());
  spec = spec_of("mixtral", 1, 1);
  EXPECT_TRUE(validate(spec).ok());
  spec.normalise_single = Choice::kUnset;  // speaks of sigmoid and sqrt-softplus scores only
  EXPECT_TRUE(validate(spec).ok());
}

TEST(RouterSpecToString, PrintsEveryFieldOnALine) {
  RouterSpec spec = spec_of("deepseek_v3", 256, 8);
  spec.num_groups = 8;
  spec.keep_groups = 4;
  spec.routed_scaling_factor = 2.5f;
  spec.on_nonfinite = OnNonfinite::kUniform;
  spec.weight_norm = WeightNorm::kReference;
  EXPECT_EQ(to_string(spec),
            "num_experts = 256\ntop_k = 8\nscore_function = sigmoid\nselection_bias = yes\n"
            "num_groups = 8\nkeep_groups = 4\ngroup_score = sum_of_best_two\nnormalise = yes\n"
            "normalise_single = yes\nweight_norm = reference\nrouted_scaling_factor = 2.5\n"
            "on_nonfinite = uniform\n");
}

}  // namespace
}  // namespace argosy::test
