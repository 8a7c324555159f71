// The build of level `generic` for any x86-64 (std::fma by the C library).
// The code is in generic.inl. Test: tests/gemm/grouped_gemm_test.cc.
#include <bit>
#include <cmath>
#include <cstring>

#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "numeric/activation.h"
#include "numeric/dot.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET
#include "gemm/generic.inl"

}  // namespace

const KernelTable& generic_kernels() { return kTable; }

}  // namespace argosy::gemm
