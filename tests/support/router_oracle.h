// A naive router in long double, the yardstick of the router's tests. One row at a time, a full
// stable sort, weights always from logarithms of scores; shares no code with src/router/.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "argosy/router.h"

namespace argosy::test {

struct OracleRow {
  std::vector<int32_t> experts;      // falling selection score, ties to the lowest id
  std::vector<long double> weights;  // of `experts`, times the factor
  // Smallest difference that decided the choice or its order, in fp32 ulps of the values compared
  // (divided by the number of values a group's score sums up).
  double gap_ulps = 0;
};

inline long double oracle_log_score(ScoreFunction function, long double z) {
  if (function == ScoreFunction::kSigmoid) {
    return z < 0 ? z - std::log1p(std::exp(z)) : -std::log1p(std::exp(-z));
  }
  if (function == ScoreFunction::kSqrtSoftplus) {
    if (z < -60) return z / 2;
    return std::log(z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z))) / 2;
  }
  return z;  // softmax: up to a constant of the row
}

inline std::vector<long double> oracle_softmax(std::span<const long double> logs) {
  const long double peak = *std::max_element(logs.begin(), logs.end());
  std::vector<long double> result;
  for (const long double log : logs) result.push_back(std::exp(log - peak));
  const long double sum = std::accumulate(result.begin(), result.end(), 0.0L);
  for (long double& value : result) value /= sum;
  return result;
}

// Scores of all experts. For kSoftmaxTopK these are the logits.
inline std::vector<long double> oracle_scores(ScoreFunction function,
                                              std::span<const float> logits) {
  std::vector<long double> values(logits.begin(), logits.end());
  if (function == ScoreFunction::kSoftmaxTopK) return values;
  if (function == ScoreFunction::kSoftmax) return oracle_softmax(values);
  for (long double& value : values) value = std::exp(oracle_log_score(function, value));
  return values;
}

// Weights of `experts`, normalised exactly where the spec says so (whatever weight_norm says).
inline std::vector<long double> oracle_weights(const RouterSpec& spec,
                                               std::span<const float> logits,
                                               std::span<const int32_t> experts) {
  const bool is_softmax = spec.score_function == ScoreFunction::kSoftmax;
  const bool post = spec.score_function == ScoreFunction::kSoftmaxTopK;
  const bool single = spec.top_k == 1 && !is_softmax && spec.normalise_single != Choice::kYes;
  std::vector<long double> weights;
  if (post || (spec.normalise == Choice::kYes && !single)) {
    std::vector<long double> logs;
    for (const int32_t e : experts) {
      logs.push_back(oracle_log_score(spec.score_function, logits[static_cast<size_t>(e)]));
    }
    weights = oracle_softmax(logs);
  } else {
    const std::vector<long double> scores = oracle_scores(spec.score_function, logits);
    for (const int32_t e : experts) weights.push_back(scores[static_cast<size_t>(e)]);
  }
  for (long double& weight : weights)
    weight *= static_cast<long double>(spec.routed_scaling_factor);
  return weights;
}

// Ids of `values` that are in `allowed`, by falling value; equal values by rising id.
inline std::vector<int32_t> oracle_order(std::span<const long double> values,
                                         const std::vector<bool>& allowed) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < values.size(); ++i) {
    if (allowed[i]) ids.push_back(static_cast<int32_t>(i));
  }
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return ids;
}

inline double oracle_ulps(long double a, long double b, long double magnitude) {
  const long double size = std::max({std::fabs(a), std::fabs(b), std::fabs(magnitude), 0x1p-126L});
  const long double ulp = std::ldexp(1.0L, std::ilogb(size) - 23);
  return static_cast<double>(std::fabs(a - b) / ulp);
}

inline std::vector<long double> oracle_group_scores(const RouterSpec& spec,
                                                    std::span<const long double> selection,
                                                    int64_t* num_summed) {
  const auto size = static_cast<size_t>(spec.num_experts / spec.num_groups);
  *num_summed = 1;
  if (spec.group_score == GroupScore::kSumOfBestTwo) *num_summed = size < 2 ? 1 : 2;
  if (spec.group_score == GroupScore::kSumOfBestKPerGroup)
    *num_summed = spec.top_k / spec.keep_groups;
  std::vector<long double> scores;
  for (size_t g = 0; g < static_cast<size_t>(spec.num_groups); ++g) {
    const auto* first = selection.data() + g * size;
    std::vector<long double> group(first, first + size);
    std::sort(group.begin(), group.end(), std::greater<>());
    scores.push_back(std::accumulate(group.begin(), group.begin() + *num_summed, 0.0L));
  }
  return scores;
}

// Precondition: validate(spec).ok(), finite logits; `bias` empty when the spec has none.
inline OracleRow oracle_route(const RouterSpec& spec, std::span<const float> logits,
                              std::span<const float> bias) {
  const auto num_experts = static_cast<size_t>(spec.num_experts);
  const std::vector<long double> scores = oracle_scores(spec.score_function, logits);
  std::vector<long double> selection = scores;
  for (size_t i = 0; i < bias.size(); ++i) selection[i] += static_cast<long double>(bias[i]);
  OracleRow row;
  row.gap_ulps = std::numeric_limits<double>::infinity();
  std::vector<bool> allowed(num_experts, true);
  if (spec.keep_groups < spec.num_groups) {
    int64_t num_summed = 1;
    const auto groups = oracle_group_scores(spec, selection, &num_summed);
    const auto order = oracle_order(groups, std::vector<bool>(groups.size(), true));
    const auto kept = static_cast<size_t>(spec.keep_groups);
    const long double last = groups[static_cast<size_t>(order[kept - 1])];
    const long double next = groups[static_cast<size_t>(order[kept])];
    row.gap_ulps = oracle_ulps(last, next, 0) / static_cast<double>(num_summed);
    const size_t size = num_experts / groups.size();
    for (size_t i = 0; i < num_experts; ++i) {
      const auto group = static_cast<int32_t>(i / size);
      allowed[i] = std::find(order.begin(), order.begin() + static_cast<int64_t>(kept), group) !=
                   order.begin() + static_cast<int64_t>(kept);
    }
  }
  const std::vector<int32_t> order = oracle_order(selection, allowed);
  for (size_t k = 0; k < static_cast<size_t>(spec.top_k) && k + 1 < order.size(); ++k) {
    const auto a = static_cast<size_t>(order[k]);
    const auto b = static_cast<size_t>(order[k + 1]);
    row.gap_ulps = std::min(
        row.gap_ulps, oracle_ulps(selection[a], selection[b], std::max(scores[a], scores[b])));
  }
  row.experts.assign(order.begin(), order.begin() + spec.top_k);
  row.weights = oracle_weights(spec, logits, row.experts);
  return row;
}

}  // namespace argosy::test
