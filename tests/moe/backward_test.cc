// The layer's backward: the same bytes for any ranks, threads, levels, receive rounds and tape policies, with skewed, empty
// and masked tokens and on dirty buffers; numerical derivatives; sizes as predicted; errors that every rank sees.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <set>

#include "argosy/moe.h"
#include "moe/layer_cases.h"
#include "moe/training_step.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::Gradients;
using testing::layer_of;
using testing::LayerCase;
using testing::Matrix;
using testing::NaiveLayer;
using testing::rows_of;
using testing::run_backward;
using testing::run_group;
using testing::RunSetup;
using testing::view_of;

class BackwardBits : public ::testing::TestWithParam<LayerCase> {};

TEST_P(BackwardBits, AreTheSameForAnySetup) {
  const NaiveLayer layer = layer_of(GetParam());
  const Matrix hidden = rows_of(layer, 45, 5), d_output = rows_of(layer, 45, 6);
  const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
  for (const float value : want.expert_down) ASSERT_TRUE(std::isfinite(value));
  const TapePolicy nothing{Keep::kRecompute, Keep::kRecompute, Keep::kRecompute, Keep::kRecompute};
  const TapePolicy rows_only{Keep::kSave, Keep::kRecompute, Keep::kRecompute, Keep::kRecompute};
  const TapePolicy no_h{Keep::kRecompute, Keep::kSave, Keep::kRecompute, Keep::kSave};
  const TapePolicy no_results{Keep::kSave, Keep::kSave, Keep::kSave, Keep::kRecompute};
  const TapePolicy h_only{Keep::kSave, Keep::kRecompute, Keep::kSave, Keep::kRecompute};
  for (const RunSetup& setup :
       {RunSetup{.num_ranks = 2}, RunSetup{.num_ranks = 3, .threads = 2, .steps = 3},
        RunSetup{.num_ranks = 4, .budget_rows = 7}, RunSetup{.num_ranks = 8, .steps = 2},
        RunSetup{.num_ranks = 16}, RunSetup{.num_ranks = 1, .level = Level::kReference},
        RunSetup{.num_ranks = 2, .budget_rows = 12, .alignment = 4, .policy = nothing, .steps = 2},
        RunSetup{.num_ranks = 3, .policy = rows_only}, RunSetup{.num_ranks = 3, .policy = no_h},
        RunSetup{.num_ranks = 1, .policy = no_results},
        RunSetup{.num_ranks = 2, .policy = h_only}}) {
    const Gradients got = run_backward(layer, hidden, d_output, nullptr, setup);
    EXPECT_TRUE(got.hidden == want.hidden) << setup.num_ranks;
    EXPECT_EQ(got.gate, want.gate) << setup.num_ranks;
    EXPECT_EQ(got.gate_bias, want.gate_bias);
    EXPECT_EQ(got.expert_gate, want.expert_gate) << setup.num_ranks;
    EXPECT_EQ(got.expert_up, want.expert_up);
    EXPECT_EQ(got.expert_down, want.expert_down);
    EXPECT_EQ(got.expert_gate_bias, want.expert_gate_bias);
    EXPECT_EQ(got.expert_down_bias, want.expert_down_bias);
    EXPECT_EQ(got.shared_gate, want.shared_gate);
    EXPECT_EQ(got.shared_up, want.shared_up);
    EXPECT_EQ(got.shared_down, want.shared_down);
    EXPECT_EQ(got.shared_scale, want.shared_scale);
    EXPECT_EQ(got.topk_weights, want.topk_weights);
    EXPECT_NEAR(got.norm, want.norm, 1e-9 * want.norm);
  }
}

