// argosy run end to end on the trained checkpoints of testdata/models: checks, captures, report,
// exit codes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "argosy/bfloat16.h"
#include "argosy/checkpoint.h"
#include "argosy/moe.h"
#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

json run_json(const Words& arguments, int exit_code = 0) {
  const CliResult result = run_cli(arguments);
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  json report = result.json();
  EXPECT_FALSE(report.is_discarded()) << result.out;
  return report;
}

int64_t sum_of(const json& values) {
  int64_t sum = 0;
  for (const json& value : values) sum += value.get<int64_t>();
  return sum;
}

class CapturedLayerTest : public ::testing::TestWithParam<CapturedLayer> {};

TEST_P(CapturedLayerTest, AgreesWithItsCaptures) {
  const CapturedLayer& layer = GetParam();
  const json report = run_json(run_arguments(
      layer.model, layer.layer, layer.run,
      {"--ranks", "3", "--compare", captures(layer.model, layer.layer, layer.run), "--json", "-"}));
  const bool is_f32 = layer.run == "f32";
  const json& compare = report["compare"];
  EXPECT_EQ(compare["experts_differ"], 0);
  EXPECT_EQ(compare["experts_equal"].get<int64_t>() + compare["ties"].get<int64_t>(),
            report["tokens"].get<int64_t>());
  EXPECT_LE(compare["output_max_rel_to_peak"].get<double>(), is_f32 ? 1e-5 : 2e-2);
  EXPECT_GT(compare["output_max_rel_to_peak"].get<double>(), 0);
  if (is_f32) {
    EXPECT_EQ(compare["ties"], 0);
    EXPECT_LE(compare["weights_max_rel"].get<double>(), 2e-6);
  }
  const json& error = report["error"];
  EXPECT_EQ(error["tokens"], 64);
  EXPECT_EQ(error["experts_differ"], 0);
  EXPECT_LE(error["max_rel_to_peak"].get<double>(), is_f32 ? 1e-5 : 2e-2);
  EXPECT_GT(error["max_abs"].get<double>(), 0);
  EXPECT_EQ(sum_of(report["rows_per_expert"]),
            report["tokens"].get<int64_t>() * report["top_k"].get<int64_t>());
  EXPECT_EQ(sum_of(report["rows_per_rank"]), sum_of(report["rows_per_expert"]));
}

INSTANTIATE_TEST_SUITE_P(All, CapturedLayerTest, ::testing::ValuesIn(captured_layers()),
                         [](const auto& param_info) {
                           return fmt::format("{}_{}_{}", param_info.param.model,
                                              param_info.param.layer, param_info.param.run);
                         });

TEST(Run, TiesOfBf16CapturesAreCountedAsTheModelsNotesSay) {
  int64_t ties = 0;
  for (const int layer : {0, 1}) {
    ties += run_json(run_arguments("olmoe_tiny", layer, "bf16",
                                   {"--check", "none", "--json", "-", "--compare",
                                    captures("olmoe_tiny", layer, "bf16")}))["compare"]["ties"]
                .get<int64_t>();
  }
  EXPECT_EQ(ties, 9);
}

TEST(Run, ReportHasEveryPromisedKey) {
  const json report =
      run_json(run_arguments("deepseek_v3_tiny", 1, "bf16",
                             {"--ranks", "4", "--threads-per-rank", "2", "--repeat", "3", "--json",
                              "-", "--compare", captures("deepseek_v3_tiny", 1, "bf16")}));
  for (const char* const key :
       {"digest", "dot_order", "level", "transport", "ranks", "tokens", "rows_per_expert",
        "rows_per_rank", "balancedness", "bytes", "stages", "error", "compare"}) {
    EXPECT_TRUE(report.contains(key)) << key;
  }
  EXPECT_EQ(report["digest"].get<std::string>().size(), 32u);
  EXPECT_EQ(report["ranks"], 4);
  EXPECT_EQ(report["transport"], "inproc");
  EXPECT_EQ(report["rows_per_expert"].size(), 16u);
  EXPECT_EQ(report["rows_per_rank"].size(), 4u);
  EXPECT_TRUE(report["passed"].get<bool>());
  double sum = 0;
  for (const json& stage : report["stages"]) {
    EXPECT_GE(stage["seconds"].get<double>(), 0) << stage["name"];
    sum += stage["seconds"].get<double>();
  }
  EXPECT_GT(sum, 0);
  for (const char* const key : {"dispatch", "combine", "saved_by_dedup"}) {
    EXPECT_EQ(report["bytes"][key].get<int64_t>(), sum_of(report["bytes"]["per_rank"][key])) << key;
    EXPECT_GT(report["bytes"][key].get<int64_t>(), 0) << key;
  }
}

