// gate_logits against the naive chain: one fp32 FMA chain over hidden, denormals flushed, bit for
// bit.
#include <gtest/gtest.h>
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "argosy/bfloat16.h"
#include "router/kernel.h"
#include "router/router_testing.h"

namespace argosy::test {
namespace {

constexpr const void* kNoData = nullptr;

// Denormals in and out count as zero; written without MXCSR so that it shares nothing with the
// code.
float flush(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

float naive_logit(const float* x, const float* gate, int64_t hidden) {
  float acc = 0.0f;
  for (int64_t h = 0; h < hidden; ++h) acc = flush(std::fma(flush(x[h]), flush(gate[h]), acc));
  return acc + 0.0f;
}

struct GateCase {
  int64_t tokens;
  int64_t hidden;
  int64_t experts;
};

std::vector<float> values_with_edges(std::mt19937_64& random, int64_t count, bool bf16) {
  std::vector<float> values = normal_logits(random, static_cast<size_t>(count), 1.0f);
  for (float& value : values) {
    const uint64_t kind = random() % 16;
    if (kind == 0) value *= 0x1p-130f;  // denormal
    if (kind == 1) value *= 0x1p-70f;   // products near the flush limit
    if (kind == 2) value = -0.0f;
    if (bf16) value = BFloat16::from_float(value).to_float();
  }
  return values;
}

std::vector<BFloat16> narrow(const std::vector<float>& values) {
  std::vector<BFloat16> result;
  for (const float value : values) result.push_back(BFloat16::from_float(value));
  return result;
}

TEST(GateLogits, EqualsTheNaiveChainForAllShapesDtypesAndThreads) {
  constexpr uint64_t kSeed = 41;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  const auto pool = make_pool(3);
  const GateCase cases[] = {{1, 1, 1},   {7, 255, 7},   {8, 256, 8},  {9, 257, 9}, {63, 31, 16},
                            {64, 64, 1}, {65, 600, 17}, {130, 33, 5}, {0, 16, 4},  {3, 0, 4}};
  for (const GateCase& c : cases) {
    for (const bool bf16_x : {false, true}) {
      for (const bool bf16_gate : {false, true}) {
        const auto x = values_with_edges(random, c.tokens * c.hidden, bf16_x);
        const auto gate = values_with_edges(random, c.experts * c.hidden, bf16_gate);
        const auto x16 = narrow(x);
        const auto gate16 = narrow(gate);
        const ConstTensorView x_view =
            bf16_x ? ConstTensorView(x16.data(), DType::kBF16, {c.tokens, c.hidden})
                   : ConstTensorView(x.data(), DType::kF32, {c.tokens, c.hidden});
        const ConstTensorView gate_view =
            bf16_gate ? ConstTensorView(gate16.data(), DType::kBF16, {c.experts, c.hidden})
                      : ConstTensorView(gate.data(), DType::kF32, {c.experts, c.hidden});
        std::vector<float> want;
        for (int64_t t = 0; t < c.tokens; ++t) {
          for (int64_t e = 0; e < c.experts; ++e) {
            want.push_back(
                naive_logit(x.data() + t * c.hidden, gate.data() + e * c.hidden, c.hidden));
          }
        }
        for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), pool.get()}) {
          std::vector<float> got(want.size(), std::nanf(""));
          const TensorView out(got.data(), DType::kF32, {c.tokens, c.experts});
          const unsigned before = _mm_getcsr();
          ASSERT_TRUE(gate_logits(x_view, gate_view, {}, threads, out).ok());
          EXPECT_EQ(_mm_getcsr(), before);
          ASSERT_TRUE(same_bits(got, want)) << c.tokens << " " << c.hidden << " " << c.experts;
        }
      }
    }
  }
}

TEST(GateLogits, BiasIsAddedOnceAndKeepsDenormals) {
  const std::vector<float> x = {1.0f, 2.0f, 0.0f, -0.0f};
  const std::vector<float> gate = {3.0f, 4.0f, -1.0f, 0.5f, 0x1p-149f, 0.0f};
  const std::vector<float> bias = {0.25f, 0x1p-149f, -0x1p-140f};
  std::vector<float> logits(6);
  const TensorView out(logits.data(), DType::kF32, {2, 3});
  const ConstTensorView x_view(x.data(), DType::kF32, {2, 2});
  const ConstTensorView gate_view(gate.data(), DType::kF32, {3, 2});
  ASSERT_TRUE(
      gate_logits(x_view, gate_view, ConstTensorView(bias.data(), DType::kF32, {3}), nullptr, out)
          .ok());
  EXPECT_EQ(logits,
            (std::vector<float>{11.25f, 0x1p-149f, -0x1p-140f, 0.25f, 0x1p-149f, -0x1p-140f}));
  const auto bias16 = narrow({0.25f, 1.0f, 2.0f});
  ASSERT_TRUE(gate_logits(x_view, gate_view, ConstTensorView(bias16.data(), DType::kBF16, {3}),
                          nullptr, out)
                  .ok());
  EXPECT_EQ(logits, (std::vector<float>{11.25f, 1.0f, 2.0f, 0.25f, 1.0f, 2.0f}));
  for (const float logit : logits) EXPECT_FALSE(std::signbit(logit) && logit == 0.0f);
}

