// See compare.h. Test: tests/cli/compare_test.cc.
#include "tools/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "argosy/reference.h"
#include "argosy/router.h"
#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

struct Weighted {
  int32_t expert = -1;
  double weight = 0;
};

// One token's experts by rising id, -1 left out.
std::vector<Weighted> row_of(const ConstTensorView& topk_idx, const ConstTensorView& topk_weights,
                             int64_t token) {
  const int64_t top_k = topk_idx.dim(1);
  const std::vector<double> weights = values_of(topk_weights, token * top_k, top_k);
  std::vector<Weighted> row;
  for (int64_t k = 0; k < top_k; ++k) {
    const int32_t expert = topk_idx.as<int32_t>()[token * top_k + k];
    if (expert >= 0) row.push_back({expert, weights[static_cast<size_t>(k)]});
  }
  std::sort(row.begin(), row.end(),
            [](const Weighted& a, const Weighted& b) { return a.expert < b.expert; });
  return row;
}

double relative_difference(double seen, double expected) {
  if (seen == expected) return 0;
  const double relative = std::abs(seen - expected) / std::abs(expected);
  return std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative;
}

bool is_tie(const RouterSpec& router, const Tensor& logits, std::span<const double> bias,
            int64_t token) {
  const std::vector<double> row =
      values_of(logits.view(), token * router.num_experts, router.num_experts);
  return reference_route(router, row, bias, SelectionPrecision::kFp32).selection_gap == 0;
}

// Compares one non-tie token's routing.
void compare_routing(const std::vector<Weighted>& seen, const std::vector<Weighted>& expected,
                     int64_t token, CompareResult* result) {
  const bool equal =
      std::equal(seen.begin(), seen.end(), expected.begin(), expected.end(),
                 [](const Weighted& a, const Weighted& b) { return a.expert == b.expert; });
  if (!equal) {
    ++result->experts_differ;
    if (result->first_differing_token < 0) result->first_differing_token = token;
    return;
  }
  ++result->experts_equal;
  for (size_t i = 0; i < seen.size(); ++i) {
    result->weights_max_rel =
        std::max(result->weights_max_rel, relative_difference(seen[i].weight, expected[i].weight));
  }
}

Status check_finite(std::string_view name, const Tensor& tensor) {
  const ConstTensorView view = tensor.view();
  for (int64_t token = 0; token < view.dim(0); ++token) {
    const std::vector<double> row = values_of(view, token * view.dim(1), view.dim(1));
    const auto bad =
        std::find_if(row.begin(), row.end(), [](double v) { return !std::isfinite(v); });
    if (bad == row.end()) continue;
    return Status(StatusCode::kNonFinite, fmt::format("{} holds {} at token {}, column {}", name,
                                                      *bad, token, bad - row.begin()));
  }
  return Status();
}

}  // namespace

Result<Captures> read_captures(std::string_view file_and_prefix, const ModelConfig& config,
                               int64_t num_tokens) {
  const size_t colon = file_and_prefix.rfind(':');
  if (colon == std::string_view::npos) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}' is not FILE:PREFIX", file_and_prefix));
  }
  const std::string path(file_and_prefix.substr(0, colon));
  const std::string prefix(file_and_prefix.substr(colon + 1));
  ARGOSY_ASSIGN_OR_RETURN(const std::shared_ptr<SafetensorsFile> file, SafetensorsFile::open(path));
  const std::string logits = prefix + ".router_logits";
  const std::string idx = prefix + ".topk_idx";
  const std::string weights = prefix + ".topk_weights";
  const std::string output = prefix + ".moe_output";
  Captures captures;
  ARGOSY_ASSIGN_OR_RETURN(captures.router_logits, file->read(logits));
  ARGOSY_ASSIGN_OR_RETURN(captures.topk_idx, file->read(idx));
  ARGOSY_ASSIGN_OR_RETURN(captures.topk_weights, file->read(weights));
  ARGOSY_ASSIGN_OR_RETURN(captures.moe_output, file->read(output));
  const RouterSpec& router = config.router;
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor(logits, std::as_const(captures.router_logits).view(),
                                             {num_tokens, router.num_experts}));
  ARGOSY_RETURN_IF_ERROR(
      expect_shape(idx, std::as_const(captures.topk_idx).view(), {num_tokens, router.top_k}));
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor(weights, std::as_const(captures.topk_weights).view(),
                                             {num_tokens, router.top_k}));
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor(output, std::as_const(captures.moe_output).view(),
                                             {num_tokens, config.hidden}));
  std::vector<int64_t> counts;
  if (const Status status =
          count_topk(std::as_const(captures.topk_idx).view(), router.num_experts, &counts);
      !status.ok()) {
    return Status(status.code(), fmt::format("{}: {}", idx, status.message()));
  }
  ARGOSY_RETURN_IF_ERROR(check_finite(logits, captures.router_logits));
  return captures;
}

Result<Tensor> router_logits(const SharedTensors& shared, const ConstTensorView& hidden) {
  const ConstTensorView gate = shared.gate.view();
  ARGOSY_ASSIGN_OR_RETURN(Tensor logits, Tensor::zeros(DType::kF32, {hidden.dim(0), gate.dim(0)}));
  const ConstTensorView bias =
      shared.gate_bias.empty() ? ConstTensorView() : ConstTensorView(shared.gate_bias.view());
  ARGOSY_RETURN_IF_ERROR(gate_logits(hidden, gate, bias, nullptr, logits.view()));
  return logits;
}

CompareResult compare(const Captures& captures, const RouterSpec& router,
                      const Tensor& selection_bias, const Tensor& logits,
                      const ConstTensorView& output, const ConstTensorView& topk_idx,
                      const ConstTensorView& topk_weights) {
  std::vector<double> bias;
  if (!selection_bias.empty()) bias = values_of(selection_bias.view());
  const int64_t num_tokens = output.dim(0);
  const int64_t hidden = output.dim(1);
  CompareResult result;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const std::vector<double> expected =
        values_of(captures.moe_output.view(), token * hidden, hidden);
    for (const double value : expected) result.output.add_to_peak(value);
    const int64_t first_logit = token * router.num_experts;
    const std::vector<double> ours = values_of(logits.view(), first_logit, router.num_experts);
    const std::vector<double> theirs =
        values_of(captures.router_logits.view(), first_logit, router.num_experts);
    for (size_t e = 0; e < ours.size(); ++e) result.logits.add(ours[e], theirs[e]);
    if (is_tie(router, captures.router_logits, bias, token)) {
      ++result.ties;
      continue;
    }
    compare_routing(row_of(topk_idx, topk_weights, token),
                    row_of(captures.topk_idx.view(), captures.topk_weights.view(), token), token,
                    &result);
    const std::vector<double> seen = values_of(output, token * hidden, hidden);
    for (size_t i = 0; i < seen.size(); ++i) result.output.add(seen[i], expected[i]);
  }
  return result;
}

}  // namespace argosy::tools
