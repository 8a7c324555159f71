// See fused.h: which specs have a fused pass, and the bounds it may rely on. Test:
// tests/router/fused_test.cc.
#include "router/fused.h"

#include <algorithm>
#include <cmath>

#include "argosy/cpu.h"

namespace argosy::router {
namespace {

// The tree that finds the best two of eight groups at once takes whole vectors of 16 experts.
bool groups_fit(const RouterSpec& spec) {
  if (spec.keep_groups == spec.num_groups) return true;
  const int64_t group_size = spec.num_experts / spec.num_groups;
  return spec.num_groups <= 8 && group_size % 16 == 0;
}

bool set_groups(const RouterSpec& spec, FusedPlan* plan) {
  if (!groups_fit(spec)) return false;
  if (spec.keep_groups == spec.num_groups) return true;
  plan->num_groups = spec.num_groups;
  plan->keep_groups = spec.keep_groups;
  const bool one =
      spec.group_score == GroupScore::kMax ||
      (spec.group_score == GroupScore::kSumOfBestKPerGroup && spec.top_k == spec.keep_groups);
  plan->sum_of_two =
      spec.group_score == GroupScore::kSumOfBestTwo ||
      (spec.group_score == GroupScore::kSumOfBestKPerGroup && spec.top_k == 2 * spec.keep_groups);
  // A sum of logits says nothing of the order of sums of scores.
  return one || (plan->sum_of_two && plan->score == FusedPlan::Score::kSigmoid);
}

// Approximations get their bias shifted so that all are positive floats near 1, whose order is that of
// their bits.
bool set_bias(const float* bias, float* shifted_bias, FusedPlan* plan) {
  const auto [low, high] = bias == nullptr ? std::pair(0.0f, 0.0f) : [&] {
    const auto range = std::minmax_element(bias, bias + plan->num_experts);
    return std::pair(*range.first, *range.second);
  }();
  const double most = 2.0 + static_cast<double>(high) - static_cast<double>(low);
  // Farther apart the bias decides nearly alone, and the shift would swallow the scores.
  if (!(most <= 64.0)) return false;
  const double largest =
      1.0 + std::max(std::fabs(static_cast<double>(low)), std::fabs(static_cast<double>(high)));
  if (largest > 65536.0) return false;
  for (int64_t i = 0; i < shifted_bias_size(plan->num_experts); ++i) {
    const double own =
        bias == nullptr || i >= plan->num_experts ? 0.0 : static_cast<double>(bias[i]);
    shifted_bias[i] = static_cast<float>(own - static_cast<double>(low) + 1.0);
  }
  plan->bias = bias;
  plan->shifted_bias = shifted_bias;
  // Roundings: of the exact score (2^-25) and its sum with the bias, of the shifted bias and the
  // approximate sum: half an ulp each, taken twice.
  const double roundings = 0x1p-24 + largest * 0x1p-23 + most * 0x1p-22;
  plan->coarse_error = static_cast<float>(static_cast<double>(kCoarseSigmoidError) + roundings);
  plan->fine_error = static_cast<float>(static_cast<double>(kFineSigmoidError) + roundings);
  return true;
}

}  // namespace

const FusedKernel* fused_kernel() {
  static const FusedKernel* const chosen = [] {
    const Result<const CpuInfo*> cpu = cpu_info();
    const bool fits = cpu.has_value() && (*cpu)->has(Level::kAvx512);
    return fits ? &kFusedKernelAvx512 : nullptr;
  }();
  return chosen;
}

int64_t shifted_bias_size(int64_t num_experts) { return (num_experts + 15) / 16 * 16; }

bool make_fused_plan(const RouterSpec& spec, const float* bias, bool normalised,
                     float* shifted_bias, FusedPlan* plan) {
  if (spec.top_k > kFusedMostTopK || spec.num_experts > kFusedMostExperts) return false;
  *plan = {};
  plan->num_experts = spec.num_experts;
  plan->top_k = spec.top_k;
  plan->normalised = normalised;
  plan->factor = spec.routed_scaling_factor;
  switch (spec.score_function) {
    case ScoreFunction::kSoftmax:
      plan->score = FusedPlan::Score::kSoftmax;
      break;
    case ScoreFunction::kSoftmaxTopK:
      plan->score = FusedPlan::Score::kLogit;
      break;
    case ScoreFunction::kSigmoid:
      plan->score = FusedPlan::Score::kSigmoid;
      break;
    case ScoreFunction::kSqrtSoftplus:
    case ScoreFunction::kUnset:
      return false;
  }
  const bool is_logit = plan->score == FusedPlan::Score::kLogit;
  const bool reference = spec.weight_norm == WeightNorm::kReference;
  plan->added_to_sum = reference && normalised && !is_logit ? 1e-20 : 0.0;
  plan->over_all = plan->score == FusedPlan::Score::kSoftmax && (!normalised || reference);
  plan->least_score = normalised && !reference ? 0x1p-100f : 0x1p-126f;
  if (plan->score == FusedPlan::Score::kSigmoid) {
    if (!set_bias(bias, shifted_bias, plan)) return false;
  } else if (bias != nullptr) {
    return false;
  }
  return set_groups(spec, plan);
}

}  // namespace argosy::router
