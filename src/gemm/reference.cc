// Level `reference`: the naive twin. Per output element, the column is read through the layout's
// accessor and given to the canonical dot product; no blocking, no padding. Test:
// tests/gemm/grouped_gemm_test.cc.
#include <bit>
#include <cstring>

#include "argosy/number_formats.h"
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

float code_value(const CodedLayout& layout, const std::byte* panel, int64_t k, int64_t column) {
  const ElementFormat format = layout.is_e2m1 ? ElementFormat::kE2M1 : ElementFormat::kE4M3;
  return decode_element(format, code_at(layout, panel, k, column));
}

template <typename X, Order order>
void scaled_dot(const DotArgs& args, const CodedPanel& coded) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const X* row = reinterpret_cast<const X*>(args.rows + r * args.row_stride_bytes);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const auto partial = [&](int64_t first, int64_t count) {
        const auto x = [row, first](int64_t k) { return element(row, first + k); };
        const auto w = [&](int64_t k) {
          return code_value(coded.layout, coded.panel, first + k, c);
        };
        if constexpr (order == Order::kAmx) return numeric::dot_amx_of(count, x, w);
        if constexpr (order == Order::kVdpbf16) return numeric::dot_vdpbf16_of(count, x, w);
        if constexpr (order == Order::kF32) return numeric::dot_f32_of(count, x, w);
      };
      const auto scale = [&](int64_t block) {
        return scale_at(coded.layout, coded.panel, block, c);
      };
      args.scratch[r * kPanelColumns + c] =
          numeric::dot_scaled_of(args.k, coded.layout.block_k, partial, scale);
    }
  }
}

template <typename X, Order order>
constexpr Dot kBf16WeightsDot{
    .run = dot<X, BFloat16, order>, .row_block = kRowBlock, .run_scaled = scaled_dot<X, order>};

}  // namespace

const KernelTable& reference_kernels() {
  static constexpr KernelTable kTable{
      .bf16_amx = kBf16WeightsDot<BFloat16, Order::kAmx>,
      .bf16_vdpbf16 = kBf16WeightsDot<BFloat16, Order::kVdpbf16>,
      .f32_bf16 = kBf16WeightsDot<float, Order::kF32>,
      .f32_f32 = {dot<float, float, Order::kF32>, kRowBlock},
      .store_bf16 = stores_of<BFloat16>(),
      .store_f32 = stores_of<float>(),
  };
  return kTable;
}

}  // namespace argosy::gemm
