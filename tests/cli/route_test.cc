// argosy route from end to end: where rules come from, losses and capacity against the library, what
// is written, replay of what was recorded, and every pair of options that do not go together.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>

#include "argosy/checkpoint.h"
#include "argosy/router_trace.h"
#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

constexpr int64_t kTokens = 6;
constexpr int64_t kExperts = 4;
// Experts by falling score: 0 1 | 0 1 | 0 2 | 3 0 | 0 1 | 2 3.
constexpr float kLogits[kTokens * kExperts] = {4, 3, 2, 1, 5, 4, 0, 1, 3, 0, 2, 1,
                                               2, 1, 0, 3, 6, 5, 4, 3, 0, 1, 9, 8};

std::string text_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

struct RouteFile {
  explicit RouteFile(const std::string& name)
      : dir(fresh_dir(name)), path(dir + "/in.safetensors") {
    const std::vector<uint8_t> mask = {1, 1, 0, 1, 1, 1};
    const std::vector<float> bias = {0, 0, 0, 0.5f};
    const std::vector<int64_t> ids = {1, 0, 0, 1, 2, 0, 3, 0, 0, 1, 0, 3};
    std::vector<float> weights(ids.size(), 0.5f);
    std::vector<float> holes(kLogits, kLogits + kTokens * kExperts);
    holes[9] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<NamedTensor> tensors = {
        {"logits", {kLogits, DType::kF32, {kTokens, kExperts}}},
        {"holes", {holes.data(), DType::kF32, {kTokens, kExperts}}},
        {"mask", {mask.data(), DType::kU8, {kTokens}}},
        {"bias", {bias.data(), DType::kF32, {kExperts}}},
        {"other.topk_idx", {ids.data(), DType::kI64, {kTokens, 2}}},
        {"other.topk_weights", {weights.data(), DType::kF32, {kTokens, 2}}}};
    EXPECT_TRUE(write_safetensors(path, tensors).ok());
  }

