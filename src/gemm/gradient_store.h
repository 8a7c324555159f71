// The epilogue of weight gradients: alpha, the main gradient, one rounding. Scalars here, rows of a
// panel per level.
//
// value = alpha * sum, an fp32 product; then main + value, an fp32 addition. Denormals are kept.
// Test: tests/gemm/wgrad_test.cc.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "argosy/bfloat16.h"
#include "argosy/cpu.h"
#include "argosy/tensor.h"

namespace argosy::gemm {

struct GradientStoreArgs {
  const float* sums = nullptr;  // [num_rows][32]
  int64_t num_rows = 0;
  int64_t num_columns = 0;   // in [1, 32]
  std::byte* out = nullptr;  // row 0, first column
  int64_t row_stride_bytes = 0;
  float alpha = 1;
};
using GradientStore = void (*)(const GradientStoreArgs& args);

// By [is fp32][accumulates].
struct GradientStores {
  GradientStore of[2][2] = {};
  // fp32, overwritten, past the caches; every row of `out` begins a line of 64 bytes. Whoever is told of them is told after
  // platform::finish_streaming(). With alpha 1 no arithmetic: denormals stay in any floating-point environment. Null: a
  // level without.
  GradientStore stream_f32 = nullptr;
};
const GradientStores& base_gradient_stores();
const GradientStores& avx2_gradient_stores();
const GradientStores& avx512_gradient_stores();
const GradientStores& gradient_stores_for(Level level);

// Whether `out`, to be overwritten, is for `stream_f32`: it is larger than what caches keep for its reader, and its rows begin
// lines, which past the caches need not be read before they are written.
bool is_streamed(Level level, const TensorView& out);

// bf16 or fp32.
inline float load_element(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  BFloat16 value;
  std::memcpy(&value, from, sizeof(value));
  return value.to_float();
}

// NaN is canonical.
inline void store_element(std::byte* to, DType dtype, float value) {
  if (dtype == DType::kF32) {
    const float canonical = value != value ? std::bit_cast<float>(0x7FC00000u) : value;
    std::memcpy(to, &canonical, sizeof(canonical));
    return;
  }
  const BFloat16 rounded = BFloat16::from_float(value);
  std::memcpy(to, &rounded, sizeof(rounded));
}

inline void store_gradient(std::byte* to, DType dtype, float sum, float alpha, bool accumulate) {
  const float value = alpha * sum;
  store_element(to, dtype, accumulate ? load_element(to, dtype) + value : value);
}

}  // namespace argosy::gemm
