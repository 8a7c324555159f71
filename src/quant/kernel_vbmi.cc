// Quantising to e4m3 with permutations of bytes (AVX512_VBMI): 64 codes at a time.
//
// A code is a byte looked up by the 7 bits of a mantissa, less eight for each exponent below the block's largest. fp32 inputs
// are brought to scale first and cut to 16 bits. What falls into e4m3's denormals, and is not zero, is divided out. Blocks
// and lines that do not fit go to kernel_avx512.cc. Only the table of functions has external linkage. Test: kernel_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined start of an intrinsic of its own header for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "quant/element.h"
#include "quant/kernel.h"
#include "quant/quotients.h"

namespace argosy::quant {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kShort = 32;  // elements of a block, two to a line
constexpr uintptr_t kLineMask = kLine - 1;

inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// Mantissa of x -> code at the block's top exponent.
struct CodeTable {
  __m512i low, high;
};

// Rounded to three bits, above the code of 256.
inline CodeTable shift_table() {
  alignas(64) uint8_t codes[128];
  for (int m = 0; m < 128; ++m) {
    codes[m] = static_cast<uint8_t>(0x78 + ((m + 7 + (m >> 4 & 1)) >> 4));
  }
  return {_mm512_load_si512(codes), _mm512_load_si512(codes + kLine)};
}

// Codes of 16 bf16 below e4m3's smallest normal: added to 2^14, the last place is that of the denormals.
inline __m128i denormal_codes(const uint16_t* x, __m512 scale, bool reciprocal) {
  const __m256i words = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)),
                                         _mm256_set1_epi16(0x7FFF));
  const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  const __m512 q = reciprocal ? _mm512_mul_ps(value, scale) : _mm512_div_ps(value, scale);
  return _mm512_cvtepi32_epi8(_mm512_castps_si512(_mm512_add_ps(q, _mm512_set1_ps(0x1p+14f))));
}

__attribute__((noinline)) __m512i with_denormals(__m512i codes, __mmask64 denormal,
                                                 const uint16_t* x, float low_scale,
                                                 float high_scale, bool reciprocal) {
  alignas(64) uint8_t exact[kLine];
  for (ptrdiff_t i = 0; i < 4; ++i) {
    const __m512 scale = _mm512_set1_ps(i < 2 ? low_scale : high_scale);
    _mm_store_si128(reinterpret_cast<__m128i*>(exact + 16 * i),
                    denormal_codes(x + 16 * i, scale, reciprocal));
  }
  return _mm512_mask_mov_epi8(codes, denormal, _mm512_load_si512(exact));
}

inline __m512i even_bytes() {
  alignas(64) uint8_t at[kLine];
  for (int i = 0; i < kLine; ++i) at[i] = static_cast<uint8_t>(2 * i);
  return _mm512_load_si512(at);
}

// A constant that stays in a register: the compiler would make it again for every line, through a general register.
inline __m512i kept(__m512i x) {
  asm("" : "+v"(x));
  return x;
}
inline __m512i bytes_of(int value) { return kept(_mm512_set1_epi8(static_cast<char>(value))); }

// What all lines of a call share.
struct Lines {
  __m512i even = even_bytes();
  __m512i odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
  __m512i all_bits = bytes_of(0xFF), sign = bytes_of(0x80);
  __m512i least_normal = bytes_of(8), most_below = bytes_of(19), most_down = bytes_of(31);
  __m512i most;
  bool reciprocal;
  bool stream;
  int64_t ahead;  // bytes to what is fetched early; 0: the same line, which is there already

  explicit Lines(const EncodeArgs& args)
      : most(bytes_of(args.nan_overflow ? kE4M3Bits.overflow_code : kE4M3Bits.max_code)),
        reciprocal(args.reciprocal),
        stream(args.stream && (reinterpret_cast<uintptr_t>(args.codes) & kLineMask) == 0),
        ahead(args.ahead) {}

