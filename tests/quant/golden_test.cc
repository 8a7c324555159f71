// The second opinion: testdata/formats/, made with ml_dtypes and numpy by scripts/make_formats_golden.py.
#include <gtest/gtest.h>

#include <cstring>

#include "quant/quant_cases.h"
#include "support/golden_file.h"

namespace argosy::testing {
namespace {

const GoldenFile& golden() {
  static const GoldenFile file("formats/formats.safetensors");
  return file;
}

TEST(Golden, ElementTablesAndCasts) {
  for (const ElementFormat format :
       {ElementFormat::kE4M3, ElementFormat::kE5M2, ElementFormat::kE2M1}) {
    const std::string name(name_of(format));
    const std::vector<float> values = golden().read<float>(name + ".values");
    for (size_t code = 0; code < values.size(); ++code) {
      const float got = decode_element(format, static_cast<uint8_t>(code));
      if (std::isnan(values[code])) {
        EXPECT_TRUE(std::isnan(got)) << name << code;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(values[code]))
            << name << code;
      }
    }
    const std::vector<float> inputs = golden().read<float>(name + ".inputs");
    const std::vector<uint8_t> codes = golden().read<uint8_t>(name + ".codes");
    const std::vector<uint8_t> saturated = golden().read<uint8_t>(name + ".saturated");
    ASSERT_GT(inputs.size(), 2000u);
    for (size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(encode_element(format, inputs[i], Overflow::kNaN), codes[i]) << name << inputs[i];
      ASSERT_EQ(encode_element(format, inputs[i]), saturated[i]) << name << inputs[i];
    }
  }
  const std::vector<float> powers = golden().read<float>("e8m0.values");
  for (size_t code = 0; code < 255; ++code) {
    EXPECT_EQ(decode_e8m0(static_cast<uint8_t>(code)), powers[code]);
  }
  EXPECT_TRUE(std::isnan(powers[255]));
}

// DeepSeek's public rule among them.
TEST(Golden, BlockRulesOfPublicSystems) {
  for (const BlockFormat format :
       {BlockFormat::kE4M3Row128, BlockFormat::kE4M3Row128E8M0, BlockFormat::kE4M3Block128,
        BlockFormat::kMxfp8, BlockFormat::kMxfp8Ceil, BlockFormat::kMxfp4}) {
    const std::string name(name_of(format));
    const char* const input = format == BlockFormat::kE4M3Block128 ? "w" : "x";
    const std::vector<float> x = golden().read<float>(input);
    const std::vector<int64_t> shape = golden().shape(input);
    QuantisedTensor out = make_quantised(layout_of(format, shape[0], shape[1]));
    const ConstTensorView values(x.data(), DType::kF32, shape);
    ASSERT_TRUE(quantise({}, values, out.view()).ok());
    const std::vector<uint8_t> codes = golden().read<uint8_t>(name + ".codes");
    const std::vector<std::byte> scales = golden().read<std::byte>(name + ".scales");
    const QuantisedView got = out.view();
    ASSERT_EQ(static_cast<int64_t>(codes.size()), got.codes.num_elements()) << name;
    EXPECT_EQ(std::memcmp(codes.data(), got.codes.data, codes.size()), 0) << name;
    ASSERT_EQ(static_cast<int64_t>(scales.size()),
              got.scales.num_elements() * size_of(got.scales.dtype));
    EXPECT_EQ(std::memcmp(scales.data(), got.scales.data, scales.size()), 0) << name;
  }
}

}  // namespace
}  // namespace argosy::testing
