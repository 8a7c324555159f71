// From the options of `argosy route` to a routing: rules, tensors, losses, capacity. Test:
// tests/cli/route_test.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "tools/route_options.h"

namespace argosy::tools {

struct RouteRules {
  RouterSpec spec;        // validated
  std::string source;     // the preset, the file, or the model's family
  SharedTensors tensors;  // of the model's layer, or empty
};

// Errors: those of presets, files and checkpoints; the first broken rule of the spec.
Result<RouteRules> effective_rules(const RouteOptions& options);

struct CapacityResult {
  std::vector<int64_t> capacity;  // [R]
  std::vector<int64_t> dropped;   // [E]
  int64_t num_dropped = 0;
  int64_t num_lost_tokens = 0;  // valid tokens without an expert
};

struct RouteResult {
  Tensor logits;              // fp32 [T, E]
  Tensor selection_bias;      // fp32 [E] or empty
  std::vector<uint8_t> mask;  // [T] or empty
  Routing routing;            // before any drop
  Routing kept;               // after it; the same without capacity
  std::vector<int64_t> rows_per_rank;
  std::optional<double> aux_loss;
  std::optional<double> z_loss;
  std::optional<CapacityResult> capacity;
  std::optional<std::vector<float>> selection_bias_next;
};

// Moves the model's tensors out of `rules`. Errors name the option of a wrong tensor.
Result<RouteResult> route_tokens(const RouteOptions& options, RouteRules& rules);

// Tokens [first, first + count) of a routing, with their own counts.
Routing part_of(const Routing& routing, int64_t first, int64_t count);

}  // namespace argosy::tools
