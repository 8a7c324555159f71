// argosy run in latency mode and with quantised payloads: the digest of throughput mode for every captured layer, over
// ranks, threads and processes; refusals.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

json run_with(const CapturedLayer& layer, Words more, int exit_code = 0) {
  more.insert(more.end(), {"--json", "-"});
  const CliResult result = run_cli(run_arguments(layer.model, layer.layer, layer.run, more));
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  json report = result.json();
  EXPECT_FALSE(report.is_discarded()) << result.out;
  return report;
}

TEST(Modes, LatencyModeGivesTheDigestOfThroughputMode) {
  const Words ranks[] = {{"--ranks", "1"},
                         {"--ranks", "2", "--transport", "shm"},
                         {"--ranks", "3"},
                         {"--ranks", "4", "--transport", "shm"},
                         {"--ranks", "8"}};
  size_t turn = 0;  // every layer meets two of them
  for (const CapturedLayer& layer : captured_layers()) {
    const json throughput = run_with(layer, {"--check", "none"});
    for (int i = 0; i < 2; ++i) {
      Words words = ranks[turn++ % std::size(ranks)];
      words.insert(words.end(), {"--check", "none", "--mode", "latency"});
      const json latency = run_with(layer, words);
      EXPECT_EQ(latency["digest"], throughput["digest"])
          << layer.model << " " << layer.layer << " " << layer.run << " " << words[1];
      EXPECT_EQ(latency["taken_mode"], "latency");
      EXPECT_EQ(latency["rows_per_expert"], throughput["rows_per_expert"]);
    }
  }
}

TEST(Modes, EveryRankNumberAndTransportOnOneLayer) {
  const CapturedLayer layer{"qwen2_moe_tiny", 0, "bf16"};
  const std::string want = run_with(layer, {"--check", "none"})["digest"];
  for (const std::string transport : {"inproc", "shm"}) {
    for (const std::string ranks : {"1", "2", "3", "4", "8"}) {
      const json report = run_with(layer, {"--check", "none", "--mode", "latency", "--ranks", ranks,
                                           "--transport", transport, "--repeat", "3"});
      EXPECT_EQ(report["digest"], want) << transport << " " << ranks;
    }
  }
  const json automatic = run_with(layer, {"--check", "none", "--mode", "auto", "--ranks", "3"});
  EXPECT_EQ(automatic["digest"], want);
  EXPECT_EQ(automatic["mode"], "auto");
  const json chunked = run_with(layer, {"--check", "none", "--mode", "latency", "--ranks", "4",
                                        "--max-tokens", "50", "--chunk", "--transport", "shm"});
  EXPECT_EQ(chunked["digest"], want);
  EXPECT_EQ(chunked["rounds"], 3);
}

// Held against the fp64 reference, which puts them there too: gpt-oss has a bias behind them.
TEST(Modes, WeightsInsideTheActivation) {
  for (const char* const model : {"qwen2_moe_tiny", "gpt_oss_tiny"}) {
    const CapturedLayer layer{model, 0, "f32"};
    const json one = run_with(layer, {"--weights-inside", "--check", "all"});
    EXPECT_EQ(one["weights_inside"], true);
    const json many = run_with(layer, {"--weights-inside", "--ranks", "3", "--transport", "shm"});
    EXPECT_EQ(many["digest"], one["digest"]);
    EXPECT_NE(run_with(layer, {})["digest"], one["digest"]);
  }
}

// Contract 3: the same bits for the same payload in both modes; the reference sees what travelled, so bf16's tolerance
// holds, and captures within that of the format.
TEST(Modes, PayloadsAgreeInBothModesAndWithTheReference) {
  for (const CapturedLayer& layer :
       {CapturedLayer{"deepseek_v3_tiny", 1, "bf16"}, CapturedLayer{"gpt_oss_tiny", 0, "bf16"}}) {
    const std::string as_it_is = run_with(layer, {"--check", "none"})["digest"];
    for (const std::string payload : {"fp8_128", "fp8_128_e8m0", "mxfp8"}) {
      const json throughput =
          run_with(layer, {"--payload", payload, "--compare",
                           captures(layer.model, layer.layer, layer.run), "--ranks", "2"});
      EXPECT_NE(throughput["digest"], as_it_is);
      EXPECT_TRUE(throughput["passed"].get<bool>());
      EXPECT_LE(throughput["error"]["max_rel_to_peak"].get<double>(), 2e-2);
      EXPECT_GT(throughput["compare"]["output_max_rel_to_peak"].get<double>(),
                throughput["error"]["max_rel_to_peak"].get<double>());
      const json latency = run_with(
          layer, {"--payload", payload, "--mode", "latency", "--ranks", "3", "--transport", "shm"});
      EXPECT_EQ(latency["digest"], throughput["digest"]) << payload;
      EXPECT_EQ(latency["payload"], payload);
    }
  }
}

TEST(Modes, WaitsNamePeers) {
  const json report = run_with({"deepseek_v3_tiny", 1, "bf16"},
                               {"--check", "none", "--mode", "latency", "--ranks", "3", "--repeat",
                                "5", "--simulate", "pause=1@60:30"});
  ASSERT_EQ(report["waits"].size(), 3u);
  for (size_t rank = 0; rank < 3; ++rank) {
    for (const json& wait : report["waits"][rank]) {
      EXPECT_NE(wait["peer"].get<size_t>(), rank);
      EXPECT_GT(wait["waits"].get<int64_t>(), 0);
      EXPECT_LE(wait["p50_seconds"].get<double>(), wait["max_seconds"].get<double>());
    }
  }
  EXPECT_EQ(report["straggler"], 1);
}

TEST(Modes, Refusals) {
  const CapturedLayer layer{"deepseek_v3_tiny", 1, "bf16"};
  const auto refusal = [&](const Words& more) {
    const CliResult result = run_cli(run_arguments(layer.model, layer.layer, layer.run, more));
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  EXPECT_NE(refusal({"--ranks", "4", "--mode", "latency", "--max-tokens", "100"})
                .find("128 tokens, max_tokens is 100"),
            std::string::npos);
  EXPECT_NE(refusal({"--mode", "fast"}).find("--mode"), std::string::npos);
  EXPECT_NE(refusal({"--payload", "fp8"}).find("--payload"), std::string::npos);
  const CliResult f32 =
      run_cli(run_arguments(layer.model, layer.layer, "f32", {"--payload", "mxfp8"}));
  EXPECT_EQ(f32.exit_code, 2);
  EXPECT_NE(f32.err.find("is decoded to BF16 rows, the rows are F32"), std::string::npos)
      << f32.err;
}

}  // namespace
}  // namespace argosy::testing
