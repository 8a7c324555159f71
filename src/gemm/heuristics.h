// The measured numbers that steer the grouped GEMM: speed only, never bits. One row per level.
// Test: tests/gemm/tiles_test.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "argosy/cpu.h"

namespace argosy::gemm {

struct Heuristics {
  // A task is at most this many rows, and at most `tile_bytes` of them (but one row block): they
  // stay in L2 beside two panels of weights.
  int64_t tile_rows = 0;
  int64_t tile_bytes = 0;
  // With several threads: the least number of tasks for each, where panels allow it.
  int64_t tasks_per_thread = 0;
  // A task of at most `few_rows` rows goes over each panel once: from `ahead_from_rows` on it
  // prefetches `ahead_bytes` before its reads (below, the hardware alone keeps up). A task of more
  // rows prefetches the next panel while its rows go by.
  int64_t few_rows = 0;
  int64_t ahead_from_rows = 0;
  int64_t ahead_bytes = 0;
};

const Heuristics& heuristics_for(Level level);

// Rows of a task for rows of `row_bytes`, in whole row blocks.
int64_t tile_rows_for(const Heuristics& heuristics, int64_t row_bytes, int64_t row_block);

// The table for people: what each level does for bf16 weights.
struct HeuristicsRow {
  Level level = Level::kReference;
  Heuristics heuristics;
  // Rows that one pass over a panel takes at most.
  int64_t row_block_amx = 0, row_block_vdpbf16 = 0, row_block_f32 = 0;
};
std::vector<HeuristicsRow> heuristics_table();

}  // namespace argosy::gemm
