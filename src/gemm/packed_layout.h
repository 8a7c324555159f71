// Where an element lies inside PackedWeights: the one place that knows the panel layout.
//
// bf16: a panel is, per block of 32 k, two tiles of 1 KiB (columns 0..15 and 16..31); a tile is 16
// k-pairs by 16 columns by 2 parities, what TDPBF16PS and VDPBF16PS read. fp32: k-major
// [padded_k][32]. All index arithmetic is int64. Test: tests/gemm/packed_weights_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "argosy/bfloat16.h"
#include "argosy/gemm.h"
#include "argosy/status.h"

namespace argosy::gemm {

inline constexpr int64_t kPanelColumns = 32;
inline constexpr int64_t kTileColumns = 16;
inline constexpr int64_t kBlockK = 32;
inline constexpr int64_t kTileElements = kTileColumns * kBlockK;

struct PackedShape {
  int64_t num_panels = 0;
  int64_t padded_k = 0;
  int64_t panel_bytes = 0;
  int64_t total_bytes = 0;
};

// Errors: kInvalidArgument for a negative or zero size, a dtype without a layout, or a size beyond
// int64; kOutOfMemory for one that no x86-64 process can map.
Result<PackedShape> packed_shape(PackedWeights::Kind kind, DType dtype, int64_t num_groups,
                                 int64_t n, int64_t k);

// Elements from the start of a panel to element (k, column).
constexpr int64_t bf16_offset_in_panel(int64_t k, int64_t column) {
  const int64_t tile = (k / kBlockK) * 2 + column / kTileColumns;
  return tile * kTileElements + (k % kBlockK / 2) * (2 * kTileColumns) +
         (column % kTileColumns) * 2 + k % 2;
}

constexpr int64_t f32_offset_in_panel(int64_t k, int64_t column) {
  return k * kPanelColumns + column;
}

// Elements from the first row to row `row`.
constexpr int64_t row_offset(int64_t row, int64_t row_stride) { return row * row_stride; }

// Units of panel_size from the first panel to (group, panel).
constexpr int64_t panel_offset(int64_t group, int64_t panel, int64_t num_panels,
                               int64_t panel_size) {
  return (group * num_panels + panel) * panel_size;
}

// Panel and column of output `n` of a plain matrix, of a gate matrix, of an up matrix.
struct PanelColumn {
  int64_t panel = 0;
  int64_t column = 0;
};
constexpr PanelColumn plain_column(int64_t n) { return {n / kPanelColumns, n % kPanelColumns}; }
constexpr PanelColumn gate_column(int64_t n) { return {n / kTileColumns, n % kTileColumns}; }
constexpr PanelColumn up_column(int64_t n) {
  return {n / kTileColumns, kTileColumns + n % kTileColumns};
}

// Element (k, column) of a panel.
inline BFloat16 bf16_at(const std::byte* panel, int64_t k, int64_t column) {
  BFloat16 value;
  std::memcpy(&value, panel + bf16_offset_in_panel(k, column) * 2, sizeof(value));
  return value;
}

inline float f32_at(const std::byte* panel, int64_t k, int64_t column) {
  float value;
  std::memcpy(&value, panel + f32_offset_in_panel(k, column) * 4, sizeof(value));
  return value;
}

}  // namespace argosy::gemm
