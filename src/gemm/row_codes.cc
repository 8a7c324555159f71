// See row_codes.h. The cast is that of dequantise() with a scale of 1.
#include "gemm/row_codes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "platform/float_env.h"
#include "quant/kernel.h"

namespace argosy::gemm {

bool are_rows_multiplied(BlockFormat format) {
  switch (format) {
    case BlockFormat::kE4M3Row128:
    case BlockFormat::kE4M3Row128E8M0:
    case BlockFormat::kMxfp8:
    case BlockFormat::kMxfp8Ceil:
      return true;
    case BlockFormat::kE4M3Block128:
    case BlockFormat::kMxfp4:
    case BlockFormat::kNvfp4:
    case BlockFormat::kUnset:
      break;
  }
  return false;
}

void decode_rows(const ConstTensorView& codes, const RowRange& range, Level level,
                 std::byte* values, int64_t stride_bytes) {
  // Blocks and chunks that the vector loops of src/quant take whole.
  constexpr int64_t kBlock = 128, kChunk = 512;
  static constexpr std::array<float, kChunk / kBlock> kOnes = {1, 1, 1, 1};
  const quant::Kernel& kernel = quant::kernel_for(level);
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const int64_t k = codes.dim(1);
  for (int64_t r = 0; r < range.count; ++r) {
    const auto* row = reinterpret_cast<const uint8_t*>(codes.row(range.first + r));
    for (int64_t at = 0; at < k; at += kChunk) {
      quant::DecodeArgs args;
      args.codes = row + at;
      args.n = std::min(kChunk, k - at);
      args.block = kBlock;
      args.scales = kOnes.data();
      args.power_of_two = true;
      args.out = values + r * stride_bytes + at * size_of(DType::kBF16);
      kernel.decode_bf16(args);
    }
  }
}

void load_row_scales(const ConstTensorView& scales, const RowRange& range, float* to) {
  const int64_t num_blocks = scales.dim(1);
  for (int64_t r = 0; r < range.count; ++r) {
    const std::byte* row = scales.row(range.first + r);
    for (int64_t block = 0; block < num_blocks; ++block) {
      float& value = to[block * range.count + r];
      if (scales.dtype == DType::kF32) {
        std::memcpy(&value, row + block * 4, sizeof(value));
      } else {
        value = row_scale_of(row[block]);
      }
    }
  }
}

}  // namespace argosy::gemm
