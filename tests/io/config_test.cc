// K24, config meaning: per family every field present, absent, aliased, nested and contradictory;
// the layer lists (C232-C234); the words of topk_method (C236); the router that comes out.
//
// Mutations tried, each makes a test fail: (index % step) for (index + 1) % step, mlp_only_layers
// ignored, intermediate_size taken for moe_intermediate_size, groups applied under "greedy", an
// alias ignored.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "argosy/checkpoint.h"
#include "io/model_writer.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using Json = nlohmann::json;
using test::expect_error;
using test::minimal_config;

const char* const kFamilyNames[] = {"deepseek_v3", "deepseek_v2", "mixtral", "qwen2_moe",
                                    "qwen3_moe",   "olmoe",       "gpt_oss"};

Result<ModelConfig> parse(const Json& config) { return parse_model_config(config.dump()); }

ModelConfig parsed(const Json& config) {
  Result<ModelConfig> result = parse(config);
  EXPECT_TRUE(result.has_value()) << result.error().message();
  return result ? *result : ModelConfig();
}

// `config` with one field set; null removes it.
Json with(Json config, const std::string& field, const Json& value) {
  if (value.is_null()) {
    config.erase(field);
  } else {
    config[field] = value;
  }
  return config;
}

using Layers = std::vector<int64_t>;

TEST(Config, DeepseekV3) {
  Json json = minimal_config("deepseek_v3");
  json["n_group"] = 4;
  json["topk_group"] = 2;
  const ModelConfig config = parsed(json);
  EXPECT_EQ(config.family, "deepseek_v3");
  EXPECT_EQ(config.num_layers, 3);
  EXPECT_EQ(config.hidden, 6);
  EXPECT_EQ(config.intermediate, 4);
  EXPECT_EQ(config.shared_intermediate, 8);
  EXPECT_FALSE(config.shared_gate);
  EXPECT_EQ(config.moe_layers(), (Layers{1, 2}));
  EXPECT_EQ(config.router.num_experts, 8);
  EXPECT_EQ(config.router.top_k, 2);
  EXPECT_EQ(config.router.score_function, ScoreFunction::kSigmoid);
  EXPECT_EQ(config.router.selection_bias, Choice::kYes);
  EXPECT_EQ(config.router.num_groups, 4);
  EXPECT_EQ(config.router.keep_groups, 2);
  EXPECT_EQ(config.router.group_score, GroupScore::kSumOfBestTwo);
  EXPECT_EQ(config.router.normalise, Choice::kYes);
  EXPECT_EQ(config.router.normalise_single, Choice::kYes);
  EXPECT_EQ(config.router.routed_scaling_factor, 2.5f);
  EXPECT_EQ(config.router.weight_norm, WeightNorm::kExact);
  EXPECT_EQ(config.router.on_nonfinite, OnNonfinite::kError);
  const ModelConfig plain = parsed(with(json, "norm_topk_prob", false));
  EXPECT_EQ(plain.router.normalise, Choice::kNo);
  EXPECT_EQ(plain.router.normalise_single, Choice::kNo);
}

TEST(Config, DeepseekV2) {
  Json json = minimal_config("deepseek_v2");
  json["topk_method"] = "group_limited_greedy";
  json["n_group"] = 4;
  json["topk_group"] = 2;
  const ModelConfig config = parsed(json);
  EXPECT_EQ(config.intermediate, 4);
  EXPECT_EQ(config.shared_intermediate, 8);
  EXPECT_EQ(config.moe_layers(), (Layers{1, 2}));
  EXPECT_EQ(config.router.score_function, ScoreFunction::kSoftmax);
  EXPECT_EQ(config.router.selection_bias, Choice::kNo);
  EXPECT_EQ(config.router.num_groups, 4);
  EXPECT_EQ(config.router.keep_groups, 2);
  EXPECT_EQ(config.router.group_score, GroupScore::kMax);
  EXPECT_EQ(config.router.normalise, Choice::kNo);
  EXPECT_EQ(config.router.normalise_single, Choice::kNo);
  EXPECT_EQ(config.router.routed_scaling_factor, 2.5f);
}

