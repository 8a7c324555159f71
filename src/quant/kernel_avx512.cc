// The quantiser's loops for AVX-512 F, BW, DQ and VL, where they are worth writing out: e4m3 in whole blocks.
//
// Inputs of bf16 stay in 16-bit lanes, 32 at a time: their codes come from the upper bits alone, by a rounding shift where the
// scale is a power of two, else from a table of quotients. What falls into e4m3's denormals, and is not zero, is divided
// out. Everything else is kernel.inl. Only the table of functions has external linkage. Floors: docs/perf/quantise.md.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined start of an intrinsic of its own header for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "quant/kernel.inl"
#include "quant/quotients.h"

namespace argosy::quant {
namespace {

constexpr int64_t kLanes = 32;  // of 16 bits
constexpr uintptr_t kLineMask = 63;

inline bool whole_lines(const void* at) {
  return (reinterpret_cast<uintptr_t>(at) & kLineMask) == 0;
}

inline void fetch(const void* at, int64_t ahead) {
  _mm_prefetch(static_cast<const char*>(at) + ahead, _MM_HINT_T0);
}

inline void store_line(void* to, __m512i line, bool stream) {
  if (stream) {
    _mm512_stream_si512(static_cast<__m512i*>(to), line);
  } else {
    _mm512_storeu_si512(to, line);
  }
}

#include "quant/scales_avx512.inl"

// --- quantise bf16 ---

struct Words {
  __m512i value;
  __mmask32 denormal;  // lanes whose code must be computed otherwise
};

// Codes below 8 are denormals, below -24 they round to 0.
inline Words settle(__m512i codes) {
  const __m512i above = _mm512_add_epi16(codes, _mm512_set1_epi16(24));
  return {_mm512_max_epi16(codes, _mm512_setzero_si512()),
          _mm512_cmplt_epu16_mask(above, _mm512_set1_epi16(32))};
}

// Codes of 16 bf16 below e4m3's smallest normal: added to 2^14, the last place is that of the denormals.
inline __m512i denormal_codes(__m256i x, __m512 scale, bool reciprocal) {
  const __m512i word =
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_and_si256(x, _mm256_set1_epi16(0x7FFF))), 16);
  const __m512 value = _mm512_castsi512_ps(word);
  const __m512 q = reciprocal ? _mm512_mul_ps(value, scale) : _mm512_div_ps(value, scale);
  const __m512 unit = _mm512_set1_ps(0x1p+14f);
  return _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(q, unit)), _mm512_castps_si512(unit));
}

__attribute__((noinline)) __m512i with_denormals(const Words& codes, __m512i x, float scale,
                                                 bool reciprocal) {
  const __m512 factor = _mm512_set1_ps(scale);
  const __m256i low =
      _mm512_cvtepi32_epi16(denormal_codes(_mm512_castsi512_si256(x), factor, reciprocal));
  const __m256i high =
      _mm512_cvtepi32_epi16(denormal_codes(_mm512_extracti64x4_epi64(x, 1), factor, reciprocal));
  return _mm512_mask_mov_epi16(codes.value, codes.denormal,
                               _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// x / scale by a rounding shift, where the scale is a power of two. Whether the lower four bits of a mantissa round up, with
// the bit above for ties, is looked up: 32 cases.
struct PowerOfTwo {
  __m512i up;  // 0 or 1, less what the scale's exponent takes off
  __m512i most;

  PowerOfTwo(int field, bool nan_overflow)
      : up(_mm512_sub_epi16(ups(), _mm512_set1_epi16(static_cast<int16_t>((field - 7) * 8)))),
        most(_mm512_set1_epi16(nan_overflow ? kE4M3Bits.overflow_code : kE4M3Bits.max_code)) {}

  static __m512i ups() {
    return _mm512_set_epi16(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0,
                            0, 0, 0, 0, 0, 0, 0, 0);
  }

  __m512i codes(__m512i x) const {
    const __m512i kept = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi16(0x7FF));
    return _mm512_min_epi16(_mm512_add_epi16(kept, _mm512_permutexvar_epi16(x, up)), most);
  }
};

// x / (amax / 448) by table.
struct Quotients {
  __m512i table[4];

  Quotients(uint32_t amax, const QuotientCodes& all) {
    const uint8_t* const row = all.codes[amax >> 16 & 0x7F];
    const __m512i down = _mm512_set1_epi16(static_cast<int16_t>(amax >> 23 << 3));
    for (ptrdiff_t i = 0; i < 4; ++i) {
      const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(row + 32 * i));
      table[i] = _mm512_sub_epi16(_mm512_cvtepu8_epi16(codes), down);
    }
  }

  __m512i codes(__m512i x) const {
    const __m512i low = _mm512_permutex2var_epi16(table[0], x, table[1]);
    const __m512i high = _mm512_permutex2var_epi16(table[2], x, table[3]);
    const __mmask32 upper = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40));
    const __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi16(0x7F8));
    return _mm512_add_epi16(_mm512_mask_mov_epi16(low, upper, high), exponent);
  }
};