TEST(Run, BytesMovedFollowFromTheRouting) {
  // Recomputed from the captured experts: a token's row of 64 fp32 goes once to every other rank
  // that holds one of its experts, every expert row of another rank comes home.
  const std::string file = testdata("models/olmoe_tiny/captures.safetensors");
  const Result<Tensor> idx = read_tensor_argument(file + ":f32.layers.0.topk_idx");
  ASSERT_TRUE(idx.has_value()) << idx.error().message();
  constexpr int kRanks = 4;
  const Placement placement{16, kRanks, 0};
  int64_t once = 0;
  int64_t all = 0;
  for (int64_t token = 0; token < 512; ++token) {
    const int home = static_cast<int>(token / (512 / kRanks));
    unsigned peers = 0;
    for (int64_t k = 0; k < 4; ++k) {
      const int owner = placement.owner(idx->view().as<int32_t>()[token * 4 + k]);
      if (owner == home) continue;
      ++all;
      peers |= 1u << owner;
    }
    once += std::popcount(peers);
  }
  const json report = run_json(
      run_arguments("olmoe_tiny", 0, "f32", {"--ranks", "4", "--check", "none", "--json", "-"}));
  EXPECT_EQ(report["bytes"]["dispatch"], once * 64 * 4);
  EXPECT_EQ(report["bytes"]["saved_by_dedup"], (all - once) * 64 * 4);
  EXPECT_EQ(report["bytes"]["combine"], all * 64 * 4);
}

TEST(Run, EveryRankReadsItsOwnExpertsOnly) {
  const json one =
      run_json(run_arguments("mixtral_tiny", 0, "bf16", {"--check", "none", "--json", "-"}));
  const json four = run_json(
      run_arguments("mixtral_tiny", 0, "bf16", {"--check", "none", "--json", "-", "--ranks", "4"}));
  const int64_t whole = one["bytes"]["weights_read"].get<int64_t>();
  const int64_t gate = 8 * 64 * 2;
  for (const json& bytes : four["bytes"]["per_rank"]["weights_read"]) {
    EXPECT_EQ(bytes.get<int64_t>(), (whole - gate) / 4 + gate);
  }
}

TEST(Run, TableShowsTheReportAndEndsWithTheDigest) {
  const Words arguments =
      run_arguments("deepseek_v2_tiny", 1, "bf16",
                    {"--ranks", "3", "--compare", captures("deepseek_v2_tiny", 1, "bf16")});
  const CliResult table = run_cli(arguments);
  ASSERT_EQ(table.exit_code, 0) << table.err;
  Words with_json = arguments;
  with_json.insert(with_json.end(), {"--json", "-"});
  const json report = run_json(with_json);
  const std::string digest = fmt::format("\ndigest {}:{}\n", report["dot_order"].get<std::string>(),
                                         report["digest"].get<std::string>());
  for (const std::string& part : Words{digest, "balancedness", "per expert", "per rank", "rank 2",
                                       "saved by dedup", "combine", "check ", "compare "}) {
    EXPECT_NE(table.out.find(part), std::string::npos) << part << "\n" << table.out;
  }
}

