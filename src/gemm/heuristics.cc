// The table of heuristics, one row per level in the order of Level. avx2 and avx512 were measured on Zen 4 (L2 1 MiB),
// avx512_bf16 on Zen 5 and, below, on Zen 4, amx is from published measurements on Granite Rapids (L2 2 MiB). Test:
// tests/gemm/tiles_test.cc.
#include "gemm/heuristics.h"

#include <algorithm>

#include "argosy/cpu.h"
#include "gemm/kernels.h"
#include "platform/cpu_detect.h"

namespace argosy {
namespace gemm {
namespace {

constexpr int64_t kKiB = 1024;

// level, tile_rows, tile_bytes, tasks_per_thread, few_rows, ahead_from_rows, ahead_bytes
constexpr GemmHeuristics kTable[] = {
    {Level::kReference, 96, 512 * kKiB, 16, 0, 0, 0},
    {Level::kGeneric, 96, 512 * kKiB, 16, 0, 0, 0},
    {Level::kAvx2, 96, 512 * kKiB, 16, 6, 3, 8 * kKiB},
    {Level::kAvx512, 96, 512 * kKiB, 16, 12, 3, 8 * kKiB},
    {Level::kAvx512Bf16, 96, 512 * kKiB, 16, 12, 2, 8 * kKiB},
    {Level::kAmx, 256, 1024 * kKiB, 16, 16, 3, 8 * kKiB},
};
constexpr GemmHeuristics kHalfWidthAvx512Bf16 = {
    Level::kAvx512Bf16, 96, 512 * kKiB, 16, 12, 5, 8 * kKiB};

}  // namespace

bool is_half_width_core() {
  static const bool is_half_width = [] {
    const Result<const CpuInfo*> cpu = cpu_info();
    return cpu.has_value() && platform::has_half_width_avx512(**cpu);
  }();
  return is_half_width;
}

const GemmHeuristics& heuristics_for(Level level) {
  if (level == Level::kAvx512Bf16 && is_half_width_core()) return kHalfWidthAvx512Bf16;
  return kTable[static_cast<size_t>(level)];
}

int64_t tile_rows_for(const GemmHeuristics& heuristics, int64_t row_bytes, int64_t row_block) {
  const int64_t fitting = heuristics.tile_bytes / std::max<int64_t>(row_bytes, 1);
  const int64_t rows = std::min(fitting, heuristics.tile_rows);
  return std::max(rows / row_block * row_block, row_block);
}

}  // namespace gemm

std::vector<GemmHeuristics> gemm_heuristics() {
  std::vector<GemmHeuristics> table(std::begin(gemm::kTable), std::end(gemm::kTable));
  for (GemmHeuristics& row : table) {
    row = gemm::heuristics_for(row.level);
    const gemm::KernelTable& kernels = gemm::kernels_of(row.level);
    row.row_block_amx = kernels.bf16_amx.row_block;
    row.row_block_vdpbf16 = kernels.bf16_vdpbf16.row_block;
    row.row_block_f32 = kernels.f32_bf16.row_block;
  }
  return table;
}

}  // namespace argosy
