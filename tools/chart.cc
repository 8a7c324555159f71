// See chart.h. Test: tests/cli/report_test.cc.
#include "tools/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "tools/load_summary.h"

namespace argosy::tools {
namespace {

constexpr double kDigitWidth = 6.7;  // of the 11 px font, rounded up

template <typename... Args>
void add(std::string* svg, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(*svg), format, std::forward<Args>(args)...);
}

std::string open_svg(double width, double height, std::string_view label) {
  return fmt::format(
      "<svg viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" role=\"img\" "
      "aria-label=\"{2}\">\n",
      width, height, label);
}

double text_width(std::string_view text) { return kDigitWidth * static_cast<double>(text.size()); }

// The smallest of 1, 2, 5, 10, ... times a power of ten that is at least `least`.
double nice_step(double least) {
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least * (1 - 1e-12)) return factor * power;
  }
  return 10 * power;
}

// How many items one label stands for, so that numbers up to `last` do not touch.
int64_t label_step(double pitch, int64_t last) {
  const double need = text_width(std::to_string(last)) + 6;
  return need <= pitch ? 1 : static_cast<int64_t>(nice_step(need / pitch));
}

struct Frame {
  double left = 0;
  double top = 0;
  double width = 0;
  double height = 0;

  double right() const { return left + width; }
  double bottom() const { return top + height; }
};

// --- bars ---

struct BarScale {
  Frame frame;
  double pitch = 0;
  double step = 1;  // of the grid
  double top_value = 1;

  double x(int64_t item) const { return frame.left + pitch * static_cast<double>(item); }
  double middle(int64_t item) const { return x(item) + pitch / 2; }
  double y(double value) const { return frame.bottom() - frame.height * value / top_value; }
};

BarScale scale_of(const BarChart& chart, int64_t max) {
  constexpr double kGridLines = 6;
  BarScale scale;
  scale.frame = {60, 22, chart.width - 60.0 - 62.0, 170};
  scale.pitch = scale.frame.width / static_cast<double>(std::max<size_t>(1, chart.values.size()));
  scale.step = nice_step(std::max(1.0, static_cast<double>(max) / kGridLines));
  scale.top_value = std::max(1.0, static_cast<double>(max));
  return scale;
}

void add_value_grid(const BarScale& scale, std::string* svg) {
  for (double value = 0; value <= scale.top_value; value += scale.step) {
    add(svg, "<line class=\"grid\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>",
        scale.frame.left, scale.frame.right(), scale.y(value), scale.y(value));
    add(svg, "<text class=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{:.0f}</text>\n", scale.frame.left - 8,
        scale.y(value) + 4, value);
  }
}

void add_bands(const BarChart& chart, const BarScale& scale, std::string* svg) {
  if (chart.group_begin.size() <= 2) return;
  const auto num_groups = static_cast<int64_t>(chart.group_begin.size()) - 1;
  const double y = scale.frame.bottom() + 34;
  add(svg, "<text class=\"end soft\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", scale.frame.left - 8,
      y, chart.group);
  const double mean_pitch = scale.frame.width / static_cast<double>(num_groups);
  const int64_t step = label_step(mean_pitch, num_groups - 1);
  for (int64_t group = 0; group < num_groups; ++group) {
    const double from = scale.x(chart.group_begin[static_cast<size_t>(group)]);
    const double to = scale.x(chart.group_begin[static_cast<size_t>(group) + 1]);
    if (to <= from) continue;  // a rank without experts
    if (group % 2 == 1) {
      add(svg,
          "<rect class=\"band\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"/>",
          from, scale.frame.top, to - from, scale.frame.height + 40);
    }
    if (group % step != 0) continue;
    add(svg, "<text class=\"mid soft\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", (from + to) / 2, y,
        group);
  }
}

// The largest value's item, the first of several; -1 when nothing is loaded.
int64_t most_loaded(std::span<const int64_t> values) {
  const auto most = std::max_element(values.begin(), values.end());
  return most == values.end() || *most <= 0 ? -1 : most - values.begin();
}