template <typename Rule>
inline __m512i finish(const Rule& rule, __m512i x, float scale, bool reciprocal) {
  const Words codes = settle(rule.codes(x));
  __m512i value = codes.value;
  if (codes.denormal != 0) [[unlikely]]
    value = with_denormals(codes, x, scale, reciprocal);
  // value | (x >> 8 & 0x80)
  return _mm512_ternarylogic_epi32(value, _mm512_srli_epi16(x, 8), _mm512_set1_epi16(0x80), 0xF8);
}

// 64 bytes from 64 words, in order.
inline __m512i pack_codes(__m512i low, __m512i high) {
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0),
                                  _mm512_packus_epi16(low, high));
}

// A whole block of a multiple of 32.
template <typename Rule>
inline void encode_whole(const Rule& rule, const uint16_t* x, int64_t size, float scale,
                         bool reciprocal, bool stream, int64_t ahead, uint8_t* codes) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    fetch(x + i, ahead);
    fetch(x + i + kLanes, ahead);
    const __m512i a = finish(rule, _mm512_loadu_si512(x + i), scale, reciprocal);
    const __m512i b = finish(rule, _mm512_loadu_si512(x + i + kLanes), scale, reciprocal);
    store_line(codes + i, pack_codes(a, b), stream);
  }
  if (i < size) {
    const __m512i a = finish(rule, _mm512_loadu_si512(x + i), scale, reciprocal);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm512_cvtepi16_epi8(a));
  }
}

// Below these exponents of amax or of a power-of-two scale, denormal inputs count: they are no normal numbers
// of exponent 0, which is what the integer steps take them for.
constexpr uint32_t kLeastAmaxField = 40;
constexpr int kLeastScaleField = 12;

inline int scale_field(const EncodeArgs& args, int64_t b) {
  const int field = static_cast<int>(as_bits(args.scales[b]) >> kMantissaBits);
  return args.reciprocal ? 254 - field : field;
}

// NaN's field as a reciprocal's gives -1.
inline bool by_shift(const EncodeArgs& args, int64_t b) {
  const bool power = args.reciprocal || (as_bits(args.scales[b]) & E8M0Args::kMantissaMask) == 0;
  return power && scale_field(args, b) >= kLeastScaleField;
}

void encode_block_bf16(const EncodeArgs& args, int64_t first, int64_t b, bool stream,
                       const QuotientCodes& all) {
  const auto* const x = reinterpret_cast<const uint16_t*>(args.x) + first;
  uint8_t* const codes = args.codes + first;
  const float scale = args.scales[b];
  const int64_t ahead = args.ahead;
  if (by_shift(args, b)) {
    const PowerOfTwo rule(scale_field(args, b), args.nan_overflow);
    return encode_whole(rule, x, args.block, scale, args.reciprocal, stream, ahead, codes);
  }
  if (scale != scale) return fill(codes, args.block, kE4M3Bits.nan_code);
  if (args.amax != nullptr && args.amax[b] >> kMantissaBits >= kLeastAmaxField) {
    const Quotients rule(args.amax[b], all);
    return encode_whole(rule, x, args.block, scale, false, stream, ahead, codes);
  }
  encode_block_e4m3<uint16_t>(args, first, args.block, scale);
}

// Two blocks of 32 to a line.
inline __m512i encode_pair(const EncodeArgs& args, int64_t first, int64_t b) {
  const auto* const x = reinterpret_cast<const uint16_t*>(args.x) + first;
  const auto one = [&](int64_t block) {
    const PowerOfTwo rule(scale_field(args, block), args.nan_overflow);
    return finish(rule, _mm512_loadu_si512(x + (block - b) * kLanes), args.scales[block], true);
  };
  fetch(x, args.ahead);
  fetch(x + kLanes, args.ahead);
  return pack_codes(one(b), one(b + 1));
}

