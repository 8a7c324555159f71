// Which kernel runs. See kernel.h.
#include "quant/kernel.h"

namespace argosy::quant {
namespace {

constexpr const Kernel* kKernels[] = {&kKernelBase, &kKernelAvx2, &kKernelAvx512};

}  // namespace

std::span<const Kernel* const> kernels() { return kKernels; }

const Kernel& kernel_for(Level level) {
  const Kernel* best = kKernels[0];
  for (const Kernel* kernel : kKernels) {
    if (kernel->level <= level) best = kernel;
  }
  return *best;
}

}  // namespace argosy::quant
