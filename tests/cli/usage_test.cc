// Bad usage and bad input: exit code 2, a message that names the value, nothing on stdout, no
// files.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;

struct BadUsage {
  Words arguments;
  Words named;  // words the message must hold
};

void expect_refused(const BadUsage& usage) {
  std::string line;
  for (const std::string& word : usage.arguments) line += word + " ";
  SCOPED_TRACE(line);
  const CliResult result = run_cli(usage.arguments);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.rfind("argosy: ", 0), 0u) << result.err;
  for (const std::string& word : usage.named) {
    EXPECT_NE(result.err.find(word), std::string::npos) << "stderr does not name " << word << ":\n"
                                                        << result.err;
  }
}

Words run_with(const Words& more) { return run_arguments("mixtral_tiny", 0, "f32", more); }

TEST(Usage, BadCommandLinesAreRefusedByName) {
  const std::vector<BadUsage> table = {
      {{}, {"subcommand"}},
      {{"sail"}, {"'sail'", "info, run, route, quantise, launch, bench, memory"}},
      {{"info", "--colour"}, {"--colour"}},
      {{"run"}, {"--"}},
      {{"route", "--preset", "mixtral"}, {"--"}},
      {run_with({"--wind", "3"}), {"'--wind' is no option"}},
      // Not the options that are missing: a misspelt one is often the reason.
      {{"run", "--bogus"}, {"'--bogus' is no option"}},
      {{"run", "--modle", "x", "--layer", "0"}, {"'--modle' is no option"}},
      {{"route", "--preset", "mixtral", "--experst", "8"}, {"'--experst' is no option"}},
      {{"run", "stray"}, {"'stray' is out of place"}},
      {{"run", "--layer", "0"}, {"--model"}},
  };
  for (const BadUsage& usage : table) expect_refused(usage);
}

TEST(Usage, BadOptionValuesAreNamed) {
  const std::vector<BadUsage> table = {
      {run_with({"--ranks", "0"}), {"--ranks", "'0'", "1 to 64"}},
      {run_with({"--ranks", "65"}), {"--ranks", "'65'", "1 to 64"}},
      {run_with({"--ranks", "-1"}), {"--ranks", "'-1'"}},
      {run_with({"--ranks", "four"}), {"--ranks", "'four'"}},
      {run_with({"--ranks", "2.5"}), {"--ranks", "'2.5'"}},
      {run_with({"--ranks", "18446744073709551617"}), {"18446744073709551617"}},
      {run_with({"--threads-per-rank", "0"}), {"--threads-per-rank", "'0'"}},
      {run_with({"--threads-per-rank", "9999"}), {"'9999'"}},
      {run_with({"--dot-order", "fast"}), {"--dot-order", "fast"}},
      {run_with({"--level", "avx1024"}), {"--level", "avx1024"}},
      {run_with({"--check", "some"}), {"--check", "'some'"}},
      {run_with({"--check", "-3"}), {"'-3'"}},
      {run_with({"--tolerance", "-1"}), {"--tolerance", "'-1'"}},
      {run_with({"--tolerance", "nan"}), {"'nan'"}},
      {run_with({"--repeat", "0"}), {"--repeat", "'0'"}},
      {run_with({"--timeout", "0"}), {"--timeout", "'0'"}},
      {run_with({"--timeout", "-5"}), {"'-5'"}},
      {run_with({"--timeout", "inf"}), {"'inf'"}},
      {run_with({"--receive-budget", "0"}), {"--receive-budget", "'0'"}},
      {run_with({"--receive-budget", "many"}), {"'many'"}},
      {run_with({"--ranks", "4", "--receive-budget", "255"}), {"255", "256"}},
      {run_with({"--compare", "no_colon"}), {"--compare", "no_colon"}},
      {run_with({"--layer", "-1"}), {"--layer", "'-1'"}},
  };
  for (const BadUsage& usage : table) expect_refused(usage);
}

TEST(Usage, EmptyNamesAreRefused) {
  const Words run = {"run", "--layer", "0", "--input", "f:x"};
  for (const std::string option : {"--model", "--output", "--json", "--report", "--trace"}) {
    Words words = run;
    if (option != "--model") words.insert(words.end(), {"--model", "m"});
    words.push_back(option);
    words.push_back("");
    expect_refused({words, {option + ": '' names nothing"}});
    words.pop_back();
    words.back() += "=";
    expect_refused({words, {option}});
  }
  expect_refused({{"info", "--json", ""}, {"--json: '' names nothing"}});
  expect_refused({{"route", "--json", ""}, {"--json: '' names nothing"}});
}

TEST(Usage, MoreThreadsThanAllowedAreNotStarted) {
  for (const char* const transport : {"inproc", "shm"}) {
    expect_refused(
        {run_with({"--ranks", "64", "--threads-per-rank", "17", "--transport", transport}),
         {"64", "17", "1088", "1024"}});
  }
  const CliResult rank =
      run_cli(run_with({"--threads-per-rank", "1024"}), {"RANK=0", "WORLD_SIZE=2147483647"});
  EXPECT_EQ(rank.exit_code, 2);
  EXPECT_EQ(rank.out, "");
}

