// The fp64 reference against hand-computed numbers, published routing cases and captures of the
// public implementation. Whatever it gets wrong, every check of the tool would repeat.
#include "argosy/reference.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>

namespace argosy {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

RouterSpec spec_of(ScoreFunction function, int64_t num_experts, int64_t top_k) {
  RouterSpec spec;
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  spec.score_function = function;
  spec.selection_bias = Choice::kNo;
  spec.normalise = Choice::kYes;
  spec.normalise_single = Choice::kYes;
  return spec;
}

ReferenceRouting route64(const RouterSpec& spec, const std::vector<double>& logits,
                         const std::vector<double>& bias = {}) {
  return reference_route(spec, logits, bias, SelectionPrecision::kFp64);
}

// The logit whose sigmoid is p.
double logit(double p) { return std::log(p / (1 - p)); }

TEST(ReferenceRoute, BiasSelectsButDoesNotWeigh) {
  const ReferenceRouting routing = route64(spec_of(ScoreFunction::kSigmoid, 3, 2),
                                           {logit(0.6), logit(0.5), logit(0.2)}, {0, 0, 1});
  EXPECT_EQ(routing.experts, (std::vector<int32_t>{2, 0}));
  EXPECT_NEAR(routing.weights[0], 0.25, 1e-15);
  EXPECT_NEAR(routing.weights[1], 0.75, 1e-15);
  EXPECT_NEAR(routing.selection_gap, (0.6 - 0.5) / 0.6, 1e-12);
}

TEST(ReferenceRoute, TheGroupScoreDecidesTheGroup) {
  RouterSpec spec = spec_of(ScoreFunction::kSigmoid, 4, 1);
  spec.num_groups = 2;
  spec.keep_groups = 1;
  const std::vector<double> logits = {logit(0.9), -200, logit(0.5), logit(0.5)};
  spec.group_score = GroupScore::kSumOfBestTwo;
  EXPECT_EQ(route64(spec, logits).experts, (std::vector<int32_t>{2}));
  spec.group_score = GroupScore::kMax;
  EXPECT_EQ(route64(spec, logits).experts, (std::vector<int32_t>{0}));
  spec.group_score = GroupScore::kSumOfBestKPerGroup;  // K / Kg = 1
  EXPECT_EQ(route64(spec, logits).experts, (std::vector<int32_t>{0}));
  spec.top_k = 2;  // K / Kg = 2
  EXPECT_EQ(route64(spec, logits).experts, (std::vector<int32_t>{2, 3}));
}

TEST(ReferenceRoute, RefusedGroupsLieBelowUnderflowedScores) {
  RouterSpec spec = spec_of(ScoreFunction::kSigmoid, 4, 2);
  spec.num_groups = 2;
  spec.keep_groups = 1;
  spec.group_score = GroupScore::kMax;
  EXPECT_EQ(route64(spec, {-120, -121, 5, 6}, {2, 0, 0, 0}).experts, (std::vector<int32_t>{0, 1}));
}

TEST(ReferenceRoute, AGroupOfOneHasThatExpertsScore) {
  RouterSpec spec = spec_of(ScoreFunction::kSigmoid, 3, 2);
  spec.num_groups = 3;
  spec.keep_groups = 2;
  spec.group_score = GroupScore::kSumOfBestTwo;
  EXPECT_EQ(route64(spec, {1, 3, 2}).experts, (std::vector<int32_t>{1, 2}));
}

TEST(ReferenceRoute, BiasesThatBf16WouldMergeStayApart) {
  std::vector<double> bias;
  for (int i = 0; i < 64; ++i) bias.push_back(6.817 + i * (0.246 / 63));
  EXPECT_EQ(
      route64(spec_of(ScoreFunction::kSigmoid, 64, 8), std::vector<double>(64, 0.0), bias).experts,
      (std::vector<int32_t>{63, 62, 61, 60, 59, 58, 57, 56}));
}

TEST(ReferenceRoute, EqualUnderflowedScoresShareEqually) {
  RouterSpec spec = spec_of(ScoreFunction::kSigmoid, 16, 8);
  for (const double z : {-50.0, -100.0, -1e8}) {
    for (const double weight : route64(spec, std::vector<double>(16, z)).weights) {
      EXPECT_NEAR(weight, 0.125, 1e-15) << z;
    }
  }
  spec.weight_norm = WeightNorm::kReference;
  double sum = 0;
  for (const double w : route64(spec, std::vector<double>(16, -50.0)).weights) sum += w;
  EXPECT_NEAR(sum, 0.133674, 1e-6);
}

TEST(ReferenceRoute, ASingleExpertIsNormalisedByItsOwnField) {
  RouterSpec spec = spec_of(ScoreFunction::kSigmoid, 2, 1);
  EXPECT_DOUBLE_EQ(route64(spec, {logit(0.3), -5}).weights[0], 1.0);
  spec.normalise_single = Choice::kNo;
  EXPECT_NEAR(route64(spec, {logit(0.3), -5}).weights[0], 0.3, 1e-15);
}

TEST(ReferenceRoute, EqualScoresGoToTheLowestExpert) {
  const ReferenceRouting routing =
      route64(spec_of(ScoreFunction::kSoftmaxTopK, 5, 2), {1, 2, 3, 2, 2});
  EXPECT_EQ(routing.experts, (std::vector<int32_t>{2, 1}));
  EXPECT_EQ(routing.selection_gap, 0);
}

TEST(ReferenceRoute, TheGapIsRelativeAndInfiniteWhenNothingIsRefused) {
  EXPECT_DOUBLE_EQ(route64(spec_of(ScoreFunction::kSoftmaxTopK, 4, 2), {4, 3, 1, 0}).selection_gap,
                   2.0 / 3.0);
  EXPECT_EQ(route64(spec_of(ScoreFunction::kSoftmax, 2, 2), {4, 3}).selection_gap, kInfinity);
}

TEST(ReferenceRoute, TheGapOfTheGroupLimitCounts) {
  RouterSpec spec = spec_of(ScoreFunction::kSoftmaxTopK, 4, 1);
  spec.num_groups = 2;
  spec.keep_groups = 1;
  spec.group_score = GroupScore::kMax;
  EXPECT_NEAR(route64(spec, {4, 0, 3.999, 0}).selection_gap, 0.001 / 4, 1e-12);
}

TEST(ReferenceRoute, Fp32SelectionSeesTiesThatFp64DoesNot) {
  const RouterSpec spec = spec_of(ScoreFunction::kSigmoid, 3, 1);
  const std::vector<double> logits = {28, 29, 0};  // both sigmoids are 1 in fp32
  EXPECT_EQ(route64(spec, logits).experts[0], 1);
  EXPECT_GT(route64(spec, logits).selection_gap, 0);
  const ReferenceRouting fp32 = reference_route(spec, logits, {}, SelectionPrecision::kFp32);
  EXPECT_EQ(fp32.experts[0], 0);
  EXPECT_EQ(fp32.selection_gap, 0);
}

TEST(ReferenceRoute, ANonFiniteRowIsARowOfZeros) {
  const RouterSpec spec = spec_of(ScoreFunction::kSoftmax, 4, 2);
  for (const double bad : {std::nan(""), kInfinity, -kInfinity}) {
    const ReferenceRouting routing = route64(spec, {1, bad, 2, 3});
    EXPECT_EQ(routing.experts, (std::vector<int32_t>{0, 1}));
    EXPECT_DOUBLE_EQ(routing.weights[0], 0.5);
  }
}

// Textbook formulas, no log domain, scores picked one maximum at a time.
std::pair<std::vector<int32_t>, std::vector<double>> naive_route(
    const RouterSpec& spec, const std::vector<double>& logits) {
  std::vector<double> scores;
  double denominator = 0;
  for (const double z : logits) denominator += std::exp(z);
  for (const double z : logits) {
    switch (spec.score_function) {
      case ScoreFunction::kSoftmax:
      case ScoreFunction::kSoftmaxTopK:
        scores.push_back(std::exp(z) / denominator);
        break;
      case ScoreFunction::kSigmoid:
        scores.push_back(1 / (1 + std::exp(-z)));
        break;
      default:
        scores.push_back(std::sqrt(std::log(1 + std::exp(z))));
    }
  }
  std::vector<int32_t> experts;
  std::vector<double> weights;
  std::vector<double> left = scores;
  double sum = 0;
  for (int64_t k = 0; k < spec.top_k; ++k) {
    const auto best = std::max_element(left.begin(), left.end());
    experts.push_back(static_cast<int32_t>(best - left.begin()));
    weights.push_back(*best);
    sum += *best;
    *best = -1;
  }
  const bool divide =
      spec.normalise == Choice::kYes || spec.score_function == ScoreFunction::kSoftmaxTopK;
  for (double& w : weights) w = (divide ? w / sum : w) * spec.routed_scaling_factor;
  return {experts, weights};
}

TEST(ReferenceRoute, AgreesWithTextbookFormulas) {
  constexpr unsigned kSeed = 20240917;
  SCOPED_TRACE(fmt::format("seed {}", kSeed));
  std::mt19937 random(kSeed);
  std::normal_distribution<double> normal(0, 3);
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxTopK,
                                       ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    for (const Choice normalise : {Choice::kNo, Choice::kYes}) {
      for (int round = 0; round < 50; ++round) {
        RouterSpec spec = spec_of(function, 3 + round, 2 + round % 2);
        spec.normalise = normalise;
        spec.routed_scaling_factor = 2.5f;
        std::vector<double> logits(static_cast<size_t>(spec.num_experts));
        for (double& z : logits) z = normal(random);
        const auto [experts, weights] = naive_route(spec, logits);
        const ReferenceRouting routing = route64(spec, logits);
        EXPECT_EQ(routing.experts, experts);
        for (size_t k = 0; k < weights.size(); ++k) {
          EXPECT_NEAR(routing.weights[k], weights[k], 1e-12 * weights[k]);
        }
      }
    }
  }
}

