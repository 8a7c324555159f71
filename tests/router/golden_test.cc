// Routings, losses and gradients against PyTorch autograd in fp64: testdata/router/, made by
// scripts/make_router_golden.py.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "argosy/balance_loss.h"
#include "argosy/router_backward.h"
#include "router/router_testing.h"
#include "support/golden_file.h"

namespace argosy::test {
namespace {

using argosy::testing::GoldenFile;

constexpr int64_t kExperts = 12;
constexpr int64_t kGroups = 4;
constexpr int64_t kKeptGroups = 2;
constexpr float kFactor = 2.5f;

RouterSpec spec_of_case(const nlohmann::json& one) {
  const std::map<std::string, ScoreFunction> functions = {
      {"softmax", ScoreFunction::kSoftmax},
      {"softmax_top_k", ScoreFunction::kSoftmaxTopK},
      {"sigmoid", ScoreFunction::kSigmoid},
      {"sqrt_softplus", ScoreFunction::kSqrtSoftplus}};
  const auto yes_no = [&](const char* name) {
    return one.at(name).get<bool>() ? Choice::kYes : Choice::kNo;
  };
  RouterSpec spec;
  spec.num_experts = kExperts;
  spec.top_k = one.at("top_k");
  spec.score_function = functions.at(one.at("function"));
  spec.selection_bias = yes_no("bias");
  spec.normalise = one.at("norm") == "no" ? Choice::kNo : Choice::kYes;
  spec.normalise_single = yes_no("single");
  spec.weight_norm = one.at("norm") == "reference" ? WeightNorm::kReference : WeightNorm::kExact;
  spec.routed_scaling_factor = kFactor;
  if (one.at("grouped").get<bool>()) {
    spec.num_groups = kGroups;
    spec.keep_groups = kKeptGroups;
    spec.group_score = GroupScore::kMax;
  }
  return spec;
}

// Relative to each value, plus what fp64 itself loses on sums of order 1.
void expect_close(const std::vector<float>& got, const std::vector<double>& want,
                  std::string_view what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 2e-7 * std::fabs(want[i]) + 1e-13) << what << " element " << i;
  }
}

struct Golden {
  Batch batch;
  Routing routing;
  std::vector<int32_t> sequence;
  std::vector<float> d_weights;

  RouterInput rows() const {
    RouterInput rows;
    rows.logits = ConstTensorView(batch.logits.data(), DType::kF32, {batch.num_tokens(), kExperts});
    rows.mask = batch.mask.data();
    return rows;
  }
};

// The choice, and the weights of what was chosen by both in whatever order of equal rank.
void expect_routing(const Golden& golden, const std::vector<int32_t>& experts,
                    const std::vector<double>& weights) {
  for (size_t i = 0; i < experts.size(); ++i) {
    const size_t token = i / static_cast<size_t>(golden.batch.spec.top_k);
    if (golden.batch.mask[token] == 0) continue;
    ASSERT_EQ(golden.routing.topk_idx[i], experts[i]);
    ASSERT_NEAR(golden.routing.topk_weights.values[i], weights[i], 5e-7 * weights[i]);
  }
}

template <typename Run>
std::vector<float> gradient_of(const Golden& golden, const Run& run) {
  std::vector<float> d_logits(golden.batch.logits.size(), NAN);
  const Status status =
      run(TensorView(d_logits.data(), DType::kF32, {golden.batch.num_tokens(), kExperts}));
  EXPECT_TRUE(status.ok()) << status.to_string();
  return d_logits;
}

std::vector<float> routing_gradient(const Golden& golden) {
  return gradient_of(golden, [&](const TensorView& out) {
    const ConstTensorView d_topk(golden.d_weights.data(), DType::kF32,
                                 {golden.batch.num_tokens(), golden.batch.spec.top_k});
    return route_backward(golden.batch.spec, golden.rows(), golden.routing, d_topk,
                          GradientMode::kWrite, nullptr, out);
  });
}

void check_losses(const Golden& golden, const GoldenFile& file, const std::string& name,
                  LossScale scale) {
  const RouterSpec& spec = golden.batch.spec;
  BalanceInput input;
  input.rows = golden.rows();
  input.routing = &golden.routing;
  input.sequence = golden.sequence.data();
  input.num_sequences = 2;
  const AuxLossSpec aux = {1.0, scale, 0};
  BalanceSums sums;
  ASSERT_TRUE(balance_sums(spec, input, nullptr, &sums).ok());
  const double want_aux = file.read<double>(name + "aux")[0];
  EXPECT_NEAR(*aux_loss(spec, aux, sums), want_aux, 1e-13 * want_aux);
  expect_close(gradient_of(golden,
                           [&](const TensorView& out) {
                             return aux_loss_backward(spec, aux, input, sums, 1.0,
                                                      GradientMode::kWrite, nullptr, out);
                           }),
               file.read<double>(name + "d_aux"), "d_aux");
  const Result<ZLossSums> z_sums = z_loss_sums(spec, input.rows, nullptr);
  ASSERT_TRUE(z_sums.has_value());
  const double want_z = file.read<double>(name + "z")[0];
  EXPECT_NEAR(z_loss(1.0, *z_sums), want_z, 1e-13 * want_z);
  expect_close(gradient_of(golden,
                           [&](const TensorView& out) {
                             return z_loss_backward(spec, 1.0, input.rows, z_sums->num_tokens, 1.0,
                                                    GradientMode::kWrite, nullptr, out);
                           }),
               file.read<double>(name + "d_z"), "d_z");
}

class RouterGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(RouterGolden, EqualsAutograd) {
  const GoldenFile file(std::string("router/") + GetParam() + ".safetensors");
  const auto cases =
      nlohmann::json::parse(file.header().at("__metadata__").at("cases").get<std::string>());
  ASSERT_EQ(cases.size(), 18u);
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cases[i].dump());
    const std::string name = std::to_string(i) + ".";
    Golden golden;
    golden.batch.spec = spec_of_case(cases[i]);
    golden.batch.logits = file.read<float>(name + "logits");
    if (golden.batch.spec.selection_bias == Choice::kYes) {
      golden.batch.bias = file.read<float>(name + "bias");
    }
    golden.batch.mask = file.read<uint8_t>(name + "mask");
    golden.sequence = file.read<int32_t>(name + "sequence");
    golden.d_weights = file.read<float>(name + "d_weights");
    golden.routing = route_ok(golden.batch);
    expect_routing(golden, file.read<int32_t>(name + "experts"),
                   file.read<double>(name + "weights"));
    expect_close(routing_gradient(golden), file.read<double>(name + "d_logits"), "d_logits");
    const bool huggingface = cases[i].at("huggingface");
    check_losses(golden, file, name, huggingface ? LossScale::kHuggingFace : LossScale::kMegatron);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RouterGolden,
                         ::testing::Values("softmax", "softmax_top_k", "sigmoid", "sqrt_softplus"),
                         [](const auto& one) { return std::string(one.param); });

// The whole chain: gate product, routing, weights and both losses, and back.
TEST(GateGolden, EqualsAutograd) {
  const GoldenFile file("router/gate.safetensors");
  const auto hidden = file.read<float>("hidden");
  const auto gate = file.read<float>("gate");
  const auto gate_bias = file.read<float>("gate_bias");
  const ConstTensorView hidden_view(hidden.data(), DType::kF32, {40, 16});
  const ConstTensorView gate_view(gate.data(), DType::kF32, {kExperts, 16});
  Golden golden;
  golden.batch.spec = spec_of("deepseek_v3", kExperts, 4);
  golden.batch.spec.selection_bias = Choice::kNo;
  golden.batch.spec.routed_scaling_factor = kFactor;
  golden.batch.logits.resize(40 * kExperts);
  golden.batch.mask = file.read<uint8_t>("mask");
  golden.d_weights = file.read<float>("d_weights");
  const TensorView logits(golden.batch.logits.data(), DType::kF32, {40, kExperts});
  ASSERT_TRUE(gate_logits(hidden_view, gate_view,
                          ConstTensorView(gate_bias.data(), DType::kF32, {kExperts}), nullptr,
                          logits)
                  .ok());
  golden.routing = route_ok(golden.batch);
  const RouterSpec& spec = golden.batch.spec;
  BalanceInput input;
  input.rows = golden.rows();
  input.routing = &golden.routing;
  BalanceSums sums;
  ASSERT_TRUE(balance_sums(spec, input, nullptr, &sums).ok());
  std::vector<float> d_logits = routing_gradient(golden);
  const TensorView d_view(d_logits.data(), DType::kF32, {40, kExperts});
  ASSERT_TRUE(aux_loss_backward(spec, {1.0, LossScale::kMegatron, 0}, input, sums, 0.5,
                                GradientMode::kAdd, nullptr, d_view)
                  .ok());
  ASSERT_TRUE(z_loss_backward(spec, 1.0, input.rows, sums.num_tokens[0], 0.25, GradientMode::kAdd,
                              nullptr, d_view)
                  .ok());
  std::vector<float> d_hidden(hidden.size());
  std::vector<float> d_gate(gate.size());
  std::vector<float> d_gate_bias(gate_bias.size());
  GateGradients out;
  out.d_hidden = TensorView(d_hidden.data(), DType::kF32, {40, 16});
  out.d_gate = TensorView(d_gate.data(), DType::kF32, {kExperts, 16});
  out.d_gate_bias = TensorView(d_gate_bias.data(), DType::kF32, {kExperts});
  ASSERT_TRUE(gate_backward(hidden_view, gate_view, d_view, nullptr, out).ok());
  const auto expect_near = [](const std::vector<float>& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-6) << i;
  };
  expect_near(d_hidden, file.read<double>("d_hidden"));
  expect_near(d_gate, file.read<double>("d_gate"));
  expect_near(d_gate_bias, file.read<double>("d_gate_bias"));
}

}  // namespace
}  // namespace argosy::test