TEST(Usage, BadInputsOfRunAreNamed) {
  const std::string model = testdata("models/mixtral_tiny");
  const std::string file = model + "/captures.safetensors";
  const std::string input = file + ":f32.layers.0.moe_input";
  const std::vector<BadUsage> table = {
      {{"run", "--model", "/no/such/folder", "--layer", "0", "--input", input},
       {"/no/such/folder"}},
      {{"run", "--model", model, "--layer", "7", "--input", input}, {"7"}},
      {{"run", "--model", model, "--layer", "0", "--input", "nofile.safetensors:x"},
       {"nofile.safetensors"}},
      {{"run", "--model", model, "--layer", "0", "--input", file + ":f32.layers.0.moe_inptu"},
       {"f32.layers.0.moe_inptu"}},
      {{"run", "--model", model, "--layer", "0", "--input", file + ":f32.layers.0.topk_idx"},
       {"--input", "I32"}},
      {{"run", "--model", model, "--layer", "0", "--input", file + ":f32.layers.0.router_logits"},
       {"--input", "[512, 8]", "64"}},
      {run_with({"--compare", file + ":f16.layers.0"}), {"f16.layers.0.router_logits"}},
      {run_with({"--compare", testdata("models/olmoe_tiny/captures.safetensors:f32.layers.0")}),
       {"router_logits", "[512, 16]", "[512, 8]"}},
      {run_with({"--level", "amx", "--output", "/no/such/folder/out"}), {"/no/such/folder"}},
      {run_with({"--json", "/no/such/folder/out.json"}), {"--json", "/no/such/folder"}},
      {run_with({"--output", "/dev/null"}), {"--output", "/dev/null"}},
  };
  for (const BadUsage& usage : table) expect_refused(usage);
}

TEST(Usage, CapturesOfAnotherNumberOfTokensAreRefused) {
  // bf16 captures of qwen3_moe_tiny hold 256 tokens, fp32 ones 512.
  const CliResult result = run_cli(run_arguments(
      "qwen3_moe_tiny", 1, "f32", {"--compare", captures("qwen3_moe_tiny", 1, "bf16")}));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("[256, 64]"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("[512, 64]"), std::string::npos) << result.err;
}

TEST(Usage, BadInputsOfRouteAreNamed) {
  const std::string seed = testdata("seed_example/seed_example.safetensors");
  const auto route = [&](const std::string& gate, const Words& more) {
    Words words = {"route", "--input", seed + ":tokens", "--gate", seed + ":" + gate};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const std::vector<BadUsage> table = {
      {route("gate.weight", {"--preset", "mixtrall", "--experts", "8", "--top-k", "2"}),
       {"'mixtrall'", "mixtral, "}},
      {route("gate.weight", {"--preset", "mixtral", "--experts", "9", "--top-k", "2"}),
       {"--gate", "[8, 512]", "[9, 512]"}},
      {route("gate.weight", {"--preset", "mixtral", "--experts", "8", "--top-k", "9"}), {"9", "8"}},
      {route("gate.weight", {"--preset", "mixtral", "--experts", "0", "--top-k", "1"}), {"'0'"}},
      {route("gate.weight",
             {"--preset", "mixtral", "--experts", "8", "--top-k", "2", "--ranks", "0"}),
       {"--ranks", "'0'"}},
      {route("gate.bias", {"--preset", "mixtral", "--experts", "8", "--top-k", "2"}), {"--gate"}},
      {route("gate.weight", {"--preset", "mixtral", "--experts", "8", "--top-k", "2", "--gate-bias",
                             seed + ":tokens"}),
       {"--gate-bias", "[4096, 512]"}},
      {route("gate.weight", {"--preset", "deepseek_v3", "--experts", "8", "--top-k", "2"}),
       {"deepseek_v3", "--selection-bias", "[8]"}},
      {route("gate.weight", {"--preset", "mixtral", "--experts", "8", "--top-k", "2",
                             "--selection-bias", seed + ":gate.bias"}),
       {"mixtral", "--selection-bias"}},
      {route("gate.weight", {"--preset", "deepseek_v3", "--experts", "8", "--top-k", "2",
                             "--selection-bias", seed + ":tokens"}),
       {"--selection-bias", "[4096, 512]", "[8]"}},
  };
  for (const BadUsage& usage : table) expect_refused(usage);
}

TEST(Usage, RefusedRunsLeaveNoFiles) {
  const std::string dir = fresh_dir("refused");
  const std::string out = dir + "/out.safetensors";
  const std::string json = dir + "/report.json";
  Words arguments = run_with({"--output", out, "--json", json});
  arguments[4] = "7";  // no such layer
  EXPECT_EQ(run_cli(arguments).exit_code, 2);
  EXPECT_TRUE(std::filesystem::is_empty(dir));
}

TEST(Usage, AnUnknownLevelInTheEnvironmentIsNamed) {
  const std::vector<std::vector<std::string>> commands = {
      {"info"}, {"route", "--preset", "mixtral", "--experts", "4", "--top-k", "2", "--print-spec"}};
  for (const std::vector<std::string>& command : commands) {
    const CliResult result = run_cli(command, {"ARGOSY_MAX_LEVEL=sse9"});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find("sse9"), std::string::npos) << result.err;
  }
}

TEST(Usage, HelpNamesOptionsDefaultsAndExamples) {
  for (const char* const command : {"info", "run", "route"}) {
    const CliResult result = run_cli({command, "--help"});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_NE(result.out.find("Example"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find("--json"), std::string::npos) << result.out;
  }
  const std::string run = run_cli({"run", "--help"}).out;
  for (const char* const word :
       {"--model", "--layer", "--input", "--ranks", "--threads-per-rank", "--dot-order", "--level",
        "--pin", "--floors", "--compare", "--check", "--output", "--repeat", "--timeout",
        "--receive-budget", "--tolerance", "default: 64", "default: 1)"}) {
    EXPECT_NE(run.find(word), std::string::npos) << word;
  }
  EXPECT_EQ(run_cli({"--version"}).out.rfind("argosy ", 0), 0u);
}

}  // namespace
}  // namespace argosy::testing