// A checkpoint of one layer with fp32 tensors, hidden 2, width 1, written to a folder of its own.
class SmallCheckpoint {
 public:
  SmallCheckpoint(const std::string& name, int64_t num_experts, int64_t top_k,
                  const std::string& model = "mixtral_tiny")
      : dir_(fmt::format("{}/argosy_reference_{}_{}", ::testing::TempDir(), name, getpid())) {
    std::filesystem::create_directories(dir_);
    std::ifstream file(std::string(ARGOSY_TESTDATA) + "/models/" + model + "/config.json");
    nlohmann::json config = nlohmann::json::parse(file, nullptr, false);
    block_ = model == "mixtral_tiny" ? "block_sparse_moe." : "mlp.";
    config["num_hidden_layers"] = 1;
    config["hidden_size"] = 2;
    const bool is_qwen = model == "qwen2_moe_tiny";
    config[is_qwen ? "moe_intermediate_size" : "intermediate_size"] = 1;
    if (is_qwen) config["shared_expert_intermediate_size"] = 1;
    config[is_qwen ? "num_experts" : "num_local_experts"] = num_experts;
    config["num_experts_per_tok"] = top_k;
    std::ofstream(dir_ + "/config.json") << config;
  }
  ~SmallCheckpoint() { std::filesystem::remove_all(dir_); }
  SmallCheckpoint(const SmallCheckpoint&) = delete;
  SmallCheckpoint& operator=(const SmallCheckpoint&) = delete;