TEST(GateLogits, ReadsStridedRowsAndStopsAtTheEdges) {
  const float nan = std::nanf("");
  // Row stride 3 over hidden 2: what lies between rows must not be read as data.
  const std::vector<float> x = {1.0f, 2.0f, nan, 3.0f, 4.0f, nan};
  const std::vector<float> gate = {10.0f, 1.0f};
  ConstTensorView view(x.data(), DType::kF32, {2, 2});
  view.strides[0] = 3;
  std::vector<float> logits = {7.0f, 7.0f, 7.0f, 7.0f};  // guards around two results
  ASSERT_TRUE(gate_logits(view, ConstTensorView(gate.data(), DType::kF32, {1, 2}), {}, nullptr,
                          TensorView(logits.data() + 1, DType::kF32, {2, 1}))
                  .ok());
  EXPECT_EQ(logits, (std::vector<float>{7.0f, 12.0f, 34.0f, 7.0f}));
}

// A chain that ends in a flushed negative product ends in -0.
TEST(GateLogits, WritesNoNegativeZero) {
  const float x = -0x1p-100f;
  const float gate = 0x1p-100f;
  float logit = -1.0f;
  ASSERT_TRUE(gate_logits(ConstTensorView(&x, DType::kF32, {1, 1}),
                          ConstTensorView(&gate, DType::kF32, {1, 1}), {}, nullptr,
                          TensorView(&logit, DType::kF32, {1, 1}))
                  .ok());
  EXPECT_EQ(std::bit_cast<uint32_t>(logit), 0u);
}

TEST(GateLogits, WritesOneNan) {
  std::vector<float> x(16, 1.0f);
  x[3] = std::bit_cast<float>(0xFFC12345u);
  const std::vector<float> gate(16 * 3, 1.0f);
  std::vector<float> logits(3);
  ASSERT_TRUE(gate_logits(ConstTensorView(x.data(), DType::kF32, {1, 16}),
                          ConstTensorView(gate.data(), DType::kF32, {3, 16}), {}, nullptr,
                          TensorView(logits.data(), DType::kF32, {1, 3}))
                  .ok());
  for (const float logit : logits) EXPECT_EQ(std::bit_cast<uint32_t>(logit), 0x7FC00000u);
}

TEST(GateLogits, TileBitsDoNotDependOnTheCompilation) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP() << "no FMA";
  std::mt19937_64 random(42);
  const auto x = normal_logits(random, router::kGateTokens * router::kGateHidden, 1.0f);
  const auto panel = normal_logits(random, router::kGateExperts * router::kGateHidden, 1.0f);
  const auto start = normal_logits(random, router::kGateExperts * router::kGateTokens, 1.0f);
  for (const int64_t depth : {0, 1, 7, 256}) {
    std::vector<float> a = start;
    std::vector<float> b = start;
    router::kBaselineKernel.gate_tile(x.data(), panel.data(), depth, a.data());
    router::kFmaKernel.gate_tile(x.data(), panel.data(), depth, b.data());
    EXPECT_TRUE(same_bits(a, b)) << depth;
  }
}

TEST(GateLogits, RefusesShapesByName) {
  const std::vector<float> data(64, 0.0f);
  std::vector<float> out(64);
  const ConstTensorView x(data.data(), DType::kF32, {4, 3});
  const ConstTensorView gate(data.data(), DType::kF32, {5, 3});
  const TensorView logits(out.data(), DType::kF32, {4, 5});
  const auto message = [&](const ConstTensorView& h, const ConstTensorView& g,
                           const ConstTensorView& b, const TensorView& l) {
    const Status status = gate_logits(h, g, b, nullptr, l);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  ConstTensorView transposed = x;
  transposed.strides = {1, 4};
  EXPECT_NE(message(transposed, gate, {}, logits).find("strides [1, 4]"), std::string::npos);
  EXPECT_NE(
      message(ConstTensorView(data.data(), DType::kI32, {4, 3}), gate, {}, logits).find("I32"),
      std::string::npos);
  EXPECT_NE(
      message(x, ConstTensorView(data.data(), DType::kF32, {5, 4}), {}, logits).find("[5, 4]"),
      std::string::npos);
  EXPECT_NE(message(x, gate, ConstTensorView(data.data(), DType::kF32, {4}), logits).find("[5]"),
            std::string::npos);
  EXPECT_NE(message(x, gate, {}, TensorView(out.data(), DType::kF32, {5, 4})).find("[4, 5]"),
            std::string::npos);
  EXPECT_NE(message(x, gate, {}, TensorView(out.data(), DType::kBF16, {4, 5})).find("BF16"),
            std::string::npos);
  EXPECT_NE(message(ConstTensorView(kNoData, DType::kF32, {4, 3}), gate, {}, logits).find("hidden"),
            std::string::npos);
}

}  // namespace
}  // namespace argosy::test
