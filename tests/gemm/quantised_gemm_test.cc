// Quantised weights: every level against the definition in quantised_case.h, bit for bit, over formats, orders,
// ends of k and n, numbers of rows and threads; an fp64 product of dequantised weights; single sums by hand.
//
// Mutations tried, each makes a test fail: a partial that runs on over a block's end, one column's scale used for
// its neighbour.
#include <gtest/gtest.h>

#include <cmath>

#include "gemm/quantised_case.h"

namespace argosy {
namespace {

using testing::all_quantised;
using testing::below;
using testing::kAllValues;
using testing::QuantisedCase;
using testing::QuantisedSpec;
using testing::Values;

const std::vector<Level> kLevels = testing::usable_levels();

void expect_levels_equal_definition(const QuantisedSpec& spec) {
  SCOPED_TRACE(spec.text());
  const QuantisedCase gemm(spec);
  const std::vector<std::byte> want = gemm.expected();
  for (const Level level : kLevels) {
    ASSERT_TRUE(gemm.run(level) == want) << "level " << name_of(level);
  }
}

TEST(QuantisedGemm, EveryEndOfK) {
  std::mt19937 rng(20250301);
  for (QuantisedSpec spec : all_quantised()) {
    for (const int64_t k : {1, 2, 31, 32, 33, 64, 95, 127, 128, 129, 160, 191, 256, 257, 300}) {
      spec.n = 19;
      spec.k = k;
      spec.sizes = {1, 0, 2, 17};
      spec.values = kAllValues[rng() % 4];
      spec.seed = static_cast<uint32_t>(rng());
      expect_levels_equal_definition(spec);
      if (HasFatalFailure()) return;
    }
  }
}

// 128 x 128 blocks change in the middle of a panel of gate and up as well.
TEST(QuantisedGemm, EveryEndOfNBothKinds) {
  std::mt19937 rng(20250302);
  for (QuantisedSpec spec : all_quantised()) {
    for (const auto kind : {PackedWeights::Kind::kPlain, PackedWeights::Kind::kGateUp}) {
      for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 130, 145}) {
        spec.kind = kind;
        spec.n = n;
        spec.k = 140;
        spec.sizes = {2, 1};
        spec.values = kAllValues[rng() % 4];
        spec.seed = static_cast<uint32_t>(rng());
        expect_levels_equal_definition(spec);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Every number that a kernel takes at once, and several blocks, for which codes are decoded once.
TEST(QuantisedGemm, EveryNumberOfRows) {
  std::mt19937 rng(20250303);
  for (QuantisedSpec spec : all_quantised()) {
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25, 33, 100}) {
      spec.n = 33;
      spec.k = 165;
      spec.sizes = {rows};
      spec.seed = static_cast<uint32_t>(rng());
      expect_levels_equal_definition(spec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(QuantisedGemm, EveryClassOfValues) {
  std::mt19937 rng(20250304);
  for (QuantisedSpec spec : all_quantised()) {
    for (const Values values : kAllValues) {
      spec.n = 40;
      spec.k = 290;
      spec.sizes = {3, 14};
      spec.values = values;
      spec.seed = static_cast<uint32_t>(rng());
      expect_levels_equal_definition(spec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(QuantisedGemm, ThreadsDoNotChangeBits) {
  for (QuantisedSpec spec : all_quantised()) {
    spec.n = 100;
    spec.k = 130;
    spec.sizes = {3, 0, 40, 1};
    SCOPED_TRACE(spec.text());
    const QuantisedCase gemm(spec);
    const std::vector<std::byte> want = gemm.expected();
    for (const int threads : {2, 3}) {
      auto pool = ThreadPool::create(threads);
      ASSERT_TRUE(pool.has_value());
      for (const Level level : kLevels) {
        EXPECT_TRUE(gemm.run(level, pool->get()) == want) << threads << " " << name_of(level);
      }
    }
  }
}

// quantise() of a matrix, multiplied, against fp64 on what dequantises from it.
TEST(QuantisedGemm, AgreesWithFp64OnDequantisedWeights) {
  constexpr int64_t kN = 37, kK = 300;
  std::mt19937 rng(20250305);
  std::normal_distribution<float> normal;
  std::vector<float> w(kN * kK), x(kK), values(kN * kK), out(kN);
  for (float& value : w) value = normal(rng);
  for (float& value : x) value = normal(rng);
  for (const BlockFormat format : testing::kGemmFormats) {
    SCOPED_TRACE(name_of(format));
    QuantisedTensor codes =
        std::move(QuantisedTensor::create(*quantised_layout(format, kN, kK))).value();
    ASSERT_TRUE(quantise({}, ConstTensorView(w.data(), DType::kF32, {kN, kK}), codes.view()).ok());
    ASSERT_TRUE(
        dequantise({}, codes.view(), TensorView(values.data(), DType::kF32, {kN, kK})).ok());
    auto packed = PackedWeights::create_quantised(PackedWeights::Kind::kPlain, format, 1, kN, kK);
    ASSERT_TRUE(packed->set_group(0, std::as_const(codes).view()).ok());
    const int64_t offset = 0, size = 1;
    const RaggedRows rows{
        ConstTensorView(x.data(), DType::kF32, {1, kK}), {&offset, 1}, {&size, 1}};
    ASSERT_TRUE(grouped_gemm({}, rows, *packed, TensorView(out.data(), DType::kF32, {1, kN})).ok());
    for (size_t n = 0; n < kN; ++n) {
      double want = 0, magnitude = 0;
      for (size_t k = 0; k < kK; ++k) {
        const double product = double{x[k]} * double{values[n * kK + k]};
        want += product;
        magnitude += std::fabs(product);
      }
      ASSERT_NEAR(out[n], want, 2 * 0x1p-24 * (kK + 12) * magnitude) << n;
    }
  }
}

// One fp32 row by one column of MXFP8 codes.
float by_hand(const std::vector<float>& x, const std::vector<float>& w,
              const std::vector<uint8_t>& scales, Level level = Level::kGeneric) {
  const auto k = static_cast<int64_t>(x.size());
  QuantisedTensor tensor =
      std::move(QuantisedTensor::create(*quantised_layout(BlockFormat::kMxfp8, 1, k))).value();
  for (size_t i = 0; i < w.size(); ++i) {
    tensor.view().codes.as<uint8_t>()[i] = encode_element(ElementFormat::kE4M3, w[i]);
  }
  std::copy(scales.begin(), scales.end(), tensor.view().scales.as<uint8_t>());
  auto packed =
      PackedWeights::create_quantised(PackedWeights::Kind::kPlain, BlockFormat::kMxfp8, 1, 1, k);
  EXPECT_TRUE(packed->set_group(0, std::as_const(tensor).view()).ok());
  float out = -7;
  const int64_t offset = 0, size = 1;
  const RaggedRows rows{ConstTensorView(x.data(), DType::kF32, {1, k}), {&offset, 1}, {&size, 1}};
  GemmOptions options;
  options.level = level;
  EXPECT_TRUE(grouped_gemm(options, rows, *packed, TensorView(&out, DType::kF32, {1, 1})).ok());
  return out;
}

// Scales of 2^-127 (flushed), 2^-126, 2^127 and NaN: codes 0, 1, 254, 255 (K18).
TEST(QuantisedGemm, EdgeScaleCodes) {
  for (const Level level : kLevels) {
    EXPECT_EQ(by_hand({0x1p100f}, {1}, {0}, level), 0.0f);
    EXPECT_EQ(by_hand({0x1p100f}, {1}, {1}, level), 0x1p-26f);
    EXPECT_EQ(by_hand({0x1p-100f}, {1}, {254}, level), 0x1p27f);
    EXPECT_TRUE(std::isnan(by_hand({1}, {1}, {255}, level)));
    EXPECT_TRUE(std::isnan(by_hand({1}, {0}, {255}, level)));
  }
}

// 2^24 + 1 is 2^24 in fp32: two ones survive together, as the partial of their own block, but not one by one.
TEST(QuantisedGemm, PartialsAreSummedBeforeTheirScale) {
  std::vector<float> x(64, 1.0f), w(64, 0.0f);
  x[0] = 0x1p24f;
  w[0] = w[1] = w[2] = 1;
  EXPECT_EQ(by_hand(x, w, {127, 127}), 0x1p24f);
  w[1] = w[2] = 0, w[32] = w[33] = 1;
  EXPECT_EQ(by_hand(x, w, {127, 127}), 0x1p24f + 2);
  // Each block by its own scale.
  EXPECT_EQ(by_hand(x, w, {126, 129}), 0x1p23f + 8);
}

TEST(QuantisedGemm, NanCodesReachOnlyTheirColumn) {
  QuantisedSpec spec{.format = BlockFormat::kE4M3Row128, .rows = DType::kF32, .n = 33, .k = 130};
  std::mt19937 rng(5);
  QuantisedTensor w = testing::random_quantised(rng, spec.format, 33, 130, Values::kOrdinary);
  w.view().codes.as<uint8_t>()[17 * 130 + 129] = 0xFF;
  auto packed = PackedWeights::create_quantised(spec.kind, spec.format, 1, 33, 130);
  ASSERT_TRUE(packed->set_group(0, std::as_const(w).view()).ok());
  const std::vector<float> x(130, 1.0f);
  std::vector<float> out(33);
  const int64_t offset = 0, size = 1;
  const RaggedRows rows{ConstTensorView(x.data(), DType::kF32, {1, 130}), {&offset, 1}, {&size, 1}};
  for (const Level level : kLevels) {
    GemmOptions options;
    options.level = level;
    ASSERT_TRUE(
        grouped_gemm(options, rows, *packed, TensorView(out.data(), DType::kF32, {1, 33})).ok());
    for (size_t n = 0; n < out.size(); ++n) EXPECT_EQ(std::isnan(out[n]), n == 17) << n;
  }
}

}  // namespace
}  // namespace argosy
