// Block formats against the naive twin: every format, level, dtype, direction; sizes around every block and vector
// (kind K18).
#include <gtest/gtest.h>

#include <cstring>

#include "quant/quant_cases.h"

namespace argosy::testing {
namespace {

constexpr uint32_t kSeed = 20260817;
constexpr DType kDTypes[] = {DType::kBF16, DType::kF32};

std::vector<float> transposed(const std::vector<float>& x, int64_t rows, int64_t cols) {
  std::vector<float> out(x.size());
  for (int64_t i = 0; i < rows * cols; ++i) {
    out[static_cast<size_t>(i % cols * rows + i / cols)] = x[static_cast<size_t>(i)];
  }
  return out;
}

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1},     {3, 15},   {2, 16},   {2, 17},  {3, 31},  {3, 32},
                             {2, 33},    {2, 63},   {3, 64},   {2, 65},  {3, 127}, {2, 128},
                             {4, 129},   {2, 255},  {5, 256},  {3, 257}, {1, 513}, {130, 3},
                             {129, 130}, {2, 4097}, {24, 1100}};

// Dequantised bits of the view against the oracle's values.
void expect_dequantised(const ConstQuantisedView& quantised, const OracleMatrix& want,
                        Level level) {
  for (const DType dtype : kDTypes) {
    const int64_t stride = want.cols + 3;
    std::vector<std::byte> out(static_cast<size_t>(want.rows * stride * size_of(dtype)),
                               std::byte{0xA5});
    TensorView view(out.data(), dtype, {want.rows, want.cols});
    view.strides[0] = stride;
    DequantiseOptions options;
    options.level = level;
    const Status status = dequantise(options, quantised, view);
    ASSERT_TRUE(status.ok()) << status.message();
    for (int64_t i = 0; i < want.rows * want.cols; ++i) {
      const float value = want.values[static_cast<size_t>(i)];
      const std::byte* const at =
          out.data() + (i / want.cols * stride + i % want.cols) * size_of(dtype);
      if (dtype == DType::kBF16) {
        ASSERT_EQ(reinterpret_cast<const BFloat16*>(at)->bits, BFloat16::from_float(value).bits)
            << name_of(quantised.format) << " element " << i << " of " << want.cols;
      } else {
        ASSERT_EQ(*reinterpret_cast<const uint32_t*>(at), std::bit_cast<uint32_t>(value))
            << name_of(quantised.format) << " element " << i << " of " << want.cols;
      }
    }
    for (int64_t r = 0; r < want.rows; ++r) {  // between the rows nothing is written
      ASSERT_EQ(out[static_cast<size_t>((r * stride + want.cols) * size_of(dtype))],
                std::byte{0xA5});
    }
  }
}

void expect_both_ways(BlockFormat format, const std::vector<float>& x, const Shape& shape,
                      DType dtype, QuantiseOptions options) {
  const auto [rows, cols] = shape;
  const OracleMatrix want = oracle_quantise(format, x, rows, cols, options);
  const std::vector<float> turned = transposed(x, rows, cols);
  const Stored values(x, rows, cols, cols + 5, dtype);
  const Stored turned_values(turned, cols, rows, rows + 1, dtype);
  for (const Level level : kernel_levels()) {
    SCOPED_TRACE(std::string(name_of(level)));
    options.level = level;
    QuantisedTensor straight = make_quantised(layout_of(format, rows, cols));
    Status status = quantise(options, values.view, straight.view());
    ASSERT_TRUE(status.ok()) << status.message();
    expect_quantised(std::as_const(straight).view(), want);
    QuantisedTensor turned_out = make_quantised(layout_of(format, rows, cols));
    status = transpose_quantise(options, turned_values.view, turned_out.view());
    ASSERT_TRUE(status.ok()) << status.message();
    expect_quantised(std::as_const(turned_out).view(), want);
    expect_dequantised(std::as_const(straight).view(), want, level);
  }
}

