// The moves of the backward in registers of 256 bits: words in blocks of 8 by 8. Test:
// tests/gemm/backward_moves_test.cc.
#include <immintrin.h>

#include "gemm/backward_moves.h"
#include "gemm/packed_layout.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx2")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline

ARGOSY_KERNEL_INLINE __m256i load(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
ARGOSY_KERNEL_INLINE void store(std::byte* to, __m256i x) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), x);
}

ARGOSY_KERNEL_INLINE void transpose_8(const std::byte* from, int64_t from_stride, std::byte* to,
                                      int64_t to_stride) {
  __m256i b[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256i row0 = load(from + i * from_stride), row1 = load(from + (i + 1) * from_stride);
    const __m256i row2 = load(from + (i + 2) * from_stride);
    const __m256i row3 = load(from + (i + 3) * from_stride);
    const __m256i low01 = _mm256_unpacklo_epi32(row0, row1);
    const __m256i high01 = _mm256_unpackhi_epi32(row0, row1);
    const __m256i low23 = _mm256_unpacklo_epi32(row2, row3);
    const __m256i high23 = _mm256_unpackhi_epi32(row2, row3);
    b[i] = _mm256_unpacklo_epi64(low01, low23);
    b[i + 1] = _mm256_unpackhi_epi64(low01, low23);
    b[i + 2] = _mm256_unpacklo_epi64(high01, high23);
    b[i + 3] = _mm256_unpackhi_epi64(high01, high23);
  }
  for (int j = 0; j < 4; ++j) {
    store(to + j * to_stride, _mm256_permute2x128_si256(b[j], b[4 + j], 0x20));
    store(to + (4 + j) * to_stride, _mm256_permute2x128_si256(b[j], b[4 + j], 0x31));
  }
}

ARGOSY_KERNEL_TARGET void transpose(const std::byte* from, int64_t from_stride, std::byte* to,
                                    int64_t to_stride) {
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      transpose_8(from + i * 8 * from_stride + j * 32, from_stride, to + j * 8 * to_stride + i * 32,
                  to_stride);
    }
  }
}

ARGOSY_KERNEL_TARGET void interleave(const std::byte* from, int64_t from_stride, int64_t num_pairs,
                                     std::byte* to) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    for (int64_t tile = 0; tile < 2; ++tile) {
      const std::byte* pair = from + 2 * i * from_stride + tile * 32;
      const __m256i even = load(pair), odd = load(pair + from_stride);
      const __m256i low = _mm256_unpacklo_epi16(even, odd);
      const __m256i high = _mm256_unpackhi_epi16(even, odd);
      std::byte* line = to + tile * kTileStride + i * kPairStride;
      store(line, _mm256_permute2x128_si256(low, high, 0x20));
      store(line + 32, _mm256_permute2x128_si256(low, high, 0x31));
    }
  }
}

ARGOSY_KERNEL_TARGET void turn_pairs(const std::byte* from, std::byte* to) {
  alignas(64) std::byte rows[16 * 64];  // [16 n][32 k]
  transpose(from, kPairStride, rows, 64);
  interleave(rows, 64, 8, to);
}

}  // namespace

const MoveKernels& avx2_moves() {
  static constexpr MoveKernels kMoves{transpose, interleave, turn_pairs};
  return kMoves;
}

}  // namespace argosy::gemm
