// The router's kernel for any x86-64, and the choice between the two. Test:
// tests/router/kernel_test.cc.
#include "router/kernel.inl"

namespace argosy::router {

constinit const Kernel kBaselineKernel = kThisKernel;

const Kernel& kernel() {
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_fma ? kFmaKernel : kBaselineKernel;
}

}  // namespace argosy::router
