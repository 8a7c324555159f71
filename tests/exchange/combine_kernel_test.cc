// Both builds of the combine kernel against scalar steps written out here; bit for bit.
#include "exchange/combine_kernel.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

namespace argosy {
namespace {

// Floats of every exponent, with zeros, denormals, Inf and NaN among them.
std::vector<float> draw(std::mt19937_64& random, int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) {
    const uint64_t word = random();
    value = std::bit_cast<float>(static_cast<uint32_t>(word));
    if (word >> 62 == 0) value = std::ldexp(static_cast<float>(word % 1000) / 500.0f - 1.0f, 3);
  }
  return values;
}

uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

bool same(float a, float b) { return bits(a) == bits(b) || (std::isnan(a) && std::isnan(b)); }

class CombineKernelTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) {
      GTEST_SKIP() << "this CPU has no FMA";
    }
  }
  const CombineKernel& kernel() const {
    return GetParam() ? kCombineKernelFma : kCombineKernelBase;
  }
};

TEST_P(CombineKernelTest, EqualsScalarSteps) {
  std::mt19937_64 random(11);
  for (const int64_t n : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 257}) {
    const auto size = static_cast<size_t>(n);
    const std::vector<float> row = draw(random, n);
    const std::vector<float> addend = draw(random, n);
    std::vector<BFloat16> row16(size);
    std::vector<BFloat16> addend16(size);
    for (size_t i = 0; i < size; ++i) {
      row16[i] = BFloat16::from_float(row[i]);
      addend16[i] = BFloat16::from_float(addend[i]);
    }
    std::vector<float> acc(size + 1, 123.0f);
    std::vector<float> acc16(size + 1, 123.0f);
    kernel().start_f32(row.data(), 0.75f, n, acc.data());
    kernel().start_bf16(row16.data(), 0.75f, n, acc16.data());
    kernel().add_f32(addend.data(), n, acc.data());
    kernel().add_bf16(addend16.data(), n, acc16.data());
    kernel().fma_f32(-1.3f, addend.data(), n, acc.data());
    kernel().fma_bf16(-1.3f, addend16.data(), n, acc16.data());
    std::vector<float> out(size + 1, 321.0f);
    std::vector<BFloat16> out16(size + 1, BFloat16{77});
    kernel().store_f32(acc.data(), n, out.data());
    kernel().store_bf16(acc16.data(), n, out16.data());
    for (size_t i = 0; i < size; ++i) {
      const float want = std::fma(-1.3f, addend[i], row[i] * 0.75f + addend[i]);
      ASSERT_TRUE(same(acc[i], want)) << n << " " << i;
      ASSERT_EQ(bits(out[i]), std::isnan(want) ? 0x7FC00000u : bits(want));
      const float wide = addend16[i].to_float();
      const float want16 = std::fma(-1.3f, wide, row16[i].to_float() * 0.75f + wide);
      ASSERT_EQ(out16[i].bits, BFloat16::from_float(want16).bits) << n << " " << i;
    }
    EXPECT_EQ(acc[size], 123.0f);
    EXPECT_EQ(out[size], 321.0f);
    EXPECT_EQ(out16[size].bits, 77);
  }
}

TEST_P(CombineKernelTest, StartsFromPlusZeroWithoutARow) {
  std::vector<float> acc(5, -1.0f);
  kernel().start_f32(nullptr, 1.0f, 5, acc.data());
  for (const float value : acc) EXPECT_EQ(bits(value), 0u);
  kernel().start_bf16(nullptr, 1.0f, 5, acc.data());
  for (const float value : acc) EXPECT_EQ(bits(value), 0u);
}

// K25, C245: eight bf16 rows, 256 and seven times 1, weights 1: 263 in fp32, rounded once to 264.
TEST_P(CombineKernelTest, SumsInFp32AndRoundsOnce) {
  float acc = 0.0f;
  for (int k = 0; k < 8; ++k) {
    const BFloat16 row = BFloat16::from_float(k == 0 ? 256.0f : 1.0f);
    kernel().fma_bf16(1.0f, &row, 1, &acc);
  }
  EXPECT_EQ(acc, 263.0f);
  BFloat16 out;
  kernel().store_bf16(&acc, 1, &out);
  EXPECT_EQ(out.to_float(), 264.0f);
}

INSTANTIATE_TEST_SUITE_P(Builds, CombineKernelTest, ::testing::Bool(),
                         [](const auto& build) { return build.param ? "fma" : "base"; });

}  // namespace
}  // namespace argosy
