// See backward_driver.h.
#include "gemm/backward_driver.h"

namespace argosy::gemm {
namespace {

constexpr int64_t kKiB = 1024;

int64_t lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

}  // namespace

BackwardLimits backward_limits(const Dot& dot, DType rows, DType panels, int64_t max_blocks,
                               bool needs_values, bool is_scaled) {
  // dgrad of 256 rows, N = K = 2048, on Zen 4: chunks of 512, 1024, 2048 with 640 KiB of rows 87,
  // 90, 87 % of the peak, with 512 KiB (tiles of 128 rows) 86, 86, 84 %. wgrad: tiles of 252, 504,
  // 1008 rows 82, 84, 83 %.
  constexpr int64_t kTileRows = 516, kTileBytes = 640 * kKiB, kAtOnce = 16;
  BackwardLimits limits;
  limits.chunk_blocks = std::clamp<int64_t>(max_blocks, 1, kMaxChunkBlocks);
  limits.at_once = kAtOnce;
  const int64_t element = size_of(rows);
  limits.value_stride = limits.chunk_blocks * kBlockK * element + 64;
  const bool stages = dot.stage != nullptr;
  const int64_t row_bytes = stages ? limits.chunk_blocks * dot.staged_bytes : limits.value_stride;
  const int64_t fitting = std::clamp<int64_t>(kTileBytes / row_bytes, 1, kTileRows);
  const int64_t unit = std::min(dot.row_block, kBlockK);  // of AMX a part of a row block
  limits.tile_rows = std::max(fitting / unit * unit, unit);

  // Rows are transposed 32 at a time; so many may be `few` too.
  const int64_t room_rows = ceil_div(limits.tile_rows, kBlockK) * kBlockK;
  const int64_t few_bytes =
      dot.few == nullptr ? 0 : dot.few_rows * limits.chunk_blocks * dot.few->staged_bytes;
  const int64_t staged_bytes = limits.tile_rows * limits.chunk_blocks * dot.staged_bytes;
  limits.staged = needs_values || !stages ? room_rows * limits.value_stride : 0;
  limits.scales = limits.staged + lines(std::max(few_bytes, staged_bytes));
  limits.panel = limits.scales + (is_scaled ? lines(room_rows * limits.chunk_blocks * 4) : 0);
  limits.products = limits.panel + (is_scaled ? kPanelScaleBytes : 0) +
                    limits.chunk_blocks * kBlockK * kPanelColumns * size_of(panels);
  const int64_t resting = max_blocks > limits.chunk_blocks ? limits.at_once : 1;
  limits.total = limits.products +
                 resting * limits.tile_rows * kPanelColumns * static_cast<int64_t>(sizeof(float));
  return limits;
}

void TileRows::put(int64_t first_block, int64_t k, const std::byte* from, int64_t stride) const {
  if (dot->stage != nullptr) {
    for (int64_t at = 0; at < num_row_blocks; ++at) {
      const Part block = row_block(at);
      dot->stage({
          .rows = from + block.first * stride,
          .row_stride_bytes = stride,
          .num_rows = block.count,
          .k = k,
          .staged =
              staged + (block.first * chunk_blocks + first_block * block.count) * dot->staged_bytes,
      });
    }
    return;
  }
  if (from == values) return;
  const int64_t padded_bytes = ceil_div(k, kBlockK) * kBlockK * element;
  for (int64_t r = 0; r < count; ++r) {
    std::byte* to = values + r * value_stride + first_block * kBlockK * element;
    std::memcpy(to, from + r * stride, static_cast<size_t>(k * element));
    std::memset(to + k * element, 0, static_cast<size_t>(padded_bytes - k * element));
  }
}

}  // namespace argosy::gemm
