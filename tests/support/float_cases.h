// Random bf16 and fp32 values by class, for differential tests: the classes that kernels get wrong.
#pragma once

#include <bit>
#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "argosy/bfloat16.h"

namespace argosy::testing {

enum class Values {
  kOrdinary,  // exponents around 1
  kWide,      // any finite exponent but the top 16: sums cancel, lose bits, may reach Inf
  kTiny,      // exponents 0..70 (biased): denormal inputs, results that underflow
  kSpecial,   // one in 16 is NaN, Inf, -Inf, 0, -0 or a denormal
};
inline constexpr Values kAllValues[] = {Values::kOrdinary, Values::kWide, Values::kTiny,
                                        Values::kSpecial};

inline std::string_view name_of(Values values) {
  constexpr std::string_view kNames[] = {"ordinary", "wide", "tiny", "special"};
  return kNames[static_cast<size_t>(values)];
}

// The upper 16 bits are the value's bf16; fp32 users may keep all 32.
inline uint32_t random_bits(std::mt19937& rng, Values values) {
  const uint32_t word = static_cast<uint32_t>(rng());
  const uint32_t keep = word & 0x807FFFFFu;
  if (values == Values::kTiny) return keep | static_cast<uint32_t>(rng() % 71) << 23;
  if (values == Values::kWide) return keep | static_cast<uint32_t>(rng() % 239) << 23;
  if (values == Values::kSpecial && rng() % 16 == 0) {
    constexpr uint32_t kSpecials[] = {0x7FC10000u, 0xFF810000u, 0x7F800000u, 0xFF800000u,
                                      0x00000000u, 0x80000000u, 0x00010000u, 0x807F0000u};
    return kSpecials[rng() % 8];
  }
  return keep | static_cast<uint32_t>(120 + rng() % 10) << 23;
}

inline std::vector<BFloat16> random_bf16(std::mt19937& rng, Values values, size_t count) {
  std::vector<BFloat16> out(count);
  for (BFloat16& value : out) value.bits = static_cast<uint16_t>(random_bits(rng, values) >> 16);
  return out;
}

inline std::vector<float> random_f32(std::mt19937& rng, Values values, size_t count) {
  std::vector<float> out(count);
  for (float& value : out) value = std::bit_cast<float>(random_bits(rng, values));
  return out;
}

inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

}  // namespace argosy::testing