  void store(__m512i code, uint8_t* codes) const {
    if (stream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(codes), code);
    } else {
      _mm512_storeu_si512(codes, code);
    }
  }

  // Codes of 64 16-bit numbers, `top`: per byte the exponent field at which the table holds.
  struct Codes {
    __m512i value;  // magnitudes
    __m512i below;  // how many exponents below the largest
    __mmask64 small;
    __m512i high;  // bytes with the signs
  };
  Codes look_up(const CodeTable& table, __m512i top, __m512i first, __m512i second) const {
    const __m512i low = _mm512_permutex2var_epi8(first, even, second);
    const __m512i high = _mm512_permutex2var_epi8(first, odd, second);
    const __m512i mantissa_code = _mm512_permutex2var_epi8(table.low, low, table.high);
    const __m512i twice = _mm512_add_epi8(high, high);
    const __m512i exponent = _mm512_mask_sub_epi8(twice, _mm512_movepi8_mask(low), twice, all_bits);
    const __m512i below = _mm512_subs_epu8(top, exponent);
    // 31 exponents down nothing is left; times eight it just fits a byte.
    const __m512i down = _mm512_slli_epi16(_mm512_min_epu8(below, most_down), 3);
    const __m512i code = _mm512_min_epu8(_mm512_subs_epu8(mantissa_code, down), most);
    return {code, below, _mm512_cmplt_epu8_mask(code, least_normal), high};
  }
  // Of small codes those that are neither zero nor too small for a denormal.
  __mmask64 denormal(const Codes& found) const {
    return _mm512_mask_cmple_epu8_mask(found.small, found.below, most_below);
  }

  // 128 values of one block.
  void encode_pair(const CodeTable& table, __m512i top, const uint16_t* x, float scale,
                   uint8_t* codes) const {
    const char* const next = reinterpret_cast<const char*>(x) + ahead;
    Codes found[2];
    for (ptrdiff_t i = 0; i < 2; ++i) {
      const uint16_t* const from = x + i * kLine;
      _mm_prefetch(next + 2 * i * kLine, _MM_HINT_T0);
      _mm_prefetch(next + (2 * i + 1) * kLine, _MM_HINT_T0);
      found[i] =
          look_up(table, top, _mm512_loadu_si512(from), _mm512_loadu_si512(from + kLine / 2));
    }
    if (_kortestz_mask64_u8(found[0].small, found[1].small) == 0) [[unlikely]] {
      for (ptrdiff_t i = 0; i < 2; ++i) {
        const __mmask64 exact = denormal(found[i]);
        if (exact == 0) continue;
        found[i].value =
            with_denormals(found[i].value, exact, x + i * kLine, scale, scale, reciprocal);
      }
    }
    for (ptrdiff_t i = 0; i < 2; ++i) {
      store(with_sign(found[i].value, found[i].high), codes + i * kLine);
    }
  }

  // code | (high & 0x80)
  __m512i with_sign(__m512i code, __m512i high) const {
    return _mm512_ternarylogic_epi32(code, high, sign, 0xF8);
  }

  void encode(const CodeTable& table, __m512i top, const uint16_t* x, float low_scale,
              float high_scale, uint8_t* codes) const {
    const __m512i first = _mm512_loadu_si512(x), second = _mm512_loadu_si512(x + kLine / 2);
    const char* const next = reinterpret_cast<const char*>(x) + ahead;
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + kLine, _MM_HINT_T0);
    Codes found = look_up(table, top, first, second);
    if (found.small != 0) [[unlikely]] {
      const __mmask64 exact = denormal(found);
      if (exact != 0) {
        found.value = with_denormals(found.value, exact, x, low_scale, high_scale, reciprocal);
      }
    }
    store(with_sign(found.value, found.high), codes);
  }
};

// Exponent fields of a power-of-two scale at which all of a block's values, denormal ones too, are what the byte steps
// take them for; see kernel_avx512.cc. The table's top is eight above.
constexpr int kLeastScaleField = 12, kMostScaleField = 247, kTopAbove = 8;
constexpr uint32_t kLeastAmaxField = 40;

// Field of the scale, out of range for NaN.
inline int scale_field(const EncodeArgs& args, int64_t b) {
  const int field = static_cast<int>(as_bits(args.scales[b]) >> kMantissaBits);
  return args.reciprocal ? 254 - field : field;
}
inline bool by_shift(const EncodeArgs& args, int64_t b) {
  const int field = scale_field(args, b);
  const bool power = args.reciprocal || (as_bits(args.scales[b]) & E8M0Args::kMantissaMask) == 0;
  return power && field >= kLeastScaleField && field <= kMostScaleField;
}