TEST(Config, SoftmaxFamilies) {
  for (const char* family : {"mixtral", "qwen3_moe", "olmoe"}) {
    SCOPED_TRACE(family);
    const ModelConfig config = parsed(minimal_config(family));
    EXPECT_EQ(config.family, family);
    EXPECT_EQ(config.intermediate, 4);
    EXPECT_EQ(config.shared_intermediate, 0);
    EXPECT_EQ(config.moe_layers(), (Layers{0, 1, 2}));
    EXPECT_EQ(config.router.num_experts, 8);
    EXPECT_EQ(config.router.score_function, ScoreFunction::kSoftmax);
    EXPECT_EQ(config.router.selection_bias, Choice::kNo);
    EXPECT_EQ(config.router.num_groups, 1);
    EXPECT_EQ(config.router.keep_groups, 1);
    EXPECT_EQ(config.router.normalise, Choice::kYes);
    EXPECT_EQ(config.router.normalise_single, Choice::kYes);
    EXPECT_EQ(config.router.routed_scaling_factor, 1.0f);
    if (family == std::string("mixtral")) continue;
    const ModelConfig plain = parsed(with(minimal_config(family), "norm_topk_prob", false));
    EXPECT_EQ(plain.router.normalise, Choice::kNo);
    EXPECT_EQ(plain.router.normalise_single, Choice::kNo);
  }
}

TEST(Config, Qwen2Moe) {
  const ModelConfig config = parsed(minimal_config("qwen2_moe"));
  EXPECT_EQ(config.intermediate, 4);
  EXPECT_EQ(config.shared_intermediate, 7);
  EXPECT_TRUE(config.shared_gate);
  EXPECT_FALSE(config.gate_bias);
  EXPECT_FALSE(config.expert_bias);
  EXPECT_EQ(config.activation.kind, ActivationKind::kSwiGlu);
  EXPECT_EQ(config.moe_layers(), (Layers{0, 1, 2}));
  EXPECT_EQ(config.router.score_function, ScoreFunction::kSoftmax);
  EXPECT_EQ(config.router.normalise, Choice::kYes);
  EXPECT_EQ(config.router.normalise_single, Choice::kYes);
  const ModelConfig plain = parsed(with(minimal_config("qwen2_moe"), "norm_topk_prob", false));
  EXPECT_EQ(plain.router.normalise, Choice::kNo);
  const ModelConfig none =
      parsed(with(minimal_config("qwen2_moe"), "shared_expert_intermediate_size", 0));
  EXPECT_EQ(none.shared_intermediate, 0);
  EXPECT_FALSE(none.shared_gate);
}

TEST(Config, GptOss) {
  const ModelConfig config = parsed(minimal_config("gpt_oss"));
  EXPECT_EQ(config.intermediate, 4);
  EXPECT_EQ(config.shared_intermediate, 0);
  EXPECT_FALSE(config.shared_gate);
  EXPECT_TRUE(config.gate_bias);
  EXPECT_TRUE(config.expert_bias);
  EXPECT_EQ(config.activation.kind, ActivationKind::kClampedSwiGlu);
  EXPECT_EQ(config.activation.limit, 2.5f);
  EXPECT_EQ(config.activation.alpha, 1.702f);
  EXPECT_EQ(config.moe_layers(), (Layers{0, 1, 2}));
  // The preset, whose weights are a softmax over the chosen already.
  RouterSpec preset = *router_preset("gpt_oss", 8, 2);
  EXPECT_EQ(to_string(config.router), to_string(preset));
  EXPECT_EQ(parsed(with(minimal_config("gpt_oss"), "swiglu_limit", nullptr)).activation.limit,
            7.0f);
  EXPECT_EQ(parsed(with(minimal_config("gpt_oss"), "swiglu_alpha", 2)).activation.alpha, 2.0f);
  for (const char* field : {"swiglu_limit", "swiglu_alpha"}) {
    for (const Json& value :
         {Json(0), Json(-7.0), Json(1e-60), Json(1e300), Json("7"), Json(true), Json::array({7})}) {
      expect_error(parse(with(minimal_config("gpt_oss"), field, value)),
                   StatusCode::kInvalidArgument, {"gpt_oss", field});
    }
  }
}

