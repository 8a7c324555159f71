// Derivatives of score functions: what the backward of the router has of arithmetic worth an
// instruction set.
//
// gradient_kernel.inl is compiled twice like kernel.inl; both give the same bits. Callers keep
// denormals. Test: tests/router/gradient_kernel_test.cc.
#pragma once

#include <cstdint>

namespace argosy::router {

// slopes[i] = d log(score) / d logit of expert i, its relative accuracy kept at any magnitude.
using ScoreSlopes = void (*)(const float* logits, int64_t count, double* slopes);

struct GradientKernel {
  ScoreSlopes sigmoid_slopes;        // sigmoid(-z)
  ScoreSlopes sqrt_softplus_slopes;  // sigmoid(z) / (2 softplus(z))
  // log of sums in [1, 2^31).
  double (*log_of_sum)(double sum);
};

extern const GradientKernel kBaselineGradientKernel;
extern const GradientKernel kFmaGradientKernel;  // only on a CPU with AVX2 and FMA

// The kernel for this CPU.
const GradientKernel& gradient_kernel();

}  // namespace argosy::router