void encode_bf16(const EncodeArgs& args) {
  if (args.element != ElementFormat::kE4M3 || args.block % kLanes != 0) {
    return encode_rows<uint16_t>(args);
  }
  const bool stream = args.stream && whole_lines(args.codes);
  const QuotientCodes& all = quotient_codes();
  const int64_t whole = args.n / args.block;
  const bool pairs = args.block == kLanes && args.reciprocal;
  for (int64_t b = 0; b < whole; ++b) {
    const int64_t first = b * args.block;
    if (pairs && b + 1 < whole && by_shift(args, b) && by_shift(args, b + 1)) {
      store_line(args.codes + first, encode_pair(args, first, b),
                 stream && whole_lines(args.codes + first));
      ++b;
    } else {
      encode_block_bf16(args, first, b, stream, all);
    }
  }
  EncodeArgs rest = args;
  rest.x += whole * args.block * 2;
  rest.n -= whole * args.block;
  rest.scales += whole;
  rest.codes += whole * args.block;
  encode_rows<uint16_t>(rest);
}

// --- dequantise ---

// Values of the codes 0..127 as bf16, times a scale.
struct CodeValues {
  __m512i table[4];

  explicit CodeValues(float scale) {
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // Codes 0..15 are multiples of 2^-9; all others are eight of them times powers of two.
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(count), _mm512_set1_ps(0x1p-9f));
    const __m512i word = _mm512_castps_si512(_mm512_mul_ps(value, _mm512_set1_ps(scale)));
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7FFF)), lsb);
    const __m512i start =
        _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    const __m512i lane =
        _mm512_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 15, 14, 13, 12, 11, 10, 9, 8, 15, 14, 13, 12,
                         11, 10, 9, 8, 15, 14, 13, 12, 11, 10, 9, 8);
    const __m512i row =
        _mm512_set_epi16(384, 384, 384, 384, 384, 384, 384, 384, 256, 256, 256, 256, 256, 256, 256,
                         256, 128, 128, 128, 128, 128, 128, 128, 128, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i normal = _mm512_add_epi16(_mm512_permutexvar_epi16(lane, start), row);
    table[0] =
        _mm512_mask_mov_epi16(_mm512_sub_epi16(normal, _mm512_set1_epi16(128)), 0xFFFF, start);
    table[1] = _mm512_add_epi16(normal, _mm512_set1_epi16(3 * 128));
    table[2] = _mm512_add_epi16(normal, _mm512_set1_epi16(7 * 128));
    table[3] = _mm512_add_epi16(normal, _mm512_set1_epi16(11 * 128));
  }

  // Magnitudes of 32 codes in 16-bit lanes.
  __m512i of(__m512i codes) const {
    const __m512i low = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    const __m512i high = _mm512_permutex2var_epi16(table[2], codes, table[3]);
    return _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), high);
  }
};

inline __m512i load_codes(const uint8_t* codes) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
}

// magnitude | (codes << 8 & 0x8000)
inline __m512i with_sign(__m512i magnitude, __m512i codes) {
  return _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(codes, 8),
                                   _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xF8);
}

inline bool has_nan(const uint8_t* codes, int64_t size) {
  __mmask32 any = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    any |= _mm256_cmpeq_epi8_mask(_mm256_or_si256(line, _mm256_set1_epi8(static_cast<char>(0x80))),
                                  _mm256_set1_epi8(static_cast<char>(0xFF)));
  }
  return any != 0;
}

// Scales at which no value of a block, and no step on the way to it, is a denormal or overflows.
constexpr float kLeastTame = 0x1p-100f, kMostTame = 0x1p+100f;
inline bool is_tame(float scale) { return scale >= kLeastTame && scale <= kMostTame; }

inline void decode_scaled(const CodeValues& values, const uint8_t* codes, int64_t size, bool stream,
                          uint16_t* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512i code = load_codes(codes + i);
    store_line(out + i, with_sign(values.of(code), code), stream);
  }
}

// Values less the bias of bf16's exponent, so that the upper half of a scale, added, makes them products. 0 stays 0.
inline CodeValues unbiased_values() {
  CodeValues values(1.0f);
  const __m512i bias = _mm512_set1_epi16(127 << 7);
  for (int i = 0; i < 4; ++i) {
    values.table[i] = _mm512_mask_sub_epi16(values.table[i], i == 0 ? 0xFFFFFFFEu : 0xFFFFFFFFu,
                                            values.table[i], bias);
  }
  return values;
}