// Fields that each family needs; all others of minimal_config may go.
const std::map<std::string, std::vector<std::string>> kRequired = {
    {"deepseek_v3",
     {"num_hidden_layers", "hidden_size", "num_experts_per_tok", "moe_intermediate_size",
      "n_routed_experts", "norm_topk_prob", "first_k_dense_replace", "routed_scaling_factor",
      "n_group", "topk_group"}},
    {"deepseek_v2",
     {"num_hidden_layers", "hidden_size", "num_experts_per_tok", "moe_intermediate_size",
      "n_routed_experts", "first_k_dense_replace", "routed_scaling_factor"}},
    {"mixtral",
     {"num_hidden_layers", "hidden_size", "num_experts_per_tok", "intermediate_size",
      "num_local_experts"}},
    {"qwen2_moe",
     {"num_hidden_layers", "hidden_size", "num_experts_per_tok", "moe_intermediate_size",
      "num_experts", "norm_topk_prob", "shared_expert_intermediate_size"}},
    {"gpt_oss",
     {"num_hidden_layers", "hidden_size", "num_experts_per_tok", "intermediate_size",
      "num_local_experts"}},
    {"qwen3_moe",
     {"num_hidden_layers", "hidden_size", "num_experts_per_tok", "moe_intermediate_size",
      "num_experts", "norm_topk_prob"}},
    {"olmoe",
     {"num_hidden_layers", "hidden_size", "num_experts_per_tok", "intermediate_size", "num_experts",
      "norm_topk_prob"}}};

TEST(Config, RequiredFieldsAreRequiredOthersAreNot) {
  for (const auto& [family, required] : kRequired) {
    const Json whole = minimal_config(family);
    for (const auto& [field, value] : whole.items()) {
      SCOPED_TRACE(family + " " + field);
      const auto config = parse(with(minimal_config(family), field, nullptr));
      if (field == "model_type" || std::count(required.begin(), required.end(), field) > 0) {
        expect_error(config, StatusCode::kInvalidArgument, {field, "missing"});
      } else {
        EXPECT_TRUE(config.has_value()) << config.error().message();
      }
      Json nothing = minimal_config(family);
      nothing[field] = nullptr;  // null counts as absent
      EXPECT_EQ(parse(nothing).has_value(), config.has_value());
    }
  }
}

TEST(Config, DefaultsOfAbsentFields) {
  EXPECT_EQ(
      parsed(with(minimal_config("deepseek_v3"), "n_shared_experts", nullptr)).shared_intermediate,
      0);
  EXPECT_EQ(parsed(with(minimal_config("deepseek_v2"), "norm_topk_prob", nullptr)).router.normalise,
            Choice::kNo);
  EXPECT_EQ(parsed(with(minimal_config("deepseek_v3"), "hidden_act", nullptr)).num_layers, 3);
}

TEST(Config, IntegersAreIntegersInBounds) {
  for (const auto& [family, required] : kRequired) {
    for (const std::string& field : required) {
      if (field == "norm_topk_prob" || field == "routed_scaling_factor") continue;
      for (const Json& value :
           {Json(-1), Json(2.0), Json("2"), Json(true), Json(Json::array({2})),
            Json(Json::object()), Json(uint64_t{1} << 32), Json(~uint64_t{0}), Json(INT64_MIN)}) {
        SCOPED_TRACE(family + " " + field + " " + value.dump());
        expect_error(parse(with(minimal_config(family), field, value)),
                     StatusCode::kInvalidArgument, {family, field});
      }
    }
  }
  // A few bytes of text may not make a long list of layers.
  expect_error(parse(with(minimal_config("olmoe"), "num_hidden_layers", 1 << 30)),
               StatusCode::kInvalidArgument, {"num_hidden_layers", "65536"});
}

