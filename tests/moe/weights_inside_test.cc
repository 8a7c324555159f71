// Weights inside the activation: the naive twin's bytes and the same gradients in any setup and under any tape policy; the
// gradients of weights at combine where a layer means the same either way; what cannot be had is refused.
#include <gtest/gtest.h>

#include <cmath>

#include "moe/training_step.h"

namespace argosy {
namespace {

using testing::Gradients;
using testing::LayerCase;
using testing::Matrix;
using testing::NaiveLayer;
using testing::rows_of;
using testing::run_backward;
using testing::run_group;
using testing::RunSetup;

NaiveLayer inside_layer(const LayerCase& param) {
  NaiveLayer layer = testing::layer_of(param);
  layer.weights_inside = true;
  return layer;
}

class WeightsInside : public ::testing::TestWithParam<LayerCase> {};

TEST_P(WeightsInside, BytesAreThoseOfTheTwinInAnySetup) {
  const NaiveLayer layer = inside_layer(GetParam());
  const Matrix hidden = rows_of(layer, 45, 5), d_output = rows_of(layer, 45, 6);
  const std::vector<std::byte> output = testing::naive_bytes(layer, hidden, nullptr);
  const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
  EXPECT_TRUE(want.output == output);
  constexpr Keep kAgain = Keep::kRecompute;
  for (const RunSetup& setup :
       {RunSetup{.num_ranks = 3, .threads = 2, .steps = 2}, RunSetup{.num_ranks = 8},
        RunSetup{.num_ranks = 4, .budget_rows = 7},
        RunSetup{.num_ranks = 1, .level = Level::kReference},
        RunSetup{.num_ranks = 2,
        .budget_rows = 12,
        .alignment = 4,
        .policy = {kAgain, kAgain, kAgain, kAgain}},
        RunSetup{.num_ranks = 3, .budget_rows = 9, .policy = {kAgain, Keep::kSave, kAgain}},
        RunSetup{.num_ranks = 2, .policy = {Keep::kOffload, kAgain, Keep::kSave, Keep::kFp8}}}) {
    Gradients got = run_backward(layer, hidden, d_output, nullptr, setup);
    EXPECT_NEAR(got.norm, want.norm, 1e-9 * want.norm);  // added rank by rank
    got.norm = want.norm;
    EXPECT_TRUE(got == want) << setup.num_ranks << " ranks, " << to_string(setup.policy);
  }
}

// forward() has no tape; a routing from outside has weights of its own.
TEST_P(WeightsInside, ForwardAloneAndRoutedGiveTheSameBytes) {
  const NaiveLayer layer = inside_layer(GetParam());
  const Matrix hidden = rows_of(layer, 20, 5);
  const std::vector<std::byte> want = testing::naive_bytes(layer, hidden, nullptr);
  const Tensor input = testing::to_tensor(hidden, layer.dtype);
  run_group(
      2,
      [&](Group& group) {
        MoeOptions options;
        options.hidden_dtype = layer.dtype;
        options.weights_inside = true;
        options.receive_budget_bytes = 8 * layer.hidden * size_of(layer.dtype);
        const std::unique_ptr<MoeLayer> moe = std::move(*MoeLayer::create(
            group, layer.router, std::move(*testing::weights_for_rank(layer, group.rank(), 2)),
            options));
        const ConstTensorView x = input.view().rows(group.rank() * 10, 10);
        Tensor output = std::move(*Tensor::zeros(layer.dtype, {10, layer.hidden}));
        const auto expect_same = [&] {
          const size_t bytes = output.bytes().size();
          EXPECT_EQ(std::memcmp(output.bytes().data(),
                                want.data() + static_cast<size_t>(group.rank()) * bytes, bytes),
                    0);
        };
        ASSERT_TRUE(moe->forward(x, nullptr, output.view(), nullptr).ok());
        expect_same();
        EXPECT_TRUE(moe->routing().topk_weights.applied);
        const Routing routing = moe->routing();
        const ConstTensorView idx(routing.topk_idx.data(), DType::kI32, {10, routing.top_k});
        const ConstTensorView weights(routing.topk_weights.values.data(), DType::kF32,
                                      {10, routing.top_k});
        std::memset(output.view().data, 0xFF, static_cast<size_t>(output.num_bytes()));
        ASSERT_TRUE(moe->forward_routed(x, idx, weights, output.view(), nullptr).ok());
        expect_same();
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) { options.dot_order = layer.order; });
}

INSTANTIATE_TEST_SUITE_P(
    Cases, WeightsInside,
    ::testing::Values(LayerCase{DType::kBF16, DotOrder::kAmx, true, true},
                      LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false, true},
                      LayerCase{DType::kF32, DotOrder::kVdpbf16, true, true},
                      LayerCase{DType::kF32, DotOrder::kVdpbf16, false, false, true}));

void expect_near(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  float peak = 0;
  for (const float value : want) peak = std::max(peak, std::abs(value));
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5f * peak);
}

