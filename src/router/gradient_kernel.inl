// Body of gradient_kernel_baseline.cc and gradient_kernel_fma.cc; see gradient_kernel.h. As in
// kernel.inl, no standard header with inline functions may come in here.

#include "numeric/elementary.h"
#include "router/gradient_kernel.h"

namespace argosy::router {
namespace {

using numeric::exp_nonpositive_f64;
using numeric::log1p_quotient_f64;

// No branch holds arithmetic below: the compiler would not vectorise it.

void sigmoid_slopes(const float* logits, int64_t count, double* slopes) {
  for (int64_t i = 0; i < count; ++i) {
    const double z = static_cast<double>(logits[i]);
    const double f = exp_nonpositive_f64(-__builtin_fabs(z));
    slopes[i] = (z > 0.0 ? f : 1.0) / (1.0 + f);
  }
}

// With f = e^-|z| and q = log(1 + f) / f: softplus is z + f q for z > 0 and f q below, where f of
// the sigmoid cancels. Below -708, where f is 0, the slope is 1/2.
void sqrt_softplus_slopes(const float* logits, int64_t count, double* slopes) {
  for (int64_t i = 0; i < count; ++i) {
    const double z = static_cast<double>(logits[i]);
    const double f = exp_nonpositive_f64(-__builtin_fabs(z));
    const double above = 0.5 * (z + __builtin_fabs(z));  // max(z, 0), exactly
    const double softplus = above + (z > 0.0 ? f : 1.0) * log1p_quotient_f64(f);
    slopes[i] = 0.5 / ((1.0 + f) * softplus);
  }
}

// sum = 2^n m with m in [1, 2): n ln 2 + log(1 + (m - 1)).
double log_of_sum(double sum) {
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1;
  const uint64_t bits = __builtin_bit_cast(uint64_t, sum);
  const auto exponent = static_cast<int64_t>(bits >> 52) - 1023;
  const double above = __builtin_bit_cast(double, (bits & kMantissa) | uint64_t{1023} << 52) - 1.0;
  return __builtin_fma(static_cast<double>(exponent), kLn2, above * log1p_quotient_f64(above));
}

constexpr GradientKernel kThisKernel = {sigmoid_slopes, sqrt_softplus_slopes, log_of_sum};

}  // namespace
}  // namespace argosy::router
