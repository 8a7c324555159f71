// Level `avx512_bf16`: VDPBF16PS in the order it computes natively, 12 rows by 32 columns at a time;
// all else is level avx512. Test: tests/gemm/kernels_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "argosy/bfloat16.h"
#include "gemm/code_tables.h"
#include "gemm/heuristics.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "numeric/dot.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline
#include "gemm/vec_avx512.inl"
// Uses Vec.
#include "gemm/vec_dot.inl"

// Rows as they are: 16 pairs of bf16.
struct PairRows {
  static constexpr int64_t kElementBytes = 2;
  static constexpr int kStaged = 16;

  ARGOSY_KERNEL_INLINE static void stage(const std::byte* from, float* to) {
    _mm512_store_si512(to, _mm512_loadu_si512(from));
  }
};

// acc + the pair at `row`, in all lanes, times the columns. The broadcast is part of the load: as an instruction of its own, which
// is what compilers make of two uses, it takes the ports of shuffles and lookups.
ARGOSY_KERNEL_INLINE __m512 add_products(__m512 acc, const float* row, __m512bh columns) {
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(columns), "m"(*row));
  return acc;
}

// What suits the kernels of few rows, whose weights come from memory. Measured: docs/perf/gemm.md.
//
// Zen 4: a load, or a VDPBF16PS, of 512 bits a cycle, so that a broadcast must serve both vectors of columns. Measured before the
// tiles of a panel lay beside each other.
struct HalfWidthCore {
  static constexpr int kNearRows = 6;
  // 2 for 5 to 12 rows 22 -> 27 GB/s at 6 rows, but 4 for 8 (23.5 -> 25).
  static constexpr int stream_unroll(int rows) { return rows == 8 ? 4 : 2; }
  // Four rows from memory 92 -> 98 % of its rate; five to twelve are 5 to 30 % slower so.
  static constexpr bool broadcasts_in_loads(int rows, bool) { return rows == 4; }
};

// Zen 5: two of each.
struct FullWidthCore {
  static constexpr int kNearRows = 0;
  static constexpr int stream_unroll(int rows) { return rows <= 2 ? 2 : 4; }
  // From a cache they are slower so.
  static constexpr bool broadcasts_in_loads(int rows, bool streams) { return streams && rows <= 8; }
};

template <typename Core, bool kStreams, int kRows, int kVectors>
struct NativeStep {
  // Measured on Zen 4: all 16 for 6 to 11 rows 198..211 -> 222..228 GF/s from cache.
  static constexpr int kUnroll = 16, kStreamUnroll = Core::stream_unroll(kRows);
  static constexpr bool kKeepsOrder = kRows <= 2;
  static constexpr bool kBroadcastsInLoads = Core::broadcasts_in_loads(kRows, kStreams);
  const BlockArgs& at;
  Vec::F (&acc)[kRows][kVectors];

  ARGOSY_KERNEL_INLINE void run(int pair) const {
    __m512bh columns[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      const std::byte* from = at.w + pair * kPairStride + vector_offset(c);
      columns[c] = (__m512bh)_mm512_load_si512(from);
    }
    for (int r = 0; r < kRows; ++r) {
      const float* const x = at.x + r * PairRows::kStaged + pair;
      if constexpr (kBroadcastsInLoads) {
        for (int c = 0; c < kVectors; ++c) {
          acc[r][c] = add_products(acc[r][c], x, columns[c]);
        }
      } else {
        const __m512bh row = (__m512bh)Vec::broadcast(x);
        for (int c = 0; c < kVectors; ++c) {
          acc[r][c] = _mm512_dpbf16_ps(acc[r][c], row, columns[c]);
        }
      }
    }
  }
};

template <typename Core>
struct NativeOrder {
  using Rows = PairRows;
  static constexpr int kChains = 1;
  static constexpr int kNearRows = Core::kNearRows;
  static constexpr int64_t kWeightBlockBytes = kTileElements * 4;

  template <int kRows, int kVectors, typename Ahead>
  ARGOSY_KERNEL_INLINE static void block(const BlockArgs& at, const Ahead& ahead,
                                         Vec::F (&acc)[kRows][kVectors]) {
    const NativeStep<Core, Ahead::kStreams, kRows, kVectors> step{at, acc};
    for_each_pair(step, ahead);
  }
};

#include "gemm/native_coded.inl"

template <typename Core>
KernelTable native_kernels() {
  KernelTable with_pairs = avx512_kernels();
  with_pairs.bf16_vdpbf16 = dot_of<NativeOrder<Core>, 12>();
  with_pairs.bf16_vdpbf16.run_scaled = native_scaled_dot;
  return with_pairs;
}

}  // namespace

const KernelTable& avx512_bf16_kernels() {
  static const KernelTable table = native_kernels<FullWidthCore>();
  return table;
}

const KernelTable& avx512_bf16_half_width_kernels() {
  static const KernelTable table = native_kernels<HalfWidthCore>();
  return table;
}

}  // namespace argosy::gemm
