// The words of a RouterSpec's choices: one table each, printed by spec.cc and read by
// spec_fields.cc. Test: tests/router/spec_test.cc.
#pragma once

#include <string_view>

#include "argosy/router.h"

namespace argosy::router {

template <typename Value>
struct Word {
  std::string_view word;
  Value value;
};

inline constexpr Word<ScoreFunction> kScoreFunctionWords[] = {
    {"softmax", ScoreFunction::kSoftmax},
    {"softmax_top_k", ScoreFunction::kSoftmaxTopK},
    {"sigmoid", ScoreFunction::kSigmoid},
    {"sqrt_softplus", ScoreFunction::kSqrtSoftplus},
};

inline constexpr Word<GroupScore> kGroupScoreWords[] = {
    {"max", GroupScore::kMax},
    {"sum_of_best_two", GroupScore::kSumOfBestTwo},
    {"sum_of_best_k_per_group", GroupScore::kSumOfBestKPerGroup},
};

inline constexpr Word<Choice> kChoiceWords[] = {{"no", Choice::kNo}, {"yes", Choice::kYes}};

inline constexpr Word<WeightNorm> kWeightNormWords[] = {{"exact", WeightNorm::kExact},
                                                        {"reference", WeightNorm::kReference}};

inline constexpr Word<OnNonfinite> kOnNonfiniteWords[] = {{"error", OnNonfinite::kError},
                                                          {"uniform", OnNonfinite::kUniform}};

// "unset" for a value without a word.
template <typename Value, size_t N>
constexpr std::string_view word_of(const Word<Value> (&words)[N], Value value) {
  for (const Word<Value>& one : words) {
    if (one.value == value) return one.word;
  }
  return "unset";
}

}  // namespace argosy::router
