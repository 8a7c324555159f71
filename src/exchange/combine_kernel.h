// One token's weighted sum over its expert rows, contract 3.5. Two builds of one source: with and
// without FMA instructions; the bits are the same. Test: tests/exchange/combine_kernel_test.cc.
#pragma once

#include <cstdint>

#include "argosy/bfloat16.h"

namespace argosy {

// acc[i] = first[i] * scale, or 0 when first is null. bf16 or fp32 rows.
// acc[i] += addend[i]; acc[i] = fma(weight, row[i], acc[i]); out[i] = acc[i], rounded once.
struct CombineKernel {
  void (*start_bf16)(const BFloat16* first, float scale, int64_t n, float* acc);
  void (*start_f32)(const float* first, float scale, int64_t n, float* acc);
  void (*add_bf16)(const BFloat16* addend, int64_t n, float* acc);
  void (*add_f32)(const float* addend, int64_t n, float* acc);
  void (*fma_bf16)(float weight, const BFloat16* row, int64_t n, float* acc);
  void (*fma_f32)(float weight, const float* row, int64_t n, float* acc);
  void (*store_bf16)(const float* acc, int64_t n, BFloat16* out);
  void (*store_f32)(const float* acc, int64_t n, float* out);
};

extern const CombineKernel kCombineKernelBase;
extern const CombineKernel kCombineKernelFma;

// The build this CPU can run; the same for the whole process.
const CombineKernel& combine_kernel();

}  // namespace argosy
