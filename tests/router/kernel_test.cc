// The compilations of the kernel give the same bits; the scores are within an fp32 ulp of
// exact; the sum has the order it promises.
#include "router/kernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "argosy/cpu.h"
#include "router/lanes.h"
#include "router/router_testing.h"
#include "support/router_oracle.h"

namespace argosy::test {
namespace {

using router::kBaselineKernel;

std::vector<const router::Kernel*> compiled_for_levels() {
  const CpuInfo& cpu = **cpu_info();
  std::vector<const router::Kernel*> kernels;
  if (cpu.has(Level::kAvx2)) kernels.push_back(&router::kFmaKernel);
  if (cpu.has(Level::kAvx512)) kernels.push_back(&router::kAvx512Kernel);
  return kernels;
}

std::vector<std::vector<float>> rows_of_all_sizes(std::mt19937_64& random) {
  std::vector<std::vector<float>> rows;
  for (const size_t experts : {1, 2, 7, 8, 9, 60, 64, 255, 1024}) {
    for (const float spread : {1e-3f, 1.0f, 30.0f, 200.0f, 1e4f, 1e37f}) {
      rows.push_back(normal_logits(random, experts, spread));
    }
  }
  return rows;
}

void expect_same_bits(const router::Kernel& kernel, const std::vector<float>& row) {
  const auto count = static_cast<int64_t>(row.size());
  std::vector<double> exact[2] = {std::vector<double>(row.size()), std::vector<double>(row.size())};
  std::vector<float> scores[2] = {std::vector<float>(row.size()), std::vector<float>(row.size())};
  for (const auto member : {&router::Kernel::softmax_scores, &router::Kernel::sigmoid_scores,
                            &router::Kernel::sqrt_softplus_scores}) {
    (kBaselineKernel.*member)(row.data(), count, exact[0].data(), scores[0].data());
    (kernel.*member)(row.data(), count, exact[1].data(), scores[1].data());
    EXPECT_EQ(exact[0], exact[1]);
    EXPECT_TRUE(same_bits(scores[0], scores[1]));
  }
  for (const auto member : {&router::Kernel::softmax_terms, &router::Kernel::sigmoid_terms,
                            &router::Kernel::sqrt_softplus_terms}) {
    const double a = (kBaselineKernel.*member)(row.data(), count, exact[0].data());
    const double b = (kernel.*member)(row.data(), count, exact[1].data());
    EXPECT_EQ(a, b);
    EXPECT_EQ(exact[0], exact[1]);
  }
}

TEST(RouterKernel, CompilationsGiveTheSameBits) {
  if (compiled_for_levels().empty()) GTEST_SKIP() << "this CPU has no AVX2 with FMA";
  std::mt19937_64 random(31);
  for (const std::vector<float>& row : rows_of_all_sizes(random)) {
    for (const router::Kernel* const kernel : compiled_for_levels()) expect_same_bits(*kernel, row);
  }
}

TEST(RouterKernel, ScoresAreRoundedOnceFromExactOnes) {
  std::mt19937_64 random(32);
  for (const std::vector<float>& row : rows_of_all_sizes(random)) {
    const auto count = static_cast<int64_t>(row.size());
    std::vector<double> exact(row.size());
    std::vector<float> scores(row.size());
    const std::pair<ScoreFunction, router::ScoreRow> functions[] = {
        {ScoreFunction::kSoftmax, router::kernel().softmax_scores},
        {ScoreFunction::kSigmoid, router::kernel().sigmoid_scores},
        {ScoreFunction::kSqrtSoftplus, router::kernel().sqrt_softplus_scores}};
    for (const auto& [function, run] : functions) {
      run(row.data(), count, exact.data(), scores.data());
      const std::vector<long double> want = oracle_scores(function, row);
      for (size_t i = 0; i < row.size(); ++i) {
        const double ulps = oracle_ulps(static_cast<long double>(scores[i]), want[i], 0);
        ASSERT_LE(ulps, 0.5 + 1e-6)
            << "function " << static_cast<int>(function) << " logit " << row[i];
      }
    }
  }
}

TEST(RouterKernel, SumsInEightLanes) {
  std::mt19937_64 random(33);
  std::normal_distribution<double> normal;
  for (int64_t count = 0; count < 200; ++count) {
    std::vector<double> values(static_cast<size_t>(count));
    for (double& value : values) value = normal(random);
    double lanes[8] = {};
    for (size_t i = 0; i < values.size(); ++i) lanes[i % 8] += values[i];
    const double even = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6]);
    const double odd = (lanes[1] + lanes[5]) + (lanes[3] + lanes[7]);
    ASSERT_EQ(router::sum_lanes(values.data(), count), even + odd) << count;
  }
}

}  // namespace
}  // namespace argosy::test
