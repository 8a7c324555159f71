// Body of kernel_baseline.cc, kernel_fma.cc and kernel_avx512.cc; see kernel.h. No standard header with inline
// functions may come in here: the linker could keep their AVX2 copy for everyone.
#include <immintrin.h>

#include <cstdint>

#include "numeric/elementary.h"
#include "router/kernel.h"
#include "router/lanes.h"

namespace argosy::router {
namespace {

using numeric::exp_nonpositive_f64;
using numeric::log1p_quotient_f64;

#include "router/select_kernel.inl"

// Eight lanes, as one chain of comparisons would wait for each. Of -0 and +0 either may come out.
float largest(const float* values, int64_t count) {
  F8 best = F8{} + values[0];
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    F8 next;
    __builtin_memcpy(&next, values + i, sizeof(next));
    best = next > best ? next : best;
  }
  for (int j = 0; i + j < count; ++j) best[j] = values[i + j] > best[j] ? values[i + j] : best[j];
  float most = best[0];
  for (int j = 1; j < kLanes; ++j) most = best[j] > most ? best[j] : most;
  return most;
}

ARGOSY_INLINE void softmax_powers(const float* logits, int64_t count, double peak, double* powers,
                                  LaneSum* sum) {
  for (int64_t i = 0; i < count; ++i) {
    powers[i] = exp_nonpositive_f64(static_cast<double>(logits[i]) - peak);
  }
  add_lanes(powers, count, sum);
}

ARGOSY_INLINE void quotients(double* values, int64_t count, double sum, float* rounded) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] /= sum;
    rounded[i] = static_cast<float>(values[i]);
  }
}

double softmax_terms(const float* logits, int64_t count, double* terms) {
  LaneSum sum;
  softmax_powers(logits, count, static_cast<double>(largest(logits, count)), terms, &sum);
  return total(sum);
}

void softmax_scores(const float* logits, int64_t num_experts, double* exact, float* scores) {
  const double sum = softmax_terms(logits, num_experts, exact);
  quotients(exact, num_experts, sum, scores);
}

// sigmoid(z) = e^min(z, 0) / (1 + e^-|z|); `shift` <= 0 is taken out of the numerator's exponent.
ARGOSY_INLINE double sigmoid_over_exp(double z, double shift) {
  const double negative = z < 0.0 ? z : 0.0;
  const double below = z < 0.0 ? z : -z;
  return exp_nonpositive_f64(negative - shift) / (1.0 + exp_nonpositive_f64(below));
}

// The bits of sigmoid_over_exp(z, 0) with one power: e^min(z, 0) is 1 or the denominator's.
void sigmoid_scores(const float* logits, int64_t num_experts, double* exact, float* scores) {
  for (int64_t i = 0; i < num_experts; ++i) {
    const auto z = static_cast<double>(logits[i]);
    const double power = exp_nonpositive_f64(z < 0.0 ? z : -z);
    exact[i] = (z < 0.0 ? power : 1.0) / (1.0 + power);
    scores[i] = static_cast<float>(exact[i]);
  }
}

// The largest chosen logit, if negative: what may be taken out of all numerators without overflow.
ARGOSY_INLINE double common_shift(const float* logits, int64_t count) {
  const double peak = static_cast<double>(largest(logits, count));
  return peak < 0.0 ? peak : 0.0;
}

double sigmoid_terms(const float* logits, int64_t count, double* terms) {
  const double shift = common_shift(logits, count);
  for (int64_t i = 0; i < count; ++i) {
    terms[i] = sigmoid_over_exp(static_cast<double>(logits[i]), shift);
  }
  return sum_lanes(terms, count);
}

// sqrt(log(1 + e^z)) = e^(z/2) sqrt(log(1 + e^z) / e^z) for z <= 0: the root is then in [0.83, 1].
ARGOSY_INLINE double sqrt_softplus_over_exp(double z, double shift) {
  const double below = z < 0.0 ? z : -z;
  const double f = exp_nonpositive_f64(below);
  const double quotient = log1p_quotient_f64(f);
  const double inside = z < 0.0 ? quotient : z + f * quotient;
  const double negative = z < 0.0 ? z : 0.0;
  return exp_nonpositive_f64(0.5 * (negative - shift)) * __builtin_sqrt(inside);
}

void sqrt_softplus_scores(const float* logits, int64_t num_experts, double* exact, float* scores) {
  for (int64_t i = 0; i < num_experts; ++i) {
    exact[i] = sqrt_softplus_over_exp(static_cast<double>(logits[i]), 0.0);
    scores[i] = static_cast<float>(exact[i]);
  }
}

double sqrt_softplus_terms(const float* logits, int64_t count, double* terms) {
  const double shift = common_shift(logits, count);
  for (int64_t i = 0; i < count; ++i) {
    terms[i] = sqrt_softplus_over_exp(static_cast<double>(logits[i]), shift);
  }
  return sum_lanes(terms, count);
}

// A register of chains: compilers make of the loop over them, at best, half as much.
#if defined(__AVX512F__)
struct Chains {
  static constexpr int64_t kWidth = 16;
  __m512 value;

  void load(const float* from) { value = _mm512_loadu_ps(from); }
  void store(float* to) const { _mm512_storeu_ps(to, value); }
  void add(float x, const float* weights) {
    value = _mm512_fmadd_ps(_mm512_set1_ps(x), _mm512_loadu_ps(weights), value);
  }
};
#elif defined(__FMA__)
struct Chains {
  static constexpr int64_t kWidth = 8;
  __m256 value;

  void load(const float* from) { value = _mm256_loadu_ps(from); }
  void store(float* to) const { _mm256_storeu_ps(to, value); }
  void add(float x, const float* weights) {
    value = _mm256_fmadd_ps(_mm256_set1_ps(x), _mm256_loadu_ps(weights), value);
  }
};
#else
struct Chains {
  static constexpr int64_t kWidth = 1;
  float value;

  void load(const float* from) { value = *from; }
  void store(float* to) const { *to = value; }
  void add(float x, const float* weights) { value = __builtin_fmaf(x, *weights, value); }
};
#endif

void gate_tile(const float* x, const float* panel, int64_t depth, float* acc) {
  for (int64_t j = 0; j < kGateExperts; j += Chains::kWidth) {
    Chains sum[kGateTokens];
    for (int64_t t = 0; t < kGateTokens; ++t) sum[t].load(acc + t * kGateExperts + j);
    for (int64_t h = 0; h < depth; ++h) {
      const float* weights = panel + h * kGateExperts + j;
      for (int64_t t = 0; t < kGateTokens; ++t) sum[t].add(x[t * kGateHidden + h], weights);
    }
    for (int64_t t = 0; t < kGateTokens; ++t) sum[t].store(acc + t * kGateExperts + j);
  }
}

constexpr Kernel kThisKernel = {softmax_scores, sigmoid_scores, sqrt_softplus_scores,
                                softmax_terms,  sigmoid_terms,  sqrt_softplus_terms,
                                largest,        softmax_powers, quotients,
                                order,          select,         gate_tile};

}  // namespace
}  // namespace argosy::router