// Whole blocks and what is left after them, or one line of a block.
EncodeArgs part_of(const EncodeArgs& args, int64_t first, int64_t size, int64_t element_bytes) {
  EncodeArgs part = args;
  part.x += first * element_bytes;
  part.n = size;
  part.scales += first / args.block;
  if (args.amax != nullptr) part.amax += first / args.block;
  part.codes += first;
  return part;
}

void encode_elsewhere(const EncodeArgs& args, int64_t first, int64_t size) {
  kKernelAvx512.encode_bf16(part_of(args, first, size, sizeof(uint16_t)));
}

// Blocks of 128 with scale = amax / 448, as many from `first` on as are finite and far from fp32's denormals; the first that
// is not. Both lines of a block are looked up before either is stored: one look for e4m3's denormals.
int64_t encode_by_quotients(const EncodeArgs& args, Lines lines, int64_t first, int64_t whole) {
  const auto* const x = reinterpret_cast<const uint16_t*>(args.x);
  const QuotientCodes& quotients = quotient_codes();
  int64_t b = first;
  for (; b < whole; ++b) {
    const uint32_t amax = args.amax[b];
    if (amax >= kInfBits || amax >> kMantissaBits < kLeastAmaxField) break;
    const uint8_t* const row = quotients.codes[amax >> 16 & 0x7F];
    const CodeTable table = {_mm512_load_si512(row), _mm512_load_si512(row + kLine)};
    const __m512i top = _mm512_set1_epi8(static_cast<char>(amax >> kMantissaBits));
    lines.encode_pair(table, top, x + b * 2 * kLine, args.scales[b], args.codes + b * 2 * kLine);
  }
  return b;
}

// Blocks of a multiple of 64.
void encode_long(const EncodeArgs& args, Lines lines, int64_t whole) {
  const auto* const x = reinterpret_cast<const uint16_t*>(args.x);
  const CodeTable shifts = shift_table();
  const QuotientCodes& quotients = quotient_codes();
  const bool by_quotients = args.amax != nullptr && !args.reciprocal && args.block == 2 * kLine;
  for (int64_t b = 0; b < whole; ++b) {
    if (by_quotients) b = encode_by_quotients(args, lines, b, whole);
    if (b == whole) return;
    const int64_t begin = b * args.block;
    CodeTable table = shifts;
    int top = 0;
    if (by_shift(args, b)) {
      top = scale_field(args, b) + kTopAbove;
    } else if (args.amax != nullptr && args.amax[b] < kInfBits &&
               args.amax[b] >> kMantissaBits >= kLeastAmaxField) {
      const uint8_t* const row = quotients.codes[args.amax[b] >> 16 & 0x7F];
      table = {_mm512_load_si512(row), _mm512_load_si512(row + kLine)};
      top = static_cast<int>(args.amax[b] >> kMantissaBits);
    } else {
      encode_elsewhere(args, begin, args.block);
      continue;
    }
    const __m512i tops = _mm512_set1_epi8(static_cast<char>(top));
    for (int64_t i = begin; i < begin + args.block; i += kLine) {
      lines.encode(table, tops, x + i, args.scales[b], args.scales[b], args.codes + i);
    }
  }
}

// Sixteen blocks of 32 with power-of-two scales. False: one of them does not fit.
inline bool tops_of(const EncodeArgs& args, int64_t b, uint8_t* tops) {
  const __m512i fields = _mm512_sub_epi32(
      _mm512_set1_epi32(254),
      _mm512_srli_epi32(_mm512_castps_si512(_mm512_loadu_ps(args.scales + b)), kMantissaBits));
  const __m512i above = _mm512_sub_epi32(fields, _mm512_set1_epi32(kLeastScaleField));
  const __mmask16 fit =
      _mm512_cmple_epu32_mask(above, _mm512_set1_epi32(kMostScaleField - kLeastScaleField));
  const __m512i top = _mm512_add_epi32(fields, _mm512_set1_epi32(kTopAbove));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(tops), _mm512_cvtepi32_epi8(top));
  return fit == 0xFFFF;
}

