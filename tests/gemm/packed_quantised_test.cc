// Packing codes and scales: every element and scale where the layout says, refusals, what a group holds before
// and after it is set.
//
// Mutations tried, each makes a test fail: the high nibble read for even k, the first row of 128 x 128 scales taken
// for all, a second set_group that only adds bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "gemm/packed_layout.h"
#include "gemm/quantised_case.h"

namespace argosy {
namespace {

using gemm::CodedLayout;
using gemm::PanelColumn;
using testing::random_quantised;
using testing::Values;
using Kind = PackedWeights::Kind;

void expect_packed(const PackedWeights& packed, int64_t group, const ConstQuantisedView& w,
                   gemm::ColumnOf column_of) {
  const CodedLayout layout = gemm::coded_layout(w.format);
  const ElementFormat element = info_of(w.format).element;
  for (int64_t n = 0; n < w.rows; ++n) {
    const PanelColumn at = column_of(n);
    const std::byte* panel = packed.panel(group, at.panel);
    for (int64_t k = 0; k < w.cols; ++k) {
      const float code = decode_element(element, gemm::code_at(layout, panel, k, at.column));
      ASSERT_EQ(testing::bits_of(code), testing::bits_of(testing::code_of(w, n, k)))
          << name_of(w.format) << " n " << n << " k " << k;
      const float scale = gemm::scale_at(layout, panel, k / layout.block_k, at.column);
      const float want = testing::scale_of(w, n, k);
      if (want != want) {
        ASSERT_NE(scale, scale);
      } else {
        ASSERT_EQ(scale, want < 0x1p-126f ? 0.0f : want) << n << " " << k;
      }
    }
  }
}

TEST(PackedQuantised, EveryElementAndScaleIsWhereTheLayoutSays) {
  std::mt19937 rng(20250310);
  for (const BlockFormat format : testing::kGemmFormats) {
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>(1, 1), {33, 31}, {140, 161}, {16, 128}}) {
      for (const Values values : {Values::kTiny, Values::kSpecial}) {
        const QuantisedTensor a = random_quantised(rng, format, n, k, values);
        const QuantisedTensor b = random_quantised(rng, format, n, k, values);
        auto plain = PackedWeights::create_quantised(Kind::kPlain, format, 2, n, k);
        ASSERT_TRUE(plain.has_value()) << plain.error().to_string();
        EXPECT_EQ(plain->format(), format);
        EXPECT_EQ(plain->dtype(), info_of(format).code_dtype);
        EXPECT_EQ(plain->panel_bytes() % 64, 0);
        // Twice: nothing of the first may shine through.
        ASSERT_TRUE(plain->set_group(1, b.view()).ok());
        ASSERT_TRUE(plain->set_group(1, a.view()).ok());
        expect_packed(*plain, 1, a.view(), gemm::plain_column);
        auto pair = PackedWeights::create_quantised(Kind::kGateUp, format, 1, n, k);
        ASSERT_TRUE(pair->set_group(0, a.view(), b.view()).ok());
        expect_packed(*pair, 0, a.view(), gemm::gate_column);
        expect_packed(*pair, 0, b.view(), gemm::up_column);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(PackedQuantised, AGroupNeverSetIsZeroAndPaddingStaysZero) {
  std::mt19937 rng(20250311);
  for (const BlockFormat format : testing::kGemmFormats) {
    auto packed = PackedWeights::create_quantised(Kind::kPlain, format, 2, 5, 33);
    ASSERT_TRUE(packed.has_value());
    // Odd K: the other half of the last byte is no code.
    QuantisedTensor w = random_quantised(rng, format, 5, 33, Values::kOrdinary);
    std::memset(w.view().codes.data, 0x77, static_cast<size_t>(w.view().codes.num_elements()));
    ASSERT_TRUE(packed->set_group(0, std::as_const(w).view()).ok());
    const CodedLayout layout = gemm::coded_layout(format);
    for (int64_t column = 0; column < gemm::kPanelColumns; ++column) {
      for (int64_t k = column < 5 ? 33 : 0; k < packed->padded_k(); ++k) {
        ASSERT_EQ(gemm::code_at(layout, packed->panel(0, 0), k, column), 0) << k << " " << column;
      }
    }
    for (int64_t i = 0; i < packed->panel_bytes(); ++i) {
      ASSERT_EQ(packed->panel(1, 0)[i], std::byte{0});
    }
  }
}

// What kernels are told of lines: that a pair of k by 32 columns holds normal numbers alone.
void expect_plain_lines(const PackedWeights& packed, int64_t group) {
  const CodedLayout layout = gemm::coded_layout(packed.format());
  for (int64_t p = 0; p < packed.num_panels(); ++p) {
    const uint16_t* const plain = packed.plain_lines_of_panel(group, p);
    ASSERT_NE(plain, nullptr);
    for (int64_t pair = 0; pair < packed.padded_k() / 2; ++pair) {
      bool is_plain = true;
      for (int64_t i = 0; i < 64; ++i) {
        const uint8_t code =
            gemm::code_at(layout, packed.panel(group, p), pair * 2 + i / 32, i % 32);
        const float value = decode_element(ElementFormat::kE4M3, code);
        is_plain &= std::abs(value) >= 0x1p-6f;  // the smallest normal number; not NaN
      }
      ASSERT_EQ((plain[pair / 16] >> pair % 16 & 1) != 0, is_plain) << p << " " << pair;
    }
  }
}

TEST(PackedQuantised, SaysWhichLinesArePlain) {
  std::mt19937 rng(20261130);
  for (const BlockFormat format : testing::kGemmFormats) {
    if (format == BlockFormat::kMxfp4) continue;
    auto packed = PackedWeights::create_quantised(Kind::kPlain, format, 2, 70, 165);
    auto pair = PackedWeights::create_quantised(Kind::kGateUp, format, 2, 70, 165);
    for (int round = 0; round < 6; ++round) {
      const QuantisedTensor a = random_quantised(rng, format, 70, 165, Values::kSpecial);
      const QuantisedTensor b = random_quantised(rng, format, 70, 165, Values::kSpecial);
      ASSERT_TRUE(packed->set_group(round % 2, a.view()).ok());
      ASSERT_TRUE(pair->set_group(round % 2, a.view(), b.view()).ok());
      expect_plain_lines(*packed, round % 2);
      expect_plain_lines(*pair, round % 2);
      if (HasFatalFailure()) return;
    }
    // Whoever writes a panel as it is does not say.
    gemm::PanelAccess::panel(&*packed, 1, 0);
    for (int64_t i = 0; i < packed->padded_k() / 32; ++i) {
      ASSERT_EQ(packed->plain_lines_of_panel(1, 0)[i], 0);
    }
  }
  auto other = PackedWeights::create_quantised(Kind::kPlain, BlockFormat::kMxfp4, 1, 4, 32);
  EXPECT_EQ(other->plain_lines_of_panel(0, 0), nullptr);
}

// Every code in every place of a line that is plain without it, times one.
TEST(PackedQuantised, EveryCodeTimesOneIsItsValue) {
  const CodedLayout layout = gemm::coded_layout(BlockFormat::kMxfp8);
  ASSERT_EQ(layout.block_k, 32);
  for (int code = 0; code < 256; ++code) {
    QuantisedTensor w =
        std::move(QuantisedTensor::create(*quantised_layout(BlockFormat::kMxfp8, 32, 32))).value();
    auto* const codes = w.view().codes.as<uint8_t>();
    std::memset(codes, 0x38, 32 * 32);  // 1
    for (int64_t n = 0; n < 32; ++n) codes[n * 32 + n] = static_cast<uint8_t>(code);
    std::memset(w.view().scales.data, 127, 32);  // 1
    auto packed = PackedWeights::create_quantised(Kind::kPlain, BlockFormat::kMxfp8, 1, 32, 32);
    ASSERT_TRUE(packed->set_group(0, std::as_const(w).view()).ok());
    for (int64_t rows = 1; rows <= 9; ++rows) {
      for (int64_t k = 0; k < 32; ++k) {
        std::vector<BFloat16> x(static_cast<size_t>(rows * 32));
        for (int64_t r = 0; r < rows; ++r) {
          x[static_cast<size_t>(r * 32 + k)] = BFloat16::from_float(1.0f);
        }
        std::vector<BFloat16> out(static_cast<size_t>(rows * 32));
        const int64_t offset = 0;
        GemmOptions options;
        options.level = *resolve_level(std::nullopt);
        options.dot_order = DotOrder::kVdpbf16;
        const RaggedRows ragged{
            ConstTensorView(x.data(), DType::kBF16, {rows, 32}), {&offset, 1}, {&rows, 1}};
        ASSERT_TRUE(
            grouped_gemm(options, ragged, *packed, TensorView(out.data(), DType::kBF16, {rows, 32}))
                .ok());
        const float value = decode_element(ElementFormat::kE4M3, static_cast<uint8_t>(code));
        for (int64_t i = 0; i < rows * 32; ++i) {
          const float got = out[static_cast<size_t>(i)].to_float();  // exact
          if (value != value) {
            ASSERT_NE(got, got);  // zero times NaN as well
          } else {
            ASSERT_EQ(got, i % 32 == k ? value : 1.0f) << code << " rows " << rows << " " << i;
          }
        }
      }
    }
  }
}

// A view of rows cut out of wider ones.
TEST(PackedQuantised, AnyRowStride) {
  std::mt19937 rng(20250312);
  const QuantisedTensor wide = random_quantised(rng, BlockFormat::kMxfp8, 6, 96, Values::kOrdinary);
  ConstQuantisedView narrow = wide.view();
  narrow.cols = 64;
  narrow.codes.shape[1] = 64;
  narrow.scales.shape[1] = 2;
  auto packed = PackedWeights::create_quantised(Kind::kPlain, BlockFormat::kMxfp8, 1, 6, 64);
  ASSERT_TRUE(packed->set_group(0, narrow).ok());
  const CodedLayout layout = gemm::coded_layout(BlockFormat::kMxfp8);
  EXPECT_EQ(gemm::code_at(layout, packed->panel(0, 0), 63, 5),
            wide.view().codes.as<uint8_t>()[5 * 96 + 63]);
  EXPECT_EQ(gemm::scale_at(layout, packed->panel(0, 0), 1, 5),
            decode_e8m0(wide.view().scales.as<uint8_t>()[5 * 3 + 1]));
}

void expect_error(const Status& status, StatusCode code, const std::vector<const char*>& parts) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const char* part : parts) {
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in " << status.message();
  }
}

TEST(PackedQuantised, CreateRefuses) {
  const auto create = [](BlockFormat format, int64_t groups, int64_t n, int64_t k) {
    return PackedWeights::create_quantised(Kind::kPlain, format, groups, n, k).error();
  };
  expect_error(create(BlockFormat::kNvfp4, 1, 4, 32), StatusCode::kUnsupported, {"nvfp4"});
  expect_error(create(BlockFormat::kUnset, 1, 4, 32), StatusCode::kInvalidArgument, {"format"});
  expect_error(create(static_cast<BlockFormat>(99), 1, 4, 32), StatusCode::kInvalidArgument,
               {"format"});
  expect_error(create(BlockFormat::kMxfp4, -1, 4, 32), StatusCode::kInvalidArgument, {"-1"});
  expect_error(create(BlockFormat::kMxfp4, 1, 0, 32), StatusCode::kInvalidArgument, {"n >= 1"});
  expect_error(create(BlockFormat::kMxfp4, 1, 4, 0), StatusCode::kInvalidArgument, {"k >= 1"});
  expect_error(create(BlockFormat::kMxfp4, 1, int64_t{1} << 62, 1), StatusCode::kInvalidArgument,
               {"4611686018427387904"});
  expect_error(create(BlockFormat::kMxfp8, 1 << 20, int64_t{1} << 20, int64_t{1} << 20),
               StatusCode::kOutOfMemory, {"bytes"});
  EXPECT_TRUE(
      PackedWeights::create_quantised(Kind::kGateUp, BlockFormat::kMxfp4, 0, 4, 32).has_value());
}

TEST(PackedQuantised, SetGroupRefuses) {
  std::mt19937 rng(20250313);
  const auto make = [&rng](BlockFormat format, int64_t n, int64_t k) {
    return random_quantised(rng, format, n, k, Values::kOrdinary);
  };
  auto packed = PackedWeights::create_quantised(Kind::kPlain, BlockFormat::kE4M3Row128, 2, 4, 130);
  const QuantisedTensor right = make(BlockFormat::kE4M3Row128, 4, 130);
  EXPECT_TRUE(packed->set_group(1, right.view()).ok());
  expect_error(packed->set_group(2, right.view()), StatusCode::kInvalidArgument, {"group 2"});
  expect_error(packed->set_group(0, right.view(), right.view()), StatusCode::kInvalidArgument,
               {"plain"});
  expect_error(packed->set_group(0, make(BlockFormat::kE4M3Block128, 4, 130).view()),
               StatusCode::kInvalidArgument, {"e4m3_128x128", "e4m3_1x128"});
  expect_error(packed->set_group(0, make(BlockFormat::kE4M3Row128, 4, 131).view()),
               StatusCode::kInvalidArgument, {"[4, 131]", "[4, 130]"});

  ConstQuantisedView view = right.view();
  view.scales.shape[1] = 1;
  expect_error(packed->set_group(0, view), StatusCode::kInvalidArgument, {"w: scales", "[4, 2]"});
  view = right.view();
  view.codes.data = nullptr;
  expect_error(packed->set_group(0, view), StatusCode::kInvalidArgument, {"no data"});
  QuantisedTensor negative = make(BlockFormat::kE4M3Row128, 4, 130);
  negative.view().scales.as<float>()[3] = -1.0f;
  expect_error(packed->set_group(0, std::as_const(negative).view()), StatusCode::kCorruptData,
               {"-1"});

  // Matrices with and without scales do not mix, even when the dtypes are equal.
  const std::vector<uint8_t> bytes(4 * 130);
  expect_error(packed->set_group(0, ConstTensorView(bytes.data(), DType::kE4M3, {4, 130})),
               StatusCode::kInvalidArgument, {"e4m3_1x128"});
  auto narrow = PackedWeights::create(Kind::kPlain, DType::kBF16, 1, 4, 130);
  EXPECT_EQ(narrow->format(), BlockFormat::kUnset);
  expect_error(narrow->set_group(0, right.view()), StatusCode::kInvalidArgument, {"BF16"});
}

// As for bf16 weights, and with a bias beside the codes.
TEST(PackedQuantised, BiasIsAddedToTheFinishedProduct) {
  std::mt19937 rng(20250314);
  const QuantisedTensor w = random_quantised(rng, BlockFormat::kMxfp4, 3, 32, Values::kOrdinary);
  auto packed = PackedWeights::create_quantised(Kind::kPlain, BlockFormat::kMxfp4, 1, 3, 32);
  ASSERT_TRUE(packed->set_group(0, w.view()).ok());
  const std::vector<float> x(32, 0.0f), bias = {1, -2, 3};
  ASSERT_TRUE(packed->add_bias().ok());
  ASSERT_TRUE(packed->set_bias(0, ConstTensorView(bias.data(), DType::kF32, {3})).ok());
  std::vector<float> out(3);
  const int64_t offset = 0, size = 1;
  const RaggedRows rows{ConstTensorView(x.data(), DType::kF32, {1, 32}), {&offset, 1}, {&size, 1}};
  ASSERT_TRUE(grouped_gemm({}, rows, *packed, TensorView(out.data(), DType::kF32, {1, 3})).ok());
  EXPECT_EQ(out, bias);
}

}  // namespace
}  // namespace argosy
