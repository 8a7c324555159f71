// What `argosy route` says: JSON, text and a page, of a routing or of a replayed trace. Test:
// tests/cli/route_test.cc.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "argosy/router_trace.h"
#include "tools/route_compare.h"
#include "tools/route_options.h"
#include "tools/route_tokens.h"

namespace argosy::tools {

struct RouteReport {
  const RouteOptions* options = nullptr;
  const RouteRules* rules = nullptr;
  const RouteResult* result = nullptr;
  std::optional<RouteCompare> compare;
};

nlohmann::ordered_json route_json(const RouteReport& report);
std::string route_text(const RouteReport& report);
std::string route_page(const RouteReport& report);

struct ReplayReport {
  std::string path;
  int num_ranks = 1;
  RouterTrace trace;
  std::vector<TraceLayerLoad> layers;
};

nlohmann::ordered_json replay_json(const ReplayReport& report);
std::string replay_text(const ReplayReport& report);
std::string replay_page(const ReplayReport& report);

}  // namespace argosy::tools
