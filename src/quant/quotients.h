// e4m3 codes of all quotients x / (amax / 448) that bf16 inputs can have.
//
// With a scale of amax / 448 the quotient's mantissa depends on the two bf16 mantissas alone: 16,384 cases, computed once by
// IEEE division. Test: tests/quant/block_test.cc (every pair).
#pragma once

#include <cstdint>

namespace argosy::quant {

// Row: mantissa of amax; column: mantissa of x. The code when both have the same exponent, for x > amax continued beyond
// the largest code; each exponent less is 8 codes less, down to the smallest normal one.
struct QuotientCodes {
  alignas(64) uint8_t codes[128][128];
};
const QuotientCodes& quotient_codes();

}  // namespace argosy::quant