void add_bars(const BarChart& chart, const BarScale& scale, std::string* svg) {
  constexpr double kMaxBarWidth = 64;
  const auto count = static_cast<int64_t>(chart.values.size());
  const double gap = scale.pitch > 5 ? scale.pitch * 0.22 : scale.pitch > 2 ? 0.4 : 0;
  const double width = std::min(kMaxBarWidth, scale.pitch - gap);
  const int64_t step = label_step(scale.pitch, count - 1);
  const int64_t most = most_loaded(chart.values);
  for (int64_t item = 0; item < count; ++item) {
    const int64_t value = chart.values[static_cast<size_t>(item)];
    const double middle = scale.middle(item);
    const double y = scale.y(static_cast<double>(value));
    add(svg,
        "<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\">"
        "<title>{} {}: {} rows</title></rect>",
        item == most ? "most" : "bar", middle - width / 2, y, width, scale.frame.bottom() - y,
        chart.item, item, value);
    if (item % step == 0) {
      add(svg, "<text class=\"mid\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", middle,
          scale.frame.bottom() + 16, item);
    }
    svg->push_back('\n');
  }
}

// Over the bars: all values where there is room, else the largest.
void add_values(const BarChart& chart, const BarScale& scale, std::string* svg) {
  const int64_t most = most_loaded(chart.values);
  if (most < 0) return;
  const std::string longest = std::to_string(chart.values[static_cast<size_t>(most)]);
  const bool has_room = text_width(longest) + 2 <= scale.pitch;
  for (int64_t item = 0; item < static_cast<int64_t>(chart.values.size()); ++item) {
    if (!has_room && item != most) continue;
    const int64_t value = chart.values[static_cast<size_t>(item)];
    add(svg, "<text class=\"value mid{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
        item == most ? " strong" : "", scale.middle(item), scale.y(static_cast<double>(value)) - 5,
        value);
  }
}

void add_mean(const BarScale& scale, double mean, std::string* svg) {
  const double y = scale.y(mean);
  add(svg, "<line class=\"mean\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>",
      scale.frame.left, scale.frame.right() + 4, y, y);
  add(svg,
      "<text class=\"accent\" x=\"{0:.1f}\" y=\"{1:.1f}\">mean</text>"
      "<text class=\"accent\" x=\"{0:.1f}\" y=\"{2:.1f}\">{3:.1f}</text>\n",
      scale.frame.right() + 8, y - 2, y + 11, mean);
}

// --- traffic ---

struct Cells {
  double left = 76;
  double top = 40;
  double width = 0;
  double height = 0;
  int64_t ranks = 0;

  double x(int64_t column) const { return left + width * static_cast<double>(column); }
  double y(int64_t row) const { return top + height * static_cast<double>(row); }
};

constexpr double kTotalsWidth = 84;

Cells cells_for(int64_t ranks) {
  Cells cells;
  cells.ranks = ranks;
  const double room = kPageWidth - cells.left - kTotalsWidth;
  cells.width = std::min(92.0, std::floor(room / static_cast<double>(ranks)));
  cells.height = ranks <= 8 ? 44 : std::min(28.0, cells.width);
  return cells;
}

std::string kib(int64_t rows, int64_t row_bytes) {
  return fmt::format("{:.1f}", static_cast<double>(rows) * static_cast<double>(row_bytes) / 1024);
}

void add_cell(const Cells& cells, const std::vector<MoeReport>& reports, int64_t from, int64_t to,
              int64_t max, std::string* svg) {
  const MoeReport& report = reports[static_cast<size_t>(from)];
  const int64_t rows = report.sent_rows_dedup[static_cast<size_t>(to)];
  const int64_t expert_rows = report.sent_rows[static_cast<size_t>(to)];
  const bool stays = from == to;
  const double share = max > 0 ? static_cast<double>(rows) / static_cast<double>(max) : 0;
  const std::string size = kib(rows, report.row_bytes);
  add(svg,
      "<g><title>rank {} to rank {}: {} rows, {} KiB{}, for {} expert rows</title>"
      "<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"",
      from, to, rows, size, stays ? " stay" : "", expert_rows, stays ? "stays" : "heat",
      cells.x(to), cells.y(from), cells.width, cells.height);
  if (!stays) add(svg, " style=\"fill-opacity:{:.3f}\"", 0.04 + 0.86 * share);
  *svg += "/>";
  const std::string number = std::to_string(rows);
  const bool two_lines = cells.height >= 40 && text_width(size + " KiB") + 4 <= cells.width;
  const std::string_view tone = stays ? " soft" : share > 0.75 ? " light" : "";
  const double middle = cells.x(to) + cells.width / 2;
  const double base = cells.y(from) + cells.height / 2 + 4;
  if (text_width(number) + 3 <= cells.width && cells.height >= 14) {
    add(svg, "<text class=\"mid{}{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", tone,
        two_lines ? " strong" : "", middle, two_lines ? base - 7 : base, number);
  }
  if (two_lines) {
    add(svg, "<text class=\"mid small{}\" x=\"{:.1f}\" y=\"{:.1f}\">{} KiB</text>", tone, middle,
        base + 8, size);
  }
  *svg += "</g>\n";
}

