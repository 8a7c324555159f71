// The two compilations of the gradient kernel give the same bits, and its functions are exact to
// some 1e-15.
#include "router/gradient_kernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "router/router_testing.h"

namespace argosy::test {
namespace {

using router::kBaselineGradientKernel;
using router::kFmaGradientKernel;

std::vector<float> logits_of_every_size() {
  std::mt19937_64 random(801);
  std::vector<float> logits = {0.0f, -0.0f, 1e-45f, -1e-45f, 700.0f, -700.0f, 3e38f, -3e38f};
  for (const float spread : {1e-6f, 1.0f, 20.0f, 300.0f, 1e6f}) {
    const std::vector<float> drawn = normal_logits(random, 501, spread);
    logits.insert(logits.end(), drawn.begin(), drawn.end());
  }
  return logits;
}

TEST(GradientKernel, BothCompilationsGiveTheSameBits) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    GTEST_SKIP() << "this CPU has no AVX2 with FMA";
  }
  const std::vector<float> logits = logits_of_every_size();
  const auto count = static_cast<int64_t>(logits.size());
  std::vector<double> a(logits.size());
  std::vector<double> b(logits.size());
  for (const auto member :
       {&router::GradientKernel::sigmoid_slopes, &router::GradientKernel::sqrt_softplus_slopes}) {
    (kBaselineGradientKernel.*member)(logits.data(), count, a.data());
    (kFmaGradientKernel.*member)(logits.data(), count, b.data());
    EXPECT_EQ(a, b);
  }
  for (double sum = 1.0; sum < 2e9; sum *= 1.0371) {
    EXPECT_EQ(kBaselineGradientKernel.log_of_sum(sum), kFmaGradientKernel.log_of_sum(sum));
  }
}

TEST(GradientKernel, SlopesKeepTheirRelativeAccuracy) {
  const std::vector<float> logits = logits_of_every_size();
  const auto count = static_cast<int64_t>(logits.size());
  std::vector<double> sigmoid(logits.size());
  std::vector<double> softplus(logits.size());
  router::gradient_kernel().sigmoid_slopes(logits.data(), count, sigmoid.data());
  router::gradient_kernel().sqrt_softplus_slopes(logits.data(), count, softplus.data());
  for (size_t i = 0; i < logits.size(); ++i) {
    const long double z = logits[i];
    // Beyond 708 e^-z is 0 here, as in the forward.
    const long double want = std::fabs(z) > 708 ? (z > 0 ? 0.0L : 1.0L) : 1 / (1 + std::exp(z));
    EXPECT_NEAR(sigmoid[i], static_cast<double>(want), 4e-15 * static_cast<double>(want)) << z;
    const long double plus = z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z));
    const long double half = z < -708 ? 0.5L : 1 / (1 + std::exp(-z)) / (2 * plus);
    EXPECT_NEAR(softplus[i], static_cast<double>(half), 4e-15 * static_cast<double>(half)) << z;
  }
}

TEST(GradientKernel, LogOfSums) {
  EXPECT_EQ(router::gradient_kernel().log_of_sum(1.0), 0.0);
  for (double sum = 1.0; sum < 2147483648.0; sum *= 1.00917) {
    const double want = std::log(sum);
    EXPECT_NEAR(router::gradient_kernel().log_of_sum(sum), want, 4e-15 * want) << sum;
  }
}

}  // namespace
}  // namespace argosy::test