void encode_short(const EncodeArgs& args, Lines lines, int64_t whole) {
  constexpr int64_t kTogether = 16;
  const auto* const x = reinterpret_cast<const uint16_t*>(args.x);
  const CodeTable table = shift_table();
  // First half of a line: byte 0 of the two tops; second half: byte 1.
  const __m512i spread = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(1), 1);
  int64_t b = 0;
  for (; b + kTogether <= whole; b += kTogether) {
    uint8_t tops[kTogether];
    if (!tops_of(args, b, tops)) {
      encode_elsewhere(args, b * kShort, kTogether * kShort);
      continue;
    }
    for (int64_t i = 0; i < kTogether; i += 2) {
      uint16_t two = 0;
      __builtin_memcpy(&two, tops + i, sizeof(two));
      const __m512i top = _mm512_shuffle_epi8(_mm512_set1_epi16(static_cast<int16_t>(two)), spread);
      const int64_t first = (b + i) * kShort;
      lines.encode(table, top, x + first, args.scales[b + i], args.scales[b + i + 1],
                   args.codes + first);
    }
  }
  if (b < whole) encode_elsewhere(args, b * kShort, (whole - b) * kShort);
}

void encode_bf16(const EncodeArgs& args) {
  const bool is_short = args.block == kShort && args.reciprocal;
  if (args.element != ElementFormat::kE4M3 || (args.block % kLine != 0 && !is_short)) {
    return kKernelAvx512.encode_bf16(args);
  }
  const Lines lines(args);
  const int64_t whole = args.n / args.block;
  is_short ? encode_short(args, lines, whole) : encode_long(args, lines, whole);
  const int64_t done = whole * args.block;
  if (done < args.n) encode_elsewhere(args, done, args.n - done);
}

// --- fp32 ---

// Rounded to three bits, a half always up: for mantissas cut to seven bits that were no ties.
inline CodeTable half_up_table() {
  alignas(64) uint8_t codes[128];
  for (int m = 0; m < 128; ++m) codes[m] = static_cast<uint8_t>(0x78 + ((m + 8) >> 4));
  return {_mm512_load_si512(codes), _mm512_load_si512(codes + kLine)};
}

// Whether a product with the rounded reciprocal, which is within four units of the last place of the quotient, lies next to a
// midpoint between codes that are normal numbers: there the low 20 bits are near 2^19.
struct Midpoints {
  __m512i moved = kept(_mm512_set1_epi32((1 << 19) + 4)), far = kept(_mm512_set1_epi32(0xFFFF8));
  __mmask16 near(__m512i word) const {
    return _mm512_testn_epi32_mask(_mm512_add_epi32(word, moved), far);
  }
};

struct F32Lines : Lines {
  const EncodeArgs& args;
  CodeTable table;
  __m512i odd_words;
  Midpoints midpoints;
  __m512i even_words, one = kept(_mm512_set1_epi16(1));
  // Quotients are looked up as they are: the block's scale is 1.
  __m512i top = _mm512_set1_epi8(static_cast<char>(127 + 8));

  explicit F32Lines(const EncodeArgs& all)
      : Lines(all), args(all), table(all.reciprocal ? shift_table() : half_up_table()) {
    alignas(64) uint16_t at[kLine / 2];
    for (int i = 0; i < kLine / 2; ++i) at[i] = static_cast<uint16_t>(2 * i + 1);
    odd_words = _mm512_load_si512(at);
    even_words = _mm512_sub_epi16(odd_words, one);
  }

  __attribute__((noinline)) void encode_exactly(int64_t first, int64_t size) const {
    EncodeArgs part = part_of(args, first, size, sizeof(float));
    if (size < part.block) part.block = size;
    part.ahead = 0;
    kKernelAvx512.encode_f32(part);
  }

  // Of 32 words. kToOdd: the last bit also stands for all bits below it, so that no second rounding is wrong.
  template <bool kToOdd>
  __m512i upper_halves(__m512i first, __m512i second) const {
    const __m512i upper = _mm512_permutex2var_epi16(first, odd_words, second);
    if constexpr (!kToOdd) return upper;
    const __m512i lower = _mm512_permutex2var_epi16(first, even_words, second);
    return _mm512_or_si512(upper, _mm512_min_epu16(lower, one));
  }

