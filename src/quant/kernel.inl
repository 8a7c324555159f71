// Included by kernel_base.cc, kernel_avx2.cc and kernel_avx512.cc: loops that a compiler turns into any vectors.
//
// Nothing here may have external linkage: a function compiled for one instruction set must never be picked by
// the linker for another. Hence the builtins in place of std:: templates. Rounding to a narrow format is one fp32
// addition: a power of two is added whose last place is that of the result.
#include "quant/element.h"
#include "quant/kernel.h"

namespace argosy::quant {
namespace {

constexpr int64_t kMostBlock = 128;

inline float as_float(uint32_t word) { return __builtin_bit_cast(float, word); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
inline uint32_t word_of(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }
inline uint32_t word_of(uint32_t f32) { return f32; }

inline void put(float value, uint16_t* out) {
  const uint32_t word = as_bits(value);
  const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  *out = static_cast<uint16_t>((word & kMagnitude) > kInfBits ? 0x7FC0u : rounded);
}
inline void put(float value, uint32_t* out) {
  const uint32_t word = as_bits(value);
  *out = (word & kMagnitude) > kInfBits ? kNaNBits : word;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A block at a time: f(first element, elements, block).
template <typename F>
inline void each_block(int64_t n, int64_t block, F&& f) {
  for (int64_t first = 0, b = 0; first < n; first += block, ++b) {
    f(first, least(block, n - first), b);
  }
}

template <typename T>
void amax_rows(const AmaxArgs& args) {
  const auto* const x = reinterpret_cast<const T*>(args.x);
  each_block(args.n, args.block, [&](int64_t first, int64_t size, int64_t b) {
    T largest = 0;
    constexpr T kMask = static_cast<T>(static_cast<T>(~T{0}) >> 1);
    for (int64_t i = 0; i < size; ++i) {
      const T magnitude = x[first + i] & kMask;
      largest = magnitude > largest ? magnitude : largest;
    }
    args.amax[b] = word_of(largest);
  });
}

inline float scale_of(uint32_t amax) {
  float scale = as_float(amax) / 448.0f;
  scale = scale == 0.0f ? as_float(kTinyBits) : scale;
  scale = amax == 0 ? 1.0f : scale;
  return amax < kInfBits ? scale : as_float(kNaNBits);
}

[[maybe_unused]] void scales_f32(const F32ScaleArgs& args) {
  const uint32_t* const __restrict amax = args.amax;
  float* const __restrict scales = args.scales;
  for (int64_t b = 0; b < args.num_blocks; ++b) scales[b] = scale_of(amax[b]);
}

[[maybe_unused]] void scales_e8m0(const E8M0Args& args) {
  // Locals: a store through uint8_t may change anything that is reached through a pointer.
  const uint32_t* const __restrict amaxes = args.amax;
  uint8_t* const __restrict codes = args.codes;
  float* const __restrict factors = args.factors;
  const int64_t num_blocks = args.num_blocks;
  const int32_t largest = args.largest_exponent, zero_code = args.zero_block_code;
  const uint32_t above = args.ceil_above;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint32_t amax = amaxes[b];
    int32_t code = static_cast<int32_t>(amax >> kMantissaBits) - largest;
    code += (amax & E8M0Args::kMantissaMask) > above ? 1 : 0;
    code = code < 0 ? 0 : code;
    code = amax == 0 ? zero_code : code;
    // 2^(127 - code); code 254 would need the denormal 2^-127, but no amax gives more than 253.
    const uint32_t factor = static_cast<uint32_t>(254 - code) << 23;
    const bool finite = amax < kInfBits;
    codes[b] = static_cast<uint8_t>(finite ? code : kE8M0NaN);
    factors[b] = as_float(finite ? factor : kNaNBits);
  }
}

[[maybe_unused]] uint32_t values_e8m0(const uint8_t* codes, int64_t num_blocks, float* values) {
  const uint8_t* const __restrict from = codes;
  float* const __restrict to = values;
  uint32_t largest = 0;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint32_t word = e8m0_bits(from[b]);
    to[b] = as_float(word);
    largest = word > largest ? word : largest;
  }
  return largest;
}

// What a magnitude becomes; codes beyond the largest are the caller's matter.
template <int kMantissa, uint32_t kLeastField, uint32_t kClampField>
inline uint32_t round_magnitude(uint32_t magnitude) {
  constexpr uint32_t kLeast = kLeastField << kMantissaBits;
  constexpr uint32_t kClamp = kClampField << kMantissaBits;
  magnitude = magnitude < kClamp ? magnitude : kClamp;
  uint32_t exponent = magnitude & kInfBits;
  exponent = exponent > kLeast ? exponent : kLeast;
  const uint32_t unit = exponent + (static_cast<uint32_t>(kMantissaBits - kMantissa) << 23);
  const uint32_t kept = as_bits(as_float(magnitude) + as_float(unit)) - unit;
  return kept + ((exponent - kLeast) >> (kMantissaBits - kMantissa));
}

inline float quotient(float value, float scale, bool reciprocal) {
  return reciprocal ? value * scale : value / scale;
}

template <typename T>
void encode_block_e4m3(const EncodeArgs& args, int64_t first, int64_t size, float scale) {
  const auto* const x = reinterpret_cast<const T*>(args.x) + first;
  uint8_t* const codes = args.codes + first;
  const uint32_t most = kE4M3Bits.max_code;
  const uint32_t beyond = args.nan_overflow ? kE4M3Bits.overflow_code : most;
  const bool reciprocal = args.reciprocal;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t word = as_bits(quotient(as_float(word_of(x[i])), scale, reciprocal));
    const uint32_t code = round_magnitude<3, 127 - 6, 127 + 10>(word & kMagnitude);
    codes[i] = static_cast<uint8_t>((code > most ? beyond : code) | (word >> 24 & 0x80u));
  }
}

template <typename T>
void encode_block_e2m1(const EncodeArgs& args, int64_t first, int64_t size, float scale) {
  const auto* const x = reinterpret_cast<const T*>(args.x) + first;
  uint8_t codes[kMostBlock + 1];
  const uint32_t most = kE2M1Bits.max_code;
  const bool reciprocal = args.reciprocal;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t word = as_bits(quotient(as_float(word_of(x[i])), scale, reciprocal));
    const uint32_t code = round_magnitude<1, 127, 127 + 4>(word & kMagnitude);
    codes[i] = static_cast<uint8_t>((code > most ? most : code) | (word >> 28 & 0x8u));
  }
  codes[size] = 0;
  uint8_t* const packed = args.codes + first / 2;
  for (int64_t i = 0; i < (size + 1) / 2; ++i) {
    packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

inline void fill(uint8_t* out, int64_t count, uint8_t value) {
  __builtin_memset(out, value, static_cast<size_t>(count));
}

template <typename T>
void encode_rows(const EncodeArgs& args) {
  each_block(args.n, args.block, [&](int64_t first, int64_t size, int64_t b) {
    const float scale = args.scales[b];
    const bool nan = scale != scale;
    if (args.element == ElementFormat::kE2M1) {
      if (nan) return fill(args.codes + first / 2, (size + 1) / 2, 0);
      encode_block_e2m1<T>(args, first, size, scale);
    } else {
      if (nan) return fill(args.codes + first, size, kE4M3Bits.nan_code);
      encode_block_e4m3<T>(args, first, size, scale);
    }
  });
}

// e4m3 as an fp32 with the wrong bias: one exact product mends it. Code 0x7F is 480 until it is seen to.
inline float widen_e4m3(uint32_t code) {
  const uint32_t magnitude = (code & 0x7Fu) << 20;
  const float value = as_float(magnitude) * 0x1p+120f;
  const uint32_t word = (code & 0x7Fu) == 0x7Fu ? kNaNBits : as_bits(value) | (code & 0x80u) << 24;
  return as_float(word);
}

inline float widen_e2m1(uint32_t code) {
  // 0, 0.5, 1, 1.5, 2, 3, 4, 6: as above, two bits of exponent and one of mantissa.
  const float value = as_float((code & 0x7u) << 22) * 0x1p+126f;
  return as_float(as_bits(value) | (code & 0x8u) << 28);
}

template <typename T>
void decode_rows(const DecodeArgs& args) {
  T* const all = reinterpret_cast<T*>(args.out);
  each_block(args.n, args.block, [&](int64_t first, int64_t size, int64_t b) {
    const float scale = args.scales[b];
    T* const out = all + first;
    if (args.element == ElementFormat::kE2M1) {
      const uint8_t* const codes = args.codes + first / 2;
      for (int64_t i = 0; i < size; ++i) {
        put(widen_e2m1(static_cast<uint32_t>(codes[i / 2]) >> (i % 2 * 4)) * scale, out + i);
      }
    } else {
      const uint8_t* const codes = args.codes + first;
      for (int64_t i = 0; i < size; ++i) put(widen_e4m3(codes[i]) * scale, out + i);
    }
  });
}

}  // namespace
}  // namespace argosy::quant