// Masked tokens: rows of zeros, never read, part of no gradient: as if they were not there.
TEST_P(BackwardBits, MaskedTokensTakePartInNothing) {
  const NaiveLayer layer = layer_of(GetParam());
  Matrix hidden = rows_of(layer, 20, 5), d_output = rows_of(layer, 20, 6);
  std::vector<uint8_t> mask(20, 1);
  Matrix kept_hidden{0, layer.hidden, {}}, kept_output{0, layer.hidden, {}};
  for (int64_t token = 0; token < 20; ++token) {
    float* const row = hidden.values.data() + token * layer.hidden;
    float* const d_row = d_output.values.data() + token * layer.hidden;
    if (token % 3 == 0) {
      mask[static_cast<size_t>(token)] = 0;
      std::fill_n(row, layer.hidden, std::nanf(""));
      std::fill_n(d_row, layer.hidden, std::nanf(""));
      continue;
    }
    kept_hidden.values.insert(kept_hidden.values.end(), row, row + layer.hidden);
    kept_output.values.insert(kept_output.values.end(), d_row, d_row + layer.hidden);
    ++kept_hidden.rows;
    ++kept_output.rows;
  }
  const Gradients want = run_backward(layer, kept_hidden, kept_output, nullptr, {});
  const Gradients got = run_backward(layer, hidden, d_output, mask.data(), {.num_ranks = 3});
  EXPECT_EQ(got.gate, want.gate);
  EXPECT_EQ(got.expert_gate, want.expert_gate);
  EXPECT_EQ(got.expert_down, want.expert_down);
  EXPECT_EQ(got.shared_down, want.shared_down);
  std::vector<std::byte> rows;
  const auto row_bytes = static_cast<int64_t>(got.hidden.size()) / 20;
  for (int64_t token = 0; token < 20; ++token) {
    const auto begin = got.hidden.begin() + token * row_bytes;
    if (mask[static_cast<size_t>(token)] != 0) {
      rows.insert(rows.end(), begin, begin + row_bytes);
    } else {
      EXPECT_TRUE(
          std::all_of(begin, begin + row_bytes, [](std::byte b) { return b == std::byte{0}; }));
    }
  }
  EXPECT_TRUE(rows == want.hidden);
}

INSTANTIATE_TEST_SUITE_P(Cases, BackwardBits,
                         ::testing::Values(LayerCase{DType::kBF16, DotOrder::kAmx, true, true},
                                           LayerCase{DType::kBF16, DotOrder::kVdpbf16, true, false},
                                           LayerCase{DType::kF32, DotOrder::kVdpbf16, true, true},
                                           LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false,
                                                     true}));

// A main gradient is added once: a second call doubles weight gradients exactly and leaves the others.
TEST(Backward, AccumulatesWeightGradients) {
  const NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  const Matrix hidden = rows_of(layer, 30, 5), d_output = rows_of(layer, 30, 6);
  const Gradients once = run_backward(layer, hidden, d_output, nullptr, {.num_ranks = 3});
  const Gradients twice =
      run_backward(layer, hidden, d_output, nullptr, {.num_ranks = 3, .accumulated = 1});
  const auto doubled = [](std::vector<float> values) {
    for (float& value : values) value += value;
    return values;
  };
  EXPECT_TRUE(twice.hidden == once.hidden);
  EXPECT_EQ(twice.topk_weights, once.topk_weights);
  EXPECT_EQ(twice.gate, doubled(once.gate));
  EXPECT_EQ(twice.expert_gate, doubled(once.expert_gate));
  EXPECT_EQ(twice.expert_down, doubled(once.expert_down));
  EXPECT_EQ(twice.shared_gate, doubled(once.shared_gate));
  EXPECT_EQ(twice.shared_scale, doubled(once.shared_scale));
}

// A loss on the logits reaches gate and hidden states, and no expert.
TEST(Backward, LossGradientsOfTheLogitsAreAdded) {
  const NaiveLayer layer = layer_of({DType::kF32, DotOrder::kVdpbf16, false, false});
  const Matrix hidden = rows_of(layer, 30, 5), d_output = rows_of(layer, 30, 6);
  const Gradients plain = run_backward(layer, hidden, d_output, nullptr, {});
  const Gradients with = run_backward(layer, hidden, d_output, nullptr, {.d_logits = 0.5f});
  EXPECT_EQ(with.expert_gate, plain.expert_gate);
  EXPECT_FALSE(with.hidden == plain.hidden);
  for (int64_t e = 0; e < 9; ++e) {
    for (int64_t h = 0; h < layer.hidden; ++h) {
      double more = 0;
      for (int64_t token = 0; token < 30; ++token) {
        more += 0.5 * static_cast<double>(hidden.row(token)[h]);
      }
      const auto at = static_cast<size_t>(e * layer.hidden + h);
      ASSERT_NEAR(with.gate[at], static_cast<double>(plain.gate[at]) + more, 1e-3);
    }
  }
  Gradients split =
      run_backward(layer, hidden, d_output, nullptr, {.num_ranks = 4, .d_logits = 0.5f});
  split.norm = with.norm;
  EXPECT_TRUE(split == with);
}

