// `argosy run --trace`: the time line as trace events, which chrome://tracing and Perfetto open.
//
// Test: tests/cli/report_test.cc.
#pragma once

#include <string>

#include "tools/run_report.h"

namespace argosy::tools {

// JSON: one process per rank, one complete event per span, microseconds since the first rank began.
std::string trace_text(const RunReport& report);

}  // namespace argosy::tools