  void add(const std::string& name, std::initializer_list<int64_t> shape,
           const std::vector<float>& values) {
    Tensor tensor = std::move(Tensor::zeros(DType::kF32, shape)).value();
    std::copy(values.begin(), values.end(), tensor.view().as<float>());
    tensors_["model.layers.0." + block_ + name] = std::move(tensor);
  }
  void add_expert(int expert, const std::vector<float>& gate, const std::vector<float>& up,
                  const std::vector<float>& down) {
    const std::string prefix = fmt::format("experts.{}.", expert);
    add(prefix + "w1.weight", {1, 2}, gate);
    add(prefix + "w3.weight", {1, 2}, up);
    add(prefix + "w2.weight", {2, 1}, down);
  }
  Result<ReferenceLayer> open() const {
    std::vector<NamedTensor> named;
    for (const auto& [name, tensor] : tensors_) named.push_back({name, tensor.view()});
    ARGOSY_RETURN_IF_ERROR(write_safetensors(dir_ + "/model.safetensors", named));
    return ReferenceLayer::open(dir_, 0);
  }

 private:
  std::string dir_;
  std::string block_;
  std::map<std::string, Tensor> tensors_;
};

constexpr double kSilu1 = 0.73105857863000487925;  // silu(1) = sigmoid(1)
constexpr double kSilu2 = 1.76159415595576488812;  // silu(2)

