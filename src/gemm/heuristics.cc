// The table of heuristics.h. Numbers of avx512_bf16, avx512 and avx2 measured on Zen 4 (L2 1 MiB); amx from
// published measurements on Granite Rapids (L2 2 MiB). Test: tests/gemm/tiles_test.cc.
#include "gemm/heuristics.h"

#include <algorithm>

#include "gemm/kernels.h"

namespace argosy::gemm {
namespace {

constexpr int64_t kKiB = 1024;

struct Row {
  Level level;
  const KernelTable& (*kernels)();
  Heuristics heuristics;
};

constexpr Row kRows[] = {
    {Level::kReference, reference_kernels, {96, 512 * kKiB, 16, 0, 0, 0}},
    {Level::kGeneric, generic_kernels, {96, 512 * kKiB, 16, 0, 0, 0}},
    {Level::kAvx2, avx2_kernels, {96, 512 * kKiB, 16, 6, 3, 8 * kKiB}},
    {Level::kAvx512, avx512_kernels, {96, 512 * kKiB, 16, 12, 3, 8 * kKiB}},
    {Level::kAvx512Bf16, avx512_bf16_kernels, {96, 512 * kKiB, 16, 12, 5, 8 * kKiB}},
    {Level::kAmx, amx_kernels, {256, 1024 * kKiB, 16, 16, 3, 8 * kKiB}},
};

}  // namespace

const Heuristics& heuristics_for(Level level) {
  return kRows[static_cast<size_t>(level)].heuristics;
}

int64_t tile_rows_for(const Heuristics& heuristics, int64_t row_bytes, int64_t row_block) {
  const int64_t fitting = heuristics.tile_bytes / std::max<int64_t>(row_bytes, 1);
  const int64_t rows = std::min(fitting, heuristics.tile_rows);
  return std::max(rows / row_block * row_block, row_block);
}

std::vector<HeuristicsRow> heuristics_table() {
  std::vector<HeuristicsRow> table;
  for (const Row& row : kRows) {
    const KernelTable& kernels = row.kernels();
    table.push_back({row.level, row.heuristics, kernels.bf16_amx.row_block,
                     kernels.bf16_vdpbf16.row_block, kernels.f32_bf16.row_block});
  }
  return table;
}

}  // namespace argosy::gemm
