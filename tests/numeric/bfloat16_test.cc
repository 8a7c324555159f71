// bf16 conversions: all 65536 codes, and rounding around every one of them against distances in
// fp64.
#include "argosy/bfloat16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "platform/float_env.h"
#include "support/float_cases.h"

namespace argosy {
namespace {

using testing::bits_of;

TEST(BFloat16, EveryCodeSurvivesTheRoundTrip) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const BFloat16 value{static_cast<uint16_t>(code)};
    EXPECT_EQ(bits_of(value.to_float()), code << 16);
    const bool is_nan = (code & 0x7FFFu) > 0x7F80u;
    EXPECT_EQ(BFloat16::from_float(value.to_float()).bits, is_nan ? 0x7FC0u : code);
  }
}

// Nearest of the two neighbours by exact fp64 distance, ties to the even code. `low` < 0x7F7F.
uint16_t nearest_by_distance(uint16_t low, float value) {
  const uint16_t high = static_cast<uint16_t>(low + 1);
  const double below = std::fabs(static_cast<double>(value) - BFloat16{low}.to_float());
  const double above = std::fabs(static_cast<double>(value) - BFloat16{high}.to_float());
  if (below != above) return below < above ? low : high;
  return low % 2 == 0 ? low : high;
}

// Every code below the largest finite one, with tails just above, around and just below the
// midpoint.
std::vector<float> values_between_codes() {
  std::vector<float> values;
  for (uint32_t code = 0; code < 0x7F7Fu; ++code) {
    for (const uint32_t tail : {0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      values.push_back(std::bit_cast<float>(code << 16 | tail));
    }
  }
  return values;
}

std::vector<uint16_t> rounded_bits(const std::vector<float>& values, uint32_t sign) {
  std::vector<uint16_t> out;
  for (const float value : values) {
    out.push_back(BFloat16::from_float(std::bit_cast<float>(bits_of(value) | sign)).bits);
  }
  return out;
}

TEST(BFloat16, RoundsToNearestEvenDenormalsIncluded) {
  const std::vector<float> values = values_between_codes();
  const std::vector<uint16_t> got = rounded_bits(values, 0);
  const std::vector<uint16_t> negative = rounded_bits(values, 0x80000000u);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto low = static_cast<uint16_t>(bits_of(values[i]) >> 16);
    ASSERT_EQ(got[i], nearest_by_distance(low, values[i])) << std::hex << bits_of(values[i]);
    ASSERT_EQ(negative[i], got[i] | 0x8000u) << std::hex << bits_of(values[i]);
  }
}

TEST(BFloat16, RoundingDoesNotDependOnMxcsr) {
  const std::vector<float> values = values_between_codes();
  const std::vector<uint16_t> want = rounded_bits(values, 0);
  const platform::ScopedFloatEnv flush(platform::Denormals::kFlush);
  EXPECT_EQ(rounded_bits(values, 0), want);
}

TEST(BFloat16, OverflowAndInfinity) {
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0x7F7F7FFFu)).bits, 0x7F7F);
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0x7F7F8000u)).bits, 0x7F80);
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0xFF7FFFFFu)).bits, 0xFF80);
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0xFF800000u)).bits, 0xFF80);
}

TEST(BFloat16, EveryNaNBecomesTheOne) {
  for (const uint32_t nan : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7FC00000u}) {
    EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(nan)).bits, 0x7FC0) << std::hex << nan;
  }
}

}  // namespace
}  // namespace argosy
