// Derivatives of the router by dual numbers in long double: the forward formulas as they stand in
// docs/routing.md, each operation carrying its derivative. Yardstick of the backward; shares no
// code and no closed derivative with src/router/. Long double reaches e^-11000, so nothing here
// needs the log domain.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "argosy/router.h"

namespace argosy::test {

struct Dual {
  long double value = 0;
  long double slope = 0;
};

inline Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.slope + b.slope}; }
inline Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.slope - b.slope}; }
inline Dual operator*(Dual a, Dual b) {
  return {a.value * b.value, a.slope * b.value + a.value * b.slope};
}
inline Dual operator/(Dual a, Dual b) {
  const long double quotient = a.value / b.value;
  return {quotient, (a.slope - quotient * b.slope) / b.value};
}
inline Dual constant(long double value) { return {value, 0}; }
inline Dual exp(Dual a) { return {std::exp(a.value), std::exp(a.value) * a.slope}; }
inline Dual log(Dual a) { return {std::log(a.value), a.slope / a.value}; }
inline Dual log1p(Dual a) { return {std::log1p(a.value), a.slope / (1 + a.value)}; }
inline Dual sqrt(Dual a) { return {std::sqrt(a.value), a.slope / (2 * std::sqrt(a.value))}; }
inline Dual negative(Dual a) { return {-a.value, -a.slope}; }

inline Dual sum_of(std::span<const Dual> values) {
  Dual sum;
  for (const Dual value : values) sum = sum + value;
  return sum;
}

inline std::vector<Dual> dual_softmax(std::span<const Dual> logits) {
  long double peak = logits[0].value;
  for (const Dual z : logits) peak = std::max(peak, z.value);
  std::vector<Dual> terms;
  for (const Dual z : logits) terms.push_back(exp(z - constant(peak)));
  const Dual sum = sum_of(terms);
  for (Dual& term : terms) term = term / sum;
  return terms;
}

inline Dual dual_score(ScoreFunction function, Dual z) {
  if (function == ScoreFunction::kSigmoid) {
    if (z.value < 0) return exp(z) / (constant(1) + exp(z));
    return constant(1) / (constant(1) + exp(negative(z)));
  }
  return sqrt(z.value < 0 ? log1p(exp(z)) : z + log1p(exp(negative(z))));
}

// Scores of all experts; of kSoftmaxTopK those of the softmax over E.
inline std::vector<Dual> dual_scores(ScoreFunction function, std::span<const Dual> logits) {
  if (function == ScoreFunction::kSoftmax || function == ScoreFunction::kSoftmaxTopK) {
    return dual_softmax(logits);
  }
  std::vector<Dual> scores;
  for (const Dual z : logits) scores.push_back(dual_score(function, z));
  return scores;
}

// Weights of `experts`.
inline std::vector<Dual> dual_weights(const RouterSpec& spec, std::span<const Dual> logits,
                                      std::span<const int32_t> experts) {
  const bool post = spec.score_function == ScoreFunction::kSoftmaxTopK;
  const bool single = spec.top_k == 1 && spec.score_function != ScoreFunction::kSoftmax && !post &&
                      spec.normalise_single != Choice::kYes;
  std::vector<Dual> weights;
  if (post) {
    std::vector<Dual> chosen;
    for (const int32_t e : experts) chosen.push_back(logits[static_cast<size_t>(e)]);
    weights = dual_softmax(chosen);
  } else {
    const std::vector<Dual> scores = dual_scores(spec.score_function, logits);
    for (const int32_t e : experts) weights.push_back(scores[static_cast<size_t>(e)]);
    if (spec.normalise == Choice::kYes && !single) {
      const long double epsilon = spec.weight_norm == WeightNorm::kReference ? 1e-20L : 0.0L;
      const Dual sum = sum_of(weights) + constant(epsilon);
      for (Dual& weight : weights) weight = weight / sum;
    }
  }
  for (Dual& weight : weights) weight = weight * constant(spec.routed_scaling_factor);
  return weights;
}

// d f / d logits of one row; f(std::span<const Dual>) -> Dual.
template <typename F>
std::vector<long double> dual_gradient(std::span<const float> logits, const F& f) {
  std::vector<Dual> row;
  for (const float z : logits) row.push_back(constant(z));
  std::vector<long double> gradient;
  for (Dual& z : row) {
    z.slope = 1;
    gradient.push_back(f(std::span<const Dual>(row)).slope);
    z.slope = 0;
  }
  return gradient;
}

// The same by central differences.
template <typename F>
std::vector<long double> difference_gradient(std::span<const float> logits, const F& f) {
  constexpr long double kStep = 1e-5L;
  std::vector<Dual> row;
  for (const float z : logits) row.push_back(constant(z));
  std::vector<long double> gradient;
  for (Dual& z : row) {
    const long double at = z.value;
    z.value = at + kStep;
    const long double above = f(std::span<const Dual>(row)).value;
    z.value = at - kStep;
    const long double below = f(std::span<const Dual>(row)).value;
    z.value = at;
    gradient.push_back((above - below) / (2 * kStep));
  }
  return gradient;
}

}  // namespace argosy::test
