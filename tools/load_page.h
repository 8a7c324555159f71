// How rows spread over experts and ranks, as sections of a page. Test: tests/cli/report_test.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace argosy::tools {

// Bars per expert, with a band for each rank that owns some, and per rank. `of` is put behind the
// titles: " of layer 3".
std::string load_sections(std::span<const int64_t> rows_per_expert,
                          std::span<const int64_t> rows_per_rank, std::string_view of = "");

}  // namespace argosy::tools
