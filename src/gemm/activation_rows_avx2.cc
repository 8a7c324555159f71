// The activation of rows in vectors of 8 fp32. Test: tests/gemm/activation_backward_test.cc.
#include <immintrin.h>

#include <bit>
#include <cstring>

#include "argosy/bfloat16.h"
#include "gemm/activation_rows.h"
#include "gemm/packed_layout.h"
#include "numeric/dot.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx2,fma")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline
#include "gemm/vec_avx2.inl"
// Uses Vec.
#include "gemm/vec_activation.inl"
// Uses both.
#include "gemm/activation_rows.inl"

}  // namespace

const ActivationRowKernels& avx2_activation_rows() { return kRows; }

}  // namespace argosy::gemm
