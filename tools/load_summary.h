// Smallest, mean and largest load, and how even it is. Test: tests/cli/table_test.cc.
#pragma once

#include <cstdint>
#include <span>

namespace argosy::tools {

struct LoadSummary {
  int64_t min = 0;
  double mean = 0;
  int64_t max = 0;
  double balancedness = 1;  // mean / max; 1 when nothing is loaded
};

LoadSummary summarise(std::span<const int64_t> loads);

}  // namespace argosy::tools