// Times a power of two: exponents move, zeros stay.
inline void decode_shifted(const CodeValues& unbiased, const float* scale, const uint8_t* codes,
                           int64_t size, bool stream, uint16_t* out) {
  int16_t upper = 0;
  __builtin_memcpy(&upper, reinterpret_cast<const char*>(scale) + 2, sizeof(upper));
  const __m512i shift = _mm512_set1_epi16(upper);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512i code = load_codes(codes + i);
    const __mmask32 nonzero = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x7F));
    const __m512i value = unbiased.of(code);
    store_line(out + i, with_sign(_mm512_mask_add_epi16(value, nonzero, value, shift), code),
               stream);
  }
}

inline void decode_widened(const CodeValues& ones, float scale, const uint8_t* codes, int64_t size,
                           bool stream, uint32_t* out) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512i code = load_codes(codes + i);
    const __m512i value = with_sign(ones.of(code), code);
    const __m256i halves[2] = {_mm512_castsi512_si256(value), _mm512_extracti64x4_epi64(value, 1)};
    for (ptrdiff_t h = 0; h < 2; ++h) {
      const __m512i word = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves[h]), 16);
      store_line(out + i + 16 * h,
                 _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(word), factor)), stream);
    }
  }
}

inline void decode_block(const DecodeArgs& args, const CodeValues& values, int64_t first, int64_t b,
                         bool stream, uint16_t* out) {
  const uint8_t* const codes = args.codes + first;
  if (args.power_of_two) {
    return decode_shifted(values, args.scales + b, codes, args.block, stream, out + first);
  }
  decode_scaled(CodeValues(args.scales[b]), codes, args.block, stream, out + first);
}
inline void decode_block(const DecodeArgs& args, const CodeValues& values, int64_t first, int64_t b,
                         bool stream, uint32_t* out) {
  decode_widened(values, args.scales[b], args.codes + first, args.block, stream, out + first);
}

// Whole blocks that are looked at together before they are decoded: a line of codes at least.
constexpr int64_t kTogether = 512;

// True when no code and no scale of them needs the careful way.
inline bool all_tame(const DecodeArgs& args, int64_t first, int64_t size) {
  const auto some = static_cast<__mmask16>((1u << size / args.block) - 1u);  // 16 at most
  const __m512 scales = _mm512_maskz_loadu_ps(some, args.scales + first / args.block);
  const __mmask16 above = _mm512_cmp_ps_mask(scales, _mm512_set1_ps(kLeastTame), _CMP_GE_OQ);
  const __mmask16 below = _mm512_cmp_ps_mask(scales, _mm512_set1_ps(kMostTame), _CMP_LE_OQ);
  return (above & below & some) == some && !has_nan(args.codes + first, size);
}

template <typename T>
void decode_carefully(const DecodeArgs& args, int64_t first, int64_t size) {
  DecodeArgs part = args;
  part.codes += first;
  part.n = size;
  part.scales += first / args.block;
  part.out += first * static_cast<int64_t>(sizeof(T));
  decode_rows<T>(part);
}

template <typename T>
void decode(const DecodeArgs& args) {
  if (args.element != ElementFormat::kE4M3 || kTogether % args.block != 0 ||
      args.block % kLanes != 0) {
    return decode_rows<T>(args);
  }
  T* const out = reinterpret_cast<T*>(args.out);
  const bool stream = args.stream && whole_lines(args.out);
  const bool shifted = sizeof(T) == 2 && args.power_of_two;
  const CodeValues values = shifted ? unbiased_values() : CodeValues(1.0f);
  for (int64_t at = 0; at < args.n; at += kTogether) {
    const int64_t size = least(kTogether, args.n - at) / args.block * args.block;
    if (all_tame(args, at, size)) {
      for (int64_t first = at, b = at / args.block; first < at + size; first += args.block, ++b) {
        decode_block(args, values, first, b, stream, out);
      }
    } else {
      decode_carefully<T>(args, at, size);
    }
    const int64_t rest = least(kTogether, args.n - at) - size;
    if (rest > 0) decode_carefully<T>(args, at + size, rest);
  }
}

// --- quantise fp32 ---

