// The element casts in integer arithmetic, independent of MXCSR, and what a format's codes look like.
//
// Static and always inlined, so that no copy of another instruction set can be picked by the linker. Test:
// tests/quant/element_test.cc.
#pragma once

#include <cstdint>

#include "argosy/number_formats.h"

namespace argosy::quant {

#define ARGOSY_QUANT_INLINE static inline __attribute__((always_inline, unused))

inline constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
inline constexpr uint32_t kInfBits = 0x7F800000u;
inline constexpr uint32_t kNaNBits = 0x7FC00000u;
inline constexpr uint32_t kTinyBits = 1;  // 2^-149
inline constexpr int kMantissaBits = 23;  // of fp32

// Sign, exponent, mantissa; codes of magnitude ascend with the value.
struct ElementBits {
  int mantissa_bits;
  int min_exponent_field;  // fp32 exponent field of the smallest normal value
  uint8_t max_code;        // largest finite magnitude
  uint8_t overflow_code;   // in Overflow::kNaN
  uint8_t nan_code;
  int sign_shift;
};
inline constexpr ElementBits kE4M3Bits = {3, 127 - 6, 0x7E, 0x7F, 0x7F, 7};
inline constexpr ElementBits kE5M2Bits = {2, 127 - 14, 0x7B, 0x7C, 0x7E, 7};
inline constexpr ElementBits kE2M1Bits = {1, 127, 0x7, 0x7, 0x0, 3};

ARGOSY_QUANT_INLINE uint8_t encode_bits(const ElementBits& to, uint32_t word, bool nan_overflow) {
  const uint32_t magnitude = word & kMagnitude;
  const auto sign = static_cast<uint8_t>(word >> 31 << to.sign_shift);
  if (magnitude > kInfBits) return static_cast<uint8_t>(sign | to.nan_code);
  const int field = static_cast<int>(magnitude >> kMantissaBits);
  const int exponent = field == 0 ? 1 : field;
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | (field == 0 ? 0u : 0x800000u);
  const int above = exponent - to.min_exponent_field;
  const int shift = kMantissaBits - to.mantissa_bits + (above < 0 ? -above : 0);
  uint32_t code = 0;
  if (shift < 32) {
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa - (kept << shift);
    const uint32_t half = 1u << (shift - 1);
    code = kept + ((rest > half || (rest == half && (kept & 1u) != 0)) ? 1u : 0u);
  }
  if (above > 0) code += static_cast<uint32_t>(above) << to.mantissa_bits;
  if (code > to.max_code) code = nan_overflow ? to.overflow_code : to.max_code;
  return static_cast<uint8_t>(sign | code);
}

// fp32 bits of the value of an e8m0 code.
ARGOSY_QUANT_INLINE uint32_t e8m0_bits(uint8_t code) {
  if (code == kE8M0NaN) return kNaNBits;
  return code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << kMantissaBits;
}

}  // namespace argosy::quant
