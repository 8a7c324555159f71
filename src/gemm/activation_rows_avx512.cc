// The activation of rows in vectors of 16 fp32. Test: tests/gemm/activation_backward_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <bit>
#include <cstring>

#include "argosy/bfloat16.h"
#include "gemm/activation_rows.h"
#include "gemm/packed_layout.h"
#include "numeric/dot.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline
#include "gemm/vec_avx512.inl"
// Uses Vec.
#include "gemm/vec_activation.inl"
// Uses both.
#include "gemm/activation_rows.inl"

}  // namespace

const ActivationRowKernels& avx512_activation_rows() { return kRows; }

}  // namespace argosy::gemm