TEST(Run, OutputFileHoldsTheBitsOfTheDigest) {
  const std::string dir = fresh_dir("output");
  const std::string out = dir + "/out.safetensors";
  const json report =
      run_json(run_arguments("olmoe_tiny", 1, "bf16",
                             {"--ranks", "2", "--check", "none", "--json", "-", "--output", out}));
  const Result<Tensor> output = read_tensor_argument(out + ":output");
  ASSERT_TRUE(output.has_value()) << output.error().message();
  EXPECT_EQ(output->view().dtype, DType::kBF16);
  EXPECT_EQ(digest_of(output->bytes()), report["digest"].get<std::string>());
  const Result<Tensor> idx = read_tensor_argument(out + ":topk_idx");
  ASSERT_TRUE(idx.has_value()) << idx.error().message();
  std::vector<int64_t> counts;
  ASSERT_TRUE(count_topk(idx->view(), 16, &counts).ok());
  EXPECT_EQ(json(counts), report["rows_per_expert"]);
  EXPECT_TRUE(read_tensor_argument(out + ":topk_weights").has_value());
}

TEST(Run, AFailedCheckGivesExitCode1AndStillWritesTheReport) {
  const std::string dir = fresh_dir("failed");
  const std::string path = dir + "/report.json";
  const CliResult result =
      run_cli(run_arguments("mixtral_tiny", 0, "bf16", {"--tolerance", "1e-9", "--json", path}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.err.find("argosy: check failed: output"), std::string::npos) << result.err;
  const json report = json::parse(read_text(path), nullptr, false);
  EXPECT_FALSE(report["passed"].get<bool>());
  EXPECT_EQ(report["failures"].size(), 1u);
}

TEST(Run, CapturesOfAnotherLayerFail) {
  const CliResult result = run_cli(run_arguments(
      "mixtral_tiny", 0, "f32",
      {"--check", "none", "--json", "-", "--compare", captures("mixtral_tiny", 1, "f32")}));
  EXPECT_EQ(result.exit_code, 1) << result.err;
  const json report = result.json();
  EXPECT_GT(report["compare"]["experts_differ"].get<int64_t>(), 100);
  EXPECT_NE(result.err.find("other experts than the captures"), std::string::npos) << result.err;
}

TEST(Run, ADeadlineThatPassesGivesExitCode3AndNoFiles) {
  // 64 ranks share a few cores for many turns: no wait of 1 ms can hold.
  const std::string dir = fresh_dir("timeout");
  const CliResult result = run_cli(run_arguments(
      "qwen3_moe_tiny", 1, "f32",
      {"--ranks", "64", "--repeat", "1000", "--timeout", "0.001", "--level", "reference", "--json",
       dir + "/report.json", "--output", dir + "/out.safetensors"}));
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_EQ(result.err.rfind("argosy: ", 0), 0u) << result.err;
  EXPECT_TRUE(std::filesystem::is_empty(dir));
}

// Writes `tensor` as x to a file and returns FILE:x.
std::string input_file(const std::string& name, const Tensor& tensor) {
  const std::string path = fresh_dir(name) + "/input.safetensors";
  const NamedTensor named{"x", tensor.view()};
  const Status status = write_safetensors(path, std::span<const NamedTensor>(&named, 1));
  EXPECT_TRUE(status.ok()) << status.message();
  return path + ":x";
}

Words run_on(const std::string& model, const std::string& layer, const std::string& input,
             const Words& more) {
  Words words = {"run", "--model", testdata("models/" + model), "--layer", layer, "--input", input};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(Run, NoTokensAtAllIsNoError) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Result<Tensor> empty = Tensor::zeros(dtype, {0, 64});
    ASSERT_TRUE(empty.has_value());
    const json report = run_json(run_on("deepseek_v3_tiny", "1", input_file("empty", *empty),
                                        {"--ranks", "4", "--check", "all", "--json", "-"}));
    EXPECT_EQ(report["tokens"], 0);
    EXPECT_EQ(sum_of(report["rows_per_expert"]), 0);
    EXPECT_EQ(report["balancedness"], 1.0);
    EXPECT_EQ(report["error"]["max_abs"], 0.0);
    EXPECT_EQ(report["error"]["max_rel_to_peak"], 0.0);
  }
}

