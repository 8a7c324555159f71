// Level `avx2`: FMA in vectors of 8 fp32, both dot orders and fp32 rows. Row blocks fill 16 registers: 6 rows by 2 vectors, or 3 with two chains.
// Test: tests/gemm/kernels_test.cc.
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

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx2,fma")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline
#include "gemm/vec_avx2.inl"
// Uses Vec.
#include "gemm/vec_dot.inl"
#include "gemm/vec_store.inl"

}  // namespace

const KernelTable& avx2_kernels() {
  static constexpr KernelTable kTable{
      .bf16_amx = dot_of<AmxOrder, 3>(),
      .bf16_vdpbf16 = dot_of<PairOrder<Bf16Rows, true>, 6>(),
      .f32_bf16 = dot_of<PairOrder<F32Rows, false>, 6>(),
      .f32_f32 = dot_of<F32Order, 6>(),
      .store_bf16 = stores_of<BFloat16>(),
      .store_f32 = stores_of<float>(),
  };
  return kTable;
}

}  // namespace argosy::gemm
