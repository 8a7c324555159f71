// See trace.h. Test: tests/cli/report_test.cc.
#include "tools/trace.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tools/chart.h"

namespace argosy::tools {
namespace {

using Json = nlohmann::ordered_json;

// The clock has nanoseconds; more digits would be noise.
double microseconds(double seconds) { return std::round(seconds * 1e9) / 1e3; }

Json name_event(size_t rank, const char* what, std::string name) {
  return {{"name", what},
          {"ph", "M"},
          {"pid", rank},
          {"tid", 0},
          {"args", {{"name", std::move(name)}}}};
}

Json span_event(size_t rank, const StageSpan& span, double begin) {
  Json args = {{"rows", span.rows}, {"bytes", span.bytes}};
  if (span.round >= 0) args["round"] = span.round;
  const double from = microseconds(span.begin - begin);
  return {{"name", name_of(span.stage)},
          {"cat", "moe"},
          {"ph", "X"},
          {"pid", rank},
          {"tid", 0},
          {"ts", from},
          {"dur", microseconds(span.end - begin) - from},
          {"args", args}};
}

Json trace_json(const RunReport& report) {
  const double begin = first_begin(report.rank_reports);
  Json events = Json::array();
  int64_t dropped = 0;
  for (size_t rank = 0; rank < report.rank_reports.size(); ++rank) {
    events.push_back(name_event(rank, "process_name", fmt::format("rank {}", rank)));
    events.push_back(name_event(rank, "thread_name", "stages"));
    for (const StageSpan& span : report.rank_reports[rank].spans) {
      events.push_back(span_event(rank, span, begin));
    }
    dropped += report.rank_reports[rank].dropped_spans;
  }
  return {{"displayTimeUnit", "ms"},
          {"otherData",
           {{"model", report.model},
            {"family", report.family},
            {"layer", report.layer},
            {"ranks", report.ranks},
            {"transport", report.transport},
            {"digest", report.dot_order + ":" + report.digest},
            {"dropped_spans", dropped}}},
          {"traceEvents", events}};
}

}  // namespace

std::string trace_text(const RunReport& report) {
  return trace_json(report).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace argosy::tools