  // 64 values from `first` on, scales of their halves.
  template <bool kExact>
  void encode(int64_t first, float low_factor, float high_factor) const {
    const float* const x = reinterpret_cast<const float*>(args.x) + first;
    const char* const next = reinterpret_cast<const char*>(x) + ahead;
    __m512i word[4];
    __mmask16 near = 0;
    for (ptrdiff_t i = 0; i < 4; ++i) {
      _mm_prefetch(next + kLine * i, _MM_HINT_T0);
      const __m512 factor = _mm512_set1_ps(i < 2 ? low_factor : high_factor);
      word[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), factor));
      if constexpr (!kExact) near = _kor_mask16(near, midpoints.near(word[i]));
    }
    const Codes found = look_up(table, top, upper_halves<kExact>(word[0], word[1]),
                                upper_halves<kExact>(word[2], word[3]));
    if ((found.small | near) != 0) [[unlikely]] {
      if ((denormal(found) | near) != 0) return encode_exactly(first, kLine);
    }
    store(with_sign(found.value, found.high), args.codes + first);
  }
};

// Scales whose reciprocals are no denormals and do not overflow. False for NaN.
inline bool is_tame(float scale) { return scale >= 0x1p-100f && scale <= 0x1p+100f; }

void encode_long_f32(F32Lines lines, int64_t whole) {
  const EncodeArgs& args = lines.args;
  for (int64_t b = 0; b < whole; ++b) {
    const int64_t begin = b * args.block, end = begin + args.block;
    const float scale = args.scales[b];
    if (!is_tame(scale)) {
      lines.encode_exactly(begin, args.block);
    } else if (args.reciprocal) {
      for (int64_t i = begin; i < end; i += kLine) lines.encode<true>(i, scale, scale);
    } else {
      const float factor = 1.0f / scale;
      for (int64_t i = begin; i < end; i += kLine) lines.encode<false>(i, factor, factor);
    }
  }
}

void encode_short_f32(F32Lines lines, int64_t pairs) {
  const float* const scales = lines.args.scales;
  for (int64_t b = 0; b < 2 * pairs; b += 2) {
    if (is_tame(scales[b]) && is_tame(scales[b + 1])) {
      lines.encode<true>(b * kShort, scales[b], scales[b + 1]);
    } else {
      lines.encode_exactly(b * kShort, kLine);
    }
  }
}

// Where no quotient reaches 512: scales of the block's own amax.
void encode_f32(const EncodeArgs& args) {
  const bool is_short = args.block == kShort && args.reciprocal;
  const bool fits = args.reciprocal || args.amax != nullptr;
  if (args.element != ElementFormat::kE4M3 || !fits || (args.block % kLine != 0 && !is_short)) {
    return kKernelAvx512.encode_f32(args);
  }
  const F32Lines lines(args);
  int64_t done = 0;
  if (is_short) {
    done = args.n / kLine * kLine;
    encode_short_f32(lines, done / kLine);
  } else {
    done = args.n / args.block * args.block;
    encode_long_f32(lines, done / args.block);
  }
  if (done < args.n) kKernelAvx512.encode_f32(part_of(args, done, args.n - done, sizeof(float)));
}

void amax_bf16(const AmaxArgs& args) { kKernelAvx512.amax_bf16(args); }
void amax_f32(const AmaxArgs& args) { kKernelAvx512.amax_f32(args); }
void scales_f32(const F32ScaleArgs& args) { kKernelAvx512.scales_f32(args); }
void scales_e8m0(const E8M0Args& args) { kKernelAvx512.scales_e8m0(args); }
uint32_t values_e8m0(const uint8_t* codes, int64_t num_blocks, float* values) {
  return kKernelAvx512.values_e8m0(codes, num_blocks, values);
}
void decode_bf16(const DecodeArgs& args) { kKernelAvx512.decode_bf16(args); }
void decode_f32(const DecodeArgs& args) { kKernelAvx512.decode_f32(args); }

}  // namespace

const Kernel kKernelVbmi = {Level::kAvx512, true,        amax_bf16,   amax_f32,
                            scales_f32,     scales_e8m0, values_e8m0, encode_bf16,
                            encode_f32,     decode_bf16, decode_f32};

}  // namespace argosy::quant
