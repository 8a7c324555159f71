// What is refused, with which code and which values in the message.
#include <gtest/gtest.h>

#include "quant/quant_cases.h"

namespace argosy::testing {
namespace {

void expect_error(const Status& status, StatusCode code, const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos) << word << " in " << status.message();
  }
}

class Arguments : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 3, kCols = 260;

  std::vector<float> x_ = std::vector<float>(kRows * kCols, 1.0f);
  Stored values_{x_, kRows, kCols, kCols, DType::kF32};

  QuantisedTensor quantised(BlockFormat format) {
    QuantisedTensor out = make_quantised(layout_of(format, kRows, kCols));
    EXPECT_TRUE(quantise({}, values_.view, out.view()).ok());
    return out;
  }
  Status decode(const ConstQuantisedView& in, OnNonFinite on_nan = OnNonFinite::kNaN) {
    std::vector<float> out(static_cast<size_t>(kRows * kCols));
    DequantiseOptions options;
    options.on_nan_scale = on_nan;
    const Status full =
        dequantise(options, in, TensorView(out.data(), DType::kF32, {kRows, kCols}));
    const Status check = check_quantised(options, in);
    EXPECT_EQ(full.message(), check.message());
    return full;
  }
};

TEST_F(Arguments, ShapesAndDtypesAreNamed) {
  QuantisedTensor out = quantised(BlockFormat::kE4M3Row128);
  QuantisedView wrong = out.view();
  wrong.scales.shape[1] = 2;
  expect_error(quantise({}, values_.view, wrong), StatusCode::kInvalidArgument,
               {"scales", "[3, 2]", "F32 [3, 3]"});
  expect_error(decode(wrong), StatusCode::kInvalidArgument, {"scales", "[3, 2]", "[3, 3]"});
  wrong = out.view();
  wrong.format = BlockFormat::kE4M3Row128E8M0;  // fp32 scales where powers of two are due
  expect_error(decode(wrong), StatusCode::kInvalidArgument, {"scales", "F32", "F8_E8M0"});
  wrong = out.view();
  wrong.codes.dtype = DType::kE5M2;
  expect_error(decode(wrong), StatusCode::kInvalidArgument, {"codes", "F8_E5M2", "F8_E4M3"});
  wrong = out.view();
  wrong.codes.strides[0] = kCols - 1;
  expect_error(quantise({}, values_.view, wrong), StatusCode::kInvalidArgument,
               {"codes", "overlap"});
  ConstTensorView bad = values_.view;
  bad.strides[1] = 2;
  expect_error(quantise({}, bad, out.view()), StatusCode::kInvalidArgument, {"values", "stride"});
  bad = values_.view;
  bad.dtype = DType::kF16;
  expect_error(quantise({}, bad, out.view()), StatusCode::kInvalidArgument, {"F16", "BF16 or F32"});
  bad = values_.view;
  bad.data = nullptr;
  expect_error(quantise({}, bad, out.view()), StatusCode::kInvalidArgument, {"values", "no data"});
  expect_error(quantise({}, values_.view, QuantisedView()), StatusCode::kInvalidArgument,
               {"unset"});
  QuantisedTensor nvfp4 = quantised(BlockFormat::kNvfp4);
  QuantisedView no_tensor = nvfp4.view();
  no_tensor.tensor_scales = {};
  expect_error(decode(no_tensor), StatusCode::kInvalidArgument, {"tensor_scales", "F32 [1]"});
  QuantiseOptions options;
  options.zero_block_code = 5;
  expect_error(quantise(options, values_.view, out.view()), StatusCode::kInvalidArgument,
               {"zero_block_code is 5"});
}

TEST_F(Arguments, NonFiniteBlocksAreNamedWhenTheCallerAsks) {
  std::vector<float> x = x_;
  x[2 * kCols + 200] = INFINITY;
  x[1 * kCols + 129] = NAN;  // the first in row-major order
  const Stored values(x, kRows, kCols, kCols, DType::kF32);
  QuantiseOptions options;
  options.on_non_finite = OnNonFinite::kError;
  for (const BlockFormat format : kAllFormats) {
    const BlockFormatInfo info = info_of(format);
    QuantisedTensor out = make_quantised(layout_of(format, kRows, kCols));
    const std::string row = info.block_rows == 1 ? "row 1," : "row of blocks 0,";
    const std::string block = "block " + std::to_string(129 / info.block_cols);
    expect_error(quantise(options, values.view, out.view()), StatusCode::kNonFinite, {row, block});
    EXPECT_TRUE(quantise({}, values.view, out.view()).ok());
    // As a NaN block it is an error only for a reader who asks.
    EXPECT_TRUE(decode(std::as_const(out).view()).ok());
    expect_error(decode(std::as_const(out).view(), OnNonFinite::kError), StatusCode::kNonFinite,
                 {row.substr(0, row.size() - 1), block, "NaN"});
  }
}

TEST_F(Arguments, ScalesOutsideTheRuleAreCorrupt) {
  QuantisedTensor f32 = quantised(BlockFormat::kE4M3Row128);
  for (const float bad : {-1.0f, INFINITY, -INFINITY}) {
    f32.view().scales.as<float>()[5] = bad;
    expect_error(decode(f32.view()), StatusCode::kCorruptData, {"row 1, block 2"});
  }
  QuantisedTensor nvfp4 = quantised(BlockFormat::kNvfp4);
  nvfp4.view().scales.as<uint8_t>()[0] = 0xB8;
  expect_error(decode(nvfp4.view()), StatusCode::kCorruptData, {"row 0, block 0", "-1"});
  nvfp4.view().scales.as<uint8_t>()[0] = 0x38;
  nvfp4.view().tensor_scales.as<float>()[0] = -2.0f;
  expect_error(decode(nvfp4.view()), StatusCode::kCorruptData, {"group 0", "-2"});
}

TEST_F(Arguments, LevelThatIsNotThereIsRefused) {
  QuantisedTensor out = quantised(BlockFormat::kMxfp8);
  const Result<const CpuInfo*> cpu = cpu_info();
  ASSERT_TRUE(cpu.has_value());
  if ((*cpu)->has(Level::kAmx)) GTEST_SKIP() << "this CPU has every level";
  QuantiseOptions options;
  options.level = Level::kAmx;
  EXPECT_EQ(quantise(options, values_.view, out.view()).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace argosy::testing