TEST(Config, ZeroIsRefusedWhereItMeansNothing) {
  for (const char* family : kFamilyNames) {
    for (const char* field : {"num_hidden_layers", "hidden_size", "num_experts_per_tok"}) {
      expect_error(parse(with(minimal_config(family), field, 0)), StatusCode::kInvalidArgument,
                   {family, field, "0"});
    }
  }
  expect_error(parse(with(minimal_config("qwen3_moe"), "decoder_sparse_step", 0)),
               StatusCode::kInvalidArgument, {"decoder_sparse_step"});
  expect_error(parse(with(minimal_config("deepseek_v3"), "moe_layer_freq", 0)),
               StatusCode::kInvalidArgument, {"moe_layer_freq"});
}

TEST(Config, BooleansAndNumbersHaveTheirKind) {
  for (const Json& value : {Json(1), Json("true"), Json(1.0)}) {
    expect_error(parse(with(minimal_config("olmoe"), "norm_topk_prob", value)),
                 StatusCode::kInvalidArgument, {"olmoe", "norm_topk_prob", "true or false"});
  }
  for (const Json& value :
       {Json("2.5"), Json(true), Json(1e300), Json(-1e300), Json(0), Json(-2.5)}) {
    expect_error(parse(with(minimal_config("deepseek_v3"), "routed_scaling_factor", value)),
                 StatusCode::kInvalidArgument, {"deepseek_v3", "routed_scaling_factor"});
  }
  EXPECT_EQ(parsed(with(minimal_config("deepseek_v3"), "routed_scaling_factor", 2))
                .router.routed_scaling_factor,
            2.0f);
}

TEST(Config, AliasesOfTheExpertCount) {
  const std::vector<std::string> aliases = {"num_experts", "num_local_experts", "n_routed_experts"};
  for (const char* family : kFamilyNames) {
    Json none = minimal_config(family);
    for (const std::string& alias : aliases) none.erase(alias);
    for (const std::string& a : aliases) {
      EXPECT_EQ(parsed(with(none, a, 6)).router.num_experts, 6);
      for (const std::string& b : aliases) {
        if (a == b) continue;
        EXPECT_EQ(parsed(with(with(none, a, 6), b, 6)).router.num_experts, 6);
        expect_error(parse(with(with(none, a, 6), b, 4)), StatusCode::kInvalidArgument,
                     {family, a + " is ", b + " is ", "6", "4"});
      }
    }
  }
}

// C232.
TEST(Config, NoExpertsIsADenseModel) {
  for (const char* family : {"qwen2_moe", "qwen3_moe", "gpt_oss"}) {
    EXPECT_EQ(parsed(minimal_config(family)).moe_layers(), (Layers{0, 1, 2}));
  }
  for (const char* family : kFamilyNames) {
    Json json = {
        {"model_type", family}, {"num_hidden_layers", 2}, {"hidden_size", 6}, {"num_experts", 0}};
    const ModelConfig config = parsed(json);  // and no router field is asked for
    EXPECT_EQ(config.moe_layers(), Layers());
    EXPECT_EQ(config.is_moe_layer.size(), 2u);
    EXPECT_EQ(config.router.num_experts, 0);
  }
}

// C233.
TEST(Config, SparseStepAndDenseLayersOfQwen) {
  for (const char* family : {"qwen2_moe", "qwen3_moe"}) {
    const auto layers = [&](int num_layers, const Json& step, const Json& dense) {
      Json json = with(minimal_config(family), "num_hidden_layers", num_layers);
      return parsed(with(with(json, "decoder_sparse_step", step), "mlp_only_layers", dense))
          .moe_layers();
    };
    EXPECT_EQ(layers(4, 2, nullptr), (Layers{1, 3}));
    EXPECT_EQ(layers(1, 2, nullptr), (Layers{}));
    EXPECT_EQ(layers(3, nullptr, {1}), (Layers{0, 2}));
    EXPECT_EQ(layers(6, 3, Json::array()), (Layers{2, 5}));
    EXPECT_EQ(layers(6, 2, {1, 2, 5}), (Layers{3}));
    for (const Json& list :
         {Json({3}), Json({-1}), Json({1.0}), Json({"1"}), Json(1), Json("1"), Json({true})}) {
      expect_error(parse(with(minimal_config(family), "mlp_only_layers", list)),
                   StatusCode::kInvalidArgument, {family, "mlp_only_layers", "0 to 2"});
    }
  }
}

