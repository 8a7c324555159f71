// See route_compare.h. Test: tests/cli/route_test.cc.
#include "tools/route_compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "argosy/checkpoint.h"
#include "argosy/reference.h"
#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

Result<Tensor> as_i32(const std::string& name, Tensor tensor) {
  const ConstTensorView from = std::as_const(tensor).view();
  if (from.dtype == DType::kI32) return tensor;
  if (from.dtype != DType::kI64 && from.dtype != DType::kI16) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} is {}, expected I32, I64 or I16", name, describe(from)));
  }
  const std::span<const int64_t> shape(from.shape.data(), static_cast<size_t>(from.num_dims));
  ARGOSY_ASSIGN_OR_RETURN(Tensor ids, Tensor::zeros(DType::kI32, shape));
  for (int64_t i = 0; i < from.num_elements(); ++i) {
    const int64_t id =
        from.dtype == DType::kI64 ? from.as<int64_t>()[i] : int64_t{from.as<int16_t>()[i]};
    if (!std::in_range<int32_t>(id)) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} holds {} at element {}", name, id, i));
    }
    ids.view().as<int32_t>()[i] = static_cast<int32_t>(id);
  }
  return ids;
}

struct Weighted {
  int32_t expert = -1;
  double weight = 0;
};

// One token's experts by rising id, -1 left out.
template <typename Weights>
std::vector<Weighted> row_of(const std::vector<int32_t>& topk_idx, const Weights& weights,
                             int64_t token, int64_t top_k) {
  std::vector<Weighted> row;
  for (auto at = static_cast<size_t>(token * top_k); at < static_cast<size_t>((token + 1) * top_k);
       ++at) {
    if (topk_idx[at] >= 0) row.push_back({topk_idx[at], static_cast<double>(weights[at])});
  }
  std::sort(row.begin(), row.end(),
            [](const Weighted& a, const Weighted& b) { return a.expert < b.expert; });
  return row;
}

std::vector<int32_t> experts_of(const std::vector<Weighted>& row) {
  std::vector<int32_t> experts;
  for (const Weighted& one : row) experts.push_back(one.expert);
  return experts;
}

double relative_difference(double seen, double expected) {
  if (seen == expected) return 0;
  const double relative = std::abs(seen - expected) / std::abs(expected);
  return std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative;
}

// Score of one expert for the choice, in fp64.
double selection_score(const RouterSpec& spec, std::span<const double> logits,
                       std::span<const double> bias, int32_t expert) {
  const auto at = static_cast<size_t>(expert);
  const double z = logits[at];
  double score = z;
  if (spec.score_function == ScoreFunction::kSigmoid) score = 1 / (1 + std::exp(-z));
  if (spec.score_function == ScoreFunction::kSqrtSoftplus) {
    score = std::sqrt(std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))));
  }
  if (spec.score_function == ScoreFunction::kSoftmax) {
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - most);
    score = std::exp(z - most) / sum;
  }
  return bias.empty() ? score : score + bias[at];
}

RouteDifference difference_at(const RouterSpec& spec, std::span<const double> logits,
                              std::span<const double> bias, std::vector<int32_t> experts,
                              std::vector<int32_t> other, int64_t token, double gap) {
  RouteDifference difference{token, std::move(experts), std::move(other), gap, {}, {}};
  const auto scores_of_only = [&](const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    std::vector<int32_t> only;
    std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(only));
    std::vector<double> scores;
    for (const int32_t expert : only) scores.push_back(selection_score(spec, logits, bias, expert));
    return scores;
  };
  const auto taken = scores_of_only(difference.experts, difference.other_experts);
  const auto refused = scores_of_only(difference.other_experts, difference.experts);
  if (!taken.empty()) {
    difference.lowest_taken = *std::min_element(taken.begin(), taken.end());
  }
  if (!refused.empty()) {
    difference.highest_refused = *std::max_element(refused.begin(), refused.end());
  }
  return difference;
}

}  // namespace

Result<OtherRouting> read_other_routing(std::string_view file_and_prefix, const RouterSpec& spec,
                                        int64_t num_tokens) {
  const size_t colon = file_and_prefix.rfind(':');
  if (colon == std::string_view::npos) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}' is not FILE:PREFIX", file_and_prefix));
  }
  const std::string prefix(file_and_prefix.substr(colon + 1));
  ARGOSY_ASSIGN_OR_RETURN(const std::shared_ptr<SafetensorsFile> file,
                          SafetensorsFile::open(std::string(file_and_prefix.substr(0, colon))));
  const std::string idx = prefix + ".topk_idx";
  const std::string weights = prefix + ".topk_weights";
  ARGOSY_ASSIGN_OR_RETURN(Tensor stored, file->read(idx));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor topk_idx, as_i32(idx, std::move(stored)));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor topk_weights, file->read(weights));
  ARGOSY_RETURN_IF_ERROR(expect_shape(idx, topk_idx.view(), {num_tokens, spec.top_k}));
  ARGOSY_RETURN_IF_ERROR(
      expect_float_tensor(weights, topk_weights.view(), {num_tokens, spec.top_k}));
  std::vector<int64_t> counts;
  if (const Status status = count_topk(topk_idx.view(), spec.num_experts, &counts); !status.ok()) {
    return Status(status.code(), fmt::format("{}: {}", idx, status.message()));
  }
  const auto* const ids = topk_idx.view().as<int32_t>();
  return OtherRouting{{ids, ids + topk_idx.view().num_elements()}, values_of(topk_weights.view())};
}

RouteCompare compare_routing(const RouterSpec& spec, const Tensor& logits,
                             const Tensor& selection_bias, const std::vector<uint8_t>& mask,
                             const Routing& routing, const OtherRouting& other) {
  std::vector<double> bias;
  if (!selection_bias.empty()) bias = values_of(selection_bias.view());
  RouteCompare result;
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    if (!mask.empty() && mask[static_cast<size_t>(token)] == 0) continue;
    const std::vector<double> row =
        values_of(logits.view(), token * spec.num_experts, spec.num_experts);
    if (reference_route(spec, row, bias, SelectionPrecision::kFp32).selection_gap == 0) {
      ++result.ties;
      continue;
    }
    const auto mine = row_of(routing.topk_idx, routing.topk_weights.values, token, spec.top_k);
    const auto theirs = row_of(other.topk_idx, other.topk_weights, token, spec.top_k);
    std::vector<int32_t> experts = experts_of(mine);
    std::vector<int32_t> other_experts = experts_of(theirs);
    if (experts != other_experts) {
      const double gap = reference_route(spec, row, bias, SelectionPrecision::kFp64).selection_gap;
      ++result.experts_differ;
      result.differ_max_gap = std::max(result.differ_max_gap, gap);
      if (!result.first_difference.has_value()) {
        result.first_difference = difference_at(spec, row, bias, std::move(experts),
                                                std::move(other_experts), token, gap);
      }
      continue;
    }
    ++result.experts_equal;
    for (size_t i = 0; i < mine.size(); ++i) {
      result.weights_max_rel =
          std::max(result.weights_max_rel, relative_difference(mine[i].weight, theirs[i].weight));
    }
  }
  return result;
}

}  // namespace argosy::tools
