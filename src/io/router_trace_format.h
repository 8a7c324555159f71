// The two forms of a router trace; router_trace.cc tells them apart. Test:
// tests/io/router_trace_test.cc.
#pragma once

#include <string_view>

#include "argosy/router_trace.h"

namespace argosy::io {

// Neither is validated as a whole: parse_router_trace() does it.
Result<RouterTrace> parse_trace_npz(std::string_view bytes, const TraceLimits& limits);
Result<RouterTrace> parse_trace_jsonl(std::string_view text);

}  // namespace argosy::io
