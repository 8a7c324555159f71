// Experts converted to each format: the error of the layer's output against bf16 weights, within what the formats give.
//
// scripts/format_errors makes the table of docs/formats.md from the same runs.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "argosy/bfloat16.h"
#include "argosy/checkpoint.h"
#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using nlohmann::json;

struct Format {
  const char* name;
  double
      weight_error;  // rms, at most: the relative step of the codes, and what a scale of 2^n clips or leaves unused
};
constexpr Format kFormats[] = {
    {"e4m3_1x128", 0.028}, {"e4m3_128x128", 0.028}, {"mxfp8", 0.034}, {"mxfp4", 0.125}};

struct Output {
  std::vector<double> values;
  std::vector<int32_t> topk_idx;
};

// The layer of the checkpoint in `dir` on the bf16 input captured from `model`.
Output run_layer(const std::string& dir, const std::string& model, int layer,
                 const std::string& file) {
  const CliResult result =
      run_cli({"run", "--model", dir, "--layer", std::to_string(layer), "--input",
               captures(model, layer, "bf16") + ".moe_input", "--check", "none", "--output", file});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto output = read_tensor_argument(file + ":output");
  const auto experts = read_tensor_argument(file + ":topk_idx");
  if (!output.has_value() || !experts.has_value()) return {};
  Output made;
  const ConstTensorView view = output->view();
  for (int64_t i = 0; i < view.dim(0) * view.dim(1); ++i) {
    made.values.push_back(view.as<BFloat16>()[i].to_float());
  }
  const ConstTensorView idx = experts->view();
  made.topk_idx.assign(idx.as<int32_t>(), idx.as<int32_t>() + idx.dim(0) * idx.dim(1));
  return made;
}

double rms_error(const Output& got, const Output& want) {
  double errors = 0, squares = 0;
  for (size_t i = 0; i < want.values.size(); ++i) {
    const double error = got.values[i] - want.values[i];
    errors += error * error;
    squares += want.values[i] * want.values[i];
  }
  return std::sqrt(errors / squares);
}

// Weight error by layer, "model.layers.N".
std::map<std::string, double> convert(const std::string& model, const char* format,
                                      const std::string& target) {
  const CliResult result = run_cli({"quantise", "--model", testdata("models/" + model), "--format",
                                    format, "--output", target, "--json", "-"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::map<std::string, double> errors;
  const json report = result.json();
  for (const json& layer : report["layers"]) {
    errors[layer["layer"].get<std::string>()] = layer["rms_error"].get<double>();
  }
  return errors;
}

// Every family, once; models whose own experts are quantised have no bf16 to compare with.
std::vector<std::string> families() {
  std::set<std::string> names;
  for (const CapturedLayer& layer : captured_layers()) {
    if (!read_model_config(testdata("models/" + layer.model))->quantisation.has_value()) {
      names.insert(layer.model);
    }
  }
  return {names.begin(), names.end()};
}

class FormatErrorsTest : public ::testing::TestWithParam<std::string> {};

// An error of a part e of each of three products in a row is at most sqrt(3) e in all, when independent; sums of rows and
// SiLU leave at least a third of it.
TEST_P(FormatErrorsTest, OutputErrorFollowsFromTheFormats) {
  const std::string& model = GetParam();
  const std::string dir = fresh_dir("format_errors_" + model);
  const std::string out = dir + "/out.safetensors";
  std::map<std::string, std::map<std::string, double>> weight_errors;
  for (const Format& format : kFormats) {
    weight_errors[format.name] = convert(model, format.name, dir + "/" + format.name);
  }
  for (const CapturedLayer& captured : captured_layers()) {
    if (captured.model != model || captured.run != "bf16") continue;
    const Output want = run_layer(testdata("models/" + model), model, captured.layer, out);
    ASSERT_FALSE(want.values.empty());
    std::map<std::string, double> errors;
    for (const Format& format : kFormats) {
      SCOPED_TRACE(std::string(format.name) + " layer " + std::to_string(captured.layer));
      const Output got = run_layer(dir + "/" + format.name, model, captured.layer, out);
      ASSERT_EQ(got.values.size(), want.values.size());
      EXPECT_EQ(got.topk_idx, want.topk_idx);
      const double weights =
          weight_errors[format.name].at("model.layers." + std::to_string(captured.layer));
      EXPECT_LT(weights, format.weight_error);
      const double error = errors[format.name] = rms_error(got, want);
      EXPECT_LT(error, weights * std::sqrt(3.0));
      EXPECT_GT(error, weights / 3);
    }
    EXPECT_GT(errors["mxfp8"], errors["e4m3_1x128"]);
    EXPECT_GT(errors["mxfp4"], 2.5 * errors["mxfp8"]);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FormatErrorsTest, ::testing::ValuesIn(families()),
                         [](const auto& param_info) { return param_info.param; });

}  // namespace
}  // namespace argosy::testing
