// RouterSpec: the presets, the check of its rules, its printed form. Test:
// tests/router/spec_test.cc.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>

#include "argosy/router.h"
#include "base/error.h"
#include "router/spec_words.h"

namespace argosy {
namespace {

using base::invalid;

// num_experts, top_k, group limit and factor are left to the caller (docs/routing.md shows this
// table).
struct Preset {
  std::string_view name;
  ScoreFunction score_function;
  Choice selection_bias;
  GroupScore group_score;
  Choice normalise;
  Choice normalise_single;
};

constexpr auto kNo = Choice::kNo;
constexpr auto kYes = Choice::kYes;
constexpr auto kNoGroups = GroupScore::kUnset;
constexpr Preset kPresets[] = {
    {"mixtral", ScoreFunction::kSoftmax, kNo, kNoGroups, kYes, kYes},
    {"qwen2_moe", ScoreFunction::kSoftmax, kNo, kNoGroups, kNo, kNo},
    {"qwen3_moe", ScoreFunction::kSoftmax, kNo, kNoGroups, kYes, kYes},
    {"olmoe", ScoreFunction::kSoftmax, kNo, kNoGroups, kNo, kNo},
    {"deepseek_v2", ScoreFunction::kSoftmax, kNo, GroupScore::kMax, kNo, kNo},
    {"deepseek_v3", ScoreFunction::kSigmoid, kYes, GroupScore::kSumOfBestTwo, kYes, kYes},
    {"gpt_oss", ScoreFunction::kSoftmaxTopK, kNo, kNoGroups, kNo, kNo},
    {"switch", ScoreFunction::kSoftmax, kNo, kNoGroups, kNo, kNo},
    {"softmax_pre", ScoreFunction::kSoftmax, kNo, GroupScore::kSumOfBestKPerGroup, kNo, kNo},
    {"softmax_post", ScoreFunction::kSoftmaxTopK, kNo, GroupScore::kSumOfBestKPerGroup, kNo, kNo},
    {"sigmoid", ScoreFunction::kSigmoid, kNo, GroupScore::kSumOfBestKPerGroup, kYes, kNo},
    {"sqrt_softplus", ScoreFunction::kSqrtSoftplus, kNo, GroupScore::kSumOfBestKPerGroup, kYes,
     kNo},
};

std::string_view word(ScoreFunction value) {
  return router::word_of(router::kScoreFunctionWords, value);
}
std::string_view word(GroupScore value) { return router::word_of(router::kGroupScoreWords, value); }
std::string_view word(Choice value) { return router::word_of(router::kChoiceWords, value); }
std::string_view word(WeightNorm value) { return router::word_of(router::kWeightNormWords, value); }
std::string_view word(OnNonfinite value) {
  return router::word_of(router::kOnNonfiniteWords, value);
}

Status validate_sizes(const RouterSpec& spec) {
  constexpr int64_t kMaxExperts = std::numeric_limits<int32_t>::max();  // ids are int32
  const int64_t experts = spec.num_experts;
  if (experts < 1 || experts > kMaxExperts) {
    return invalid("num_experts is {}, expected 1 to {}", experts, kMaxExperts);
  }
  if (spec.top_k < 1 || spec.top_k > experts) {
    return invalid("top_k is {}, expected 1 to num_experts = {}", spec.top_k, experts);
  }
  return {};
}

Status validate_groups(const RouterSpec& spec) {
  const int64_t groups = spec.num_groups;
  const int64_t kept = spec.keep_groups;
  if (groups < 1) return invalid("num_groups is {}, expected at least 1", groups);
  if (spec.num_experts % groups != 0) {
    return invalid("num_experts % num_groups must be 0: num_experts {}, num_groups {}",
                   spec.num_experts, groups);
  }
  if (kept < 1 || kept > groups) {
    return invalid("keep_groups is {}, expected 1 to num_groups = {}", kept, groups);
  }
  const int64_t reachable = kept * (spec.num_experts / groups);
  if (spec.top_k > reachable) {
    return invalid(
        "top_k <= keep_groups * num_experts / num_groups must hold: top_k {}, but {} of {} groups "
        "hold {} of {} experts",
        spec.top_k, kept, groups, reachable, spec.num_experts);
  }
  if (spec.group_score == GroupScore::kSumOfBestKPerGroup && spec.top_k % kept != 0) {
    return invalid(
        "sum_of_best_k_per_group needs top_k % keep_groups = 0: top_k {}, keep_groups {}",
        spec.top_k, kept);
  }
  return {};
}

bool has_single_choice(const RouterSpec& spec) {
  return spec.score_function == ScoreFunction::kSigmoid ||
         spec.score_function == ScoreFunction::kSqrtSoftplus;
}

Status validate_choices(const RouterSpec& spec) {
  if (spec.score_function == ScoreFunction::kUnset) return invalid("score_function is unset");
  if (spec.selection_bias == Choice::kUnset) return invalid("selection_bias is unset");
  if (spec.normalise == Choice::kUnset) return invalid("normalise is unset");
  if (spec.num_groups > 1 && spec.group_score == GroupScore::kUnset) {
    return invalid("group_score is unset, but num_groups is {}", spec.num_groups);
  }
  if (spec.top_k == 1 && spec.normalise == Choice::kYes && has_single_choice(spec) &&
      spec.normalise_single == Choice::kUnset) {
    return invalid("normalise_single is unset, but top_k is 1 and {} scores are normalised",
                   word(spec.score_function));
  }
  if (!std::isfinite(spec.routed_scaling_factor) || spec.routed_scaling_factor <= 0.0f) {
    return invalid("routed_scaling_factor is {}, expected finite and positive",
                   spec.routed_scaling_factor);
  }
  return {};
}

}  // namespace

Status validate(const RouterSpec& spec) {
  ARGOSY_RETURN_IF_ERROR(validate_sizes(spec));
  ARGOSY_RETURN_IF_ERROR(validate_groups(spec));
  return validate_choices(spec);
}

Result<RouterSpec> router_preset(std::string_view name, int64_t num_experts, int64_t top_k) {
  for (const Preset& preset : kPresets) {
    if (preset.name != name) continue;
    RouterSpec spec;
    spec.num_experts = num_experts;
    spec.top_k = top_k;
    spec.score_function = preset.score_function;
    spec.selection_bias = preset.selection_bias;
    spec.group_score = preset.group_score;
    spec.normalise = preset.normalise;
    spec.normalise_single = preset.normalise_single;
    return spec;
  }
  return base::error(StatusCode::kNotFound, "no router preset \"{}\"; there are: {}", name,
                     fmt::join(router_preset_names(), ", "));
}

const std::vector<std::string>& router_preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Preset& preset : kPresets) list.emplace_back(preset.name);
    return list;
  }();
  return names;
}

std::string to_string(const RouterSpec& spec) {
  return fmt::format(
      "num_experts = {}\ntop_k = {}\nscore_function = {}\nselection_bias = {}\nnum_groups = {}\n"
      "keep_groups = {}\ngroup_score = {}\nnormalise = {}\nnormalise_single = {}\n"
      "weight_norm = {}\nrouted_scaling_factor = {}\non_nonfinite = {}\n",
      spec.num_experts, spec.top_k, word(spec.score_function), word(spec.selection_bias),
      spec.num_groups, spec.keep_groups, word(spec.group_score), word(spec.normalise),
      word(spec.normalise_single), word(spec.weight_norm), spec.routed_scaling_factor,
      word(spec.on_nonfinite));
}

}  // namespace argosy