void add_traffic_labels(const Cells& cells, std::string* svg) {
  const double right = cells.x(cells.ranks);
  const double bottom = cells.y(cells.ranks);
  add(svg,
      "<text class=\"end soft\" x=\"{0:.1f}\" y=\"{1:.1f}\">to rank</text>"
      "<text class=\"mid soft\" x=\"{2:.1f}\" y=\"{1:.1f}\">leaving</text>"
      "<text class=\"end soft\" x=\"{0:.1f}\" y=\"{3:.1f}\">arriving</text>\n",
      cells.left - 8, cells.top - 8, right + kTotalsWidth / 2, bottom + 18);
  const int64_t across = label_step(cells.width, cells.ranks - 1);
  const int64_t down = cells.height >= 11 ? 1 : 2;
  for (int64_t rank = 0; rank < cells.ranks; ++rank) {
    if (rank % across == 0) {
      add(svg, "<text class=\"mid\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
          cells.x(rank) + cells.width / 2, cells.top - 8, rank);
    }
    if (rank % down == 0) {
      add(svg, "<text class=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">from {}</text>", cells.left - 8,
          cells.y(rank) + cells.height / 2 + 4, rank);
    }
  }
}

void add_traffic_totals(const Cells& cells, const std::vector<MoeReport>& reports,
                        std::string* svg) {
  std::vector<int64_t> leaving(reports.size(), 0);
  std::vector<int64_t> arriving(reports.size(), 0);
  for (size_t from = 0; from < reports.size(); ++from) {
    for (size_t to = 0; to < reports.size(); ++to) {
      if (from == to) continue;
      leaving[from] += reports[from].sent_rows_dedup[to];
      arriving[to] += reports[from].sent_rows_dedup[to];
    }
  }
  const int64_t most = *std::max_element(arriving.begin(), arriving.end());
  const int64_t across = label_step(cells.width, most);
  const int64_t down = cells.height >= 11 ? 1 : 2;
  for (int64_t rank = 0; rank < cells.ranks; ++rank) {
    if (rank % down == 0) {
      add(svg, "<text class=\"mid\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
          cells.x(cells.ranks) + kTotalsWidth / 2, cells.y(rank) + cells.height / 2 + 4,
          leaving[static_cast<size_t>(rank)]);
    }
    if (rank % across == 0) {
      add(svg, "<text class=\"mid\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
          cells.x(rank) + cells.width / 2, cells.y(cells.ranks) + 18,
          arriving[static_cast<size_t>(rank)]);
    }
  }
}

// --- time ---

constexpr size_t kMostTitledSpans = 4000;  // a page of many rounds stays small

struct TimeScale {
  Frame frame;
  double begin = 0;
  double seconds = 1;
  double lane = 0;

  double x(double time) const { return frame.left + frame.width * (time - begin) / seconds; }
  double y(size_t rank) const { return frame.top + lane * static_cast<double>(rank); }
};

TimeScale time_scale(const std::vector<MoeReport>& reports) {
  TimeScale scale;
  scale.begin = first_begin(reports);
  double end = scale.begin;
  for (const MoeReport& report : reports) {
    if (!report.spans.empty()) end = std::max(end, report.spans.back().end);
  }
  scale.seconds = std::max(end - scale.begin, 1e-9);
  const size_t ranks = reports.size();
  scale.lane = ranks <= 8 ? 30 : ranks <= 20 ? 22 : 13;
  scale.frame = {60, 8, kPageWidth - 60.0 - 16.0, scale.lane * static_cast<double>(ranks)};
  return scale;
}