  std::string at(const std::string& tensor) const { return path + ":" + tensor; }
  Words words(const Words& more, const std::string& logits = "logits") const {
    Words all = {"route", "--logits", at(logits), "--json", "-"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Words preset(const Words& more, const std::string& logits = "logits") const {
    Words all = words({"--preset", "mixtral", "--experts", "4", "--top-k", "2"}, logits);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  std::string dir;
  std::string path;
};

json json_of(const Words& words, int exit_code = 0) {
  const CliResult result = run_cli(words);
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  return result.json();
}

void expect_refused(const Words& words, const std::vector<std::string>& named) {
  const CliResult result = run_cli(words);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  for (const std::string& name : named) {
    EXPECT_NE(result.err.find(name), std::string::npos) << name << "\n" << result.err;
  }
}

TEST(RouteCommand, LogitsGiveCounts) {
  const RouteFile file("route_logits");
  const json report = json_of(file.preset({"--ranks", "2"}));
  EXPECT_EQ(report["rows_per_expert"], json({5, 3, 2, 2}));
  EXPECT_EQ(report["rows_per_rank"], json({8, 4}));
  EXPECT_EQ(report["losses"], json::object());
  EXPECT_EQ(report["preset"], "mixtral");
  EXPECT_EQ(report["spec"]["normalise"], "yes");
  EXPECT_EQ(report["spec"]["top_k"], 2);
}

// The captures of every family: the checkpoint's own rules, gate and bias.
TEST(RouteCommand, ModelsRouteAsCaptured) {
  for (const CapturedLayer& layer : captured_layers()) {
    if (layer.run != "f32") continue;
    SCOPED_TRACE(layer.model);
    const std::string from = captures(layer.model, layer.layer, "f32");
    const json report = json_of({"route", "--model", testdata("models/" + layer.model), "--layer",
                                 std::to_string(layer.layer), "--input", from + ".moe_input",
                                 "--compare", from, "--json", "-"});
    EXPECT_EQ(report["compare"]["experts_equal"], report["tokens"]);
    EXPECT_EQ(report["compare"]["experts_differ"], 0);
    EXPECT_EQ(report["compare"]["first_difference"], nullptr);
    EXPECT_LT(report["compare"]["weights_max_rel"].get<double>(), 2e-6);
    // The same experts, other weights.
    const json scaled = json_of({"route", "--model", testdata("models/" + layer.model), "--layer",
                                 std::to_string(layer.layer), "--logits", from + ".router_logits",
                                 "--compare", from, "--routed-scaling-factor", "7", "--json", "-"},
                                1);
    EXPECT_EQ(scaled["compare"]["experts_differ"], 0);
  }
}

// Router modules of transformers, on tokens whose choice is clear in fp64
// (scripts/router_peers.py).
TEST(RouteCommand, ModulesOfTransformersChooseTheSame) {
  const std::string file = testdata("router/modules.safetensors");
  const struct {
    const char* name;
    int experts;
    int top_k;
    Words more;
  } kModules[] = {
      {"mixtral", 8, 2, {}},
      {"qwen2_moe", 20, 4, {}},
      {"qwen3_moe", 32, 8, {}},
      {"olmoe", 16, 8, {}},
      {"deepseek_v2",
       40,
       6,
       {"--groups", "8", "--keep-groups", "3", "--routed-scaling-factor", "16"}},
      {"deepseek_v3",
       32,
       8,
       {"--groups", "8", "--keep-groups", "4", "--routed-scaling-factor", "2.5", "--selection-bias",
        file + ":deepseek_v3.selection_bias"}},
      {"gpt_oss", 32, 4, {}},
  };
  for (const auto& module : kModules) {
    SCOPED_TRACE(module.name);
    Words words = {"route",
                   "--logits",
                   file + ":" + module.name + ".logits",
                   "--preset",
                   module.name,
                   "--experts",
                   std::to_string(module.experts),
                   "--top-k",
                   std::to_string(module.top_k),
                   "--compare",
                   file + ":" + module.name,
                   "--json",
                   "-"};
    words.insert(words.end(), module.more.begin(), module.more.end());
    const json compare = json_of(words)["compare"];
    EXPECT_EQ(compare["experts_equal"], 24);
    EXPECT_EQ(compare["ties"], 0);
    EXPECT_LT(compare["weights_max_rel"].get<double>(), 2e-6);
  }
}

TEST(RouteCommand, PrintSpecShowsFileAndOverrides) {
  const std::string dir = fresh_dir("route_spec");
  const std::string router = text_file(
      dir + "/r.json", R"({"preset": "deepseek_v3", "num_experts": 16, "num_groups": 4})");
  const CliResult result =
      run_cli({"route", "--router", router, "--top-k", "4", "--keep-groups", "2", "--group-score",
               "max", "--normalise", "no", "--print-spec"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out,
            "num_experts = 16\ntop_k = 4\nscore_function = sigmoid\nselection_bias = yes\n"
            "num_groups = 4\nkeep_groups = 2\ngroup_score = max\nnormalise = no\n"
            "normalise_single = yes\nweight_norm = exact\nrouted_scaling_factor = 1\n"
            "on_nonfinite = error\n");
  expect_refused({"route", "--router", router, "--top-k", "17", "--print-spec"}, {"17", "16"});
  EXPECT_NE(
      run_cli({"route", "--preset", "mixtral", "--experts", "8", "--top-k", "1", "--print-spec"})
          .out.find("no gradient"),
      std::string::npos);
}

// A bias given by hand stands in for the checkpoint's, also where that has none.
TEST(RouteCommand, ASelectionBiasStandsInForTheModels) {
  const std::string dir = fresh_dir("route_bias");
  const std::string router = text_file(dir + "/r.json", R"({"preset": "deepseek_v3"})");
  Words words = {"route",
                 "--model",
                 testdata("models/olmoe_tiny"),
                 "--layer",
                 "0",
                 "--input",
                 captures("olmoe_tiny", 0, "f32") + ".moe_input",
                 "--router",
                 router,
                 "--json",
                 "-"};
  expect_refused(words, {"e_score_correction_bias"});
  words.insert(words.end(), {"--selection-bias", testdata("models/deepseek_v3_tiny") +
                                                     "/model.safetensors:model.layers.1.mlp.gate."
                                                     "e_score_correction_bias"});
  EXPECT_EQ(json_of(words)["tokens"], 512);
}

// A router file in place of the model's own rule changes the layer, and its checks go along.
TEST(RouteCommand, RunTakesARouterFile) {
  const std::string dir = fresh_dir("run_router");
  const std::string router =
      text_file(dir + "/r.json", R"({"preset": "mixtral", "num_experts": 16, "top_k": 2})");
  const Words same = run_arguments("olmoe_tiny", 0, "f32", {"--ranks", "2", "--json", "-"});
  Words other = same;
  other.insert(other.end(), {"--router", router, "--record-routing", dir + "/r.npz"});
  const json plain = json_of(same);
  const json report = json_of(other);
  EXPECT_EQ(plain["top_k"], 4);
  EXPECT_EQ(report["top_k"], 2);
  EXPECT_NE(plain["digest"], report["digest"]);
  const json replayed =
      json_of({"route", "--replay", dir + "/r.npz", "--ranks", "2", "--json", "-"});
  EXPECT_EQ(replayed["records"], 2);
  EXPECT_EQ(replayed["layers"][0]["rows_per_expert"], report["rows_per_expert"]);
  EXPECT_EQ(replayed["layers"][0]["rows_per_rank"], report["rows_per_rank"]);
  Words wrong = same;
  wrong.insert(wrong.end(), {"--router", text_file(dir + "/w.json",
                                                   R"({"preset": "mixtral", "num_experts": 8})")});
  expect_refused(wrong, {"num_experts", "16", "8"});
}

// Case C069: the model has a dense layer 0; what the others load is reported under their own numbers.
TEST(RouteCommand, ReplaysALayerUnderItsNumberInTheModel) {
  const std::string dir = fresh_dir("run_layers");
  for (const int layer : {1, 2}) {
    const std::string file = dir + "/" + std::to_string(layer) + ".npz";
    const json report =
        json_of(run_arguments("deepseek_v3_tiny", layer, "f32",
                              {"--ranks", "2", "--record-routing", file, "--json", "-"}));
    const json replayed = json_of({"route", "--replay", file, "--ranks", "2", "--json", "-"});
    ASSERT_EQ(replayed["layers"].size(), 1u);
    EXPECT_EQ(replayed["layers"][0]["layer"], layer);
    EXPECT_EQ(replayed["layers"][0]["rows_per_expert"], report["rows_per_expert"]);
  }
  expect_refused(
      {"run", "--model", testdata("models/deepseek_v3_tiny"), "--layer", "0", "--input",
       testdata("models/deepseek_v3_tiny") + "/captures.safetensors:f32.layers.1.moe_input"},
      {"layer 0 has no experts", "[1, 2]"});
}

TEST(RouteCommand, LossesOfASpreadAreTheirFormulas) {
  const RouteFile file("route_losses");
  const json report =
      json_of(file.preset({"--aux-loss", "0.5", "--z-loss", "0.25", "--mask", file.at("mask")}));
  double score_sums[kExperts] = {};
  double z = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    if (t == 2) continue;
    double sum = 0;
    for (int64_t e = 0; e < kExperts; ++e) sum += std::exp(double{kLogits[t * kExperts + e]});
    for (int64_t e = 0; e < kExperts; ++e) {
      score_sums[e] += std::exp(double{kLogits[t * kExperts + e]}) / sum;
    }
    z += std::log(sum) * std::log(sum);
  }
  const double counts[kExperts] = {4, 3, 1, 2};
  double aux = 0;
  for (int64_t e = 0; e < kExperts; ++e) aux += counts[e] * score_sums[e];
  aux *= 0.5 * kExperts / (2.0 * 25);
  EXPECT_EQ(report["valid_tokens"], 5);
  EXPECT_EQ(report["rows_per_expert"], json({4, 3, 1, 2}));
  EXPECT_NEAR(report["losses"]["aux"].get<double>(), aux, 1e-12);
  EXPECT_NEAR(report["losses"]["z"].get<double>(), 0.25 * z / 5, 1e-12);
  const auto aux_of = [&](const Words& more) {
    Words words = file.preset({"--aux-loss", "0.5", "--mask", file.at("mask")});
    words.insert(words.end(), more.begin(), more.end());
    return json_of(words)["losses"]["aux"].get<double>();
  };
  EXPECT_NEAR(aux_of({"--aux-scale", "hf"}), 2 * aux, 1e-12);
  EXPECT_NEAR(aux_of({"--aux-scope", "global"}), aux, 1e-12);
  EXPECT_NEAR(aux_of({"--aux-scope", "sequence", "--sequence-lengths", "6,0"}), aux, 1e-12);
  EXPECT_GT(std::abs(aux_of({"--aux-scope", "sequence", "--sequence-lengths", "3,3"}) - aux), 1e-3);
}

TEST(RouteCommand, CapacityDropsByPolicyAndScope) {
  const RouteFile file("route_capacity");
  // C = ceil(6 * 2 / 4) = 3: expert 0 has five, the first three stay.
  const json position = json_of(file.preset({"--capacity", "1", "--policy", "position"}));
  EXPECT_EQ(position["rows_per_expert"], json({3, 3, 2, 2}));
  EXPECT_EQ(position["capacity"]["capacity"], json({3}));
  EXPECT_EQ(position["capacity"]["dropped"], 2);
  EXPECT_EQ(position["capacity"]["dropped_per_expert"], json({2, 0, 0, 0}));
  // Of expert 0 the largest weights: tokens 0, 1, 4 have 0.73, token 2 has 0.73, token 3 has 0.27.
  const std::string out = file.dir + "/out.safetensors";
  const json weight =
      json_of(file.preset({"--capacity", "2/2", "--policy", "weight", "--output", out}));
  EXPECT_EQ(weight["rows_per_expert"], json({3, 3, 2, 2}));
  const auto tensors = SafetensorsFile::open(out);
  ASSERT_TRUE(tensors.has_value());
  const Tensor counts = (*tensors)->read("counts").value();
  EXPECT_EQ(counts.view().as<int64_t>()[0], 5);  // before the drop
  const Tensor ids = (*tensors)->read("topk_idx").value();
  EXPECT_EQ(ids.view().as<int32_t>()[3 * 2 + 1], -1);
  // Ranks of three tokens: C = ceil(3 * 2 / 4) = 2 of each.
  const json rank = json_of(file.preset(
      {"--capacity", "1", "--policy", "position", "--capacity-scope", "rank", "--ranks", "2"}));
  EXPECT_EQ(rank["capacity"]["capacity"], json({2, 2}));
  EXPECT_EQ(rank["rows_per_expert"], json({4, 3, 2, 2}));
  const json huge = json_of(file.preset({"--capacity", "1000", "--policy", "weight"}));
  EXPECT_EQ(huge["capacity"]["dropped"], 0);
}

TEST(RouteCommand, NonfiniteRowsAsAsked) {
  const RouteFile file("route_nonfinite");
  expect_refused(file.preset({}, "holes"), {"token 2", "nan"});
  expect_refused(file.preset({"--on-nonfinite", "error"}, "holes"), {"token 2"});
  const json uniform = json_of(file.preset({"--on-nonfinite", "uniform"}, "holes"));
  EXPECT_EQ(uniform["nonfinite_rows"], 1);
  EXPECT_EQ(uniform["rows_per_expert"], json({5, 4, 1, 2}));
  const json masked = json_of(file.preset({"--mask", file.at("mask")}, "holes"));
  EXPECT_EQ(masked["rows_per_expert"], json({4, 3, 1, 2}));
}

TEST(RouteCommand, BiasStepsTowardsTheMean) {
  const RouteFile file("route_bias");
  const std::string out = file.dir + "/out.safetensors";
  const json report =
      json_of(file.preset({"--use-selection-bias", "yes", "--selection-bias", file.at("bias"),
                           "--bias-update", "0.25", "--output", out}));
  const std::vector<int64_t> counts = report["rows_per_expert"];
  const auto tensors = SafetensorsFile::open(out);
  ASSERT_TRUE(tensors.has_value());
  const Tensor next = (*tensors)->read("selection_bias_next").value();
  for (size_t e = 0; e < 4; ++e) {
    const float before = e == 3 ? 0.5f : 0.0f;
    EXPECT_EQ(next.view().as<float>()[e], before + (counts[e] > 3   ? -0.25f
                                                    : counts[e] < 3 ? 0.25f
                                                                    : 0.0f));
  }
  expect_refused(file.preset({"--bias-update", "0.25", "--output", out}),
                 {"--bias-update", "selection bias"});
  expect_refused(file.preset({"--bias-update", "0.25"}), {"--bias-update", "--output"});
}

TEST(RouteCommand, CompareShowsTheFirstDifference) {
  const RouteFile file("route_compare");
  const json compare = json_of(file.preset({"--compare", file.at("other")}), 1)["compare"];
  EXPECT_EQ(compare["experts_equal"], 5);
  EXPECT_EQ(compare["experts_differ"], 1);
  EXPECT_EQ(compare["ties"], 0);
  const json first = compare["first_difference"];
  EXPECT_EQ(first["token"], 5);
  EXPECT_EQ(first["experts"], json({2, 3}));
  EXPECT_EQ(first["other_experts"], json({0, 3}));
  const double sum = 1 + std::exp(1.0) + std::exp(9.0) + std::exp(8.0);
  EXPECT_NEAR(first["lowest_taken"].get<double>(), std::exp(9.0) / sum, 1e-12);
  EXPECT_NEAR(first["highest_refused"].get<double>(), 1 / sum, 1e-12);
  EXPECT_NEAR(first["selection_gap"].get<double>(), 1 - std::exp(-7.0), 1e-9);
  // Normalised weights are 0.731 and 0.269 here, or 0.881 and 0.119; the other has one half.
  EXPECT_NEAR(compare["weights_max_rel"].get<double>(), 2 / (1 + std::exp(-1.0)) - 1, 1e-6);
  expect_refused(file.preset({"--compare", file.at("nobody")}), {"nobody.topk_idx"});
}

TEST(RouteCommand, RecordReplayAndReport) {
  const RouteFile file("route_record");
  for (const char* const name : {"/t.npz", "/t.jsonl"}) {
    const std::string trace = file.dir + name;
    const json routed = json_of(file.preset({"--ranks", "3", "--record", trace}));
    const json replayed = json_of({"route", "--replay", trace, "--ranks", "3", "--json", "-"});
    EXPECT_EQ(replayed["records"], 3);
    EXPECT_EQ(replayed["has_weights"], true);
    EXPECT_EQ(replayed["layers"][0]["rows_per_expert"], routed["rows_per_expert"]);
    EXPECT_EQ(replayed["layers"][0]["rows_per_rank"], routed["rows_per_rank"]);
    expect_refused({"route", "--replay", trace, "--experts", "5"}, {"5", "4"});
  }
  const std::string empty = file.dir + "/empty.jsonl";
  std::ofstream(empty).close();
  expect_refused({"route", "--replay", empty}, {"no records"});
  const std::string page = file.dir + "/page.html";
  ASSERT_EQ(run_cli({"route", "--replay", testdata("router/trace.npz"), "--ranks", "8", "--experts",
                     "64", "--report", page})
                .exit_code,
            0);
  EXPECT_NE(read_text(page).find("Load per expert, layer 2"), std::string::npos);
  Words words = file.preset({"--report", page, "--ranks", "2", "--aux-loss", "1"});
  ASSERT_EQ(run_cli(words).exit_code, 0);
  for (const char* const part : {"Load per expert", "Load per rank", "auxiliary loss", "<svg"}) {
    EXPECT_NE(read_text(page).find(part), std::string::npos) << part;
  }
  expect_refused(file.preset({"--record", file.dir + "/t.csv"}), {".npz", "t.csv"});
}

TEST(RouteCommand, OptionsThatDoNotGoTogetherAreNamed) {
  const RouteFile file("route_pairs");
  const std::string logits = file.at("logits");
  const std::string model = testdata("models/mixtral_tiny");
  const Words rules = {"--preset", "mixtral", "--experts", "4", "--top-k", "2"};
  const auto route = [](const Words& a, const Words& b) {
    Words words = {"route"};
    words.insert(words.end(), a.begin(), a.end());
    words.insert(words.end(), b.begin(), b.end());
    return words;
  };
  const Words tokens = {"--logits", logits};
  expect_refused(route(rules, {}), {"--logits", "--input", "--replay"});
  expect_refused(route(tokens, {}), {"--preset", "--model", "--router"});
  expect_refused(route(rules, {"--input", logits}), {"--input", "--gate"});
  expect_refused(route(rules, {"--logits", logits, "--input", logits}), {"--logits", "--input"});
  expect_refused(route(rules, {"--logits", logits, "--gate", logits}), {"--logits", "--gate"});
  expect_refused(route(tokens, {"--preset", "mixtral", "--top-k", "2"}), {"--preset", "--experts"});
  expect_refused(route(tokens, {"--model", model}), {"--model", "--layer"});
  const struct {
    Words words;
    std::vector<std::string> named;
  } kTable[] = {
      {{"--model", model, "--layer", "0"}, {"--preset", "--model"}},
      {{"--router", "r.json"}, {"--preset", "--router"}},
      {{"--layer", "0"}, {"--layer", "--model"}},
      {{"--aux-scope", "global"}, {"--aux-scope", "--aux-loss"}},
      {{"--aux-loss", "1", "--aux-scope", "sequence"}, {"--aux-scope", "--sequence-lengths"}},
      {{"--aux-loss", "1", "--sequence-lengths", "6"}, {"--aux-scope", "--sequence-lengths"}},
      {{"--aux-loss", "1", "--aux-scope", "sequence", "--sequence-lengths", "3,2"}, {"5", "6"}},
      {{"--aux-loss", "1", "--aux-scope", "sequence", "--sequence-lengths", "3,4"}, {"4", "6"}},
      {{"--aux-loss", "1", "--aux-scope", "sequence", "--sequence-lengths", "3,,3"},
       {"--sequence-lengths", "item 2 of '3,,3'", "''"}},
      {{"--aux-loss", "1", "--aux-scope", "sequence", "--sequence-lengths", "6,"}, {"item 2 of"}},
      {{"--aux-loss", "1", "--aux-scope", "sequence", "--sequence-lengths", "-1,7"},
       {"item 1 of '-1,7'", "'-1'"}},
      {{"--capacity", "1"}, {"--capacity", "--policy"}},
      {{"--policy", "weight"}, {"--policy", "--capacity"}},
      {{"--capacity", "1/0", "--policy", "weight"}, {"--capacity", "'1/0'"}},
      {{"--capacity", "1.5", "--policy", "weight"}, {"--capacity", "'1.5'"}},
      {{"--capacity-scope", "rank"}, {"--capacity-scope", "--capacity"}},
      {{"--bias-centred"}, {"--bias-centred", "--bias-update"}},
      {{"--replay", "t.npz"}, {"--replay", "--logits"}},
      {{"--groups", "3"}, {"num_experts 4", "num_groups 3"}},
      {{"--normalise", "maybe"}, {"--normalise", "maybe", "no, yes"}},
      {{"--mask", file.at("bias")}, {"--mask", "F32"}},
  };
  for (const auto& row : kTable) {
    Words words = route(tokens, rules);
    words.erase(words.begin());  // once more in front
    words.insert(words.end(), row.words.begin(), row.words.end());
    if (row.words[0] == "--replay") {
      words = {"--replay", "t.npz", "--logits", logits};
    }
    expect_refused(route({}, words), row.named);
  }
}

}  // namespace
}  // namespace argosy::testing
