// argosy quantise from end to end: figures against a loop over values, the way back, whole folders, and every
// refusal with the values that it names.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "argosy/bfloat16.h"
#include "argosy/checkpoint.h"
#include "argosy/checkpoint_convert.h"
#include "cli/cli_process.h"
#include "tools/quantise_error.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

constexpr int64_t kRows = 130;
constexpr int64_t kCols = 67;  // odd: rows of e2m1 end in half a byte
const char* const kFormats[] = {"e4m3_1x128", "e4m3_1x128_e8m0", "e4m3_128x128", "mxfp8",
                                "mxfp8_ceil", "mxfp4",           "nvfp4"};

struct Inputs {
  explicit Inputs(const std::string& name) : dir(fresh_dir(name)), path(dir + "/in.safetensors") {
    std::mt19937 random(17);
    std::normal_distribution<float> normal;
    values.resize(kRows * kCols);
    for (float& value : values) value = normal(random);
    const std::vector<float> holes = {1, 2, std::numeric_limits<float>::infinity(), 4};
    const std::vector<int32_t> numbers = {1, 2, 3, 4};
    const std::vector<NamedTensor> tensors = {
        {"a.weight", {values.data(), DType::kF32, {kRows, kCols}}},
        {"b.weight", {values.data(), DType::kF32, {2, 3}}},
        {"c.bias", {values.data(), DType::kF32, {5}}},
        {"holes", {holes.data(), DType::kF32, {2, 2}}},
        {"numbers", {numbers.data(), DType::kI32, {2, 2}}}};
    EXPECT_TRUE(write_safetensors(path, tensors).ok());
  }
  Words words(const std::string& selected, const Words& more) const {
    Words all = {"quantise", "--input", path + selected, "--output", dir + "/q.safetensors"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::string dir, path;
  std::vector<float> values;
};

void expect_refused(const Words& words, const std::vector<std::string>& named) {
  const CliResult result = run_cli(words);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  for (const std::string& name : named) {
    EXPECT_NE(result.err.find(name), std::string::npos) << name << "\n" << result.err;
  }
}

TEST(QuantiseCommand, EveryFormatThereAndBack) {
  const Inputs inputs("quantise_back");
  for (const std::string format : kFormats) {
    SCOPED_TRACE(format);
    const CliResult there = run_cli(inputs.words(":a.weight", {"--format", format, "--json", "-"}));
    ASSERT_EQ(there.exit_code, 0) << there.err;
    const json report = there.json()["tensors"];
    ASSERT_EQ(report.size(), 1u);
    EXPECT_EQ(report[0]["name"], "a.weight");
    EXPECT_EQ(report[0]["shape"], json({kRows, kCols}));
    const auto file = *SafetensorsFile::open(inputs.dir + "/q.safetensors");
    EXPECT_EQ(file->tensors().size(), format == "nvfp4" ? 4u : 3u);
    const auto layout = *quantised_layout(*parse_block_format(format), kRows, kCols);
    EXPECT_EQ(file->find("a.weight.codes")->shape,
              (std::vector<int64_t>(layout.codes.begin(), layout.codes.end())));
    EXPECT_EQ(file->find("a.weight.scales")->dtype, info_of(layout.format).scale_dtype);

    const std::string back_path = inputs.dir + "/back.safetensors";
    const CliResult back = run_cli({"quantise", "--input", inputs.dir + "/q.safetensors",
                                    "--dequantise", "--dtype", "f32", "--output", back_path});
    ASSERT_EQ(back.exit_code, 0) << back.err;
    EXPECT_NE(back.out.find(format), std::string::npos);
    const auto values = read_tensor_argument(back_path + ":a.weight");
    ASSERT_TRUE(values.has_value()) << values.error().message();
    const float* const got = values->view().as<float>();
    double largest = 0, squares = 0, errors = 0, zeros = 0;
    for (size_t i = 0; i < inputs.values.size(); ++i) {
      const double error = static_cast<double>(got[i]) - inputs.values[i];
      largest = std::max(largest, std::abs(error));
      squares += static_cast<double>(inputs.values[i]) * inputs.values[i];
      errors += error * error;
      zeros += got[i] == 0;
    }
    EXPECT_EQ(report[0]["max_abs_error"], largest);
    EXPECT_NEAR(report[0]["rms_error"], std::sqrt(errors / squares), 1e-12);
    EXPECT_NEAR(report[0]["zeros"], zeros / static_cast<double>(inputs.values.size()), 1e-12);
    EXPECT_LT(report[0]["rms_error"],
              info_of(layout.format).element == ElementFormat::kE2M1 ? 0.15 : 0.04);
    // Only the floor rule, and nvfp4's scale where it is rounded down, leave values beyond the largest code.
    const bool saturates = format == "mxfp8" || format == "mxfp4" || format == "nvfp4";
    EXPECT_EQ(report[0]["saturated"] > 0.001, saturates) << report;
  }
}

TEST(QuantiseCommand, BytesDoNotDependOnThreads) {
  const Inputs inputs("quantise_threads");
  std::string first;
  for (const std::string threads : {"1", "3"}) {
    ASSERT_EQ(run_cli(inputs.words("", {"--format", "mxfp4", "--threads", threads})).exit_code, 0);
    const std::string bytes = read_text(inputs.dir + "/q.safetensors");
    if (first.empty()) first = bytes;
    EXPECT_EQ(bytes, first);
  }
}

TEST(QuantiseCommand, PatternsAndWholeFilesLeaveOutWhatIsNoMatrix) {
  const Inputs inputs("quantise_patterns");
  const auto names = [&](const std::string& selected) {
    const CliResult result = run_cli(inputs.words(selected, {"--format", "mxfp8", "--json", "-"}));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    json list = json::array();
    const json report = result.json();
    for (const json& tensor : report["tensors"]) list.push_back(tensor["name"]);
    return std::pair(list, report["skipped"]);
  };
  EXPECT_EQ(names(""),
            std::pair(json({"a.weight", "b.weight", "holes"}), json({"c.bias", "numbers"})));
  EXPECT_EQ(names(":*.weight"), std::pair(json({"a.weight", "b.weight"}), json::array()));
  EXPECT_EQ(names(":?.*"), std::pair(json({"a.weight", "b.weight"}), json({"c.bias"})));
  const CliResult table = run_cli(inputs.words("", {"--format", "mxfp8"}));
  EXPECT_NE(table.out.find("rms error"), std::string::npos);
  EXPECT_NE(table.out.find("c.bias"), std::string::npos);
}

TEST(QuantiseCommand, NonFiniteValuesAsTheCallerChose) {
  const Inputs inputs("quantise_holes");
  const CliResult kept = run_cli(inputs.words(":holes", {"--format", "mxfp8", "--json", "-"}));
  ASSERT_EQ(kept.exit_code, 0) << kept.err;
  // The row with the Inf becomes NaN.
  EXPECT_EQ(kept.json()["tensors"][0]["non_finite"], 2);
  expect_refused({"quantise", "--input", inputs.dir + "/q.safetensors", "--dequantise", "--output",
                  inputs.dir + "/b.safetensors", "--non-finite", "error"},
                 {"holes", "row 1"});
  expect_refused(inputs.words(":holes", {"--format", "mxfp8", "--non-finite", "error"}),
                 {"'holes'", "row 1"});
}

TEST(QuantiseCommand, RefusalsNameWhatIsWrong) {
  const Inputs inputs("quantise_refused");
  const std::string out = inputs.dir + "/o.safetensors";
  const Words format = {"--format", "mxfp8"};
  expect_refused({"quantise", "--output", out, "--format", "mxfp8"}, {"--input", "--model"});
  expect_refused({"quantise", "--input", inputs.path, "--output", out},
                 {"--format", "--dequantise"});
  expect_refused(inputs.words("", {"--format", "int4"}), {"--format", "int4", "nvfp4"});
  expect_refused(inputs.words("", {"--format", "mxfp8", "--dequantise"}),
                 {"--dequantise", "--format"});
  expect_refused(inputs.words("", {"--format", "mxfp8", "--dtype", "f32"}),
                 {"--dtype", "--dequantise"});
  expect_refused(inputs.words("", {"--format", "mxfp8", "--model", inputs.dir}),
                 {"--input", "--model"});
  expect_refused({"quantise", "--model", inputs.dir, "--dequantise", "--output", out},
                 {"--dequantise", "--model"});
  expect_refused(inputs.words(":c.bias", format), {"'c.bias'", "F32 [5]", "[rows, cols]"});
  expect_refused(inputs.words(":numbers", format), {"'numbers'", "I32 [2, 2]"});
  expect_refused(inputs.words(":x*", format), {"none of 5", "'x*'"});
  expect_refused(inputs.words(":a.weigth", format), {"\"a.weigth\"", "near", "\"a.weight\""});
  expect_refused(inputs.words(":c*", format), {"none of 5", "'c*'"});
  expect_refused(
      {"quantise", "--input", inputs.dir + "/absent", "--format", "mxfp8", "--output", out},
      {"absent"});
  expect_refused({"quantise", "--input", inputs.path, "--format", "mxfp8", "--output", inputs.path},
                 {"--output", "would overwrite", "--input"});
  expect_refused({"quantise", "--input", inputs.path, "--dequantise", "--output", out},
                 {"none of 5", ".tag"});
  EXPECT_FALSE(exists(out));
}

// What lies beside a tag is compared with it before it is believed.
TEST(QuantiseCommand, DamagedFilesAreRefused) {
  const std::string dir = fresh_dir("quantise_damaged");
  const std::string path = dir + "/q.safetensors";
  const auto expect = [&](uint64_t tag, const std::vector<NamedTensor>& more, const Words& named) {
    std::vector<NamedTensor> tensors = {{"x.tag", {&tag, DType::kU64, {1}}}};
    tensors.insert(tensors.end(), more.begin(), more.end());
    ASSERT_TRUE(write_safetensors(path, tensors).ok());
    expect_refused({"quantise", "--input", path, "--dequantise", "--output", dir + "/o"}, named);
  };
  const uint64_t tag = *make_payload_tag(BlockFormat::kMxfp8, 4);
  const std::vector<uint8_t> bytes(64, 1);
  const std::vector<float> floats(8, -1.0f);
  const NamedTensor codes = {"x.codes", {bytes.data(), DType::kE4M3, {2, 4}}};
  const NamedTensor scales = {"x.scales", {bytes.data(), DType::kE8M0, {2, 1}}};
  expect(tag, {scales}, {"'x'", "x.codes"});
  expect(tag, {codes}, {"'x'", "x.scales", "F8_E8M0 [2, 1]"});
  expect(tag, {codes, {"x.scales", {bytes.data(), DType::kE8M0, {1, 2}}}},
         {"x.scales", "[1, 2]", "[2, 1]"});
  expect(tag, {codes, {"x.scales", {floats.data(), DType::kF32, {2, 1}}}},
         {"x.scales", "F32", "F8_E8M0"});
  // Code 255 is NaN, as the caller chose.
  const uint8_t nan_scale[] = {127, 255};
  const NamedTensor nan_scales = {"x.scales", {nan_scale, DType::kE8M0, {2, 1}}};
  const std::vector<NamedTensor> holed = {{"x.tag", {&tag, DType::kU64, {1}}}, codes, nan_scales};
  ASSERT_TRUE(write_safetensors(path, holed).ok());
  const Words back = {"quantise", "--input", path, "--dequantise", "--output", dir + "/b"};
  EXPECT_EQ(run_cli(back).exit_code, 0);
  EXPECT_FALSE(
      std::isfinite(read_tensor_argument(dir + "/b:x")->view().as<BFloat16>()[4].to_float()));
  EXPECT_TRUE(
      std::isfinite(read_tensor_argument(dir + "/b:x")->view().as<BFloat16>()[3].to_float()));
  Words strict = back;
  strict.insert(strict.end(), {"--non-finite", "error"});
  expect_refused(strict, {"'x'", "row 1"});
  expect(tag, {{"x.codes", {bytes.data(), DType::kE4M3, {2, 5}}}, scales},
         {"x.codes", "[2, 5]", "[2, 4]"});
  expect(5, {codes, scales}, {"'x'", "tag"});
  expect(tag | uint64_t{99} << 32, {codes, scales}, {"'x'"});
  expect(*make_payload_tag(BlockFormat::kMxfp8, 0xFFFFFFFF), {codes, scales},
         {"x.codes", "4294967295"});
  expect(*make_payload_tag(BlockFormat::kE4M3Row128, 4),
         {codes, {"x.scales", {floats.data(), DType::kF32, {2, 1}}}}, {"'x'", "row 0"});
}

// What the README of the reference models says of these two: rms of 2.6 % and 11.4 %.
TEST(QuantiseCommand, WholeFoldersLoadAndSayTheirError) {
  for (const auto& [model, format, rms] : {std::tuple("deepseek_v3_tiny", "e4m3_128x128", 0.026),
                                           std::tuple("gpt_oss_tiny", "mxfp4", 0.114)}) {
    SCOPED_TRACE(model);
    const std::string dir = fresh_dir("quantise_model");
    const CliResult result =
        run_cli({"quantise", "--model", testdata(std::string("models/") + model), "--format",
                 format, "--output", dir + "/q", "--json", "-"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const json report = result.json();
    ASSERT_EQ(report["layers"].size(), 2u);
    for (const json& layer : report["layers"]) EXPECT_NEAR(layer["rms_error"], rms, 0.003);
    const auto made = Checkpoint::open(dir + "/q");
    ASSERT_TRUE(made.has_value()) << made.error().message();
    EXPECT_TRUE(made->read_expert(1, 3)->quantised.has_value());
    expect_refused({"quantise", "--model", testdata(std::string("models/") + model), "--format",
                    format, "--output", dir + "/q"},
                   {"/q", "not empty"});
    expect_refused({"quantise", "--model", testdata(std::string("models/") + model), "--format",
                    "nvfp4", "--output", dir + "/r"},
                   {"nvfp4"});
    EXPECT_FALSE(exists(dir + "/r"));
  }
}

QuantisedTensor make_quantised(BlockFormat format, int64_t rows, int64_t cols) {
  return QuantisedTensor::create(*quantised_layout(format, rows, cols)).value();
}

// Definitions, on values whose codes are known.
TEST(QuantiseError, CountsWhatItSays) {
  using tools::QuantiseError;
  // One mxfp4 block: scale 1 (amax 7.5 is saturated at 6), 0.2 goes to 0, 0 is 0, 6 is exact.
  const std::vector<float> values = {7.5f, 0.2f, 0.0f, 6.0f, -7.0f, std::nanf(""), 1.0f};
  auto made = make_quantised(BlockFormat::kMxfp4, 1, 5);
  ASSERT_TRUE(quantise({}, ConstTensorView(values.data(), DType::kF32, {1, 5}), made.view()).ok());
  const QuantiseError error =
      *tools::measure_error(ConstTensorView(values.data(), DType::kF32, {1, 5}), made.view());
  EXPECT_EQ(error.elements, 5);
  EXPECT_EQ(error.zeros, 2);
  EXPECT_EQ(error.flushed, 1);
  EXPECT_EQ(error.saturated, 2);
  EXPECT_EQ(error.non_finite, 0);
  EXPECT_EQ(error.max_abs, 1.5);
  EXPECT_EQ(error.peak, 7.5);
  EXPECT_EQ(error.relative_max(), 0.2);
  auto block = make_quantised(BlockFormat::kMxfp4, 1, 7);
  ASSERT_TRUE(quantise({}, ConstTensorView(values.data(), DType::kF32, {1, 7}), block.view()).ok());
  QuantiseError sum =
      *tools::measure_error(ConstTensorView(values.data(), DType::kF32, {1, 7}), block.view());
  EXPECT_EQ(sum.non_finite, 7);
  EXPECT_EQ(sum.peak, 0);
  EXPECT_EQ(sum.relative_max(), 0);
  EXPECT_EQ(sum.relative_rms(), 0);
  sum.add(error);
  EXPECT_EQ(sum.elements, 12);
  EXPECT_EQ(sum.saturated, 2);
  EXPECT_EQ(sum.relative_rms(), error.relative_rms());
}

}  // namespace
}  // namespace argosy::testing
