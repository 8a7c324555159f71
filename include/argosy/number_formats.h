// Narrow number formats, element by element: e4m3, e5m2, e2m1 and the scale format e8m0.
//
// Casts round to nearest even, keep denormals, the sign of zero and NaN, and do not depend on MXCSR
// (contract 5). Whole tensors: argosy/quantise.h. The page with all values: docs/formats.md. Test:
// tests/quant/element_test.cc.
#pragma once

#include <cstdint>
#include <string_view>

#include "argosy/status.h"

namespace argosy {

enum class ElementFormat : uint8_t {
  kE4M3,  // OCP "fn": bias 7, largest 448, no Inf, NaN 0x7F and 0xFF
  kE5M2,  // IEEE-like: bias 15, largest 57344, Inf 0x7C, NaN 0x7D..0x7F
  kE2M1,  // 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign in 4 bits; neither Inf nor NaN
};

// "e4m3", "e5m2", "e2m1".
std::string_view name_of(ElementFormat format);

// What becomes of a value that rounds beyond the largest finite one, Inf included.
enum class Overflow : uint8_t {
  kSaturate,  // the largest finite value of its sign
  kNaN,       // NaN of its sign; in e5m2, which has one, Inf; e2m1 has neither and saturates
};

// The code of `value`. e4m3 of 448 < v < 464 is 448 in either mode, as is 464 itself (a tie that goes to the
// even mantissa). NaN becomes 0x7F (e4m3) or 0x7E (e5m2) with its sign. e2m1 has no NaN: its code is
// that of 0 with the NaN's sign, and whoever quantises a block marks the NaN in the block's scale.
uint8_t encode_element(ElementFormat format, float value, Overflow overflow = Overflow::kSaturate);

// The value of a code, exact. e2m1 uses the low 4 bits. Every NaN is 0x7FC00000.
float decode_element(ElementFormat format, uint8_t code);

// e8m0: code c < 255 is 2^(c - 127), 255 is NaN. Code 0 is 2^-127, a denormal of fp32; there is no zero.
inline constexpr uint8_t kE8M0NaN = 255;
inline constexpr uint8_t kE8M0One = 127;
float decode_e8m0(uint8_t code);

// Which power of two stands for a value between two of them.
enum class E8M0Rule : uint8_t { kFloor, kCeil };

// The code of 2^floor(log2 |v|) or 2^ceil(log2 |v|) by exact arithmetic, clamped to 0..254; NaN and Inf: 255;
// 0: 0.
uint8_t encode_e8m0(float value, E8M0Rule rule);

// The code of a scale that must be a power of two, or NaN. Errors: kInvalidArgument, naming it, for any
// other value: rounding 1.5 to a neighbour would be off by a third.
Result<uint8_t> encode_e8m0_exact(float scale);

// Two e2m1 codes in one byte: the element of the even index in the low half (the layout of gpt-oss checkpoints).
inline uint8_t pack_e2m1(uint8_t even, uint8_t odd) {
  return static_cast<uint8_t>((even & 0xF) | odd << 4);
}

}  // namespace argosy
