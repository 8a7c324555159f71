// The charts of the report page as inline SVG: bars, a heat map, lanes of time.
//
// Colours are classes and variables of the page's style sheet (report_style.h), so that light, dark
// and print are one drawing. Labels thin out when there is no room for all. Every value is also a
// <title>, which browsers show on hover. Test: tests/cli/report_test.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "argosy/moe.h"

namespace argosy::tools {

// Width of a drawing that fills the page.
inline constexpr int kPageWidth = 920;

struct BarChart {
  std::string item;                 // what one bar is: "expert"
  std::span<const int64_t> values;  // rows, in order of the items
  // First item of each group and one past the last; empty: no groups. Groups get a band each.
  std::vector<int64_t> group_begin;
  std::string group;  // what a group is: "rank"
  int width = kPageWidth;
};
// Rows per item, the mean as a line, the largest marked.
std::string bar_chart(const BarChart& chart);

// reports: [R]. Rows and KiB that every rank sends to every other, with each token once per
// destination; what stays on its rank stands apart from the colour scale.
std::string traffic_map(const std::vector<MoeReport>& reports);

// One lane a rank, stages coloured, ms since the first rank began.
std::string time_lanes(const std::vector<MoeReport>& reports);

// When the first rank began, seconds of the monotonic clock; 0 without spans.
double first_begin(const std::vector<MoeReport>& reports);

}  // namespace argosy::tools
