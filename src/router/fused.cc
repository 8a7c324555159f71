// See fused.h: which specs have a fused pass, and the bounds it may rely on. Test:
// tests/router/fused_test.cc.
#include "router/fused.h"

#include <algorithm>
#include <cmath>

#include "argosy/cpu.h"
#include "platform/cpu_detect.h"

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

int64_t padded(int64_t num_experts) { return (num_experts + 15) / 16 * 16; }

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
  for (int64_t i = 0; i < padded(plan->num_experts); ++i) {
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

// Whole vectors of 32 words, a group each, of experts whose number fits a byte.
bool words_fit(const FusedPlan& plan) {
  if (plan.num_experts % 32 != 0 || plan.num_experts > kWordMostExperts) return false;
  if (plan.num_groups == 1) return true;
  return plan.score == FusedPlan::Score::kSigmoid && plan.num_groups == 8 &&
         plan.num_experts == 256 && plan.sum_of_two && plan.top_k <= 2 * plan.keep_groups;
}

void set_words(float* shifted_bias, FusedPlan* plan) {
  if (!words_fit(*plan)) return;
  auto* const words = reinterpret_cast<uint16_t*>(shifted_bias + padded(plan->num_experts));
  if (plan->score != FusedPlan::Score::kSigmoid) {
    plan->word_bias = words;
    return;
  }
  constexpr double kUnit = 16384.0;
  double most = 0.0;
  for (int64_t i = 0; i < plan->num_experts; ++i) {
    const int64_t expert = i / 32 * 32 + expert_of_word(static_cast<int>(i % 32));
    const double bias = static_cast<double>(shifted_bias[expert]) - 1.0;
    most = std::max(most, bias);
    // Half of the sigmoid, the half unit of the tables, and some more, so that all words are positive.
    words[i] = static_cast<uint16_t>(std::lrint(std::min(bias, 1.0) * kUnit + 0.5) + 8192 + 16);
  }
  // A sum of two has to fit a word.
  if (most > 0.97) return;
  plan->word_bias = words;
  const double roundings = static_cast<double>(plan->fine_error) - kFineSigmoidError;
  const double error = kWordSigmoidError + 0.5 + roundings * kUnit;
  plan->word_margin = static_cast<int32_t>(std::ceil(2.0 * error));
}

}  // namespace

const FusedKernel* fused_kernel() {
  static const FusedKernel* const chosen = [] {
    const Result<const CpuInfo*> cpu = cpu_info();
    const bool fits = cpu.has_value() && (*cpu)->has(Level::kAvx512);
    if (fits && platform::cpu_features().avx512_vbmi2) return &kFusedKernelVbmi2;
    return fits ? &kFusedKernelAvx512 : nullptr;
  }();
  return chosen;
}

int64_t shifted_bias_size(int64_t num_experts) {
  return padded(num_experts) + padded(num_experts) / 2;
}

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
  if (!set_groups(spec, plan)) return false;
  set_words(shifted_bias, plan);
  return true;
}

}  // namespace argosy::router
