// Level `reference`: the naive twin. Per output element, the column is read through the layout's
// accessor and given to the canonical dot product; no blocking, no padding. Test:
// tests/gemm/grouped_gemm_test.cc.
#include <bit>
#include <cstring>

#include "argosy/number_formats.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "numeric/activation.h"
#include "numeric/dot.h"

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

// Element and scale of a panel's column, of whatever kind the panel is.
float weight_of(const CodedPanel& coded, int64_t k, int64_t column) {
  if (coded.layout.block_k == 0) return bf16_at(coded.panel, k, column).to_float();
  const ElementFormat format = coded.layout.is_e2m1 ? ElementFormat::kE2M1 : ElementFormat::kE4M3;
  return decode_element(format, code_at(coded.layout, coded.panel, k, column));
}

float scale_of(const CodedPanel& coded, int64_t k, int64_t column) {
  if (coded.layout.block_k == 0) return 1.0f;
  return scale_at(coded.layout, coded.panel, k / coded.layout.block_k, column);
}

template <typename X, Order order>
void scaled_dot(const DotArgs& args, const CodedPanel& coded) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const X* row = reinterpret_cast<const X*>(args.rows + r * args.row_stride_bytes);
    const auto row_scale = [&](int64_t first) {
      const int64_t block = first / coded.block_k >> coded.rows.block_shift;
      return coded.rows.values == nullptr ? 1.0f : coded.rows.values[block * args.num_rows + r];
    };
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const auto partial = [&](int64_t first, int64_t count) {
        const auto x = [row, first](int64_t k) { return element(row, first + k); };
        const auto w = [&](int64_t k) { return weight_of(coded, first + k, c); };
        if constexpr (order == Order::kAmx) return numeric::dot_amx_of(count, x, w);
        if constexpr (order == Order::kVdpbf16) return numeric::dot_vdpbf16_of(count, x, w);
        if constexpr (order == Order::kF32) return numeric::dot_f32_of(count, x, w);
      };
      const auto add = [&](float block, int64_t first, float acc) {
        return numeric::add_scaled(block, row_scale(first), scale_of(coded, first, c),
                                   coded.are_e8m0, acc);
      };
      args.scratch[r * kPanelColumns + c] =
          numeric::dot_blocks_of(args.k, coded.block_k, partial, add);
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
