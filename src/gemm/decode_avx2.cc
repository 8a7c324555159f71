// Codes to bf16, 32 bytes at a time, by byte arithmetic and tables of 16. Test: tests/gemm/decode_test.cc.
#include <immintrin.h>

#include "gemm/code_tables.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx2")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline

constexpr int64_t kPairBytes = 64;

ARGOSY_KERNEL_INLINE __m256i splat(uint8_t byte) {
  return _mm256_set1_epi8(static_cast<char>(byte));
}
ARGOSY_KERNEL_INLINE __m256i load(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
ARGOSY_KERNEL_INLINE __m256i table_of_16(const uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// The bf16 bytes of 0 to 7 times 2^-9.
alignas(16) constexpr uint8_t kSmallLow[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x20, 0x40, 0x60};
alignas(16) constexpr uint8_t kSmallHigh[16] = {0x00, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C, 0x3C, 0x3C};

// Two bytes of every code to half a pair of both tiles.
ARGOSY_KERNEL_INLINE void store_pair(__m256i low, __m256i high, std::byte* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi8(low, high));
  _mm256_store_si256(reinterpret_cast<__m256i*>(to + kTileStride), _mm256_unpackhi_epi8(low, high));
}

// bf16 of a normal e4m3 code: sign, then magnitude * 16 + 120 * 128. The 8 smallest magnitudes are denormals
// of e4m3 and come from a table; 0x7F becomes NaN.
ARGOSY_KERNEL_TARGET void decode_e4m3(const std::byte* codes, std::byte* block) {
  const __m256i small_high = table_of_16(kSmallHigh);
  const __m256i small_low = table_of_16(kSmallLow);
  for (int64_t at = 0; at < kBlockK / 2 * kPairBytes; at += 32) {
    const __m256i code = load(codes + at);
    const __m256i magnitude = _mm256_and_si256(code, splat(0x7F));
    const __m256i nibble = _mm256_and_si256(code, splat(0x0F));
    const __m256i is_small = _mm256_cmpgt_epi8(splat(8), magnitude);
    const __m256i is_nan = _mm256_cmpeq_epi8(magnitude, splat(0x7F));
    const __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(magnitude, 4), splat(0x07));
    __m256i high = _mm256_add_epi8(exponent, splat(0x3C));
    high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(small_high, nibble), is_small);
    high = _mm256_or_si256(high, _mm256_and_si256(is_nan, splat(0x7F)));
    high = _mm256_or_si256(high, _mm256_and_si256(code, splat(0x80)));
    const __m256i low = _mm256_blendv_epi8(_mm256_slli_epi16(nibble, 4),
                                           _mm256_shuffle_epi8(small_low, nibble), is_small);
    store_pair(low, high, block + at / kPairBytes * kPairStride + at % kPairBytes);
  }
}

// Words of two bytes: the codes of a tile's even pair are in the low ones, those of its odd pair in the high ones.
ARGOSY_KERNEL_TARGET void decode_e2m1(const std::byte* codes, std::byte* block) {
  const __m256i high_of = table_of_16(kE2M1High);
  const __m256i low_of = table_of_16(kE2M1Low);
  const __m256i low_byte = _mm256_set1_epi16(0x00FF);
  for (int64_t at = 0; at < kBlockK / 4 * kPairBytes; at += 32) {
    const __m256i four = load(codes + at);
    std::byte* to = block + at / kPairBytes * 2 * kPairStride + at % kPairBytes;
    for (int tile = 0; tile < 2; ++tile, to += kTileStride) {
      const __m256i code =
          _mm256_and_si256(tile == 0 ? four : _mm256_srli_epi16(four, 4), splat(0x0F));
      const __m256i low = _mm256_shuffle_epi8(low_of, code);
      const __m256i high = _mm256_shuffle_epi8(high_of, code);
      _mm256_store_si256(
          reinterpret_cast<__m256i*>(to),
          _mm256_or_si256(_mm256_and_si256(low, low_byte), _mm256_slli_epi16(high, 8)));
      _mm256_store_si256(
          reinterpret_cast<__m256i*>(to + kPairStride),
          _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(low_byte, high)));
    }
  }
}

}  // namespace

const Decoders& avx2_decoders() {
  static constexpr Decoders kDecoders{decode_e4m3, decode_e2m1};
  return kDecoders;
}

}  // namespace argosy::gemm