TEST(Block, EveryFormatLevelDtypeAndDirectionGivesTheTwinsBytes) {
  std::mt19937 rng(kSeed);
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  for (const Shape& shape : kShapes) {
    for (const DType dtype : kDTypes) {
      const std::vector<float> x = case_values(rng, shape.rows, shape.cols, dtype, true);
      for (const BlockFormat format : kAllFormats) {
        SCOPED_TRACE(std::string(name_of(format)) + " " + std::string(name_of(dtype)) + " " +
                     std::to_string(shape.rows) + " x " + std::to_string(shape.cols));
        expect_both_ways(format, x, shape, dtype, {});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Block, OptionsGiveTheTwinsBytes) {
  std::mt19937 rng(kSeed + 1);
  const Shape shape{12, 300};
  QuantiseOptions nan_overflow, other_rule, zero_code;
  nan_overflow.overflow = Overflow::kNaN;
  zero_code.zero_block_code = 0;
  for (const DType dtype : kDTypes) {
    for (const BlockFormat format : kAllFormats) {
      for (const E8M0Rule rule : {E8M0Rule::kFloor, E8M0Rule::kCeil}) {
        other_rule.e8m0_rule = rule;
        for (const QuantiseOptions& options : {nan_overflow, other_rule, zero_code}) {
          const std::vector<float> x = case_values(rng, shape.rows, shape.cols, dtype, true);
          expect_both_ways(format, x, shape, dtype, options);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Every bf16 mantissa of amax with every bf16 mantissa of x, at the exponents where codes are normal, denormal and
// 0: all quotients that bf16 inputs can have.
TEST(Block, EveryPairOfBf16MantissasIsTheTrueQuotient) {
  constexpr int64_t kCols = 128;
  for (const int amax_field : {127, 60, 20, 250}) {
    for (uint32_t mantissa = 0; mantissa < 128; ++mantissa) {
      const auto amax = static_cast<uint32_t>(amax_field) << 23 | mantissa << 16;
      std::vector<float> x;
      for (int below = 0; below < 20; ++below) {
        for (uint32_t i = 0; i < kCols; ++i) {
          const uint32_t word = amax_field - below < 0
                                    ? 0
                                    : static_cast<uint32_t>(amax_field - below) << 23 | i << 16;
          const bool fits = (word & 0x7FFFFFFFu) <= amax;
          x.push_back(std::bit_cast<float>((fits ? word : amax) | (i % 2) << 31));
        }
        x[x.size() - 1 - mantissa] = std::bit_cast<float>(amax);
      }
      const auto rows = static_cast<int64_t>(x.size()) / kCols;
      const Stored values(x, rows, kCols, kCols, DType::kBF16);
      const OracleMatrix want = oracle_quantise(BlockFormat::kE4M3Row128, x, rows, kCols, {});
      for (const Level level : kernel_levels()) {
        QuantiseOptions options;
        options.level = level;
        QuantisedTensor out = make_quantised(layout_of(BlockFormat::kE4M3Row128, rows, kCols));
        ASSERT_TRUE(quantise(options, values.view, out.view()).ok());
        expect_quantised(std::as_const(out).view(), want);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Quotients of fp32 values next to every midpoint between codes: where a product with the reciprocal would be wrong.
TEST(Block, Fp32QuotientsNextToMidpointsAreTrue) {
  std::mt19937 rng(kSeed + 4);
  SCOPED_TRACE("seed " + std::to_string(kSeed + 4));
  constexpr int64_t kCols = 128;
  for (int round = 0; round < 60; ++round) {
    const float amax = std::bit_cast<float>(random_bits(rng, Values::kOrdinary) & 0x7FFFFFFFu);
    const float scale = amax / 448.0f;
    std::vector<float> x;
    for (int code = 0; code < max_code(ElementFormat::kE4M3); ++code) {
      const double middle =
          (definition(ElementFormat::kE4M3, code) + definition(ElementFormat::kE4M3, code + 1)) / 2;
      const auto word =
          std::bit_cast<int32_t>(static_cast<float>(middle * static_cast<double>(scale)));
      for (int32_t ulps = -4; ulps <= 4; ++ulps) {
        if (x.size() % kCols == 0) x.push_back(amax);
        const float value = std::bit_cast<float>(word + ulps);
        x.push_back(ulps % 2 == 0 ? value : -value);
      }
    }
    x.resize((x.size() + kCols - 1) / kCols * kCols, 0.0f);
    x[x.size() - 1] = amax;
    const Shape shape{static_cast<int64_t>(x.size()) / kCols, kCols};
    expect_both_ways(BlockFormat::kE4M3Row128, x, shape, DType::kF32, {});
    if (HasFatalFailure()) return;
  }
}

TEST(Block, NamedScaleCases) {
  const float amaxes[] = {1.0f, 1.5f, 1.75f, 1.76f, 3.5f, 480.0f};  // C181
  const int floor_codes[] = {119, 119, 119, 119, 120, 127};
  const int ceil_codes[] = {119, 119, 119, 120, 120, 128};
  for (size_t i = 0; i < 6; ++i) {
    const ConstTensorView x(&amaxes[i], DType::kF32, {1, 1});
    for (const bool ceil : {false, true}) {
      QuantisedTensor out =
          make_quantised(layout_of(ceil ? BlockFormat::kMxfp8Ceil : BlockFormat::kMxfp8, 1, 1));
      ASSERT_TRUE(quantise({}, x, out.view()).ok());
      EXPECT_EQ(stored_scale(out.view(), 0, 0),
                static_cast<uint32_t>((ceil ? ceil_codes : floor_codes)[i]));
      EXPECT_TRUE(amaxes[i] != 480.0f || code_at(out.view(), 0, 0) == (ceil ? 0x77 : 0x7E));
    }
  }
}

// The bound of K18: half a step of the element at the block's scale, and what clipping at the largest costs.
TEST(Block, DequantisedErrorStaysWithinTheBlocksBound) {
  std::mt19937 rng(kSeed + 2);
  for (const BlockFormat format : kAllFormats) {
    const BlockFormatInfo info = info_of(format);
    const bool e4m3 = info.element == ElementFormat::kE4M3;
    const int64_t rows = 40, cols = 260;
    const std::vector<float> x = case_values(rng, rows, cols, DType::kF32, false);
    const OracleMatrix m = oracle_quantise(format, x, rows, cols, {});
    for (int64_t i = 0; i < rows * cols; ++i) {
      const auto at = static_cast<size_t>(i);
      const int64_t block = i / cols / info.block_rows * m.block_cols + i % cols / info.block_cols;
      const uint32_t stored = m.scales[static_cast<size_t>(block)];
      double scale = static_cast<double>(std::bit_cast<float>(stored));
      if (info.scale_dtype == DType::kE8M0)
        scale = static_cast<double>(oracle_e8m0(static_cast<int>(stored)));
      if (info.scale_dtype == DType::kE4M3) {
        scale = static_cast<double>(oracle_decode(ElementFormat::kE4M3, static_cast<int>(stored))) *
                static_cast<double>(m.tensor);
      }
      const double value = std::fabs(static_cast<double>(x[at]));
      // Normal elements: half of 2^-3 (2^-1) relative; below: half of the smallest step; clipping: floor rule, NVFP4's scale.
      const double step = e4m3 ? 0x1p-10 : 0.25;
      double bound = std::max(value * (e4m3 ? 0x1p-4 : 0.25), scale * step) * (1 + 1e-6) + 0x1p-149;
      bound = std::max(bound, value - (e4m3 ? 448 : 6) * scale * (1 - 1e-6));
      ASSERT_LE(std::fabs(static_cast<double>(m.values[at]) - static_cast<double>(x[at])), bound)
          << name_of(format) << " " << x[at] << " scale " << scale;
      if (x[at] == 0) {
        ASSERT_EQ(std::bit_cast<uint32_t>(m.values[at]), std::bit_cast<uint32_t>(x[at]));
      }
    }
  }
}

TEST(Block, ThreadsAndStreamingDoNotMatter) {
  std::mt19937 rng(kSeed + 3);
  const int64_t rows = 4099, cols = 4160;  // 17 million codes: past the caches
  const std::vector<float> few = case_values(rng, 7, cols, DType::kBF16, true);
  std::vector<float> x;
  for (int64_t r = 0; r < rows; ++r) {
    const auto from = few.begin() + r % 7 * cols;
    x.insert(x.end(), from, from + cols);
  }
  const Stored values(x, rows, cols, cols, DType::kBF16);
  Result<std::unique_ptr<ThreadPool>> pool = ThreadPool::create(3);
  ASSERT_TRUE(pool.has_value());
  for (const BlockFormat format : {BlockFormat::kE4M3Row128, BlockFormat::kMxfp8}) {
    const OracleMatrix want = oracle_quantise(format, few, 7, cols, {});
    QuantiseOptions options;
    options.pool = pool->get();
    QuantisedTensor out = make_quantised(layout_of(format, rows, cols));
    ASSERT_TRUE(quantise(options, values.view, out.view()).ok());
    const ConstQuantisedView got = std::as_const(out).view();
    expect_quantised(got, want);
    for (int64_t r = 7; r < rows; ++r) {
      ASSERT_EQ(std::memcmp(got.codes.row(r), got.codes.row(r % 7), static_cast<size_t>(cols)), 0);
    }
    Result<Tensor> back = Tensor::zeros(DType::kBF16, {rows, cols});
    ASSERT_TRUE(back.has_value());
    DequantiseOptions decode;
    decode.pool = pool->get();
    ASSERT_TRUE(dequantise(decode, got, back->view()).ok());
    for (int64_t i = 0; i < rows * cols; ++i) {
      const float value = want.values[static_cast<size_t>(i / cols % 7 * cols + i % cols)];
      ASSERT_EQ(back->view().as<BFloat16>()[i].bits, BFloat16::from_float(value).bits) << i;
    }
  }
}

}  // namespace
}  // namespace argosy::testing
