// bfloat16: the upper half of an fp32. A storage type: arithmetic happens in fp32 (contract 3.5).
//
// Test: tests/numeric/bfloat16_test.cc.
#pragma once

#include <bit>
#include <cstdint>

namespace argosy {

struct BFloat16 {
  uint16_t bits = 0;

  // Exact.
  float to_float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

  // Round to nearest even; Inf stays Inf; every NaN becomes 0x7FC0; denormals are kept. Integer
  // arithmetic only, so the result does not depend on MXCSR.
  static BFloat16 from_float(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7FFFFFFFu) > 0x7F800000u) return BFloat16{0x7FC0};
    const uint32_t rounded = word + 0x7FFFu + ((word >> 16) & 1u);
    return BFloat16{static_cast<uint16_t>(rounded >> 16)};
  }

  friend bool operator==(BFloat16, BFloat16) = default;  // compares bits
};
static_assert(sizeof(BFloat16) == 2);

}  // namespace argosy
