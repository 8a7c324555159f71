// The measured numbers that steer the grouped GEMM (GemmHeuristics in argosy/gemm.h), for the driver.
// Test: tests/gemm/tiles_test.cc.
#pragma once

#include <cstdint>

#include "argosy/gemm.h"

namespace argosy::gemm {

const GemmHeuristics& heuristics_for(Level level);

// Rows of a task for rows of `row_bytes`, in whole row blocks.
int64_t tile_rows_for(const GemmHeuristics& heuristics, int64_t row_bytes, int64_t row_block);

}  // namespace argosy::gemm
