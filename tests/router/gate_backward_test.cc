// gate_backward() against one naive chain an output (numeric/dot.h), bit for bit: sizes around
// every tile, bf16 and fp32, masked rows, splits, threads, modes.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "argosy/bfloat16.h"
#include "argosy/router_backward.h"
#include "numeric/dot.h"
#include "platform/float_env.h"
#include "router/router_testing.h"

namespace argosy::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct GateCase {
  int64_t num_tokens = 0;
  int64_t num_experts = 0;
  int64_t num_hidden = 0;
  bool is_bf16 = false;
  std::vector<float> hidden;    // [T, H], values of the dtype
  std::vector<float> gate;      // [E, H]
  std::vector<float> d_logits;  // [T, E]

  float& d_logit(int64_t t, int64_t e) {
    return d_logits[static_cast<size_t>(t * num_experts + e)];
  }
};

struct Gradients {
  std::vector<float> d_hidden;
  std::vector<float> d_gate;
  std::vector<float> d_bias;
};

void round_all(std::vector<float>* values) {
  for (float& value : *values) value = BFloat16::from_float(value).to_float();
}

GateCase make_case(std::mt19937_64& random, int64_t tokens, int64_t experts, int64_t hidden,
                   bool is_bf16) {
  GateCase made{tokens, experts, hidden, is_bf16, {}, {}, {}};
  made.hidden = normal_logits(random, static_cast<size_t>(tokens * hidden), 1.0f);
  made.gate = normal_logits(random, static_cast<size_t>(experts * hidden), 0.1f);
  made.d_logits = normal_logits(random, static_cast<size_t>(tokens * experts), 0.01f);
  if (is_bf16) {
    round_all(&made.hidden);
    round_all(&made.gate);
  }
  // Mostly zero, as a top-k leaves it, and some rows altogether.
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      if (t % 5 == 3 || (t + e) % 3 == 0) made.d_logit(t, e) = (t + e) % 2 == 0 ? 0.0f : -0.0f;
    }
  }
  return made;
}

bool takes_part(const GateCase& made, int64_t token) {
  for (int64_t e = 0; e < made.num_experts; ++e) {
    if (made.d_logits[static_cast<size_t>(token * made.num_experts + e)] != 0.0f) return true;
  }
  return false;
}

[[gnu::noinline]] Gradients naive(const GateCase& made) {
  const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
  const auto at = [](int64_t row, int64_t width, int64_t i) {
    return static_cast<size_t>(row * width + i);
  };
  Gradients out;
  std::vector<int64_t> tokens;
  for (int64_t t = 0; t < made.num_tokens; ++t) {
    if (takes_part(made, t)) tokens.push_back(t);
    for (int64_t h = 0; h < made.num_hidden; ++h) {
      const float sum = numeric::dot_f32_of(
          made.num_experts, [&](int64_t e) { return made.d_logits[at(t, made.num_experts, e)]; },
          [&](int64_t e) { return made.gate[at(e, made.num_hidden, h)]; });
      out.d_hidden.push_back(takes_part(made, t) ? sum : 0.0f);
    }
  }
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t e = 0; e < made.num_experts; ++e) {
    const auto d = [&](int64_t i) {
      return made.d_logits[at(tokens[static_cast<size_t>(i)], made.num_experts, e)];
    };
    for (int64_t h = 0; h < made.num_hidden; ++h) {
      out.d_gate.push_back(numeric::dot_f32_of(count, d, [&](int64_t i) {
        return made.hidden[at(tokens[static_cast<size_t>(i)], made.num_hidden, h)];
      }));
    }
    out.d_bias.push_back(numeric::dot_f32_of(count, d, [](int64_t) { return 1.0f; }));
  }
  return out;
}

struct Buffers {
  std::vector<BFloat16> hidden;
  std::vector<BFloat16> gate;
};

ConstTensorView view_of(const std::vector<float>& values, bool is_bf16, int64_t rows,
                        int64_t columns, std::vector<BFloat16>* buffer) {
  if (!is_bf16) return ConstTensorView(values.data(), DType::kF32, {rows, columns});
  buffer->clear();
  for (const float value : values) buffer->push_back(BFloat16::from_float(value));
  return ConstTensorView(buffer->data(), DType::kBF16, {rows, columns});
}

