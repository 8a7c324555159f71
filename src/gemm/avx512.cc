// Level `avx512`: FMA in vectors of 16 fp32, both dot orders and fp32 rows. Row blocks fill 32 registers: 12 rows by 2 vectors, or 6 with two chains.
// Test: tests/gemm/kernels_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "argosy/bfloat16.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "numeric/dot.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline
#include "gemm/vec_avx512.inl"
// Uses Vec.
#include "gemm/vec_dot.inl"
#include "gemm/vec_store.inl"

}  // namespace

const KernelTable& avx512_kernels() {
  static constexpr KernelTable kTable{
      .bf16_amx = dot_of<AmxOrder, 6>(),
      .bf16_vdpbf16 = dot_of<PairOrder<Bf16Rows, true>, 12>(),
      .f32_bf16 = dot_of<PairOrder<F32Rows, false>, 12>(),
      .f32_f32 = dot_of<F32Order, 12>(),
      .store_bf16 = stores_of<BFloat16>(),
      .store_f32 = stores_of<float>(),
  };
  return kTable;
}

}  // namespace argosy::gemm
