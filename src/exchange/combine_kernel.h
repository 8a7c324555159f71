// One token's weighted sum over its expert rows, contract 3.5: every column from start to rounding in
// registers, each row read once.
//
// Builds for three levels, the last of them in two ways, picked at run time; the bits are the same. Denormals are kept: the caller sets the
// floating-point environment. Floor: docs/perf/exchange.md. Test: tests/exchange/combine_kernel_test.cc.
#pragma once

#include <cstdint>
#include <span>

#include "argosy/cpu.h"

namespace argosy {

// out[i] = round(fma over k of weights[k], rows[k][i], ((shared[i] * shared_scale or 0) + residual[i]) + bias[i]).
// Rows, shared, residual and out are all bf16 or all fp32; any alignment.
struct CombineArgs {
  const std::byte* const* rows = nullptr;  // [num_rows], in top-k order
  const float* weights = nullptr;          // [num_rows]
  int64_t num_rows = 0;
  // What the next call will read: fetched ahead, never read by this one.
  const std::byte* const* next_rows = nullptr;  // [num_next]
  int64_t num_next = 0;
  const std::byte* shared = nullptr;  // null: starts from +0
  float shared_scale = 1.0f;
  const std::byte* residual = nullptr;  // null: none
  const float* bias = nullptr;          // null: none
  int64_t n = 0;
  std::byte* out = nullptr;
  // Past the caches where whole lines can be; the caller ends with platform::finish_streaming().
  bool stream = false;
};

struct CombineKernel {
  Level level;  // that the CPU must have
  void (*combine_bf16)(const CombineArgs& args);
  void (*combine_f32)(const CombineArgs& args);
};

extern const CombineKernel kCombineKernelBase;
extern const CombineKernel kCombineKernelFma;
extern const CombineKernel kCombineKernelHalfWidth;  // AVX-512 on platform::has_half_width_avx512()
extern const CombineKernel kCombineKernelAvx512;

// All of them, rising by level.
std::span<const CombineKernel* const> combine_kernels();

// The best this CPU can run; the same for the whole process.
const CombineKernel& combine_kernel();

}  // namespace argosy