// y = W (w h) = w (W h): without a bias behind it a layer is the same function, so its gradients are.
TEST(WeightsInsideGradients, AreThoseOfWeightsAtCombineWhereThatIsTheSame) {
  const NaiveLayer inside = inside_layer({DType::kF32, DotOrder::kVdpbf16, true, true});
  NaiveLayer combine = inside;
  combine.weights_inside = false;
  const Matrix hidden = rows_of(inside, 45, 5), d_output = rows_of(inside, 45, 6);
  const Gradients got = run_backward(inside, hidden, d_output, nullptr, {.num_ranks = 2});
  const Gradients want = run_backward(combine, hidden, d_output, nullptr, {});
  EXPECT_FALSE(got.expert_down == want.expert_down);
  for (const auto member :
       {&Gradients::gate, &Gradients::expert_gate, &Gradients::expert_up, &Gradients::expert_down,
        &Gradients::topk_weights, &Gradients::shared_up}) {
    expect_near(got.*member, want.*member);
  }
}

// A bias behind the second product is not weighted: its gradient is a sum of d_output, and no part of a weight's.
TEST(WeightsInsideGradients, LeaveTheLastBiasUnweighted) {
  const NaiveLayer inside = inside_layer({DType::kF32, DotOrder::kVdpbf16, false, false, true});
  NaiveLayer combine = inside;
  combine.weights_inside = false;
  const Matrix hidden = rows_of(inside, 12, 5), d_output = rows_of(inside, 12, 6);
  const Gradients got = run_backward(inside, hidden, d_output, nullptr, {});
  const Gradients at_combine = run_backward(combine, hidden, d_output, nullptr, {});
  expect_near(got.expert_down, at_combine.expert_down);
  const int64_t top_k = inside.router.top_k, h = inside.hidden;
  Matrix logits{12, 9, std::vector<float>(12 * 9)};
  for (int64_t t = 0; t < 12; ++t) {
    for (int64_t e = 0; e < 9; ++e) {
      logits.values[static_cast<size_t>(t * 9 + e)] =
          numeric::dot_f32(std::span(hidden.row(t), static_cast<size_t>(h)),
                           std::span(inside.gate.row(e), static_cast<size_t>(h))) +
          inside.gate_bias[static_cast<size_t>(e)];
    }
  }
  Routing routing;
  ASSERT_TRUE(route(inside.router,
                    {ConstTensorView(logits.values.data(), DType::kF32, {12, 9}), {}, nullptr},
                    nullptr, &routing)
                  .ok());
  std::vector<float> bias(static_cast<size_t>(9 * h), 0.0f);
  std::vector<float> weights = at_combine.topk_weights;
  for (int64_t at = 0; at < 12 * top_k; ++at) {
    const int64_t e = routing.topk_idx[static_cast<size_t>(at)];
    const float* const d_out = d_output.row(at / top_k);
    double part = 0;
    for (int64_t i = 0; i < h; ++i) {
      bias[static_cast<size_t>(e * h + i)] += d_out[i];
      part += static_cast<double>(d_out[i]) *
              static_cast<double>(
                  inside.experts[static_cast<size_t>(e)].down_bias[static_cast<size_t>(i)]);
    }
    weights[static_cast<size_t>(at)] -= static_cast<float>(part);
  }
  expect_near(got.expert_down_bias, bias);
  expect_near(got.topk_weights, weights);
}

TEST(WeightsInsideErrors, WhatCannotBeHadIsRefused) {
  const NaiveLayer layer = inside_layer({});
  run_group(1, [&](Group& group) {
    const auto refused = [&](const MoeOptions& options, const char* text) {
      const auto made = MoeLayer::create(
          group, layer.router, std::move(*testing::weights_for_rank(layer, 0, 1)), options);
      ASSERT_FALSE(made.has_value());
      EXPECT_EQ(made.error().code(), StatusCode::kUnsupported);
      EXPECT_NE(made.error().message().find(text), std::string::npos) << made.error().to_string();
    };
    MoeOptions options;
    options.hidden_dtype = layer.dtype;
    options.weights_inside = true;
    options.mode = MoeMode::kLatency;
    refused(options, "in latency mode");
    options.mode = MoeMode::kThroughput;
    options.payload = BlockFormat::kE4M3Row128;
    refused(options, "with a quantised payload");
  });
}

}  // namespace
}  // namespace argosy
