// See load_page.h. Test: tests/cli/report_test.cc.
#include "tools/load_page.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "argosy/plan.h"
#include "tools/chart.h"
#include "tools/html.h"
#include "tools/load_summary.h"

namespace argosy::tools {
namespace {

std::vector<std::string> load_line(std::string name, std::span<const int64_t> loads) {
  const LoadSummary load = summarise(loads);
  return {std::move(name), std::to_string(load.min), fmt::format("{:.1f}", load.mean),
          std::to_string(load.max), fmt::format("{:.3f}", load.balancedness)};
}

}  // namespace

std::string load_sections(std::span<const int64_t> rows_per_expert,
                          std::span<const int64_t> rows_per_rank, std::string_view of) {
  const auto num_experts = static_cast<int64_t>(rows_per_expert.size());
  const auto num_ranks = static_cast<int>(rows_per_rank.size());
  BarChart experts;
  experts.item = "expert";
  experts.values = rows_per_expert;
  experts.group = "rank";
  for (int rank = 0; rank <= num_ranks; ++rank) {
    experts.group_begin.push_back(owned_begin(num_experts, num_ranks, rank));
  }
  BarChart ranks;
  ranks.item = "rank";
  ranks.values = rows_per_rank;
  constexpr int kRanksBesideTheTable = 12;
  if (num_ranks <= kRanksBesideTheTable) ranks.width = 480;
  const std::string summary = table({{"rows", "min", "mean", "max", "balancedness"},
                                     load_line("per expert", rows_per_expert),
                                     load_line("per rank", rows_per_rank)},
                                    false);
  return section(fmt::format("Load per expert{}", of),
                 "Rows that each expert computes, over all ranks. The most loaded one is marked; "
                 "balancedness is mean / max, 1 is even.",
                 scrolling(bar_chart(experts))) +
         section(fmt::format("Load per rank{}", of), "Rows that each rank computes.",
                 "<div class=\"beside\">\n" + scrolling(bar_chart(ranks)) + summary + "</div>\n");
}

}  // namespace argosy::tools
