// See load_summary.h. Test: tests/cli/table_test.cc.
#include "tools/load_summary.h"

#include <algorithm>

#include "argosy/moe.h"

namespace argosy::tools {

LoadSummary summarise(std::span<const int64_t> loads) {
  LoadSummary summary;
  if (loads.empty()) return summary;
  const auto [min, max] = std::minmax_element(loads.begin(), loads.end());
  summary.min = *min;
  summary.max = *max;
  double sum = 0;
  for (const int64_t load : loads) sum += static_cast<double>(load);
  summary.mean = sum / static_cast<double>(loads.size());
  summary.balancedness = balancedness(loads);
  return summary;
}

}  // namespace argosy::tools
