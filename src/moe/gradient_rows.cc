// The three builds of gradient_rows.inl; what differs is the instruction set. Test: tests/moe/gradient_rows_test.cc.
#include "moe/gradient_rows.h"

#include "argosy/bfloat16.h"

namespace argosy {
namespace {

namespace base_build {
#define ARGOSY_KERNEL_TARGET
#include "moe/gradient_rows.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace base_build

namespace avx2_build {
#define ARGOSY_KERNEL_TARGET __attribute__((target("avx2")))
#include "moe/gradient_rows.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace avx2_build

namespace avx512_build {
#define ARGOSY_KERNEL_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "moe/gradient_rows.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace avx512_build

constexpr GradientRowBuild kBuilds[] = {
    {Level::kGeneric, base_build::kernels_of<BFloat16>(), base_build::kernels_of<float>()},
    {Level::kAvx2, avx2_build::kernels_of<BFloat16>(), avx2_build::kernels_of<float>()},
    {Level::kAvx512, avx512_build::kernels_of<BFloat16>(), avx512_build::kernels_of<float>()}};

const GradientRowBuild& choose() {
  const Result<const CpuInfo*> cpu = cpu_info();
  const GradientRowBuild* best = kBuilds;
  for (const GradientRowBuild& build : kBuilds) {
    if (cpu.has_value() && (*cpu)->has(build.level)) best = &build;
  }
  return *best;
}

}  // namespace

std::span<const GradientRowBuild> gradient_row_builds() { return kBuilds; }

const GradientRowKernels& gradient_rows(DType dtype) {
  static const GradientRowBuild& chosen = choose();
  return chosen.of(dtype);
}

}  // namespace argosy