void add_time_axis(const TimeScale& scale, std::string* svg) {
  constexpr double kTicks = 9;
  const double step = nice_step(scale.seconds * 1e3 / kTicks);
  const int digits = std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-9)));
  for (int64_t tick = 0; static_cast<double>(tick) * step <= scale.seconds * 1e3; ++tick) {
    const double ms = static_cast<double>(tick) * step;
    const double x = scale.x(scale.begin + ms / 1e3);
    add(svg, "<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>",
        x, scale.frame.top, scale.frame.bottom() + 4);
    add(svg, "<text class=\"mid\" x=\"{:.1f}\" y=\"{:.1f}\">{:.{}f}</text>\n", x,
        scale.frame.bottom() + 18, ms, digits);
  }
  add(svg, "<text class=\"end soft\" x=\"{:.1f}\" y=\"{:.1f}\">ms</text>\n", scale.frame.left - 18,
      scale.frame.bottom() + 18);
}

void add_span(const TimeScale& scale, size_t rank, const StageSpan& span, bool titled,
              std::string* svg) {
  constexpr double kLeastWidth = 0.3;  // anything that took time shows
  const double gap = scale.lane > 16 ? 3 : 1;
  const double x = scale.x(span.begin);
  add(svg, "<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"",
      name_of(span.stage), x, scale.y(rank) + gap, std::max(kLeastWidth, scale.x(span.end) - x),
      scale.lane - 2 * gap);
  if (!titled) {
    *svg += "/>";
    return;
  }
  add(svg, "><title>rank {}, {}", rank, name_of(span.stage));
  if (span.round >= 0) add(svg, ", round {}", span.round);
  add(svg, ": {:.3f} ms from {:.3f} ms, {} rows, {} bytes</title></rect>",
      (span.end - span.begin) * 1e3, (span.begin - scale.begin) * 1e3, span.rows, span.bytes);
}

}  // namespace

std::string bar_chart(const BarChart& chart) {
  const LoadSummary load = summarise(chart.values);
  const BarScale scale = scale_of(chart, load.max);
  const bool has_bands = chart.group_begin.size() > 2;
  const double height = scale.frame.bottom() + (has_bands ? 42 : 24);
  std::string svg = open_svg(chart.width, height, fmt::format("rows per {}", chart.item));
  add_bands(chart, scale, &svg);
  add_value_grid(scale, &svg);
  add_bars(chart, scale, &svg);
  add_mean(scale, load.mean, &svg);
  add_values(chart, scale, &svg);
  add(&svg, "<text class=\"end soft\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", scale.frame.left - 8,
      scale.frame.bottom() + 16, chart.item);
  return svg + "</svg>\n";
}

std::string traffic_map(const std::vector<MoeReport>& reports) {
  const auto ranks = static_cast<int64_t>(reports.size());
  const Cells cells = cells_for(ranks);
  int64_t max = 0;
  for (size_t from = 0; from < reports.size(); ++from) {
    for (size_t to = 0; to < reports.size(); ++to) {
      if (from != to) max = std::max(max, reports[from].sent_rows_dedup[to]);
    }
  }
  std::string svg =
      open_svg(cells.x(ranks) + kTotalsWidth, cells.y(ranks) + 28, "rows from rank to rank");
  add_traffic_labels(cells, &svg);
  for (int64_t from = 0; from < ranks; ++from) {
    for (int64_t to = 0; to < ranks; ++to) add_cell(cells, reports, from, to, max, &svg);
  }
  add_traffic_totals(cells, reports, &svg);
  return svg + "</svg>\n";
}

double first_begin(const std::vector<MoeReport>& reports) {
  double begin = std::numeric_limits<double>::infinity();
  for (const MoeReport& report : reports) {
    if (!report.spans.empty()) begin = std::min(begin, report.spans.front().begin);
  }
  return std::isfinite(begin) ? begin : 0;
}

std::string time_lanes(const std::vector<MoeReport>& reports) {
  const TimeScale scale = time_scale(reports);
  size_t num_spans = 0;
  for (const MoeReport& report : reports) num_spans += report.spans.size();
  std::string svg = open_svg(kPageWidth, scale.frame.bottom() + 26, "time line of every rank");
  add_time_axis(scale, &svg);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    add(&svg, "<text class=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">rank {}</text>", scale.frame.left - 8,
        scale.y(rank) + scale.lane / 2 + 4, rank);
    for (const StageSpan& span : reports[rank].spans) {
      add_span(scale, rank, span, num_spans <= kMostTitledSpans, &svg);
    }
    svg.push_back('\n');
  }
  return svg + "</svg>\n";
}

}  // namespace argosy::tools
