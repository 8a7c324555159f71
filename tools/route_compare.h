// A routing against another system's: which experts differ, and how close the scores were there.
//
// FILE:PREFIX names PREFIX.topk_idx [T, K] (I32, I64 or I16) and PREFIX.topk_weights [T, K] (fp32 or
// bf16). Experts are compared as sets, weights by expert. A token whose K-th and next selection
// score (or group score at the group limit) are equal in fp32 is a tie: counted and left out.
// Masked tokens are not compared. Test: tests/cli/route_test.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy::tools {

struct OtherRouting {
  std::vector<int32_t> topk_idx;  // [T, K]
  std::vector<double> topk_weights;
};

// Errors: those of SafetensorsFile; kInvalidArgument for shapes, dtypes and ids.
Result<OtherRouting> read_other_routing(std::string_view file_and_prefix, const RouterSpec& spec,
                                        int64_t num_tokens);

// The first token whose experts differ.
struct RouteDifference {
  int64_t token = 0;
  std::vector<int32_t> experts;        // by rising id
  std::vector<int32_t> other_experts;  // by rising id
  // fp64, from the logits: between the K-th and the next selection score (or the groups at the
  // limit), relative to the larger; infinite when nothing was refused.
  double selection_gap = 0;
  // Selection scores in fp64: the lowest of those only this routing took, the highest of those only
  // the other took. Unset when one of them took nothing that the other did not.
  std::optional<double> lowest_taken;
  std::optional<double> highest_refused;
};

// experts_equal + experts_differ + ties = the valid tokens.
struct RouteCompare {
  int64_t experts_equal = 0;
  int64_t experts_differ = 0;
  int64_t ties = 0;
  double weights_max_rel = 0;  // over tokens whose experts are equal
  double differ_max_gap = 0;   // the largest selection_gap of a token whose experts differ
  std::optional<RouteDifference> first_difference;
};

// logits: fp32 [T, E]; selection_bias: fp32 [E] or empty; mask: [T] or empty.
RouteCompare compare_routing(const RouterSpec& spec, const Tensor& logits,
                             const Tensor& selection_bias, const std::vector<uint8_t>& mask,
                             const Routing& routing, const OtherRouting& other);

}  // namespace argosy::tools
