// Which kernel runs. See kernel.h.
#include "quant/kernel.h"

#include <vector>

#include "platform/cpu_detect.h"

namespace argosy::quant {
namespace {

std::vector<const Kernel*> usable_kernels() {
  std::vector<const Kernel*> usable;
  const Result<const CpuInfo*> cpu = cpu_info();
  const bool vbmi = platform::cpu_features().avx512_vbmi;
  for (const Kernel* kernel : {&kKernelBase, &kKernelAvx2, &kKernelAvx512, &kKernelVbmi}) {
    const bool has_level = cpu.has_value() && (*cpu)->has(kernel->level);
    if (kernel == &kKernelBase || (has_level && (vbmi || !kernel->vbmi))) usable.push_back(kernel);
  }
  return usable;
}

}  // namespace

std::span<const Kernel* const> kernels() {
  static const std::vector<const Kernel*> usable = usable_kernels();
  return usable;
}

const Kernel& kernel_for(Level level) {
  const Kernel* best = &kKernelBase;
  for (const Kernel* kernel : kernels()) {
    if (kernel->level <= level) best = kernel;
  }
  return *best;
}

}  // namespace argosy::quant