TEST(ReferenceLayer, GivesTheHandComputedToken) {
  SmallCheckpoint checkpoint("hand", 2, 2);
  checkpoint.add("gate.weight", {2, 2}, {1, 0, 0, 0});  // logits of (1, 2): 1, 0
  checkpoint.add_expert(0, {1, 0}, {0, 1}, {1, -1});    // silu(1) * 2 * (1, -1)
  checkpoint.add_expert(1, {0, 1}, {1, 1}, {0, 2});     // silu(2) * 3 * (0, 2)
  const Result<ReferenceLayer> layer = checkpoint.open();
  ASSERT_TRUE(layer.has_value()) << layer.error().message();
  const double hidden[] = {1, 2};
  const ReferenceToken token = layer->run(hidden);
  EXPECT_EQ(token.experts, (std::vector<int32_t>{0, 1}));
  EXPECT_NEAR(token.weights[0], kSilu1, 1e-15);  // sigmoid(1)
  EXPECT_NEAR(token.output[0], kSilu1 * kSilu1 * 2, 1e-14);
  EXPECT_NEAR(token.output[1], -kSilu1 * kSilu1 * 2 + (1 - kSilu1) * kSilu2 * 6, 1e-14);
}

// qwen2_moe: sigmoid of the shared expert's gate scales its row; weights are not normalised.
TEST(ReferenceLayer, GivesTheHandComputedTokenOfAGatedSharedExpert) {
  SmallCheckpoint checkpoint("shared", 2, 1, "qwen2_moe_tiny");
  checkpoint.add("gate.weight", {2, 2}, {1, 0, 0, 0});
  for (const std::string expert : {"experts.0.", "experts.1.", "shared_expert."}) {
    const bool is_shared = expert == "shared_expert.";
    checkpoint.add(expert + "gate_proj.weight", {1, 2}, {1, 0});
    checkpoint.add(expert + "up_proj.weight", {1, 2}, {0, 1});
    checkpoint.add(expert + "down_proj.weight", {2, 1}, {is_shared ? 0.0f : 1.0f, 1});
  }
  checkpoint.add("shared_expert_gate.weight", {1, 2}, {-1, 1});  // logit 1 of (1, 2)
  const Result<ReferenceLayer> layer = checkpoint.open();
  ASSERT_TRUE(layer.has_value()) << layer.error().message();
  const double hidden[] = {1, 2};
  const ReferenceToken token = layer->run(hidden);
  EXPECT_EQ(token.experts, (std::vector<int32_t>{0}));
  EXPECT_NEAR(token.weights[0], kSilu1, 1e-15);  // softmax over both: sigmoid(1)
  EXPECT_NEAR(token.output[0], kSilu1 * kSilu1 * 2, 1e-14);
  EXPECT_NEAR(token.output[1], kSilu1 * kSilu1 * 2 + kSilu1 * kSilu1 * 2, 1e-14);
}

