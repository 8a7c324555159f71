// See quotients.h.
#include "quant/quotients.h"

#include <bit>

#include "quant/element.h"
#include "quant/kernel.h"

namespace argosy::quant {
namespace {

QuotientCodes make_codes() {
  QuotientCodes made;
  // An exponent at which neither scale nor quotient is a denormal; shifted down, no code saturates.
  constexpr uint32_t kField = 127u << kMantissaBits;
  constexpr int kShift = 4;  // exponents
  for (uint32_t amax = 0; amax < 128; ++amax) {
    const uint32_t word = kField | amax << 16;
    float scale = 0;
    kKernelBase.scales_f32({&word, 1, &scale});
    for (uint32_t x = 0; x < 128; ++x) {
      const float quotient = std::bit_cast<float>(kField | x << 16) / scale;
      const uint32_t lower = std::bit_cast<uint32_t>(quotient) - (kShift << kMantissaBits);
      made.codes[amax][x] = static_cast<uint8_t>(encode_bits(kE4M3Bits, lower, false) + 8 * kShift);
    }
  }
  return made;
}

}  // namespace

const QuotientCodes& quotient_codes() {
  static const QuotientCodes made = make_codes();
  return made;
}

}  // namespace argosy::quant
