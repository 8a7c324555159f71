// Which decoder runs, and the one for any CPU: a table of all codes. Test: tests/gemm/decode_test.cc.
#include <array>

#include "argosy/number_formats.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "platform/cpu_detect.h"

namespace argosy::gemm {
namespace {

using Table = std::array<BFloat16, 256>;

Table table_of(ElementFormat format) {
  Table table;
  for (size_t code = 0; code < table.size(); ++code) {
    table[code] = BFloat16::from_float(decode_element(format, static_cast<uint8_t>(code)));
  }
  return table;
}

template <BlockFormat kFormat>
void decode(const std::byte* codes, std::byte* block) {
  static constexpr CodedLayout kLayout = coded_layout(kFormat);
  static const Table table = table_of(info_of(kFormat).element);
  // As if in the first scale block of a panel.
  const std::byte* panel = codes - kLayout.scale_bytes;
  for (int64_t k = 0; k < kBlockK; ++k) {
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const BFloat16 value = table[code_at(kLayout, panel, k, column)];
      std::memcpy(block + bf16_offset_in_panel(k, column) * 2, &value, sizeof(value));
    }
  }
}

}  // namespace

const Decoders& base_decoders() {
  static constexpr Decoders kDecoders{decode<BlockFormat::kMxfp8>, decode<BlockFormat::kMxfp4>};
  return kDecoders;
}

const Decoders& decoders_for(Level level) {
  // The products that go with these decoders are compiled for GFNI too.
  static const bool has_vbmi =
      platform::cpu_features().avx512_vbmi && platform::cpu_features().gfni;
  if (level < Level::kAvx2) return base_decoders();
  return level >= Level::kAvx512 && has_vbmi ? vbmi_decoders() : avx2_decoders();
}

}  // namespace argosy::gemm
