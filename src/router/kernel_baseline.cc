// The router's kernel for any x86-64, and the choice between the three. Test:
// tests/router/kernel_test.cc.
#include "argosy/cpu.h"
#include "router/kernel.inl"

namespace argosy::router {

constinit const Kernel kBaselineKernel = kThisKernel;

const Kernel& kernel() {
  static const Kernel& chosen = []() -> const Kernel& {
    const Result<const CpuInfo*> cpu = cpu_info();
    if (!cpu.has_value()) return kBaselineKernel;
    if ((*cpu)->has(Level::kAvx512)) return kAvx512Kernel;
    return (*cpu)->has(Level::kAvx2) ? kFmaKernel : kBaselineKernel;
  }();
  return chosen;
}

}  // namespace argosy::router
