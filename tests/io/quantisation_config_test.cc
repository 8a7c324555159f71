// quantization_config: the fields of the published models, and every value that would be passed over
// refused with its name.
#include <gtest/gtest.h>

#include "argosy/checkpoint.h"
#include "io/model_writer.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using Json = nlohmann::json;
using test::expect_error;

Result<ModelConfig> parse(const Json& quantization, const char* family = "deepseek_v3") {
  Json config = test::minimal_config(family);
  config["quantization_config"] = quantization;
  return parse_model_config(config.dump());
}

Json fp8() {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {128, 128}}};
}

Json with(Json json, const char* field, const Json& value) {
  json[field] = value;
  return json;
}

TEST(QuantisationConfig, ThePublishedOnesAreRead) {
  const Json mxfp4 = {{"quant_method", "mxfp4"},
                      {"modules_to_not_convert", {"model.layers.*.self_attn", "lm_head"}}};
  const std::vector<std::pair<Json, BlockFormat>> cases = {
      {fp8(), BlockFormat::kE4M3Block128},
      {with(fp8(), "scale_fmt", "ue8m0"), BlockFormat::kE4M3Block128},
      {with(fp8(), "weight_block_size", {1, 128}), BlockFormat::kE4M3Row128},
      {{{"quant_method", "mxfp8"}}, BlockFormat::kMxfp8},
      {{{"quant_method", "mxfp8"}, {"weight_block_size", {1, 32}}}, BlockFormat::kMxfp8},
      {mxfp4, BlockFormat::kMxfp4}};
  for (const auto& [json, format] : cases) {
    const auto config = parse(json);
    ASSERT_TRUE(config.has_value()) << config.error().message();
    ASSERT_TRUE(config->quantisation.has_value());
    EXPECT_EQ(config->quantisation->format, format) << json;
  }
  EXPECT_EQ(parse(mxfp4, "gpt_oss")->quantisation->modules_to_not_convert,
            (std::vector<std::string>{"model.layers.*.self_attn", "lm_head"}));
  EXPECT_FALSE(parse(nullptr)->quantisation.has_value());
  EXPECT_EQ(parse(with(fp8(), "ignored_layers", {"a"}))->quantisation->modules_to_not_convert,
            std::vector<std::string>{"a"});
}

TEST(QuantisationConfig, WhatWouldBePassedOverIsRefused) {
  Json no_block = fp8();
  no_block.erase("weight_block_size");
  struct Case {
    Json json;
    StatusCode code;
    std::initializer_list<std::string_view> words;
  };
  const auto unsupported = StatusCode::kUnsupported;
  const auto invalid = StatusCode::kInvalidArgument;
  const Case cases[] = {
      {Json::object(), invalid, {"quant_method", "missing"}},
      {"fp8", invalid, {"quantization_config", "no object"}},
      {{{"quant_method", "awq"}}, unsupported, {"\"awq\"", "fp8, mxfp8, mxfp4"}},
      {{{"quant_method", 8}}, invalid, {"quant_method", "8"}},
      {with(fp8(), "fmt", "e5m2"), unsupported, {"fmt", "\"e5m2\"", "e4m3"}},
      {with(fp8(), "activation_scheme", "static"), unsupported, {"\"static\"", "dynamic"}},
      {with(fp8(), "scale_fmt", "int"), unsupported, {"scale_fmt", "\"int\""}},
      {no_block, unsupported, {"weight_block_size", "missing"}},
      {with(fp8(), "weight_block_size", {128, 64}), unsupported, {"[128, 64]", "[128, 128]"}},
      {with(fp8(), "weight_block_size", {128}), invalid, {"weight_block_size", "a list of 1"}},
      {with(fp8(), "weight_block_size", 128), invalid, {"weight_block_size", "no list"}},
      {with(fp8(), "weight_block_size", {128, 0}), invalid, {"weight_block_size", "65536"}},
      {with(fp8(), "weight_block_size", {128, -1}), invalid, {"weight_block_size", "65536"}},
      {with(fp8(), "weight_block_size", {128, "x"}), invalid, {"weight_block_size", "65536"}},
      {{{"quant_method", "mxfp4"}, {"weight_block_size", {1, 16}}}, unsupported, {"[1, 16]"}},
      {{{"quant_method", "mxfp4"}, {"fmt", "e4m3"}}, unsupported, {"fmt", "e2m1"}},
      {with(fp8(), "config_groups", Json::object()), unsupported, {"\"config_groups\""}},
      {with(fp8(), "modules_to_not_convert", "lm_head"), invalid, {"no list"}},
      {with(fp8(), "modules_to_not_convert", {"a", 5}), invalid, {"modules_to_not_convert"}},
      {with(fp8(), "modules_to_not_convert", {""}), invalid, {"modules_to_not_convert"}},
      {with(fp8(), "modules_to_not_convert", {"re:.*gate$"}), unsupported, {"\"re:.*gate$\""}}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.json.dump());
    expect_error(parse(one.json), one.code, one.words);
    expect_error(parse(one.json), one.code, {"deepseek_v3", "quantization_config"});
  }
}

TEST(QuantisationConfig, PatternsNameWholeComponents) {
  const std::string module = "model.layers.11.mlp.experts.3.gate_proj";
  const auto converts = [&](const char* pattern) {
    return CheckpointQuantisation{BlockFormat::kMxfp8, {pattern}}.converts(module);
  };
  for (const char* names : {"model.layers.11.mlp.experts.3.gate_proj", "model.layers.11",
                            "gate_proj", "mlp.experts", "model.layers.*.mlp", "*.experts.*", "*",
                            "*gate_proj", "layers.1*", "model", "experts.3"}) {
    EXPECT_FALSE(converts(names)) << names;
  }
  for (const char* other : {"model.layers.1", "gate", "proj", "lm_head", "model.layers.*.self_attn",
                            "mlp.gate", "expert", "model.layers.11.mlp.experts.3.gate_proj.x",
                            "1*.experts.3.gate", "layers..mlp", "."}) {
    EXPECT_TRUE(converts(other)) << other;
  }
  EXPECT_TRUE(CheckpointQuantisation{}.converts(module));
}

// A pattern from outside may not take exponential time.
TEST(QuantisationConfig, HostilePatternsEnd) {
  std::string pattern;
  for (int i = 0; i < 2000; ++i) pattern += "*a";
  const std::string module(20000, 'a');
  EXPECT_FALSE((CheckpointQuantisation{BlockFormat::kMxfp8, {pattern}}.converts(module)));
  EXPECT_TRUE((CheckpointQuantisation{BlockFormat::kMxfp8, {pattern + "*b"}}.converts(module)));
}

}  // namespace
}  // namespace argosy
