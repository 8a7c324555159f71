// Every row is one column of a panel: its codes spread over the pairs, its scales over the blocks. Only what
// exists is read; padding keeps code 0 and scale 0 from create_quantised(). Test:
// tests/gemm/packed_quantised_test.cc.
#include "gemm/pack_quantised.h"

#include <bit>
#include <limits>

#include "base/error.h"
#include "quant/scales.h"

namespace argosy::gemm {
namespace {

// The scale as the products read it: denormals are zero to them (contract 5), on any hardware.
float flushed(float scale) { return scale < std::numeric_limits<float>::min() ? 0.0f : scale; }

void pack_scales(const ConstQuantisedView& w, int64_t n, const CodedLayout& layout,
                 std::byte* panel, int64_t column) {
  const BlockFormatInfo info = info_of(w.format);
  const std::byte* row = w.scales.row(n / info.block_rows);
  for (int64_t block = 0; block < w.scales.dim(1); ++block) {
    const float scale = flushed(quant::scale_at(info, row, block));
    std::byte* scales = panel + scale_block_offset(layout, block);
    if (layout.has_f32_scales()) {
      std::memcpy(scales + column * 4, &scale, sizeof(scale));
    } else {
      const BFloat16 narrow{static_cast<uint16_t>(std::bit_cast<uint32_t>(scale) >> 16)};
      std::memcpy(scales + column * 2, &narrow, sizeof(narrow));
    }
  }
}

void pack_codes(const ConstQuantisedView& w, int64_t n, const CodedLayout& layout, std::byte* panel,
                int64_t column) {
  const std::byte* row = w.codes.row(n);
  for (int64_t k = 0; k < w.cols; ++k) {
    const CodePlace place = code_place(layout, k, column);
    std::byte& to = panel[place.byte];
    if (!layout.is_e2m1) {
      to = row[k];
      continue;
    }
    const std::byte code = row[k / 2] >> static_cast<int>(k % 2 * 4) & std::byte{0xF};
    to = (to & ~(std::byte{0xF} << place.shift)) | code << place.shift;
  }
}

}  // namespace

Status check_quantised_matrix(const PackedWeights& packed, const char* name,
                              const ConstQuantisedView& w) {
  if (packed.format() == BlockFormat::kUnset || w.format != packed.format() ||
      w.rows != packed.n() || w.cols != packed.k()) {
    return base::invalid("{} is {} [{}, {}], the packed weights hold {} [{}, {}]", name,
                         argosy::name_of(w.format), w.rows, w.cols,
                         packed.format() == BlockFormat::kUnset ? argosy::name_of(packed.dtype())
                                                                : argosy::name_of(packed.format()),
                         packed.n(), packed.k());
  }
  const Status status = check_quantised({}, w);
  if (status.ok()) return {};
  return base::error(status.code(), "{}: {}", name, status.message());
}

void pack_quantised(const ConstQuantisedView& w, std::byte* group_data, int64_t panel_bytes,
                    ColumnOf column_of) {
  const CodedLayout layout = coded_layout(w.format);
  for (int64_t n = 0; n < w.rows; ++n) {
    const PanelColumn at = column_of(n);
    std::byte* panel = group_data + panel_offset(0, at.panel, 0, panel_bytes);
    pack_scales(w, n, layout, panel, at.column);
    pack_codes(w, n, layout, panel, at.column);
  }
}

void find_plain_lines(const CodedLayout& layout, const std::byte* panel, int64_t num_blocks,
                      uint16_t* plain) {
  constexpr int kLines = kBlockK / 2;
  constexpr uint8_t kLeast = 0x08, kMost = 0x7E;  // magnitudes of normal numbers
  for (int64_t block = 0; block < num_blocks; ++block) {
    const auto* codes = reinterpret_cast<const uint8_t*>(panel + codes_offset(layout, block));
    uint32_t found = 0;
    for (int line = 0; line < kLines; ++line, codes += 2 * kPanelColumns) {
      uint8_t special = 0;
      for (int64_t i = 0; i < 2 * kPanelColumns; ++i) {
        const uint8_t magnitude = codes[i] & 0x7F;
        special |= static_cast<uint8_t>((magnitude < kLeast) | (magnitude > kMost));
      }
      found |= static_cast<uint32_t>(special == 0) << line;
    }
    plain[block] = static_cast<uint16_t>(found);
  }
}

void pack_line(const ConstQuantisedView& lines, int64_t column, std::byte* panel) {
  const CodedLayout layout = coded_layout(lines.format);
  pack_scales(lines, column, layout, panel, column);
  const std::byte* codes = lines.codes.row(column);
  // Pairs of k lie 64 bytes apart: two codes at a time.
  const int64_t at = code_place(layout, 0, column).byte - codes_offset(layout, 0);
  int64_t k = 0;
  for (; k + kBlockK <= lines.cols; k += kBlockK) {
    std::byte* to = panel + codes_offset(layout, k / kBlockK) + at;
    for (int64_t pair = 0; pair < kBlockK / 2; ++pair) {
      std::memcpy(to + pair * 2 * kPanelColumns, codes + k + 2 * pair, 2);
    }
  }
  for (; k < lines.cols; ++k) panel[code_place(layout, k, column).byte] = codes[k];
}

}  // namespace argosy::gemm