// C234.
TEST(Config, FirstDenseLayersAndFrequencyOfDeepseek) {
  for (const char* family : {"deepseek_v3", "deepseek_v2"}) {
    const auto layers = [&](int first, const Json& step) {
      Json json = with(minimal_config(family), "num_hidden_layers", 6);
      return parsed(with(with(json, "first_k_dense_replace", first), "moe_layer_freq", step))
          .moe_layers();
    };
    EXPECT_EQ(layers(1, 2), (Layers{2, 4}));
    EXPECT_EQ(layers(0, 2), (Layers{0, 2, 4}));
    EXPECT_EQ(layers(3, nullptr), (Layers{3, 4, 5}));
    EXPECT_EQ(layers(4, 3), (Layers{}));
    EXPECT_EQ(layers(6, 1), (Layers{}));
    EXPECT_EQ(layers(7, 1), (Layers{}));
  }
}

// C236.
TEST(Config, TopkMethod) {
  const auto v2 = [](const Json& method) {
    Json json = with(minimal_config("deepseek_v2"), "n_group", 4);
    return with(with(json, "topk_group", 2), "topk_method", method);
  };
  for (const Json& greedy : {Json("gready"), Json("greedy"), Json()}) {
    EXPECT_EQ(parsed(v2(greedy)).router.num_groups, 1);
    EXPECT_EQ(parsed(v2(greedy)).router.keep_groups, 1);
    Json without = v2(greedy);
    without.erase("n_group");
    without.erase("topk_group");
    EXPECT_TRUE(parse(without).has_value());
  }
  EXPECT_EQ(parsed(v2("group_limited_greedy")).router.num_groups, 4);
  for (const char* field : {"n_group", "topk_group"}) {
    expect_error(parse(with(v2("group_limited_greedy"), field, nullptr)),
                 StatusCode::kInvalidArgument, {"deepseek_v2", field, "missing"});
  }
  for (const Json& other : {Json("xyz"), Json("noaux_tc"), Json(""), Json("Greedy"), Json(1)}) {
    expect_error(parse(v2(other)), StatusCode::kInvalidArgument, {"deepseek_v2", "topk_method"});
  }
  for (const Json& any : {Json("gready"), Json("greedy"), Json(), Json("xyz"), Json("noaux_tc")}) {
    Json json = with(with(minimal_config("deepseek_v3"), "n_group", 4), "topk_group", 2);
    EXPECT_EQ(parsed(with(json, "topk_method", any)).router.num_groups, 4);
  }
}

TEST(Config, ContradictionsAreRefused) {
  const auto refuse = [](const char* family, const char* field, const Json& value) {
    expect_error(parse(with(minimal_config(family), field, value)), StatusCode::kInvalidArgument,
                 {family, field});
  };
  refuse("mixtral", "norm_topk_prob", false);
  refuse("deepseek_v2", "norm_topk_prob", true);
  refuse("deepseek_v3", "scoring_func", "softmax");
  refuse("deepseek_v2", "scoring_func", "sigmoid");
  for (const char* family : {"mixtral", "qwen3_moe", "olmoe"}) {
    refuse(family, "scoring_func", "sigmoid");
    refuse(family, "n_shared_experts", 1);
    refuse(family, "shared_expert_intermediate_size", 4);
    refuse(family, "routed_scaling_factor", 2.0);
    EXPECT_TRUE(parse(with(minimal_config(family), "routed_scaling_factor", 1.0)).has_value());
    EXPECT_TRUE(parse(with(minimal_config(family), "n_shared_experts", 0)).has_value());
  }
  EXPECT_TRUE(parse(with(minimal_config("mixtral"), "norm_topk_prob", true)).has_value());
  refuse("gpt_oss", "norm_topk_prob", false);
  refuse("gpt_oss", "mlp_bias", false);
  for (const char* field : {"norm_topk_prob", "mlp_bias"}) {
    EXPECT_EQ(to_string(parsed(with(minimal_config("gpt_oss"), field, true)).router),
              to_string(parsed(minimal_config("gpt_oss")).router));
  }
}

