// Level `reference`: the naive twin. Per output element, the column is read through the layout's
// accessor and given to the canonical dot product; no blocking, no padding. Test:
// tests/gemm/grouped_gemm_test.cc.
#include <bit>
#include <cstring>

#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "numeric/dot.h"
#include "numeric/elementary.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET
#include "gemm/store.inl"

float element(const BFloat16* row, int64_t k) { return row[k].to_float(); }
float element(const float* row, int64_t k) { return row[k]; }

float column_element(const BFloat16*, const std::byte* panel, int64_t k, int64_t column) {
  return bf16_at(panel, k, column).to_float();
}
float column_element(const float*, const std::byte* panel, int64_t k, int64_t column) {
  return f32_at(panel, k, column);
}

constexpr int64_t kRowBlock = 16;

enum class Order { kAmx, kVdpbf16, kF32 };

template <typename X, typename W, Order order>
void dot(const DotArgs& args) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const X* row = reinterpret_cast<const X*>(args.rows + r * args.row_stride_bytes);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const auto x = [row](int64_t k) { return element(row, k); };
      const auto w = [&args, c](int64_t k) {
        return column_element(static_cast<const W*>(nullptr), args.panel, k, c);
      };
      float* to = args.scratch + r * kPanelColumns + c;
      if constexpr (order == Order::kAmx) *to = numeric::dot_amx_of(args.k, x, w);
      if constexpr (order == Order::kVdpbf16) *to = numeric::dot_vdpbf16_of(args.k, x, w);
      if constexpr (order == Order::kF32) *to = numeric::dot_f32_of(args.k, x, w);
    }
  }
}

}  // namespace

const KernelTable& reference_kernels() {
  static constexpr KernelTable kTable{
      .bf16_amx = {dot<BFloat16, BFloat16, Order::kAmx>, kRowBlock},
      .bf16_vdpbf16 = {dot<BFloat16, BFloat16, Order::kVdpbf16>, kRowBlock},
      .f32_bf16 = {dot<float, BFloat16, Order::kF32>, kRowBlock},
      .f32_f32 = {dot<float, float, Order::kF32>, kRowBlock},
      .store_bf16 = stores_of<BFloat16>(),
      .store_f32 = stores_of<float>(),
  };
  return kTable;
}

}  // namespace argosy::gemm
