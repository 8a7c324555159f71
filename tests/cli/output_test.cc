// What info and route say, and where output goes: stdout or files, whole or not at all.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "argosy/checkpoint.h"
#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

Words seed_route(const Words& more) {
  const std::string seed = testdata("seed_example/seed_example.safetensors");
  Words words = {"route",
                 "--input",
                 seed + ":tokens",
                 "--gate",
                 seed + ":gate.weight",
                 "--gate-bias",
                 seed + ":gate.bias",
                 "--preset",
                 "mixtral",
                 "--experts",
                 "8",
                 "--top-k",
                 "2",
                 "--ranks",
                 "4"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(Route, GivesThePublishedLoadsOfTheSeedExample) {
  const CliResult result = run_cli(seed_route({"--json", "-"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json report = result.json();
  ASSERT_FALSE(report.is_discarded()) << result.out;
  EXPECT_EQ(report["rows_per_expert"], json({1087, 1021, 1061, 1078, 948, 1020, 978, 999}));
  EXPECT_EQ(report["rows_per_rank"], json({2108, 2139, 1968, 1977}));
  EXPECT_EQ(report["tokens"], 4096);
  EXPECT_DOUBLE_EQ(report["balancedness"].get<double>(), 2048.0 / 2139.0);
  EXPECT_DOUBLE_EQ(report["expert_balancedness"].get<double>(), 1024.0 / 1087.0);
}

TEST(Route, TableShowsEveryExpertAndRank) {
  const CliResult result = run_cli(seed_route({}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* const line :
       {"expert 0  1087  ####", "expert 7   999  ####",
        "rank 1  2139  ########################################\n", "rank 3  1977  ####"}) {
    EXPECT_NE(result.out.find(line), std::string::npos) << line << "\n" << result.out;
  }
  EXPECT_EQ(result.err, "");
}

TEST(Route, MoreRanksThanExpertsLeaveRanksEmpty) {
  Words words = seed_route({"--json", "-"});
  words[14] = "16";
  const CliResult result = run_cli(words);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json rows = result.json()["rows_per_rank"];
  ASSERT_EQ(rows.size(), 16u);
  int64_t sum = 0;
  for (const json& value : rows) sum += value.get<int64_t>();
  EXPECT_EQ(sum, 8192);
}

struct RouteTensors {
  std::vector<float> input = std::vector<float>(5 * 3, 0.5f);       // [5, 3]
  std::vector<float> gate = std::vector<float>(4 * 3, 0.0f);        // [4, 3]
  std::vector<float> gate_bias = std::vector<float>(4, 0.0f);       // [4]
  std::vector<float> selection_bias = std::vector<float>(4, 0.0f);  // [4]
};

// deepseek_v3 routing, top-1 of 4 experts.
CliResult route_tensors(const RouteTensors& tensors, int64_t hidden = 3) {
  const std::string file = fresh_dir("route") + "/in.safetensors";
  const auto f32 = [](const std::vector<float>& values, std::initializer_list<int64_t> shape) {
    return ConstTensorView(values.data(), DType::kF32, shape);
  };
  const std::vector<NamedTensor> named = {{"input", f32(tensors.input, {5, hidden})},
                                          {"gate", f32(tensors.gate, {4, hidden})},
                                          {"gate_bias", f32(tensors.gate_bias, {4})},
                                          {"selection_bias", f32(tensors.selection_bias, {4})}};
  const Status status = write_safetensors(file, named);
  EXPECT_TRUE(status.ok()) << status.message();
  return run_cli({"route", "--input", file + ":input", "--gate", file + ":gate", "--gate-bias",
                  file + ":gate_bias", "--selection-bias", file + ":selection_bias", "--preset",
                  "deepseek_v3", "--experts", "4", "--top-k", "1", "--json", "-"});
}

TEST(Route, TheSelectionBiasDecides) {
  RouteTensors tensors;
  EXPECT_EQ(route_tensors(tensors).json()["rows_per_expert"], json({5, 0, 0, 0}));
  tensors.selection_bias[2] = 0.25f;
  EXPECT_EQ(route_tensors(tensors).json()["rows_per_expert"], json({0, 0, 5, 0}));
}

TEST(Route, NanAndInfAreBlamedOnTheirTensor) {
  std::vector<RouteTensors> bad(4);
  bad[0].input[4] = std::numeric_limits<float>::quiet_NaN();
  bad[1].gate[11] = -std::numeric_limits<float>::infinity();
  bad[2].gate_bias[1] = std::numeric_limits<float>::infinity();
  bad[3].selection_bias[3] = std::numeric_limits<float>::quiet_NaN();
  const char* const messages[] = {"--input holds nan at [1, 1]", "--gate holds -inf at [3, 2]",
                                  "--gate-bias holds inf at [1]",
                                  "--selection-bias holds nan at [3]"};
  for (size_t i = 0; i < bad.size(); ++i) {
    const CliResult result = route_tensors(bad[i]);
    EXPECT_EQ(result.exit_code, 2) << messages[i];
    EXPECT_EQ(result.err, std::string("argosy: ") + messages[i] + "\n");
  }
}

TEST(Route, AHiddenSizeOfZeroIsRefused) {
  RouteTensors tensors;
  tensors.input.clear();
  tensors.gate.clear();
  const CliResult result = route_tensors(tensors, 0);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("--input is F32 [5, 0]"), std::string::npos) << result.err;
}

TEST(Route, TheExamplesOfItsHelpRun) {
  const std::string help = run_cli({"route", "--help"}).out;
  const size_t begin = help.find("Examples:\n");
  ASSERT_NE(begin, std::string::npos) << help;
  const std::string dir = fresh_dir("examples");
  std::ofstream(dir + "/script") << "set -e\ncd '" ARGOSY_TESTDATA "/..'\n"
                                 << "argosy() { '" ARGOSY_CLI "' \"$@\"; }\n"
                                 << help.substr(begin + 10);
  const std::string command = "sh '" + dir + "/script' >'" + dir + "/out' 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0) << read_text(dir + "/out");
  const std::string out = read_text(dir + "/out");
  EXPECT_NE(out.find("mixtral, 4096 tokens, 8 experts"), std::string::npos) << out;
  EXPECT_NE(out.find("deepseek_v3, 512 tokens, 16 experts"), std::string::npos) << out;
}

TEST(Info, NamesLevelsCoresAndTransports) {
  const CliResult result = run_cli({"info", "--json", "-"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json info = result.json();
  ASSERT_FALSE(info.is_discarded()) << result.out;
  EXPECT_GE(info["cores"].get<int>(), 1);
  EXPECT_EQ(info["transports"], json({"inproc", "shm"}));
  const json& built = info["levels"]["built"];
  EXPECT_NE(std::find(built.begin(), built.end(), json("generic")), built.end());
  EXPECT_TRUE(info["levels"]["failed_self_test"].empty());
  const json& detected = info["levels"]["detected"];
  const bool has_amx = std::find(detected.begin(), detected.end(), json("amx")) != detected.end();
  EXPECT_EQ(info["dot_order"], has_amx ? "amx" : "vdpbf16");
  for (const char* const key : {"version", "cpu", "caches", "level"})
    EXPECT_TRUE(info.contains(key));
}

TEST(Info, ACappedMachineTakesTheOtherDotOrder) {
  const CliResult result = run_cli({"info", "--json", "-"}, {"ARGOSY_MAX_LEVEL=generic"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json info = result.json();
  EXPECT_EQ(info["dot_order"], "vdpbf16");
  EXPECT_EQ(info["level"], "generic");
  EXPECT_EQ(info["levels"]["detected"], json({"reference", "generic"}));
  EXPECT_EQ(info["levels"]["cap"], "generic");
}

TEST(Output, JsonGoesToAFileBesideTheTable) {
  const std::string dir = fresh_dir("json");
  const CliResult result = run_cli({"info", "--json", dir + "/info.json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("dot_order auto"), std::string::npos) << result.out;
  const json info = json::parse(read_text(dir + "/info.json"), nullptr, false);
  EXPECT_TRUE(info.contains("levels"));
}

TEST(Output, AFullDiskIsAnError) {
  if (!exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const std::string command = std::string(ARGOSY_CLI) + " info >/dev/full 2>/dev/null";
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 2);
}

TEST(Output, NothingButTheResultIsPrintedWithoutATerminal) {
  // No progress bar, no carriage return, no colour.
  const CliResult result = run_cli(run_arguments("mixtral_tiny", 0, "f32", {"--repeat", "3"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(result.out.find('\r'), std::string::npos);
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace argosy::testing
