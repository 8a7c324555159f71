// The exact way of one token against the same rules with all scores of the row at once: the same bits at every
// level, below, at and above the size of a chunk; and the scratch of a thread, which fits a first-level cache.
#include "router/exact_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "argosy/cpu.h"
#include "platform/float_env.h"
#include "router/lanes.h"
#include "router/router_testing.h"
#include "router/top_k.h"

namespace argosy::test {
namespace {

using router::ExactRow;
using router::kBaselineKernel;

std::vector<router::RoutePath> paths_here() {
  const CpuInfo& cpu = **cpu_info();
  std::vector<router::RoutePath> paths = {{&kBaselineKernel, false, nullptr},
                                          {&kBaselineKernel, true, nullptr}};
  if (cpu.has(Level::kAvx2)) paths.push_back({&router::kFmaKernel, true, nullptr});
  if (cpu.has(Level::kAvx512)) paths.push_back({&router::kAvx512Kernel, true, nullptr});
  return paths;
}

struct Chosen {
  std::vector<int32_t> idx;
  std::vector<float> weights;
};

void whole_row_scores(const RouterSpec& spec, const std::vector<float>& logits,
                      std::vector<double>* exact, std::vector<float>* scores) {
  exact->assign(logits.size(), 0.0);
  *scores = logits;
  const auto count = static_cast<int64_t>(logits.size());
  router::ScoreRow run = nullptr;
  if (spec.score_function == ScoreFunction::kSoftmax) run = kBaselineKernel.softmax_scores;
  if (spec.score_function == ScoreFunction::kSigmoid) run = kBaselineKernel.sigmoid_scores;
  if (spec.score_function == ScoreFunction::kSqrtSoftplus) {
    run = kBaselineKernel.sqrt_softplus_scores;
  }
  if (run != nullptr) run(logits.data(), count, exact->data(), scores->data());
}

// The naive twin: whole rows.
Chosen by_whole_row(const RouterSpec& spec, const std::vector<float>& logits,
                    const std::vector<float>& bias, bool normalised) {
  std::vector<double> exact;
  std::vector<float> scores;
  whole_row_scores(spec, logits, &exact, &scores);
  std::vector<float> selection = scores;
  for (size_t i = 0; i < bias.size(); ++i) selection[i] = scores[i] + bias[i];
  std::vector<uint64_t> keys(4096), group_keys(4096);
  Chosen chosen{std::vector<int32_t>(static_cast<size_t>(spec.top_k)),
                std::vector<float>(static_cast<size_t>(spec.top_k))};
  router::select_experts(spec, selection.data(), {keys.data(), group_keys.data()},
                         chosen.idx.data());
  const bool is_softmax = spec.score_function == ScoreFunction::kSoftmax;
  const bool reference = spec.weight_norm == WeightNorm::kReference;
  std::vector<float> of_chosen, logits_of_chosen;
  for (const int32_t id : chosen.idx) {
    of_chosen.push_back(scores[static_cast<size_t>(id)]);
    logits_of_chosen.push_back(logits[static_cast<size_t>(id)]);
  }
  std::vector<double> terms(chosen.idx.size());
  double sum = 1;
  if (!normalised) {
    for (size_t k = 0; k < terms.size(); ++k) terms[k] = exact[static_cast<size_t>(chosen.idx[k])];
  } else if (spec.score_function != ScoreFunction::kSoftmaxTopK && (!is_softmax || reference) &&
             (reference || *std::ranges::min_element(of_chosen) >= 0x1p-100f)) {
    terms.assign(of_chosen.begin(), of_chosen.end());
    sum = router::sum_lanes(of_chosen.data(), spec.top_k) + (reference ? 1e-20 : 0.0);
  } else {
    router::ChosenTerms run = kBaselineKernel.softmax_terms;
    if (spec.score_function == ScoreFunction::kSigmoid) run = kBaselineKernel.sigmoid_terms;
    if (spec.score_function == ScoreFunction::kSqrtSoftplus) {
      run = kBaselineKernel.sqrt_softplus_terms;
    }
    sum = run(logits_of_chosen.data(), spec.top_k, terms.data());
  }
  for (size_t k = 0; k < terms.size(); ++k) {
    const double weight = terms[k] / sum;
    const auto rounded = static_cast<float>(weight);
    const bool is_normal = rounded >= std::numeric_limits<float>::min();
    chosen.weights[k] =
        is_normal ? rounded * spec.routed_scaling_factor
                  : static_cast<float>(weight * static_cast<double>(spec.routed_scaling_factor));
  }
  return chosen;
}

int64_t draw(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

RouterSpec draw_spec(std::mt19937_64& random) {
  constexpr int64_t kSizes[] = {1, 8, 60, 511, 512, 513, 1024, 1300, 1536, 2047, 4096};
  while (true) {
    RouterSpec spec = spec_of("sigmoid", kSizes[draw(random, 0, 10)], 1);
    spec.score_function = static_cast<ScoreFunction>(draw(random, 1, 4));
    spec.weight_norm = draw(random, 0, 2) == 0 ? WeightNorm::kReference : WeightNorm::kExact;
    spec.top_k = std::min(spec.num_experts, draw(random, 1, 64));
    spec.routed_scaling_factor = draw(random, 0, 1) == 0 ? 1.0f : 2.5f;
    spec.group_score = static_cast<GroupScore>(draw(random, 1, 3));
    spec.num_groups = draw(random, 0, 1) == 0 ? 1 : int64_t{1} << draw(random, 0, 6);
    spec.keep_groups = draw(random, 1, spec.num_groups);
    if (validate(spec).ok()) return spec;
  }
}

std::vector<float> draw_logits(std::mt19937_64& random, const RouterSpec& spec) {
  const float spread = std::pow(10.0f, static_cast<float>(draw(random, -3, 4)));
  std::vector<float> logits = normal_logits(random, static_cast<size_t>(spec.num_experts), spread);
  if (draw(random, 0, 3) == 0) {  // many ties
    for (float& logit : logits) logit = std::round(logit);
  }
  if (draw(random, 0, 5) == 0) std::ranges::fill(logits, 0.0f);
  return logits;
}

TEST(ExactRow, EqualsTheWholeRow) {
  constexpr uint64_t kSeed = 151;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  for (int round = 0; round < 600; ++round) {
    const RouterSpec spec = draw_spec(random);
    const std::vector<float> logits = draw_logits(random, spec);
    std::vector<float> bias;
    if (draw(random, 0, 1) == 0) bias = normal_logits(random, logits.size(), 1.0f);
    const bool normalised =
        spec.score_function == ScoreFunction::kSoftmaxTopK || draw(random, 0, 1) == 0;
    const Chosen want = by_whole_row(spec, logits, bias, normalised);
    const bool is_zero = std::ranges::all_of(logits, [](float logit) { return logit == 0.0f; });
    for (const router::RoutePath& path : paths_here()) {
      const ExactRow row(path, spec, bias.empty() ? nullptr : bias.data(), normalised);
      AlignedBuffer scratch;
      ASSERT_TRUE(scratch.reserve(row.scratch_bytes()).ok());
      for (const float* const given : {logits.data(), static_cast<const float*>(nullptr)}) {
        if (given == nullptr && !is_zero) continue;
        std::memset(scratch.data(), 0xFF, static_cast<size_t>(row.scratch_bytes()));  // NaN
        Chosen got{std::vector<int32_t>(want.idx.size()), std::vector<float>(want.idx.size())};
        row.route(given, row.scratch_at(scratch.data()), got.idx.data(), got.weights.data());
        ASSERT_EQ(got.idx, want.idx) << round << " " << to_string(spec);
        ASSERT_TRUE(same_bits(got.weights, want.weights)) << round << " " << to_string(spec);
      }
    }
  }
}

// Of every spec within what the router promises: E up to 4096, K up to 64, up to 64 groups.
TEST(ExactRow, ScratchFitsAFirstLevelCache) {
  std::mt19937_64 random(152);
  const std::vector<float> bias(4096);
  int64_t most = 0;
  for (const int64_t num_experts : {1, 2, 63, 64, 65, 512, 513, 4032, 4095, 4096}) {
    for (int64_t num_groups = 1; num_groups <= 64; ++num_groups) {
      for (const int64_t top_k : {1, 8, 64}) {
        RouterSpec spec = spec_of("sigmoid", num_experts, top_k);
        spec.num_groups = num_groups;
        spec.keep_groups = num_groups;
        if (num_groups > 1 && draw(random, 0, 1) == 0) spec.keep_groups = num_groups - 1;
        if (!validate(spec).ok()) continue;
        for (const router::RoutePath& path : paths_here()) {
          most = std::max(most, ExactRow(path, spec, bias.data(), true).scratch_bytes());
        }
      }
    }
  }
  EXPECT_LE(most, router::kMostScratchBytes);
  EXPECT_GT(most, 4096 * 4);
  EXPECT_LE(router::kFusedScratchFloats * 4, router::kMostScratchBytes);
}

}  // namespace
}  // namespace argosy::test