TEST(Run, FewerTokensThanRanksLeaveRanksEmpty) {
  Result<Tensor> few = Tensor::zeros(DType::kF32, {3, 64});
  ASSERT_TRUE(few.has_value());
  for (int i = 0; i < 3 * 64; ++i) {
    few->view().as<float>()[i] = 0.01f * static_cast<float>(i % 17) - 0.05f;
  }
  const std::string input = input_file("few", *few);
  const json one = run_json(run_on("mixtral_tiny", "1", input, {"--check", "all", "--json", "-"}));
  const json eight = run_json(
      run_on("mixtral_tiny", "1", input, {"--check", "all", "--json", "-", "--ranks", "8"}));
  EXPECT_EQ(eight["error"]["tokens"], 3);
  EXPECT_EQ(one["digest"], eight["digest"]);
}

TEST(Run, NanInOneRanksTokensIsAnErrorThatNamesTheToken) {
  Result<Tensor> bad = Tensor::zeros(DType::kF32, {16, 64});
  ASSERT_TRUE(bad.has_value());
  bad->view().as<float>()[13 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
  const CliResult result =
      run_cli(run_on("mixtral_tiny", "0", input_file("nan", *bad), {"--ranks", "4"}));
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("token"), std::string::npos) << result.err;
}

TEST(Run, NanIsOneMessageWhicheverRankIsFirst) {
  // Ranks that have not read the error of the call yet must not see an abort instead.
  Result<Tensor> bad = Tensor::zeros(DType::kF32, {64, 64});
  ASSERT_TRUE(bad.has_value());
  bad->view().as<float>()[40 * 64] = std::numeric_limits<float>::quiet_NaN();
  const std::string input = input_file("nan_order", *bad);
  for (const std::string transport : {"inproc", "shm"}) {
    const std::string prefix = transport == "shm" ? "argosy: rank 0: rank 5: " : "argosy: rank 5: ";
    for (int repeat = 0; repeat < 10; ++repeat) {
      const CliResult result =
          run_cli(run_on("mixtral_tiny", "0", input, {"--ranks", "8", "--transport", transport}));
      EXPECT_EQ(result.exit_code, 2) << result.err;
      EXPECT_EQ(result.err.rfind(prefix + "logits[0, 0] is nan", 0), 0u) << result.err;
      EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    }
  }
}

TEST(Run, DenormalInputsPassTheCheck) {
  // Their products are flushed, so the output is zero where the fp64 reference is not.
  Result<Tensor> small = Tensor::zeros(DType::kF32, {8, 64});
  ASSERT_TRUE(small.has_value());
  for (int i = 0; i < 8 * 64; ++i)
    small->view().as<float>()[i] = 1e-40f * static_cast<float>(i % 5);
  for (const std::string model : {"mixtral_tiny", "deepseek_v3_tiny"}) {
    const json report = run_json(
        run_on(model, "1", input_file("denormal", *small), {"--check", "all", "--json", "-"}));
    EXPECT_GT(report["error"]["max_abs"].get<double>(), 0);
    EXPECT_LT(report["error"]["max_rel_to_peak"].get<double>(), 1e-5);
  }
}

TEST(Run, ATruncatedCheckpointIsRefusedOnEveryRank) {
  const std::string dir = fresh_dir("truncated");
  const std::string source = testdata("models/mixtral_tiny");
  std::filesystem::copy_file(source + "/config.json", dir + "/config.json");
  const std::string whole = read_text(source + "/model.safetensors");
  std::ofstream(dir + "/model.safetensors", std::ios::binary)
      << whole.substr(0, whole.size() - 1000);
  const CliResult result =
      run_cli({"run", "--model", dir, "--layer", "0", "--input",
               captures("mixtral_tiny", 0, "f32") + ".moe_input", "--ranks", "4"});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
}

}  // namespace
}  // namespace argosy::testing