Status run(const GateCase& made, ThreadPool* pool, GradientMode hidden_mode,
           GateGradientMode gate_mode, Gradients* out) {
  Buffers buffers;
  const int64_t width = made.num_hidden;
  GateGradients gradients;
  gradients.d_hidden = TensorView(out->d_hidden.data(), DType::kF32, {made.num_tokens, width});
  gradients.d_hidden_mode = hidden_mode;
  gradients.d_gate = TensorView(out->d_gate.data(), DType::kF32, {made.num_experts, width});
  gradients.d_gate_bias = TensorView(out->d_bias.data(), DType::kF32, {made.num_experts});
  gradients.d_gate_mode = gate_mode;
  const ConstTensorView d_logits(made.d_logits.data(), DType::kF32,
                                 {made.num_tokens, made.num_experts});
  return gate_backward(view_of(made.hidden, made.is_bf16, made.num_tokens, width, &buffers.hidden),
                       view_of(made.gate, made.is_bf16, made.num_experts, width, &buffers.gate),
                       d_logits, pool, gradients);
}

Gradients buffers_of(const GateCase& made, float value) {
  return {std::vector<float>(static_cast<size_t>(made.num_tokens * made.num_hidden), value),
          std::vector<float>(static_cast<size_t>(made.num_experts * made.num_hidden), value),
          std::vector<float>(static_cast<size_t>(made.num_experts), value)};
}

Gradients run_ok(const GateCase& made, ThreadPool* pool = nullptr) {
  Gradients out = buffers_of(made, kNaN);
  const Status status = run(made, pool, GradientMode::kWrite, GateGradientMode::kWrite, &out);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return out;
}

void expect_same(const Gradients& got, const Gradients& want) {
  EXPECT_TRUE(same_bits(got.d_hidden, want.d_hidden));
  EXPECT_TRUE(same_bits(got.d_gate, want.d_gate));
  EXPECT_TRUE(same_bits(got.d_bias, want.d_bias));
}

TEST(GateBackward, EqualsTheNaiveChainsAtEverySize) {
  constexpr uint64_t kSeed = 701;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  const int64_t sizes[][3] = {{1, 1, 1},   {7, 8, 9},     {8, 64, 32}, {65, 65, 33},
                              {64, 7, 31}, {0, 8, 16},    {300, 3, 5}, {3, 300, 7},
                              {9, 8, 0},   {257, 16, 70}, {320, 9, 40}};
  for (const auto& size : sizes) {
    for (const bool is_bf16 : {false, true}) {
      SCOPED_TRACE(testing::Message() << size[0] << " tokens " << size[1] << " experts " << size[2]
                                      << " hidden, bf16 " << is_bf16);
      const GateCase made = make_case(random, size[0], size[1], size[2], is_bf16);
      const Gradients want = naive(made);
      expect_same(run_ok(made), want);
      const auto pool = make_pool(3);
      expect_same(run_ok(made, pool.get()), want);
    }
  }
}

// Rows without a gradient (masked, replaced) may hold anything.
TEST(GateBackward, NeverReadsTheHiddenRowOfATokenWithoutAGradient) {
  std::mt19937_64 random(702);
  GateCase made = make_case(random, 40, 16, 24, false);
  const Gradients want = run_ok(made);
  for (int64_t t = 3; t < 40; t += 5) {
    for (int64_t h = 0; h < 24; ++h) made.hidden[static_cast<size_t>(t * 24 + h)] = kNaN;
  }
  expect_same(run_ok(made), want);
  Gradients added = buffers_of(made, 1.0f);
  ASSERT_TRUE(run(made, nullptr, GradientMode::kAdd, GateGradientMode::kWrite, &added).ok());
  for (int64_t t = 0; t < 40; ++t) {
    const auto at = static_cast<size_t>(t * 24);
    ASSERT_EQ(added.d_hidden[at], t % 5 == 3 ? 1.0f : 1.0f + want.d_hidden[at]);
  }
}

// K06, C054: any split of the tokens over ranks, in order, gives the bits of one rank.
TEST(GateBackward, ChainsGoOnOverSplits) {
  constexpr uint64_t kSeed = 703;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 20; ++round) {
    const GateCase whole = make_case(random, 90, 12, 40, round % 2 == 0);
    const Gradients want = run_ok(whole);
    Gradients got = buffers_of(whole, kNaN);
    int64_t first = 0;
    while (first < 90) {
      const int64_t last =
          std::min<int64_t>(90, first + std::uniform_int_distribution<int64_t>(0, 50)(random));
      GateCase part = whole;
      part.num_tokens = last - first;
      part.hidden = {whole.hidden.begin() + first * 40, whole.hidden.begin() + last * 40};
      part.d_logits = {whole.d_logits.begin() + first * 12, whole.d_logits.begin() + last * 12};
      const auto mode = first == 0 ? GateGradientMode::kWrite : GateGradientMode::kContinue;
      ASSERT_TRUE(run(part, nullptr, GradientMode::kWrite, mode, &got).ok());
      first = last;
    }
    EXPECT_TRUE(same_bits(got.d_gate, want.d_gate));
    EXPECT_TRUE(same_bits(got.d_bias, want.d_bias));
  }
}