// A field of another family's rule is read in no family without it, so only the value without effect is accepted.
TEST(Config, FieldsOfOtherFamiliesMustHaveNoEffect) {
  struct Row {
    const char* field;
    std::vector<std::string> readers;  // families whose rule it is
    Json neutral, other;
  };
  const Row rows[] = {
      {"n_shared_experts", {"deepseek_v3", "deepseek_v2", "qwen2_moe"}, 0, 1},
      {"shared_expert_intermediate_size", {"deepseek_v3", "deepseek_v2", "qwen2_moe"}, 0, 4},
      {"first_k_dense_replace", {"deepseek_v3", "deepseek_v2"}, 0, 1},
      {"moe_layer_freq", {"deepseek_v3", "deepseek_v2"}, 1, 2},
      {"decoder_sparse_step", {"qwen2_moe", "qwen3_moe"}, 1, 2},
      {"mlp_only_layers", {"qwen2_moe", "qwen3_moe"}, Json::array(), {0}},
      {"n_group", {"deepseek_v3", "deepseek_v2"}, 1, 2},
      {"topk_group", {"deepseek_v3", "deepseek_v2"}, 1, 2},
      {"topk_method", {"deepseek_v3", "deepseek_v2"}, "greedy", "group_limited_greedy"},
      {"topk_method", {"deepseek_v3", "deepseek_v2"}, "gready", "noaux_tc"},
      {"routed_scaling_factor", {"deepseek_v3", "deepseek_v2"}, 1.0, 2.0},
      {"scoring_func", {"deepseek_v3"}, "softmax", "sigmoid"},
      {"hidden_act", {}, "silu", nullptr},
      {"mlp_bias", {"gpt_oss"}, false, nullptr},
  };
  for (const Row& row : rows) {
    for (const char* family : kFamilyNames) {
      if (std::count(row.readers.begin(), row.readers.end(), family) > 0) continue;
      SCOPED_TRACE(std::string(family) + " " + row.field);
      EXPECT_TRUE(parse(with(minimal_config(family), row.field, row.neutral)).has_value());
      if (row.other.is_null()) continue;
      expect_error(parse(with(minimal_config(family), row.field, row.other)),
                   StatusCode::kInvalidArgument, {family, row.field});
    }
  }
  for (const char* family : kFamilyNames) {
    if (family == std::string("gpt_oss")) continue;
    for (const char* field : {"swiglu_limit", "swiglu_alpha"}) {
      expect_error(parse(with(minimal_config(family), field, 7.0)), StatusCode::kUnsupported,
                   {family, field, "7", "not clamped"});
    }
  }
}

// Every name of one value, alone and in pairs that agree and that differ.
void expect_aliases(const char* family, const std::vector<std::string>& names,
                    const std::function<int64_t(const ModelConfig&)>& value) {
  Json none = minimal_config(family);
  for (const std::string& name : names) none.erase(name);
  expect_error(parse(none), StatusCode::kInvalidArgument, {family, names[0], names[1], "missing"});
  for (const std::string& a : names) {
    SCOPED_TRACE(std::string(family) + " " + a);
    EXPECT_EQ(value(parsed(with(none, a, 2))), 2);
    for (const Json& wrong : {Json(0), Json(-1), Json("2"), Json(2.0), Json(true)}) {
      expect_error(parse(with(none, a, wrong)), StatusCode::kInvalidArgument, {family, a});
    }
    for (const std::string& b : names) {
      if (a == b) continue;
      EXPECT_EQ(value(parsed(with(with(none, a, 2), b, 2))), 2);
      EXPECT_EQ(value(parsed(with(Json{{"text_config", with(none, a, 2)}}, b, 2))), 2);
      expect_error(parse(with(with(none, a, 2), b, 3)), StatusCode::kInvalidArgument,
                   {family, a + " is ", b + " is ", "2", "3"});
    }
  }
}