// gpt_oss: the router's bias decides, columns are by turns gate and up, both are clamped at 2, down has a bias.
TEST(ReferenceLayer, GivesTheHandComputedTokenOfGptOss) {
  SmallCheckpoint checkpoint("gpt_oss", 3, 2, "gpt_oss_tiny");
  checkpoint.add("router.weight", {3, 2}, {1, 0, 1, 0, 1, 0});
  checkpoint.add("router.bias", {3}, {0, 1, 2});
  // [E, H, 2]: expert 2 has gate = x0 + 4 = 5 -> 2 and up = x1 - 5 = -3 -> -2; expert 1 gate 1, up 2.
  checkpoint.add("experts.gate_up_proj", {3, 2, 2}, {9, 9, 9, 9, 1, 0, 0, 1, 1, 0, 0, 1});
  checkpoint.add("experts.gate_up_proj_bias", {3, 2}, {9, 9, 0, 0, 4, -5});
  checkpoint.add("experts.down_proj", {3, 1, 2}, {9, 9, 1, 0, 1, 2});
  checkpoint.add("experts.down_proj_bias", {3, 2}, {9, 9, 0, 10, 20, 0});
  const Result<ReferenceLayer> layer = checkpoint.open();
  ASSERT_TRUE(layer.has_value()) << layer.error().message();
  const double hidden[] = {1, 2};
  const ReferenceToken token = layer->run(hidden);
  EXPECT_EQ(token.experts, (std::vector<int32_t>{2, 1}));
  EXPECT_NEAR(token.weights[0], kSilu1, 1e-15);  // softmax of 2 and 1
  constexpr double kAlpha = 1.702f;
  const double two = (-2.0 + 1) * 2 / (1 + std::exp(-2 * kAlpha));
  const double one = (2.0 + 1) * 1 / (1 + std::exp(-kAlpha));
  EXPECT_NEAR(token.output[0], kSilu1 * (two + 20) + (1 - kSilu1) * one, 1e-13);
  EXPECT_NEAR(token.output[1], kSilu1 * 2 * two + (1 - kSilu1) * 10, 1e-13);
}

TEST(ReferenceLayer, GivenExpertsReplaceTheChoiceButNotTheGate) {
  SmallCheckpoint checkpoint("given", 3, 1);
  checkpoint.add("gate.weight", {3, 2}, {3, 0, 2, 0, 1, 0});
  for (int e = 0; e < 3; ++e) {
    checkpoint.add_expert(e, {1, 0}, {1, 0}, {static_cast<float>(e + 1), 0});
  }
  const Result<ReferenceLayer> layer = checkpoint.open();
  ASSERT_TRUE(layer.has_value()) << layer.error().message();
  const double hidden[] = {1, 0};
  const int32_t used[] = {2};
  EXPECT_EQ(layer->run(hidden).experts[0], 0);
  const ReferenceToken token = layer->run(hidden, used);
  EXPECT_EQ(token.experts[0], 2);
  EXPECT_NEAR(token.output[0], 3 * kSilu1, 1e-14);
  EXPECT_EQ(token.selection_gap, layer->run(hidden).selection_gap);
}

TEST(ReferenceLayer, ASumOfUnequalRowsLosesNothing) {
  // Rows in the ratio 256 to seven times 1: a bf16 chain would stay at 256.
  SmallCheckpoint checkpoint("sum", 8, 8);
  checkpoint.add("gate.weight", {8, 2}, std::vector<float>(16, 0.0f));
  for (int e = 0; e < 8; ++e) {
    checkpoint.add_expert(e, {1, 0}, {1, 0}, {e == 0 ? 2048.0f : 8.0f, 0});
  }
  const Result<ReferenceLayer> layer = checkpoint.open();
  ASSERT_TRUE(layer.has_value()) << layer.error().message();
  const double hidden[] = {1, 0};
  EXPECT_NEAR(layer->run(hidden).output[0], 263 * kSilu1, 1e-12);
}

