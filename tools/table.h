// The tables people read: aligned columns, units in the heads, one fact a line.
//
// Test: tests/cli/table_test.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/run_report.h"

namespace argosy::tools {

// Lines of cells, the first column left-aligned, the others right-aligned, two spaces between
// columns.
std::string aligned(const std::vector<std::vector<std::string>>& lines);

// A bar of `load` on a scale where `most` fills `width` characters.
std::string load_bar(int64_t load, int64_t most, int width);

// "min mean max balancedness" of rows per expert and per rank.
std::string load_table(std::span<const int64_t> rows_per_expert,
                       std::span<const int64_t> rows_per_rank);

std::string run_table(const RunReport& report);

}  // namespace argosy::tools
