// The combine kernel for any x86-64, and the choice between the two builds.
#define ARGOSY_KERNEL_TABLE kCombineKernelBase
#include "exchange/combine_kernel.inl"

namespace argosy {

const CombineKernel& combine_kernel() {
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_fma ? kCombineKernelFma : kCombineKernelBase;
}

}  // namespace argosy
