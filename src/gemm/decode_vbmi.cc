// Codes to bf16, 64 bytes at a time: AVX512_VBMI looks e4m3 up in tables of all 128 magnitudes. Test:
// tests/gemm/decode_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "argosy/number_formats.h"
#include "gemm/code_tables.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx512f,avx512bw,avx512vbmi")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline

constexpr int64_t kPairBytes = 64;  // of codes of e4m3; of e2m1 two pairs

E4M3Tables make_tables() {
  E4M3Tables tables;
  for (size_t code = 0; code < 128; ++code) {
    const float value = decode_element(ElementFormat::kE4M3, static_cast<uint8_t>(code));
    const uint16_t bits = BFloat16::from_float(value).bits;
    tables.low[code] = static_cast<uint8_t>(bits & 0xFF);
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return tables;
}

ARGOSY_KERNEL_INLINE void store_pair(__m512i low, __m512i high, std::byte* to) {
  _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
  _mm512_store_si512(to + kTileStride, _mm512_unpackhi_epi8(low, high));
}

ARGOSY_KERNEL_TARGET void decode_e4m3(const std::byte* codes, std::byte* block) {
  const E4M3Tables& tables = e4m3_tables();
  const __m512i low_of[] = {_mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64)};
  const __m512i high_of[] = {_mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)};
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  constexpr int kOrOfAnd = 0xEA;  // a & b | c
  for (int64_t at = 0; at < kBlockK / 2 * kPairBytes; at += kPairBytes) {
    const __m512i code = _mm512_loadu_si512(codes + at);
    const __m512i low = _mm512_permutex2var_epi8(low_of[0], code, low_of[1]);
    const __m512i high = _mm512_permutex2var_epi8(high_of[0], code, high_of[1]);
    store_pair(low, _mm512_ternarylogic_epi64(code, sign, high, kOrOfAnd),
               block + at / kPairBytes * kPairStride);
  }
}

ARGOSY_KERNEL_TARGET void decode_e2m1(const std::byte* codes, std::byte* block) {
  const __m512i words = _mm512_load_si512(kE2M1Words);
  for (int64_t line = 0; line < kBlockK / 4; ++line) {
    const __m512i four = _mm512_loadu_si512(codes + line * kPairBytes);
    std::byte* to = block + line * 2 * kPairStride;
    _mm512_store_si512(to, _mm512_permutexvar_epi16(four, words));
    _mm512_store_si512(to + kTileStride,
                       _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4), words));
    _mm512_store_si512(to + kPairStride,
                       _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 8), words));
    _mm512_store_si512(to + kTileStride + kPairStride,
                       _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 12), words));
  }
}

}  // namespace

const E4M3Tables& e4m3_tables() {
  static const E4M3Tables tables = make_tables();
  return tables;
}

const Decoders& vbmi_decoders() {
  static constexpr Decoders kDecoders{decode_e4m3, decode_e2m1};
  return kDecoders;
}

}  // namespace argosy::gemm
