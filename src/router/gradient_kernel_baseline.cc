// The gradient kernel for any x86-64, and the choice between the two. Test:
// tests/router/gradient_kernel_test.cc.
#include "router/gradient_kernel.inl"

namespace argosy::router {

constinit const GradientKernel kBaselineGradientKernel = kThisKernel;

const GradientKernel& gradient_kernel() {
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_fma ? kFmaGradientKernel : kBaselineGradientKernel;
}

}  // namespace argosy::router
