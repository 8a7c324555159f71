// Where an element lies inside PackedWeights: the one place that knows the panel layout.
//
// bf16: a panel is a line pair of 128 bytes per pair of k: columns 0..15 by 2 parities, then 16..31, each what VDPBF16PS reads;
// 16 lines of either, two lines apart, are a tile of TDPBF16PS. Whoever reads a panel once reads it in the order of memory. fp32: k-major
// [padded_k][32]. Quantised: per scale block of k the 32 columns' scales, then their codes; a k-pair of e4m3
// codes is 64 bytes whose halves of 8 unpack to the two bf16 tiles; two pairs of e2m1 codes are 32 words that hold,
// from the lowest, the nibbles of the same place in both tiles of the even pair and of the odd one. All
// index arithmetic is int64. Test: tests/gemm/packed_weights_test.cc.
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
inline constexpr int64_t kDecodedBlockBytes = 2 * kTileElements * 2;  // of bf16, 32 k by 32 columns
// Bytes of a bf16 panel from one pair of k to the next, and from columns 0..15 to 16..31.
inline constexpr int64_t kPairStride = kPanelColumns * 4;
inline constexpr int64_t kTileStride = kTileColumns * 4;

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

// What a format fixes of a panel of codes. Scales are fp32, or bf16 where they are powers of two in blocks
// of 32: 1/9 of an MXFP4 panel less to read.
struct CodedLayout {
  int64_t block_k = 0;      // elements of k under one scale
  int64_t scale_bytes = 0;  // of the 32 columns of a block
  int64_t code_bytes = 0;   // of 32 k by 32 columns
  bool is_e2m1 = false;

  constexpr bool has_f32_scales() const { return scale_bytes == kPanelColumns * 4; }
  constexpr int64_t block_bytes() const { return scale_bytes + block_k / kBlockK * code_bytes; }
};

// block_k 0 for formats that the GEMM does not take.
constexpr CodedLayout coded_layout(BlockFormat format) {
  constexpr int64_t kF32Scales = kPanelColumns * 4, kBF16Scales = kPanelColumns * 2;
  constexpr int64_t kElements = kBlockK * kPanelColumns;
  switch (format) {
    case BlockFormat::kE4M3Row128:
    case BlockFormat::kE4M3Row128E8M0:
    case BlockFormat::kE4M3Block128:
      return {128, kF32Scales, kElements, false};
    case BlockFormat::kMxfp8:
    case BlockFormat::kMxfp8Ceil:
      return {32, kBF16Scales, kElements, false};
    case BlockFormat::kMxfp4:
      return {32, kBF16Scales, kElements / 2, true};
    case BlockFormat::kNvfp4:
    case BlockFormat::kUnset:
      break;
  }
  return {};
}

// As packed_shape, for codes. Errors beside its own: kUnsupported for a format without a CodedLayout.
Result<PackedShape> packed_shape(PackedWeights::Kind kind, BlockFormat format, int64_t num_groups,
                                 int64_t n, int64_t k);

// Bytes from the start of a panel to scale block `block`.
constexpr int64_t scale_block_offset(const CodedLayout& layout, int64_t block) {
  return block * layout.block_bytes();
}

// Bytes from the start of a panel to the codes of block `k_block` of 32 k.
constexpr int64_t codes_offset(const CodedLayout& layout, int64_t k_block) {
  const int64_t blocks_per_scale = layout.block_k / kBlockK;
  return scale_block_offset(layout, k_block / blocks_per_scale) + layout.scale_bytes +
         k_block % blocks_per_scale * layout.code_bytes;
}

// Where the code of element (k, column) is: its byte in the panel and, of e2m1, how far up in it.
struct CodePlace {
  int64_t byte = 0;
  int shift = 0;
};
constexpr CodePlace code_place(const CodedLayout& layout, int64_t k, int64_t column) {
  constexpr int64_t kPairBytes = 2 * kPanelColumns;
  const int64_t pair = k % kBlockK / 2;
  if (layout.is_e2m1) {
    const int64_t word = column % kTileColumns * 2 + k % 2;
    const int64_t nibble = pair % 2 * 2 + column / kTileColumns;
    return {codes_offset(layout, k / kBlockK) + pair / 2 * kPairBytes + word * 2 + nibble / 2,
            static_cast<int>(nibble % 2 * 4)};
  }
  const int64_t at =
      column % kTileColumns / 4 * 16 + column / kTileColumns * 8 + column % 4 * 2 + k % 2;
  return {codes_offset(layout, k / kBlockK) + pair * kPairBytes + at, 0};
}

inline uint8_t code_at(const CodedLayout& layout, const std::byte* panel, int64_t k,
                       int64_t column) {
  const CodePlace place = code_place(layout, k, column);
  const auto byte = static_cast<uint8_t>(panel[place.byte]);
  return layout.is_e2m1 ? static_cast<uint8_t>(byte >> place.shift & 0xF) : byte;
}

inline float scale_at(const CodedLayout& layout, const std::byte* panel, int64_t block,
                      int64_t column) {
  const std::byte* scales = panel + scale_block_offset(layout, block);
  if (layout.has_f32_scales()) {
    float scale;
    std::memcpy(&scale, scales + column * 4, sizeof(scale));
    return scale;
  }
  BFloat16 scale;
  std::memcpy(&scale, scales + column * 2, sizeof(scale));
  return scale.to_float();
}

// Elements from the start of a panel to element (k, column).
constexpr int64_t bf16_offset_in_panel(int64_t k, int64_t column) {
  return k / 2 * (2 * kPanelColumns) + column * 2 + k % 2;
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

// For those who write whole panels; no line of one is then known to be plain.
struct PanelAccess {
  static std::byte* panel(PackedWeights* w, int64_t group, int64_t panel) {
    if (uint16_t* const plain = w->plain_lines(group, panel); plain != nullptr) {
      std::memset(plain, 0, static_cast<size_t>(w->padded_k_ / kBlockK) * sizeof(*plain));
    }
    return w->data_.data() + panel_offset(group, panel, w->num_panels_, w->panel_bytes_);
  }
  // Precondition: both have a bias, of as many panels.
  static void copy_bias(const PackedWeights& from, PackedWeights* to) {
    if (from.bias_.size_bytes() == 0) return;
    std::memcpy(to->bias_.data(), from.bias_.data(), static_cast<size_t>(from.bias_.size_bytes()));
  }
};

// Panel and column of output `n` of a plain matrix, of a gate matrix, of an up matrix.
struct PanelColumn {
  int64_t panel = 0;
  int64_t column = 0;
};
using ColumnOf = PanelColumn (*)(int64_t n);
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
