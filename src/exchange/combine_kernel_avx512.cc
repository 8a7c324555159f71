// The combine kernel compiled with AVX-512 F and BW.
//
// bf16: a word holds two neighbours; the even one is its low half shifted up, the odd one its high half as it
// stands, so no lane moves on the way in or out. Two words of 16 columns and four sums are in flight.
// Only the table has external linkage.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined start of an intrinsic of its own header for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "exchange/combine_kernel.h"

namespace argosy {
namespace {

// Bytes of the next token's rows that are asked for early. Measured: docs/perf/exchange.md.
constexpr int64_t kNextBytes = 512;
// Within a row, how far ahead; past its end it asks in vain. Zen 5: combine 5 % faster, dispatch and combine 4 %. Not on Zen 4,
// whose hardware keeps up by itself: there it cost 5 to 15 %.
constexpr int64_t kAheadBytes = 256;
constexpr int64_t kLineBytes = 64;

struct Pair {
  __m512 even;
  __m512 odd;
};

inline Pair widen(__m512i words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)))};
}

// Round to nearest even in the upper half; NaN becomes the canonical one.
inline __m512i round_bf16(__m512 value) {
  const __m512i word = _mm512_castps_si512(value);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7FFF)), lsb);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7FC00000));
}

inline __m512i narrow(const Pair& pair) {
  const __m512i even = _mm512_srli_epi32(round_bf16(pair.even), 16);
  const __m512i odd = _mm512_and_si512(round_bf16(pair.odd), _mm512_set1_epi32(-65536));
  return _mm512_or_si512(even, odd);
}

inline __m512 canonical(__m512 value) {
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
}

// 32 columns of bf16 from `column` on; those outside `mask` are zero and not touched.
inline __m512i load_words(const std::byte* row, int64_t column, __mmask32 mask) {
  return _mm512_maskz_loadu_epi16(mask, row + column * 2);
}

// The even and odd columns of 32 fp32, of which `count` exist.
inline Pair load_pair(const float* values, int64_t count) {
  const auto low = static_cast<__mmask16>(count >= 16 ? 0xFFFFu : (1u << count) - 1u);
  const auto high = static_cast<__mmask16>(count >= 32   ? 0xFFFFu
                                           : count <= 16 ? 0u
                                                         : (1u << (count - 16)) - 1u);
  const __m512 first = _mm512_maskz_loadu_ps(low, values);
  const __m512 second = _mm512_maskz_loadu_ps(high, values + 16);
  const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return {_mm512_permutex2var_ps(first, evens, second),
          _mm512_permutex2var_ps(first, odds, second)};
}

inline Pair start_bf16(const CombineArgs& args, int64_t column, __mmask32 mask, int64_t count) {
  Pair acc{_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (args.shared != nullptr) {
    const Pair shared = widen(load_words(args.shared, column, mask));
    const __m512 scale = _mm512_set1_ps(args.shared_scale);
    acc = {_mm512_mul_ps(shared.even, scale), _mm512_mul_ps(shared.odd, scale)};
  }
  if (args.residual != nullptr) {
    const Pair residual = widen(load_words(args.residual, column, mask));
    acc = {_mm512_add_ps(acc.even, residual.even), _mm512_add_ps(acc.odd, residual.odd)};
  }
  if (args.bias != nullptr) {
    const Pair bias = load_pair(args.bias + column, count);
    acc = {_mm512_add_ps(acc.even, bias.even), _mm512_add_ps(acc.odd, bias.odd)};
  }
  return acc;
}

inline void add_row(__m512 weight, __m512i words, Pair* acc) {
  const Pair row = widen(words);
  acc->even = _mm512_fmadd_ps(weight, row.even, acc->even);
  acc->odd = _mm512_fmadd_ps(weight, row.odd, acc->odd);
}

inline void store_line(std::byte* to, __m512i line, bool stream) {
  if (stream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
  } else {
    _mm512_storeu_si512(to, line);
  }
}

template <bool kAsksAhead>
void combine_bf16(const CombineArgs& args) {
  int64_t column = 0;
  constexpr __mmask32 kAll = 0xFFFFFFFFu;
  const bool stream = args.stream && reinterpret_cast<uintptr_t>(args.out) % kLineBytes == 0;
  for (; column + 64 <= args.n; column += 64) {
    Pair low = start_bf16(args, column, kAll, 32);
    Pair high = start_bf16(args, column + 32, kAll, 32);
    for (int64_t k = 0; k < args.num_rows; ++k) {
      const std::byte* const at = args.rows[k] + column * 2;
      if constexpr (kAsksAhead) {
        _mm_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes + kLineBytes, _MM_HINT_T0);
      }
      const __m512 weight = _mm512_set1_ps(args.weights[k]);
      add_row(weight, _mm512_loadu_si512(at), &low);
      add_row(weight, _mm512_loadu_si512(at + kLineBytes), &high);
    }
    store_line(args.out + column * 2, narrow(low), stream);
    store_line(args.out + column * 2 + kLineBytes, narrow(high), stream);
  }
  for (int64_t k = 0; k < args.num_next; ++k) {
    for (int64_t byte = 0; byte < kNextBytes; byte += kLineBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(args.next_rows[k]) + byte, _MM_HINT_T0);
    }
  }
  for (; column < args.n; column += 32) {
    const int64_t count = args.n - column < 32 ? args.n - column : 32;
    const auto mask = static_cast<__mmask32>(count >= 32 ? kAll : (1u << count) - 1u);
    Pair acc = start_bf16(args, column, mask, count);
    for (int64_t k = 0; k < args.num_rows; ++k) {
      add_row(_mm512_set1_ps(args.weights[k]), load_words(args.rows[k], column, mask), &acc);
    }
    _mm512_mask_storeu_epi16(args.out + column * 2, mask, narrow(acc));
  }
}

inline __m512 load_floats(const std::byte* row, int64_t column, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, row + column * 4);
}

void combine_f32(const CombineArgs& args) {
  for (int64_t column = 0; column < args.n; column += 16) {
    const int64_t count = args.n - column < 16 ? args.n - column : 16;
    const auto mask = static_cast<__mmask16>(count >= 16 ? 0xFFFFu : (1u << count) - 1u);
    __m512 acc = _mm512_setzero_ps();
    if (args.shared != nullptr) {
      acc =
          _mm512_mul_ps(load_floats(args.shared, column, mask), _mm512_set1_ps(args.shared_scale));
    }
    if (args.residual != nullptr) {
      acc = _mm512_add_ps(acc, load_floats(args.residual, column, mask));
    }
    if (args.bias != nullptr) {
      acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, args.bias + column));
    }
    for (int64_t k = 0; k < args.num_rows; ++k) {
      acc = _mm512_fmadd_ps(_mm512_set1_ps(args.weights[k]),
                            load_floats(args.rows[k], column, mask), acc);
    }
    _mm512_mask_storeu_ps(args.out + column * 4, mask, canonical(acc));
  }
}

}  // namespace

const CombineKernel kCombineKernelAvx512 = {Level::kAvx512, combine_bf16<true>, combine_f32};
const CombineKernel kCombineKernelHalfWidth = {Level::kAvx512, combine_bf16<false>, combine_f32};

}  // namespace argosy
