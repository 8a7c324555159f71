// Arithmetic of the layer backward row by row: weigh a gradient, find its weight's, sum what came home.
//
// One source, built for three instruction sets and picked at run time; the bits are the same. Every NaN written is canonical.
// Denormals are kept: the caller sets the floating-point environment. Test: tests/moe/gradient_rows_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "argosy/cpu.h"
#include "argosy/tensor.h"

namespace argosy {

// out[i] = round((+0 or shared[i]) + rows[k][i], k ascending + last[i]), fp32 sums in this order.
struct SumRowsArgs {
  const float* shared = nullptr;           // null: none
  const float* last = nullptr;             // [n]
  const std::byte* const* rows = nullptr;  // [num_rows]; null ones are left out
  int64_t num_rows = 0;
  int64_t n = 0;
  std::byte* out = nullptr;
};

// Rows have `n` elements of one dtype, any alignment.
struct GradientRowKernels {
  // out[i] = x[i] * weight, one rounding.
  void (*scale)(const std::byte* x, float weight, int64_t n, std::byte* out) = nullptr;
  // sum of a[i] * b[i]: products in fp64 are exact; 16 chains, i modulo 16, added 8 apart, then 4, 2, 1.
  double (*dot)(const std::byte* a, const std::byte* b, int64_t n) = nullptr;
  void (*sum)(const SumRowsArgs& args) = nullptr;
};

struct GradientRowBuild {
  Level level;  // that the CPU must have
  GradientRowKernels bf16, f32;

  const GradientRowKernels& of(DType dtype) const { return dtype == DType::kBF16 ? bf16 : f32; }
};

// All of them, rising by level.
std::span<const GradientRowBuild> gradient_row_builds();
// The best this CPU can run; the same for the whole process.
const GradientRowKernels& gradient_rows(DType dtype);

inline void scale_row(DType dtype, const std::byte* x, float weight, int64_t n, std::byte* out) {
  gradient_rows(dtype).scale(x, weight, n, out);
}
inline double dot_rows(DType dtype, const std::byte* a, const std::byte* b, int64_t n) {
  return gradient_rows(dtype).dot(a, b, n);
}

}  // namespace argosy