TEST(ReferenceLayer, ALayerWithoutExpertsIsRefused) {
  const std::string dir = std::string(ARGOSY_TESTDATA) + "/models/deepseek_v3_tiny";
  const Result<ReferenceLayer> layer = ReferenceLayer::open(dir, 0);
  ASSERT_FALSE(layer.has_value());
  EXPECT_EQ(layer.error().code(), StatusCode::kInvalidArgument);
}

struct Captured {
  const char* model;
  int layer;
};

class ReferenceCaptureTest : public ::testing::TestWithParam<Captured> {};

std::vector<double> row_of(const Tensor& tensor, int64_t row) {
  const int64_t width = tensor.view().dim(1);
  const float* const begin = tensor.view().as<float>() + row * width;
  return std::vector<double>(begin, begin + width);
}

// Tensors of the fp32 captures of one layer.
struct CaptureFile {
  std::shared_ptr<SafetensorsFile> file;
  std::string prefix;

  Tensor read(const std::string& name) const {
    Result<Tensor> tensor = file->read(prefix + name);
    EXPECT_TRUE(tensor.has_value()) << tensor.error().message();
    return std::move(tensor).value();
  }
};

TEST_P(ReferenceCaptureTest, AgreesWithThePublicImplementation) {
  const std::string dir = std::string(ARGOSY_TESTDATA) + "/models/" + GetParam().model;
  const Result<ReferenceLayer> layer = ReferenceLayer::open(dir, GetParam().layer);
  ASSERT_TRUE(layer.has_value()) << layer.error().message();
  const auto file = SafetensorsFile::open(dir + "/captures.safetensors");
  ASSERT_TRUE(file.has_value()) << file.error().message();
  const CaptureFile captures{*file, fmt::format("f32.layers.{}.", GetParam().layer)};
  const Tensor input = captures.read("moe_input");
  const Tensor idx = captures.read("topk_idx");
  const Tensor weights = captures.read("topk_weights");
  const Tensor output = captures.read("moe_output");
  const int64_t top_k = idx.view().dim(1);
  double peak = 0;
  double worst = 0;
  for (int64_t t = 0; t < input.view().dim(0); t += 7) {
    const ReferenceToken token = layer->run(row_of(input, t));
    std::map<int32_t, double> seen;
    std::map<int32_t, double> expected;
    for (int64_t k = 0; k < top_k; ++k) {
      seen[token.experts[static_cast<size_t>(k)]] = token.weights[static_cast<size_t>(k)];
      expected[idx.view().as<int32_t>()[t * top_k + k]] = weights.view().as<float>()[t * top_k + k];
    }
    ASSERT_EQ(seen.size(), expected.size()) << "token " << t;
    for (const auto& [expert, weight] : expected) {
      ASSERT_TRUE(seen.contains(expert)) << "token " << t << " expert " << expert;
      EXPECT_NEAR(seen[expert], weight, 2e-6 * weight) << "token " << t;
    }
    const std::vector<double> row = row_of(output, t);
    for (size_t i = 0; i < row.size(); ++i) {
      peak = std::max(peak, std::abs(row[i]));
      worst = std::max(worst, std::abs(row[i] - token.output[i]));
    }
  }
  EXPECT_LE(worst, 2e-6 * peak);
}

INSTANTIATE_TEST_SUITE_P(
    Families, ReferenceCaptureTest,
    ::testing::Values(Captured{"deepseek_v3_tiny", 1}, Captured{"deepseek_v3_tiny", 2},
                      Captured{"deepseek_v2_tiny", 1}, Captured{"mixtral_tiny", 0},
                      Captured{"olmoe_tiny", 1}, Captured{"qwen3_moe_tiny", 1},
                      Captured{"qwen2_moe_tiny", 0}, Captured{"qwen2_moe_tiny", 1},
                      Captured{"gpt_oss_tiny", 0}, Captured{"gpt_oss_tiny", 1}),
    [](const auto& param_info) {
      return fmt::format("{}_{}", param_info.param.model, param_info.param.layer);
    });

}  // namespace
}  // namespace argosy
