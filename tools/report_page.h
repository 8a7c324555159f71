// `argosy run --report`: one page that says all of it to a colleague.
//
// Invariant: the page is whole in itself; it names no other file or host, and holds every figure of
// the table and the JSON. Test: tests/cli/report_test.cc.
#pragma once

#include <string>

#include "tools/run_report.h"

namespace argosy::tools {

// HTML. Precondition: report.rank_reports holds one report per rank.
std::string report_page(const RunReport& report);

}  // namespace argosy::tools
