// argosy bench and info --measure from outside: JSON, tables, refusals. Tiny sizes; no test looks
// at how long anything took.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

const Words kAreas = {"gemm", "layer", "exchange", "router", "quantise", "train"};

CliResult quick(const std::string& area, Words more) {
  more.insert(more.begin(), {"bench", area, "--quick", "--samples", "3"});
  return run_cli(more);
}

std::set<std::string> names_in(const json& list) {
  std::set<std::string> names;
  for (const json& item : list) names.insert(item["name"].get<std::string>());
  return names;
}

TEST(Bench, JsonHasTheKeysAndReachedIsTheRatio) {
  const std::set<std::string> kKeys = {"name",        "params", "median_seconds", "min_seconds",
                                       "max_seconds", "limit",  "limit_seconds",  "reached"};
  for (const std::string& area : kAreas) {
    SCOPED_TRACE(area);
    const CliResult result = quick(area, {"--json", "-"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    const json list = result.json();
    ASSERT_TRUE(list.is_array()) << result.out;
    ASSERT_FALSE(list.empty());
    for (const json& item : list) {
      std::set<std::string> keys;
      for (const auto& [key, value] : item.items()) keys.insert(key);
      const std::string name = item["name"].get<std::string>();
      std::set<std::string> want = kKeys;
      if (name.ends_with("_fp8") || name.ends_with("_mxfp4")) {
        want.insert({"error_max", "error_rms"});
        // e4m3 rounds by at most 1/16, e2m1 by 1/3; there is some difference.
        const double most = name.ends_with("_fp8") ? 0.1 : 0.5;
        for (const char* const error : {"error_max", "error_rms"}) {
          EXPECT_GT(item[error].get<double>(), 0.0) << name;
          EXPECT_LT(item[error].get<double>(), most) << name;
        }
      }
      EXPECT_EQ(keys, want);
      const double median = item["median_seconds"].get<double>();
      const double limit = item["limit_seconds"].get<double>();
      EXPECT_GT(median, 0.0);
      EXPECT_GT(limit, 0.0);
      EXPECT_LE(item["min_seconds"].get<double>(), median);
      EXPECT_GE(item["max_seconds"].get<double>(), median);
      EXPECT_NEAR(item["reached"].get<double>(), limit / median, 1e-9 * limit / median);
      EXPECT_FALSE(item["limit"].get<std::string>().empty());
      ASSERT_TRUE(item["params"].is_object());
      for (const auto& [key, value] : item["params"].items()) EXPECT_TRUE(value.is_number()) << key;
    }
  }
}

TEST(Bench, LatencyHasPercentilesAndBothModes) {
  const CliResult result = quick("latency", {"--json", "-"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json list = result.json();
  ASSERT_TRUE(list.is_array()) << result.out;
  std::set<std::string> transports;
  for (const json& item : list) {
    for (const char* const key :
         {"p99_seconds", "limit_p99_seconds", "throughput_seconds", "over_throughput"}) {
      ASSERT_TRUE(item.contains(key)) << key;
      EXPECT_GT(item[key].get<double>(), 0);
    }
    EXPECT_LE(item["median_seconds"].get<double>(), item["max_seconds"].get<double>());
    transports.insert(item["params"]["processes"].dump());
  }
  EXPECT_EQ(names_in(list),
            (std::set<std::string>{"latency_dispatch_bf16", "latency_dispatch_fp8",
                                   "latency_combine", "latency_both_bf16", "latency_both_fp8"}));
  EXPECT_EQ(transports, (std::set<std::string>{"0", "1"}));
}

TEST(Bench, AreasHaveTheNamedCases) {
  const std::vector<std::set<std::string>> names = {
      {"gemm_hot", "gemm_cold", "gemm_skew", "gemm_dgrad", "gemm_wgrad", "gemm_wgrad_added",
       "gemm_wgrad_mxfp8"},
      {"layer_prefill", "layer_decode", "layer_ranks", "layer_decode_fp8", "layer_decode_mxfp4",
       "layer_prefill_fp8", "layer_prefill_mxfp4"},
      {"exchange_throughput"},
      {"router_deepseek_v3", "router_softmax"},
      {"quantise_e4m3_1x128", "quantise_mxfp8", "dequantise_e4m3_1x128", "dequantise_mxfp8"},
      {"layer_train", "layer_train_mxfp8"}};
  for (size_t i = 0; i < kAreas.size(); ++i) {
    const CliResult result = run_cli({"bench", kAreas[i], "--list", "--json", "-"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(names_in(result.json()), names[i]);
  }
}

// The sizes and goals that docs/perf/ and its tables speak of.
TEST(Bench, FullSizesAndGoals) {
  const auto find = [](const json& list, const std::string& name, const json& params) {
    for (const json& item : list) {
      bool same = item["name"] == name;
      for (const auto& [key, value] : params.items()) same = same && item["params"][key] == value;
      if (same) return item;
    }
    return json();
  };
  const auto list_of = [](const std::string& area) {
    return run_cli({"bench", area, "--list", "--json", "-"}).json();
  };
  const json gemm = list_of("gemm");
  EXPECT_EQ(find(gemm, "gemm_hot", {{"rows", 256}, {"N", 2048}, {"K", 2048}})["goals"],
            json({{"amx", 0.45}, {"avx512_bf16", 0.88}, {"fma", 0.75}}));
  for (int rows = 1; rows <= 8; ++rows) {
    EXPECT_EQ(find(gemm, "gemm_cold", {{"rows", rows}})["goals"]["fma"], 0.88);
  }
  EXPECT_EQ(find(gemm, "gemm_skew", {{"rows", 4096}, {"threads", 2}})["goals"]["amx"], 0.95);
  for (const char* name : {"gemm_dgrad", "gemm_wgrad"}) {
    EXPECT_EQ(find(gemm, name, {{"rows", 256}, {"N", 2048}})["goals"]["avx512_bf16"], 0.80) << name;
  }
  const json layer = list_of("layer");
  const json shape = {{"E", 32}, {"K", 4}, {"H", 2048}, {"F", 1024}};
  const auto layer_of = [&](const std::string& name, int tokens) {
    json params = shape;
    params["T"] = tokens;
    return find(layer, name, params)["goals"];
  };
  EXPECT_EQ(layer_of("layer_prefill", 512),
            json({{"amx", 0.30}, {"avx512_bf16", 0.88}, {"fma", 0.70}}));
  EXPECT_EQ(layer_of("layer_prefill", 2048),
            json({{"amx", 0.30}, {"avx512_bf16", 0.90}, {"fma", 0.70}}));
  EXPECT_EQ(layer_of("layer_decode", 1)["amx"], 0.95);
  EXPECT_EQ(layer_of("layer_decode", 8)["fma"], 0.95);
  EXPECT_EQ(layer_of("layer_decode", 64)["avx512_bf16"], 0.80);
  for (const int tokens : {1, 8}) {
    EXPECT_EQ(layer_of("layer_decode_fp8", tokens)["avx512_bf16"], 1.0);
    EXPECT_EQ(layer_of("layer_decode_mxfp4", tokens)["avx512_bf16"], 1.0);
  }
  EXPECT_EQ(layer_of("layer_prefill_fp8", 2048)["fma"], 1.0);
  EXPECT_EQ(layer_of("layer_prefill_mxfp4", 2048)["amx"], 1.0);
  EXPECT_DOUBLE_EQ(layer_of("layer_ranks", 2048)["amx"].get<double>(), 1 / 1.15);
  const json exchange = list_of("exchange");
  EXPECT_DOUBLE_EQ(find(exchange, "exchange_throughput",
                        {{"H", 7168}, {"K", 8}, {"E", 256}, {"T", 1024}, {"R", 4}})["goals"]["amx"]
                       .get<double>(),
                   1 / 1.15);
  const json quantise = list_of("quantise");
  for (const char* const name : {"quantise_e4m3_1x128", "dequantise_mxfp8"}) {
    EXPECT_EQ(find(quantise, name, {{"rows", 8192}, {"cols", 7168}, {"bits", 16}})["goals"]["fma"],
              0.8);
  }
  const json router = list_of("router");
  const json deepseek = {{"T", 8192}, {"E", 256}, {"K", 8}, {"groups", 8}, {"keep_groups", 4}};
  EXPECT_DOUBLE_EQ(find(router, "router_deepseek_v3", deepseek)["goals"]["fma"].get<double>(),
                   1 / 3.5);
  const json softmax = {{"T", 8192}, {"E", 128}, {"K", 8}, {"threads", 1}};
  EXPECT_DOUBLE_EQ(find(router, "router_softmax", softmax)["goals"]["amx"].get<double>(), 1 / 3.0);
}

TEST(Bench, FilterPicksByNameAndParameter) {
  const CliResult rows = quick("gemm", {"--filter", "gemm_cold rows=3", "--json", "-"});
  ASSERT_EQ(rows.exit_code, 0) << rows.err;
  ASSERT_EQ(rows.json().size(), 1u);
  EXPECT_EQ(rows.json()[0]["params"]["rows"], 3);
  const CliResult name = quick("layer", {"--filter", "decode T", "--json", "-"});
  ASSERT_EQ(name.exit_code, 0) << name.err;
  EXPECT_EQ(names_in(name.json()), std::set<std::string>{"layer_decode"});
}

TEST(Bench, TwoThreadsRunEveryCase) {
  for (const std::string& area : kAreas) {
    const CliResult result = quick(area, {"--threads", "2", "--json", "-"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_FALSE(result.json().is_discarded());
  }
}

TEST(Bench, TableShowsGoalAndLimit) {
  const CliResult result = quick("gemm", {"--filter", "gemm_hot"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* const text :
       {"gemm_hot rows=8", "reached", "goal", "limit of gemm_hot: bf16 peak"}) {
    EXPECT_NE(result.out.find(text), std::string::npos) << text << "\n" << result.out;
  }
}

TEST(Bench, JsonFileComesBesideTheTable) {
  const std::string path = fresh_dir("bench") + "/gemm.json";
  const CliResult result = quick("gemm", {"--filter", "gemm_hot", "--json", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("gemm_hot"), std::string::npos);
  EXPECT_EQ(json::parse(read_text(path)).size(), 1u);
}

TEST(Bench, LevelBoundsThePeakToo) {
  const CliResult result = quick("gemm", {"--filter", "gemm_hot", "--level", "generic"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("level generic"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("goals for fma"), std::string::npos) << result.out;
}

TEST(Bench, BadWordsAreRefusedByName) {
  struct Case {
    Words arguments;
    Words named;
  };
  const std::vector<Case> table = {
      {{"bench"}, {"area"}},
      {{"bench", "routing"}, {"'routing'", "gemm", "layer", "exchange", "router", "quantise"}},
      {{"bench", "layer", "--filter", "layer_nap"},
       {"'layer_nap'", "layer_decode T=8 ", "layer_ranks T=2048 "}},
      {{"bench", "gemm", "--level", "mmx"}, {"mmx", "generic"}},
      {{"bench", "gemm", "--samples", "0"}, {"--samples", "'0'"}},
      {{"bench", "gemm", "--seconds", "soon"}, {"--seconds", "'soon'"}},
      {{"bench", "gemm", "--threads", "0"}, {"--threads", "'0'"}},
      {{"bench", "gemm", "--threads", "1024", "--quick"}, {"--threads is 1024", "cores"}},
      {{"bench", "gemm", "--json", "no/such/folder/x.json"}, {"--json", "no/such/folder"}},
  };
  for (const Case& usage : table) {
    const CliResult result = run_cli(usage.arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    for (const std::string& word : usage.named) {
      EXPECT_NE(result.err.find(word), std::string::npos) << word << "\n" << result.err;
    }
  }
}

TEST(Bench, LevelThatIsNotThereListsWhatIs) {
  const CliResult result =
      run_cli({"bench", "gemm", "--quick", "--level", "avx2"}, {"ARGOSY_MAX_LEVEL=generic"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("avx2"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("reference, generic"), std::string::npos) << result.err;
}

TEST(InfoMeasure, GivesFinitePositiveRates) {
  const CliResult result = run_cli({"info", "--measure", "--json", "-"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json measured = result.json()["measured"];
  ASSERT_FALSE(measured["peaks"].empty());
  std::set<std::string> levels;
  for (const json& peak : measured["peaks"]) {
    levels.insert(peak["level"].get<std::string>());
    for (const char* const key :
         {"one_thread_operations_per_second", "all_threads_operations_per_second"}) {
      EXPECT_TRUE(std::isfinite(peak[key].get<double>()));
      EXPECT_GT(peak[key].get<double>(), 0.0);
    }
  }
  EXPECT_EQ(levels.count(measured["bf16_peak"].get<std::string>()), 1u);
  for (const char* const threads : {"one_thread", "all_threads"}) {
    for (const char* const key :
         {"read_bytes_per_second", "copy_bytes_per_second", "streaming_copy_bytes_per_second"}) {
      EXPECT_TRUE(std::isfinite(measured[threads][key].get<double>()));
      EXPECT_GT(measured[threads][key].get<double>(), 0.0);
    }
  }
}

TEST(InfoMeasure, PlainInfoMeasuresNothing) {
  EXPECT_FALSE(run_cli({"info", "--json", "-"}).json().contains("measured"));
}

}  // namespace
}  // namespace argosy::testing
