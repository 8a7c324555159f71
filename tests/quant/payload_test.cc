// Rows as they travel equal quantise() and dequantise(), byte for byte: every payload, any width, also odd ones whose last
// block is partial (kind K19); the tag names what differs.
#include "argosy/payload.h"

#include <gtest/gtest.h>

#include <cstring>

#include "quant/quant_cases.h"

namespace argosy::testing {
namespace {

constexpr uint32_t kSeed = 20261130;
constexpr int64_t kWidths[] = {1,    7,    31,   32,   33,   127,  128,  129,  1000,
                               2047, 2048, 2049, 4100, 7168, 8192, 8193, 16500};

TEST(Payload, EqualsQuantiseAndDequantise) {
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  std::mt19937 rng(kSeed);
  for (const char* name : {"fp8_128", "fp8_128_e8m0", "mxfp8"}) {
    const Result<BlockFormat> format = parse_payload(name);
    ASSERT_TRUE(format.has_value());
    for (const int64_t hidden : kWidths) {
      SCOPED_TRACE(::testing::Message() << name << " of " << hidden);
      const Result<PayloadLayout> layout = payload_layout(DType::kBF16, *format, hidden);
      ASSERT_TRUE(layout.has_value()) << layout.error().to_string();
      EXPECT_EQ(name_of(*layout), name);
      constexpr int64_t kRows = 12;
      const Stored stored(case_values(rng, kRows, hidden, DType::kBF16, true), kRows, hidden,
                          hidden + 1, DType::kBF16);
      Result<QuantisedTensor> want =
          QuantisedTensor::create(*quantised_layout(*format, kRows, hidden));
      ASSERT_TRUE(want.has_value());
      ASSERT_TRUE(quantise({}, stored.view, want->view()).ok());
      Result<Tensor> values = Tensor::zeros(DType::kBF16, {kRows, hidden});
      ASSERT_TRUE(dequantise({}, want->view(), values->view()).ok());
      const ConstQuantisedView view = std::as_const(*want).view();
      const int64_t scale_bytes = view.scales.dim(1) * size_of(view.scales.dtype);
      ASSERT_EQ(layout->num_bytes, layout->scales_at + scale_bytes);
      AlignedBuffer encoded;
      ASSERT_TRUE(encoded.reserve(layout->num_bytes + 1).ok());
      std::vector<BFloat16> row(static_cast<size_t>(hidden + 1));
      for (int64_t r = 0; r < kRows; ++r) {
        std::memset(encoded.data(), 0xA5, static_cast<size_t>(layout->num_bytes + 1));
        encode_payload(*layout, stored.view.row(r), encoded.data());
        ASSERT_EQ(encoded.data()[layout->num_bytes], std::byte{0xA5});
        ASSERT_EQ(std::memcmp(encoded.data(), view.codes.row(r), static_cast<size_t>(hidden)), 0);
        ASSERT_EQ(std::memcmp(encoded.data() + layout->scales_at, view.scales.row(r),
                              static_cast<size_t>(scale_bytes)),
                  0);
        row.back() = BFloat16{0x1234};
        decode_payload(*layout, encoded.data(), reinterpret_cast<std::byte*>(row.data()));
        ASSERT_EQ(row.back().bits, 0x1234);
        ASSERT_EQ(std::memcmp(row.data(), values->view().row(r), static_cast<size_t>(hidden) * 2),
                  0)
            << "row " << r;
      }
    }
  }
}

TEST(Payload, RowsAsTheyAre) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Result<PayloadLayout> layout = payload_layout(dtype, BlockFormat::kUnset, 5);
    ASSERT_TRUE(layout.has_value());
    EXPECT_EQ(layout->num_bytes, 5 * size_of(dtype));
    EXPECT_EQ(name_of(*layout), dtype == DType::kBF16 ? "bf16" : "fp32");
    std::vector<std::byte> row(static_cast<size_t>(layout->num_bytes), std::byte{0x7F});
    std::vector<std::byte> out(row.size()), back(row.size());
    encode_payload(*layout, row.data(), out.data());
    decode_payload(*layout, out.data(), back.data());
    EXPECT_EQ(back, row);
  }
}

TEST(Payload, ErrorsNameWhatIsWrong) {
  const auto message = [](DType dtype, BlockFormat format, int64_t hidden) {
    return payload_layout(dtype, format, hidden).error().to_string();
  };
  EXPECT_EQ(message(DType::kI32, BlockFormat::kUnset, 4),
            "InvalidArgument: payload rows are I32, must be BF16 or F32");
  EXPECT_EQ(message(DType::kBF16, BlockFormat::kUnset, 0),
            "InvalidArgument: hidden is 0, must be in [1, 2^31)");
  EXPECT_EQ(message(DType::kF32, BlockFormat::kMxfp8, 64),
            "InvalidArgument: a payload of mxfp8 is decoded to BF16 rows, the rows are F32");
  EXPECT_EQ(
      message(DType::kBF16, BlockFormat::kMxfp4, 64),
      "Unsupported: rows do not travel as mxfp4, only as bf16, e4m3_1x128, e4m3_1x128_e8m0 or "
      "mxfp8");
  EXPECT_EQ(parse_payload("fp8").error().to_string(),
            "NotFound: no payload 'fp8'; there are bf16, fp8_128, fp8_128_e8m0, mxfp8");
}

// C185, C186: a payload of another format, dtype or width is refused by its tag.
TEST(Payload, TagNamesWhatDiffers) {
  std::vector<PayloadLayout> layouts;
  for (const char* name : {"bf16", "fp8_128", "fp8_128_e8m0", "mxfp8"}) {
    layouts.push_back(*payload_layout(DType::kBF16, *parse_payload(name), 256));
  }
  layouts.push_back(*payload_layout(DType::kF32, BlockFormat::kUnset, 256));
  layouts.push_back(*payload_layout(DType::kBF16, BlockFormat::kUnset, 128));
  layouts.push_back(*payload_layout(DType::kBF16, BlockFormat::kMxfp8, 128));
  for (size_t i = 0; i < layouts.size(); ++i) {
    for (size_t j = 0; j < layouts.size(); ++j) {
      const Status status = check_payload_tag(payload_tag(layouts[i]), layouts[j]);
      EXPECT_EQ(status.ok(), i == j) << i << " for " << j << ": " << status.to_string();
    }
    EXPECT_FALSE(check_payload_tag(0, layouts[i]).ok());
    EXPECT_FALSE(check_payload_tag(~uint64_t{0}, layouts[i]).ok());
  }
}

}  // namespace
}  // namespace argosy::testing
