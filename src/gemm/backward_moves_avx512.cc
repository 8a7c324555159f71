// The moves of the backward in registers of 512 bits: 64 shuffles for 16 by 16 words or a tile of
// pairs, two permutations for a pair of rows. Test: tests/gemm/backward_moves_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "gemm/backward_moves.h"
#include "gemm/packed_layout.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

ARGOSY_KERNEL_TARGET void transpose(const std::byte* from, int64_t from_stride, std::byte* to,
                                    int64_t to_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * from_stride);
  // Words of rows 4 i .. 4 i + 3 gather in the quarters of b.
  for (int i = 0; i < 16; i += 4) {
    const __m512i low01 = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    const __m512i high01 = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    const __m512i low23 = _mm512_unpacklo_epi32(a[i + 2], a[i + 3]);
    const __m512i high23 = _mm512_unpackhi_epi32(a[i + 2], a[i + 3]);
    b[i] = _mm512_unpacklo_epi64(low01, low23);
    b[i + 1] = _mm512_unpackhi_epi64(low01, low23);
    b[i + 2] = _mm512_unpacklo_epi64(high01, high23);
    b[i + 3] = _mm512_unpackhi_epi64(high01, high23);
  }
  // b[4 i + j] holds columns j, j + 4, j + 8, j + 12 of rows 4 i .. 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xDD);
    const __m512i high_odd = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xDD);
    _mm512_store_si512(to + j * to_stride, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_store_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(low, high, 0xDD));
    _mm512_store_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
    _mm512_store_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0xDD));
  }
}

ARGOSY_KERNEL_TARGET void interleave(const std::byte* from, int64_t from_stride, int64_t num_pairs,
                                     std::byte* to) {
  // Halves i of both rows; 32 counts from the second.
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                    37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                    11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < num_pairs; ++i) {
    const __m512i even = _mm512_loadu_si512(from + 2 * i * from_stride);
    const __m512i odd = _mm512_loadu_si512(from + (2 * i + 1) * from_stride);
    _mm512_store_si512(to + i * kPairStride, _mm512_permutex2var_epi16(even, low, odd));
    _mm512_store_si512(to + i * kPairStride + kTileStride,
                       _mm512_permutex2var_epi16(even, high, odd));
  }
}

// Quarter i of each row, in row order.
ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline void store_quarters(
    const __m512i (&rows)[4], std::byte* to, int64_t step) {
  const __m512i low01 = _mm512_shuffle_i64x2(rows[0], rows[1], 0x44);
  const __m512i high01 = _mm512_shuffle_i64x2(rows[0], rows[1], 0xEE);
  const __m512i low23 = _mm512_shuffle_i64x2(rows[2], rows[3], 0x44);
  const __m512i high23 = _mm512_shuffle_i64x2(rows[2], rows[3], 0xEE);
  _mm512_store_si512(to, _mm512_shuffle_i64x2(low01, low23, 0x88));
  _mm512_store_si512(to + step, _mm512_shuffle_i64x2(low01, low23, 0xDD));
  _mm512_store_si512(to + 2 * step, _mm512_shuffle_i64x2(high01, high23, 0x88));
  _mm512_store_si512(to + 3 * step, _mm512_shuffle_i64x2(high01, high23, 0xDD));
}

// Two neighbouring n by a pair of k are 64 bits: turned by themselves, they are what 8 by 8 words of
// 64 bits transpose.
ARGOSY_KERNEL_TARGET void turn_pairs(const std::byte* from, std::byte* to) {
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_set_epi16(0x0F0E, 0x0B0A, 0x0D0C, 0x0908, 0x0706, 0x0302, 0x0504, 0x0100));
  for (int tile = 0; tile < 2; ++tile) {
    __m512i even[4], odd[4];  // 64-bit words 0, 2, 4, 6 and 1, 3, 5, 7 of two lines
    for (int i = 0; i < 4; ++i) {
      const std::byte* lines = from + (tile * 8 + i * 2) * kPairStride;
      const __m512i first = _mm512_shuffle_epi8(_mm512_load_si512(lines), order);
      const __m512i second = _mm512_shuffle_epi8(_mm512_load_si512(lines + kPairStride), order);
      even[i] = _mm512_unpacklo_epi64(first, second);
      odd[i] = _mm512_unpackhi_epi64(first, second);
    }
    store_quarters(even, to + tile * kTileStride, 2 * kPairStride);
    store_quarters(odd, to + tile * kTileStride + kPairStride, 2 * kPairStride);
  }
}

}  // namespace

const MoveKernels& avx512_moves() {
  static constexpr MoveKernels kMoves{transpose, interleave, turn_pairs};
  return kMoves;
}

}  // namespace argosy::gemm