// Contract 4.3, exact: a rank computes some columns of d_gate from those columns of all rows.
TEST(GateBackward, AColumnSliceGivesThoseColumns) {
  std::mt19937_64 random(707);
  const GateCase made = make_case(random, 50, 10, 48, false);
  const Gradients want = run_ok(made);
  const ConstTensorView d_logits(made.d_logits.data(), DType::kF32, {50, 10});
  for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, 13}, {13, 48}}) {
    ConstTensorView slice(made.hidden.data() + first, DType::kF32, {50, last - first});
    slice.strides[0] = 48;
    std::vector<float> d_gate(static_cast<size_t>(10 * (last - first)));
    GateGradients gradients;
    gradients.d_gate = TensorView(d_gate.data(), DType::kF32, {10, last - first});
    ASSERT_TRUE(gate_backward(slice, {}, d_logits, nullptr, gradients).ok());
    for (int64_t e = 0; e < 10; ++e) {
      for (int64_t h = first; h < last; ++h) {
        ASSERT_EQ(d_gate[static_cast<size_t>(e * (last - first) + h - first)],
                  want.d_gate[static_cast<size_t>(e * 48 + h)]);
      }
    }
  }
}

TEST(GateBackward, AMainGradientIsAddedLastAndOnce) {
  std::mt19937_64 random(704);
  const GateCase made = make_case(random, 33, 9, 17, true);
  const Gradients chains = run_ok(made);
  Gradients sums = buffers_of(made, 0.7f);
  ASSERT_TRUE(run(made, nullptr, GradientMode::kAdd, GateGradientMode::kAdd, &sums).ok());
  for (size_t i = 0; i < sums.d_gate.size(); ++i) {
    ASSERT_EQ(sums.d_gate[i], 0.7f + chains.d_gate[i]);
  }
  for (size_t i = 0; i < sums.d_bias.size(); ++i) {
    ASSERT_EQ(sums.d_bias[i], 0.7f + chains.d_bias[i]);
  }
}

TEST(GateBackward, FlushesDenormalsAndWritesTheOneNaN) {
  std::mt19937_64 random(705);
  GateCase made = make_case(random, 2, 2, 3, false);
  made.d_logits = {1e-40f, 0.0f, 1e-20f, -kNaN};
  made.gate = {1e30f, 1.0f, 1.0f, 0.0f, 0.0f, 0.0f};
  const Gradients out = run_ok(made);
  EXPECT_EQ(out.d_hidden[0], 0.0f);
  EXPECT_EQ(std::bit_cast<uint32_t>(out.d_hidden[3]), 0x7FC00000u);
  EXPECT_EQ(std::bit_cast<uint32_t>(out.d_gate[3]), 0x7FC00000u);
  EXPECT_EQ(out.d_bias[0], 1e-20f);
  expect_same(out, naive(made));
}

TEST(GateBackward, ComputesOnlyWhatIsAskedAndRefusesShapes) {
  std::mt19937_64 random(706);
  const GateCase made = make_case(random, 4, 3, 5, false);
  const ConstTensorView hidden(made.hidden.data(), DType::kF32, {4, 5});
  const ConstTensorView d_logits(made.d_logits.data(), DType::kF32, {4, 3});
  std::vector<float> d_gate(15);
  GateGradients gradients;
  gradients.d_gate = TensorView(d_gate.data(), DType::kF32, {3, 5});
  ASSERT_TRUE(gate_backward(hidden, {}, d_logits, nullptr, gradients).ok());
  EXPECT_TRUE(same_bits(d_gate, run_ok(made).d_gate));
  gradients.d_gate = TensorView(d_gate.data(), DType::kF32, {3, 4});
  Status status = gate_backward(hidden, {}, d_logits, nullptr, gradients);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("d_gate is F32 [3, 4], expected dense F32 [3, 5]"),
            std::string::npos);
  gradients.d_hidden = TensorView(d_gate.data(), DType::kF32, {4, 3});
  status = gate_backward(hidden, {}, d_logits, nullptr, gradients);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("gate is"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace argosy::test