TEST(Config, AliasesOfTopK) {
  for (const char* family : kFamilyNames) {
    expect_aliases(family, {"num_experts_per_tok", "num_experts_per_token", "experts_per_token"},
                   [](const ModelConfig& config) { return config.router.top_k; });
    // A parameter of sampling that some configs carry.
    EXPECT_EQ(parsed(with(minimal_config(family), "top_k", 50)).router.top_k, 2);
  }
}

TEST(Config, AliasesOfTheExpertsWidth) {
  const auto width = [](const ModelConfig& config) { return config.intermediate; };
  for (const char* family : {"mixtral", "olmoe", "gpt_oss"}) {
    expect_aliases(family, {"intermediate_size", "moe_intermediate_size"}, width);
  }
  // Where dense layers have a width of their own it is no alias, whatever it says.
  for (const char* family : {"deepseek_v3", "deepseek_v2", "qwen2_moe", "qwen3_moe"}) {
    for (const Json& dense : {Json(4), Json(99), Json()}) {
      EXPECT_EQ(parsed(with(minimal_config(family), "intermediate_size", dense)).intermediate, 4);
    }
    expect_error(parse(with(minimal_config(family), "moe_intermediate_size", nullptr)),
                 StatusCode::kInvalidArgument, {family, "moe_intermediate_size", "missing"});
  }
}

TEST(Config, CountAndWidthOfSharedExpertsMustAgree) {
  const auto shared = [](const char* family, const Json& count, const Json& width) {
    return parse(with(with(minimal_config(family), "n_shared_experts", count),
                      "shared_expert_intermediate_size", width));
  };
  for (const char* family : {"deepseek_v3", "deepseek_v2"}) {
    EXPECT_EQ(shared(family, 2, 8)->shared_intermediate, 8);
    EXPECT_EQ(shared(family, 0, 0)->shared_intermediate, 0);
    EXPECT_EQ(shared(family, nullptr, 0)->shared_intermediate, 0);
    expect_error(shared(family, 2, 4), StatusCode::kInvalidArgument,
                 {family, "n_shared_experts is 2", "shared_expert_intermediate_size is 4", "8"});
    expect_error(shared(family, nullptr, 4), StatusCode::kInvalidArgument,
                 {family, "n_shared_experts", "shared_expert_intermediate_size is 4"});
  }
  EXPECT_EQ(shared("qwen2_moe", 1, 8)->shared_intermediate, 8);
  EXPECT_EQ(shared("qwen2_moe", nullptr, 8)->shared_intermediate, 8);
  EXPECT_EQ(shared("qwen2_moe", 0, 0)->shared_intermediate, 0);
  for (const auto& [count, width] : {std::pair(2, 8), std::pair(0, 8), std::pair(1, 0)}) {
    expect_error(shared("qwen2_moe", count, width), StatusCode::kInvalidArgument,
                 {"qwen2_moe", "n_shared_experts is " + std::to_string(count),
                  "shared_expert_intermediate_size is " + std::to_string(width)});
  }
}

TEST(Config, TheRouterIsValidated) {
  const auto refuse = [](const Json& json) {
    expect_error(parse(json), StatusCode::kInvalidArgument,
                 {json["model_type"].get<std::string>()});
  };
  refuse(with(minimal_config("olmoe"), "num_experts_per_tok", 9));
  refuse(with(with(minimal_config("deepseek_v3"), "n_group", 3), "topk_group", 1));
  refuse(with(with(minimal_config("deepseek_v3"), "n_group", 4), "topk_group", 5));
  Json narrow = with(with(minimal_config("deepseek_v3"), "n_group", 8), "topk_group", 1);
  refuse(narrow);  // 2 of 1 expert
}

