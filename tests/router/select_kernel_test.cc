// Kernel::select against select_experts() at every level: the same ids in the same order, groups of any size
// and ties of any number among them; and what it leaves alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "argosy/cpu.h"
#include "router/kernel.h"
#include "router/router_testing.h"
#include "router/top_k.h"

namespace argosy::test {
namespace {

std::vector<const router::Kernel*> kernels_here() {
  const CpuInfo& cpu = **cpu_info();
  std::vector<const router::Kernel*> kernels = {&router::kBaselineKernel};
  if (cpu.has(Level::kAvx2)) kernels.push_back(&router::kFmaKernel);
  if (cpu.has(Level::kAvx512)) kernels.push_back(&router::kAvx512Kernel);
  return kernels;
}

int64_t draw(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

RouterSpec draw_spec(std::mt19937_64& random) {
  while (true) {
    RouterSpec spec = spec_of("sigmoid", draw(random, 1, 300), 1);
    if (draw(random, 0, 9) == 0) spec.num_experts = draw(random, 1, 4200);
    spec.top_k = std::min(spec.num_experts, draw(random, 1, draw(random, 0, 3) == 0 ? 64 : 12));
    spec.group_score = static_cast<GroupScore>(draw(random, 1, 3));
    spec.num_groups = draw(random, 0, 1) == 0 ? 1 : draw(random, 1, 64);
    spec.keep_groups = draw(random, 1, spec.num_groups);
    if (validate(spec).ok()) return spec;
  }
}

float draw_score(std::mt19937_64& random, int kind) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0:
      return std::round(normal(random) * 8.0f) / 8.0f;  // many ties, both zeros
    case 1:
      return std::bit_cast<float>(static_cast<uint32_t>(draw(random, 0, 3)) |
                                  (draw(random, 0, 1) != 0 ? 0x80000000u : 0u));
    case 2:
      return draw(random, 0, 3) == 0 ? -std::numeric_limits<float>::infinity() : -3e38f;
    default:
      return normal(random);
  }
}

std::vector<int32_t> by_select_experts(const RouterSpec& spec, const std::vector<float>& scores) {
  const int64_t most = std::max(spec.top_k, router::experts_per_group_score(spec));
  std::vector<uint64_t> keys(static_cast<size_t>(router::TopK::buffer_size(most)));
  std::vector<uint64_t> groups(static_cast<size_t>(router::TopK::buffer_size(spec.keep_groups)));
  std::vector<int32_t> ids(static_cast<size_t>(spec.top_k));
  router::select_experts(spec, scores.data(), {keys.data(), groups.data()}, ids.data());
  return ids;
}

// In pieces of `chunk` experts, as a caller may bring them.
bool select_by(const router::Kernel& kernel, const router::SelectRules& rules,
               const std::vector<float>& scores, int64_t chunk, std::vector<int32_t>* ids) {
  const auto count = static_cast<int64_t>(scores.size());
  std::vector<int32_t> orders(static_cast<size_t>(rules.num_groups * rules.group_stride), 77);
  for (int64_t first = 0; first < count; first += chunk) {
    kernel.order(rules, scores.data() + first, first, std::min(chunk, count - first),
                 orders.data());
  }
  return kernel.select(rules, orders.data(), ids->data());
}

TEST(SelectKernel, EqualsSelectExperts) {
  constexpr uint64_t kSeed = 91;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  const std::vector<const router::Kernel*> kernels = kernels_here();
  int64_t num_taken = 0, num_rounds = 0;
  while (num_rounds < 4000) {
    const RouterSpec spec = draw_spec(random);
    const auto rules = router::select_rules(spec);
    if (!rules.has_value()) continue;
    ++num_rounds;
    const int kind = static_cast<int>(draw(random, 0, 5));
    std::vector<float> scores;
    for (int64_t i = 0; i < spec.num_experts; ++i) scores.push_back(draw_score(random, kind));
    const std::vector<int32_t> want = by_select_experts(spec, scores);
    const int64_t chunk = draw(random, 1, 2 * spec.num_experts);
    for (size_t level = 0; level < kernels.size(); ++level) {
      std::vector<int32_t> got(want.size(), -1);
      if (!select_by(*kernels[level], *rules, scores, chunk, &got)) continue;
      ASSERT_EQ(got, want) << to_string(spec) << "level " << level << " kind " << kind << " chunk "
                           << chunk << " scores " << testing::PrintToString(scores);
      ++num_taken;
    }
  }
  EXPECT_GT(num_taken, num_rounds * static_cast<int64_t>(kernels.size()) * 3 / 4);
}

// Ordinary scores are never left, up to the largest shape.
TEST(SelectKernel, TakesEveryTopKOfOrdinaryScores) {
  std::mt19937_64 random(92);
  for (int64_t top_k = 1; top_k <= router::kSelectMostTopK; ++top_k) {
    const RouterSpec spec = spec_of("sigmoid", top_k % 2 == 0 ? 4096 : 257, top_k);
    const std::vector<float> scores =
        normal_logits(random, static_cast<size_t>(spec.num_experts), 1.0f);
    const auto rules = router::select_rules(spec);
    ASSERT_TRUE(rules.has_value());
    for (const router::Kernel* const kernel : kernels_here()) {
      std::vector<int32_t> got(static_cast<size_t>(top_k));
      ASSERT_TRUE(select_by(*kernel, *rules, scores, 512, &got)) << top_k;
      ASSERT_EQ(got, by_select_experts(spec, scores)) << top_k;
    }
  }
}

TEST(SelectKernel, LeavesRowsOfEqualScores) {
  const RouterSpec spec = spec_of("sigmoid", 4096, 8);
  const std::vector<float> scores(4096, 0.5f);
  const auto rules = router::select_rules(spec);
  ASSERT_TRUE(rules.has_value());
  std::vector<int32_t> got(8);
  for (const router::Kernel* const kernel : kernels_here()) {
    EXPECT_FALSE(select_by(*kernel, *rules, scores, 4096, &got));
  }
}

TEST(SelectKernel, HasNoRulesForWhatDoesNotFit) {
  EXPECT_TRUE(router::select_rules(spec_of("sigmoid", 128, 64)).has_value());
  EXPECT_FALSE(router::select_rules(spec_of("sigmoid", 128, 65)).has_value());
  RouterSpec spec = spec_of("deepseek_v3", 4096, 8);
  spec.num_groups = 64;
  spec.keep_groups = 4;
  EXPECT_TRUE(router::select_rules(spec).has_value());
  spec.num_groups = 128;
  EXPECT_FALSE(router::select_rules(spec).has_value());
  spec = spec_of("deepseek_v3", 100, 4);
  spec.num_groups = 50;
  spec.keep_groups = 4;
  EXPECT_FALSE(router::select_rules(spec).has_value());  // groups of 2 in vectors of 8
}

}  // namespace
}  // namespace argosy::test
