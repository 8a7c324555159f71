// Which combine kernel runs. See combine_kernel.h.
#include "exchange/combine_kernel.h"

namespace argosy {
namespace {

constexpr const CombineKernel* kKernels[] = {&kCombineKernelBase, &kCombineKernelFma,
                                             &kCombineKernelAvx512};

const CombineKernel& choose() {
  const Result<const CpuInfo*> cpu = cpu_info();
  const CombineKernel* best = kKernels[0];
  for (const CombineKernel* kernel : kKernels) {
    if (cpu.has_value() && (*cpu)->has(kernel->level)) best = kernel;
  }
  return *best;
}

}  // namespace

std::span<const CombineKernel* const> combine_kernels() { return kKernels; }

const CombineKernel& combine_kernel() {
  static const CombineKernel& chosen = choose();
  return chosen;
}

}  // namespace argosy