// Codes of sixteen quotients in the low byte of each lane, saturating; other bits are not 0.
inline __m512i round_codes(__m512i q) {
  const __m512i magnitude = _mm512_min_epu32(_mm512_and_si512(q, _mm512_set1_epi32(0x7FFFFFFF)),
                                             _mm512_set1_epi32(0x43E00000));  // 448
  const __m512i exponent = _mm512_max_epu32(
      _mm512_and_si512(magnitude, _mm512_set1_epi32(0x7F800000)), _mm512_set1_epi32(121 << 23));
  // 2^20 times the power of two: the sum's last place is that of the code. 56 = -8 * 121 mod 256 takes the exponent's
  // bias off and is even, so ties stay ties.
  const __m512i unit = _mm512_add_epi32(exponent, _mm512_set1_epi32((20 << 23) + 56));
  const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(unit));
  const __m512i code = _mm512_add_epi32(_mm512_castps_si512(sum), _mm512_srli_epi32(exponent, 20));
  // The sign, and zeros above it: c ? b : a for c = ~0x7F.
  return _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(q, 24), _mm512_set1_epi32(~0x7F), 0xD8);
}

struct Divisor {
  __m512 scale, factor;
  bool exact;  // factor is the exact reciprocal

  // x / scale, or something that rounds to the same code. A product with the rounded reciprocal is within four units of the
  // last place; only next to a midpoint between codes, where the low 19 bits are near 0, can that matter.
  __m512 quotient(__m512 x) const {
    const __m512 q = _mm512_mul_ps(x, factor);
    if (exact) return q;
    const __m512i magnitude =
        _mm512_and_si512(_mm512_castps_si512(q), _mm512_set1_epi32(0x7FFFFFFF));
    const __mmask16 counts =
        _mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(116 << 23));  // 2^-11
    const __m512i around = _mm512_add_epi32(magnitude, _mm512_set1_epi32(4));
    const __mmask16 near = _mm512_mask_testn_epi32_mask(counts, around, _mm512_set1_epi32(0x7FFF8));
    if (near != 0) [[unlikely]]
      return _mm512_div_ps(x, scale);
    return q;
  }
};

inline __m512i encode_16(const Divisor& divisor, const uint32_t* x) {
  return round_codes(_mm512_castps_si512(divisor.quotient(_mm512_loadu_ps(x))));
}

void encode_block_f32(const EncodeArgs& args, int64_t first, float scale, bool stream) {
  const auto* const x = reinterpret_cast<const uint32_t*>(args.x) + first;
  uint8_t* const codes = args.codes + first;
  const Divisor divisor{_mm512_set1_ps(scale),
                        _mm512_set1_ps(args.reciprocal ? scale : 1.0f / scale), args.reciprocal};
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  int64_t i = 0;
  const int64_t ahead = args.ahead;
  for (; i + 64 <= args.block; i += 64) {
    for (int64_t line = 0; line < 64; line += 16) fetch(x + i + line, ahead);
    const __m512i low =
        _mm512_packus_epi32(encode_16(divisor, x + i), encode_16(divisor, x + i + 16));
    const __m512i high =
        _mm512_packus_epi32(encode_16(divisor, x + i + 32), encode_16(divisor, x + i + 48));
    store_line(codes + i, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)), stream);
  }
  for (; i < args.block; i += 16) {
    fetch(x + i, ahead);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i),
                     _mm512_cvtepi32_epi8(encode_16(divisor, x + i)));
  }
}

void encode_f32(const EncodeArgs& args) {
  if (args.element != ElementFormat::kE4M3 || args.block % kLanes != 0 || args.nan_overflow) {
    return encode_rows<uint32_t>(args);
  }
  const bool stream = args.stream && whole_lines(args.codes);
  each_block(args.n, args.block, [&](int64_t first, int64_t size, int64_t b) {
    const float scale = args.scales[b];
    if (scale != scale) return fill(args.codes + first, size, kE4M3Bits.nan_code);
    if (size < args.block || !(args.reciprocal || is_tame(scale))) {
      return encode_block_e4m3<uint32_t>(args, first, size, scale);
    }
    encode_block_f32(args, first, scale, stream);
  });
}

}  // namespace

const Kernel kKernelAvx512 = {Level::kAvx512,  false,     amax_bf16,   amax_f32,   scales_f32,
                              store_e8m0,      load_e8m0, encode_bf16, encode_f32, decode<uint16_t>,
                              decode<uint32_t>};

}  // namespace argosy::quant