// No token on some ranks, one hot expert, nothing at all.
TEST(Backward, EmptyRanksAndNoTokens) {
  const NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  for (const int64_t tokens : {0, 1, 2}) {
    const Matrix hidden = rows_of(layer, tokens, 5), d_output = rows_of(layer, tokens, 6);
    const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
    Gradients got = run_backward(layer, hidden, d_output, nullptr, {.num_ranks = 5, .steps = 2});
    EXPECT_NEAR(got.norm, want.norm, 1e-9 * want.norm);  // added rank by rank
    got.norm = want.norm;
    EXPECT_TRUE(got == want) << tokens;
    if (tokens == 0) {
      for (const float value : got.expert_gate) ASSERT_EQ(value, 0.0f);
    }
  }
}

// Within 1e-6 of the exact ones, and repeatable.
TEST(Backward, ReducedGradientsAreNearExactOnes) {
  const NaiveLayer layer = layer_of({DType::kF32, DotOrder::kVdpbf16, true, true});
  const Matrix hidden = rows_of(layer, 45, 5), d_output = rows_of(layer, 45, 6);
  const Gradients exact = run_backward(layer, hidden, d_output, nullptr, {});
  const RunSetup setup{.num_ranks = 4, .replicated = ReplicatedGradients::kReduced};
  const Gradients reduced = run_backward(layer, hidden, d_output, nullptr, setup);
  EXPECT_EQ(reduced.expert_gate, exact.expert_gate);
  const auto expect_near = [](const std::vector<float>& got, const std::vector<float>& want) {
    ASSERT_EQ(got.size(), want.size());
    float peak = 0;
    for (const float value : want) peak = std::max(peak, std::abs(value));
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-6f * peak);
  };
  expect_near(reduced.gate, exact.gate);
  expect_near(reduced.shared_gate, exact.shared_gate);
  expect_near(reduced.shared_scale, exact.shared_scale);
  EXPECT_TRUE(run_backward(layer, hidden, d_output, nullptr, setup) == reduced);
}

// What is wrong with one rank's call is every rank's error, and the group goes on.
TEST(Backward, BadCallsAreEveryRanksErrorAndTheGroupGoesOn) {
  const NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, false, false});
  const Matrix hidden = rows_of(layer, 6, 5);
  const Tensor input = testing::to_tensor(hidden, layer.dtype);
  run_group(
      2,
      [&](Group& group) {
        const auto make = [&](bool training) {
          MoeOptions options;
          options.hidden_dtype = layer.dtype;
          options.training = training;
          return std::move(*MoeLayer::create(
              group, layer.router,
              std::move(*testing::weights_for_rank(layer, group.rank(), group.num_ranks())),
              options));
        };
        const std::unique_ptr<MoeLayer> moe = make(true), other = make(true), plain = make(false);
        const ConstTensorView x = input.view().rows(group.rank() * 3, 3);
        Tensor output = std::move(*Tensor::zeros(layer.dtype, {3, layer.hidden}));
        MoeTape tape, empty;
        EXPECT_EQ(plain->forward_train(x, nullptr, output.view(), &tape, nullptr).code(),
                  StatusCode::kUnsupported);
        EXPECT_EQ(plain->backward(tape, x, x, {}, {}).code(), StatusCode::kUnsupported);
        const bool is_bad = group.rank() == 1;
        const auto expect_error = [&](MoeLayer& target, const MoeTape& used,
                                      const ConstTensorView& d, const MoeGradients& g,
                                      StatusCode code, const char* text) {
          const Status status = target.backward(used, x, d, {}, g);
          EXPECT_EQ(status.code(), code) << status.to_string();
          EXPECT_NE(status.message().find(text), std::string::npos) << status.to_string();
        };
        ASSERT_TRUE(moe->forward_train(x, nullptr, output.view(), &tape, nullptr).ok());
        expect_error(*moe, is_bad ? empty : tape, x, {}, StatusCode::kStalePlan,
                     "rank 1: the tape is empty");
        expect_error(*other, tape, x, {}, StatusCode::kStalePlan,
                     "rank 0: the tape was filled by another layer");
        expect_error(*moe, tape, is_bad ? x.rows(0, 2) : x, {}, StatusCode::kInvalidArgument,
                     "rank 1: d_output is BF16 [2, 37]");
        MoeGradients wrong;
        std::vector<float> values;
        if (is_bad) wrong.d_gate = view_of(values, {9, 36});
        expect_error(*moe, tape, x, wrong, StatusCode::kInvalidArgument,
                     "rank 1: d_gate is F32 [9, 36]");
        EXPECT_TRUE(moe->backward(tape, x, x, {}, {}).ok());  // also without any gradient asked for
        EXPECT_TRUE(moe->forward(x, nullptr, output.view(), nullptr).ok());
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) { options.dot_order = layer.order; });
}

}  // namespace
}  // namespace argosy