TEST(Config, WhatIsNotBuiltIsUnsupported) {
  for (const char* family : kFamilyNames) {
    const Json json = minimal_config(family);
    expect_error(parse(with(json, "hidden_act", "gelu")), StatusCode::kUnsupported,
                 {family, "hidden_act", "gelu", "silu"});
    expect_error(parse(with(json, "compression_config", {{"format", "dense"}})),
                 StatusCode::kUnsupported, {family, "compression_config"});
    if (family != std::string("gpt_oss")) {
      expect_error(parse(with(json, "mlp_bias", true)), StatusCode::kUnsupported,
                   {family, "mlp_bias"});
    }
    expect_error(
        parse({{"text_config", json}, {"quantization_config", {{"quant_method", "gptq"}}}}),
        StatusCode::kUnsupported, {family, "quantization_config", "gptq"});
  }
}

TEST(Config, UnknownFamiliesListTheKnownOnes) {
  expect_error(parse({{"model_type", "llama"}}), StatusCode::kUnsupported,
               {"\"llama\" is unknown", "deepseek_v3", "deepseek_v2", "mixtral", "qwen2_moe",
                "qwen3_moe", "olmoe", "gpt_oss"});
  expect_error(parse(Json::object()), StatusCode::kInvalidArgument, {"model_type", "missing"});
  expect_error(parse({{"model_type", 5}}), StatusCode::kInvalidArgument, {"model_type", "5"});
}

TEST(Config, ANestedLanguageModelIsRead) {
  for (const char* family : kFamilyNames) {
    const Json inner = minimal_config(family);
    for (const Json& outer :
         {Json({{"model_type", "some_vl"}}), Json({{"model_type", "some_vl"}, {"hidden_size", 6}}),
          Json(Json::object())}) {
      const ModelConfig config = parsed(with(outer, "text_config", inner));
      EXPECT_EQ(config.family, family);
      EXPECT_EQ(config.router.num_experts, 8);
    }
    // The type at the root when the inner one has none.
    EXPECT_EQ(parsed({{"model_type", family}, {"text_config", with(inner, "model_type", nullptr)}})
                  .family,
              family);
    expect_error(parse({{"hidden_size", 7}, {"text_config", inner}}), StatusCode::kInvalidArgument,
                 {family, "hidden_size is 7", "text_config.hidden_size is 6"});
  }
  Json null_text = minimal_config("olmoe");
  null_text["text_config"] = nullptr;
  EXPECT_TRUE(parse(null_text).has_value());
  expect_error(parse(with(minimal_config("olmoe"), "text_config", 5)), StatusCode::kInvalidArgument,
               {"text_config"});
}

TEST(Config, SharedWidthIsBounded) {
  Json json = with(minimal_config("deepseek_v3"), "moe_intermediate_size", int64_t{1} << 31);
  expect_error(parse(with(json, "n_shared_experts", 1 << 30)), StatusCode::kInvalidArgument,
               {"n_shared_experts"});
  EXPECT_EQ(parsed(with(json, "n_shared_experts", 1 << 16)).shared_intermediate, int64_t{1} << 47);
}

TEST(Config, TextThatIsNoObjectIsCorrupt) {
  for (const char* text : {"", "{", "[]", "5", "null", R"({"a":1,"a":1})"}) {
    expect_error(parse_model_config(text), StatusCode::kCorruptData, {"config"});
  }
}

TEST(Config, FileErrorsNameThePath) {
  const test::TempFolder folder;
  expect_error(read_model_config(folder.path()), StatusCode::kNotFound, {folder / "config.json"});
  folder.write("config.json", "{");
  expect_error(read_model_config(folder.path()), StatusCode::kCorruptData,
               {folder / "config.json"});
  folder.write("config.json", with(minimal_config("olmoe"), "hidden_size", "x").dump());
  expect_error(read_model_config(folder.path()), StatusCode::kInvalidArgument,
               {folder / "config.json", "olmoe", "hidden_size", "\"x\""});
  std::filesystem::resize_file(folder / "config.json", 17 << 20);
  expect_error(read_model_config(folder.path()), StatusCode::kCorruptData,
               {folder / "config.json"});
}

}  // namespace
}  // namespace argosy
