// The measured numbers that steer the grouped GEMM (GemmHeuristics in argosy/gemm.h), for the driver.
// Test: tests/gemm/tiles_test.cc.
#pragma once

#include <cstdint>

#include "argosy/gemm.h"

namespace argosy::gemm {

// Level avx512_bf16 has kernels, and a row, of its own for such a core.
bool is_half_width_core();

// For this CPU.
const GemmHeuristics& heuristics_for(Level level);

// Rows of a task for rows of `row_bytes`, in whole row blocks.
int64_t tile_rows_for(const GemmHeuristics& heuristics, int64_t row_bytes, int64_t row_block);

}  // namespace argosy::gemm
