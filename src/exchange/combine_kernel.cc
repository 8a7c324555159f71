// Which combine kernel runs. See combine_kernel.h.
#include "exchange/combine_kernel.h"

#include "platform/cpu_detect.h"

namespace argosy {
namespace {

constexpr const CombineKernel* kKernels[] = {&kCombineKernelBase, &kCombineKernelFma,
                                             &kCombineKernelHalfWidth, &kCombineKernelAvx512};

const CombineKernel& choose() {
  const Result<const CpuInfo*> cpu = cpu_info();
  const CombineKernel* best = kKernels[0];
  for (const CombineKernel* kernel : kKernels) {
    if (cpu.has_value() && (*cpu)->has(kernel->level)) best = kernel;
  }
  const bool is_half_width = cpu.has_value() && platform::has_half_width_avx512(**cpu);
  return is_half_width && best == &kCombineKernelAvx512 ? kCombineKernelHalfWidth : *best;
}

}  // namespace

std::span<const CombineKernel* const> combine_kernels() { return kKernels; }

const CombineKernel& combine_kernel() {
  static const CombineKernel& chosen = choose();
  return chosen;
}

}  // namespace argosy
