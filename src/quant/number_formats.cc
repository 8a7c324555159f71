// Scalar casts of argosy/number_formats.h. Test: tests/quant/element_test.cc.
#include "argosy/number_formats.h"

#include <bit>

#include "base/error.h"
#include "quant/element.h"

namespace argosy {
namespace {

const quant::ElementBits& bits_of(ElementFormat format) {
  switch (format) {
    case ElementFormat::kE5M2:
      return quant::kE5M2Bits;
    case ElementFormat::kE2M1:
      return quant::kE2M1Bits;
    default:
      return quant::kE4M3Bits;
  }
}

bool is_nan(ElementFormat format, uint32_t magnitude) {
  if (format == ElementFormat::kE4M3) return magnitude == quant::kE4M3Bits.nan_code;
  return format == ElementFormat::kE5M2 && magnitude > quant::kE5M2Bits.overflow_code;
}

}  // namespace

std::string_view name_of(ElementFormat format) {
  switch (format) {
    case ElementFormat::kE5M2:
      return "e5m2";
    case ElementFormat::kE2M1:
      return "e2m1";
    default:
      return "e4m3";
  }
}

uint8_t encode_element(ElementFormat format, float value, Overflow overflow) {
  return quant::encode_bits(bits_of(format), std::bit_cast<uint32_t>(value),
                            overflow == Overflow::kNaN);
}

float decode_element(ElementFormat format, uint8_t code) {
  const quant::ElementBits& from = bits_of(format);
  const uint32_t magnitude = code & ((1u << from.sign_shift) - 1u);
  if (is_nan(format, magnitude)) return std::bit_cast<float>(quant::kNaNBits);
  const uint32_t sign = (static_cast<uint32_t>(code) >> from.sign_shift & 1u) << 31;
  if (format == ElementFormat::kE5M2 && magnitude == from.overflow_code) {
    return std::bit_cast<float>(sign | quant::kInfBits);
  }
  const uint32_t steps = 1u << from.mantissa_bits;
  const uint32_t field = magnitude / steps;
  uint32_t mantissa = magnitude % steps;
  int exponent = from.min_exponent_field;
  if (field > 0) {
    exponent += static_cast<int>(field) - 1;
    mantissa += steps;
  } else if (mantissa == 0) {
    return std::bit_cast<float>(sign);
  }
  // A denormal of the narrow format is a normal fp32: shift until the hidden bit stands.
  for (; mantissa < steps; mantissa *= 2) --exponent;
  const uint32_t fraction = (mantissa - steps) << (quant::kMantissaBits - from.mantissa_bits);
  return std::bit_cast<float>(sign | static_cast<uint32_t>(exponent) << quant::kMantissaBits |
                              fraction);
}

float decode_e8m0(uint8_t code) { return std::bit_cast<float>(quant::e8m0_bits(code)); }

uint8_t encode_e8m0(float value, E8M0Rule rule) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(value) & quant::kMagnitude;
  if (magnitude >= quant::kInfBits) return kE8M0NaN;
  const uint32_t mantissa = magnitude & 0x7FFFFFu;
  uint32_t code = magnitude >> quant::kMantissaBits;
  if (rule == E8M0Rule::kCeil) {
    // Below 2^-126 only 2^-127 and less fit code 0.
    code += code == 0 ? (mantissa > 0x400000u ? 1u : 0u) : (mantissa != 0 ? 1u : 0u);
  }
  return static_cast<uint8_t>(code > 254 ? 254 : code);
}

Result<uint8_t> encode_e8m0_exact(float scale) {
  const uint32_t word = std::bit_cast<uint32_t>(scale);
  if ((word & quant::kMagnitude) > quant::kInfBits) return kE8M0NaN;
  const uint8_t code = encode_e8m0(scale, E8M0Rule::kFloor);
  if (code != kE8M0NaN && quant::e8m0_bits(code) == word) return code;
  return base::invalid("scale {} is no power of two from 2^-127 to 2^127, as e8m0 needs", scale);
}

}  // namespace argosy
