// The router file: every field, presets and overrides, and every refusal by name and value; and
// checkpoints read with one.
#include "argosy/router_file.h"

#include <gtest/gtest.h>

#include "argosy/checkpoint.h"
#include "io/temp_folder.h"

namespace argosy::test {
namespace {

TEST(RouterFile, EveryFieldByHand) {
  const Result<RouterFile> file = parse_router_file(R"({
    "num_experts": 16, "top_k": 4, "score_function": "sqrt_softplus", "selection_bias": true,
    "num_groups": 4, "keep_groups": 2, "group_score": "sum_of_best_k_per_group",
    "normalise": "yes", "normalise_single": false, "weight_norm": "reference",
    "routed_scaling_factor": 2.5, "on_nonfinite": "uniform", "family": "deepseek_v3"})");
  ASSERT_TRUE(file.has_value()) << file.error().message();
  EXPECT_EQ(file->family, "deepseek_v3");
  EXPECT_EQ(to_string(file->spec),
            "num_experts = 16\ntop_k = 4\nscore_function = sqrt_softplus\nselection_bias = yes\n"
            "num_groups = 4\nkeep_groups = 2\ngroup_score = sum_of_best_k_per_group\n"
            "normalise = yes\nnormalise_single = no\nweight_norm = reference\n"
            "routed_scaling_factor = 2.5\non_nonfinite = uniform\n");
  EXPECT_TRUE(validate(file->spec).ok());
}

// What a preset says stands unless a field beside it, before or behind, says otherwise.
TEST(RouterFile, FieldsOverrideEveryPreset) {
  for (const std::string& name : router_preset_names()) {
    const auto plain = parse_router_file(R"({"preset": ")" + name + R"("})");
    ASSERT_TRUE(plain.has_value()) << name;
    EXPECT_EQ(to_string(plain->spec), to_string(*router_preset(name, 0, 0)));
    const auto changed = parse_router_file(R"({"normalise_single": "yes", "preset": ")" + name +
                                           R"(", "top_k": 3})");
    ASSERT_TRUE(changed.has_value()) << name;
    RouterSpec expected = *router_preset(name, 0, 3);
    expected.normalise_single = Choice::kYes;
    EXPECT_EQ(to_string(changed->spec), to_string(expected));
  }
}

TEST(RouterFile, RefusalsNameFieldAndValue) {
  const struct {
    const char* text;
    StatusCode code;
    std::initializer_list<std::string_view> words;
  } kTable[] = {
      {R"({"top_k": )", StatusCode::kCorruptData, {"router file"}},
      {R"([])", StatusCode::kCorruptData, {"no JSON object"}},
      {R"({"top_k": 1, "top_k": 2})", StatusCode::kCorruptData, {"top_k"}},
      {R"({"topk": 2})", StatusCode::kInvalidArgument, {"\"topk\"", "2", "top_k"}},
      {R"({"preset": "mixtrall"})", StatusCode::kNotFound, {"mixtrall", "mixtral,"}},
      {R"({"preset": 3})", StatusCode::kInvalidArgument, {"preset", "3"}},
      {R"({"family": ""})", StatusCode::kInvalidArgument, {"family"}},
      {R"({"top_k": "2"})", StatusCode::kInvalidArgument, {"top_k", "\"2\"", "number"}},
      {R"({"top_k": 2.0})", StatusCode::kInvalidArgument, {"top_k", "2.0", "whole"}},
      {R"({"num_experts": 99999999999999999999})",
       StatusCode::kInvalidArgument,
       {"num_experts", "whole"}},
      {R"({"normalise": 1})", StatusCode::kInvalidArgument, {"normalise", "1", "no, yes"}},
      {R"({"normalise": null})", StatusCode::kInvalidArgument, {"normalise", "null"}},
      {R"({"score_function": "Softmax"})",
       StatusCode::kInvalidArgument,
       {"score_function", "Softmax", "softmax_top_k"}},
      {R"({"score_function": true})", StatusCode::kInvalidArgument, {"score_function", "true"}},
      {R"({"group_score": ["max"]})", StatusCode::kInvalidArgument, {"group_score", "a list"}},
      {R"({"routed_scaling_factor": 1e39})",
       StatusCode::kInvalidArgument,
       {"routed_scaling_factor", "1e+39", "fp32"}},
      {R"({"on_nonfinite": "\u001b[2J"})", StatusCode::kInvalidArgument, {"on_nonfinite", "?[2J"}},
  };
  for (const auto& row : kTable) {
    SCOPED_TRACE(row.text);
    expect_error(parse_router_file(row.text), row.code, row.words);
  }
  const TempFolder folder;
  expect_error(read_router_file(folder / "none.json"), StatusCode::kNotFound, {"none.json"});
  expect_error(read_router_file(folder.write("r.json", "{}x")), StatusCode::kCorruptData,
               {"r.json"});
}

constexpr const char* kConfig =
    R"({"model_type": "brand_new", "num_hidden_layers": 2, "hidden_size": 8,
        "n_routed_experts": 16, "moe_intermediate_size": 4, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "scoring_func": "tanh", "norm_topk_prob": "odd"})";

// The fields of the router in the config are not even looked at.
TEST(RouterFile, StandsInForTheRouterRuleOfAConfig) {
  expect_error(parse_model_config(kConfig), StatusCode::kUnsupported, {"brand_new"});
  auto file = parse_router_file(R"({"preset": "deepseek_v3", "family": "deepseek_v3",
      "num_groups": 4, "keep_groups": 2, "normalise": false})");
  ASSERT_TRUE(file.has_value());
  const Result<ModelConfig> config = parse_model_config(kConfig, &*file);
  ASSERT_TRUE(config.has_value()) << config.error().message();
  EXPECT_EQ(config->family, "deepseek_v3");
  EXPECT_EQ(config->router.num_experts, 16);
  EXPECT_EQ(config->router.top_k, 4);
  EXPECT_EQ(config->router.normalise, Choice::kNo);
  EXPECT_EQ(config->moe_layers(), std::vector<int64_t>({1}));

  file->spec.top_k = 2;
  EXPECT_EQ(parse_model_config(kConfig, &*file)->router.top_k, 2);
  file->spec.num_experts = 32;
  expect_error(parse_model_config(kConfig, &*file), StatusCode::kInvalidArgument,
               {"num_experts", "16", "32"});
  file->spec.num_experts = 16;
  file->spec.top_k = 9;
  expect_error(parse_model_config(kConfig, &*file), StatusCode::kInvalidArgument,
               {"router file", "top_k 9"});
  file->family.clear();
  expect_error(parse_model_config(kConfig, &*file), StatusCode::kUnsupported, {"brand_new"});
  file->family = "nobody";
  expect_error(parse_model_config(kConfig, &*file), StatusCode::kUnsupported, {"nobody"});
}

}  // namespace
}  // namespace argosy::test
