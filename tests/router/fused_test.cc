// The fused pass gives the bits of the reference for every spec, level and row that was thought of to
// break it; its approximations keep their bounds; and it leaves few tokens to the reference.
#include "router/fused.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string_view>

#include "argosy/cpu.h"
#include "platform/float_env.h"
#include "router/router_testing.h"

namespace argosy::test {
namespace {

using Random = std::mt19937_64;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

template <typename T>
T one_of(Random& random, std::initializer_list<T> values) {
  return values.begin()[draw(random, 0, static_cast<int64_t>(values.size()) - 1)];
}

RouterInput input_of(const Batch& batch) {
  RouterInput input;
  input.logits = ConstTensorView(batch.logits.data(), DType::kF32,
                                 {batch.num_tokens(), batch.spec.num_experts});
  if (!batch.bias.empty()) {
    input.selection_bias =
        ConstTensorView(batch.bias.data(), DType::kF32, {static_cast<int64_t>(batch.bias.size())});
  }
  input.mask = batch.mask.empty() ? nullptr : batch.mask.data();
  return input;
}

struct NamedPath {
  const char* name;
  router::RoutePath path;
};

// What this CPU can run, the twin apart.
std::vector<NamedPath> paths_here() {
  const CpuInfo& cpu = **cpu_info();
  std::vector<NamedPath> paths = {{"baseline", {&router::kBaselineKernel, true, nullptr}}};
  if (cpu.has(Level::kAvx2)) paths.push_back({"avx2", {&router::kFmaKernel, true, nullptr}});
  if (cpu.has(Level::kAvx512)) {
    paths.push_back({"avx512", {&router::kAvx512Kernel, true, nullptr}});
    paths.push_back({"fused", {&router::kAvx512Kernel, true, &router::kFusedKernelAvx512}});
    if (router::fused_kernel() != &router::kFusedKernelAvx512) {
      paths.push_back({"fused, words", {&router::kAvx512Kernel, true, router::fused_kernel()}});
    }
  }
  return paths;
}

void expect_same(const Batch& batch, const Routing& got, const Routing& want);

void expect_bits_of_reference(const Batch& batch) {
  Routing want;
  const Status status =
      router::route_by(router::kReferencePath, batch.spec, input_of(batch), nullptr, &want);
  ASSERT_TRUE(status.ok()) << status.to_string();
  for (const NamedPath& each : paths_here()) {
    SCOPED_TRACE(each.name);
    Routing got;
    ASSERT_TRUE(router::route_by(each.path, batch.spec, input_of(batch), nullptr, &got).ok());
    expect_same(batch, got, want);
    if (testing::Test::HasFatalFailure()) return;
  }
}

void expect_same(const Batch& batch, const Routing& got, const Routing& want) {
  for (int64_t t = 0; t < batch.num_tokens(); ++t) {
    ASSERT_EQ(ids_of(got, t), ids_of(want, t))
        << to_string(batch.spec) << "token " << t << " row "
        << testing::PrintToString(std::vector<float>(batch.row(t).begin(), batch.row(t).end()));
    ASSERT_TRUE(same_bits(weights_of(got, t), weights_of(want, t)))
        << to_string(batch.spec) << "token " << t << " first weights " << weights_of(got, t)[0]
        << " and " << weights_of(want, t)[0];
  }
  ASSERT_EQ(got.counts, want.counts);
  ASSERT_EQ(got.num_nonfinite_rows, want.num_nonfinite_rows);
}

// Specs that the pass takes, and some that it does not.
RouterSpec draw_spec(Random& random) {
  while (true) {
    RouterSpec spec;
    spec.num_experts =
        one_of<int64_t>(random, {1, 2, 5, 8, 15, 16, 17, 32, 60, 64, 96, 128, 160, 256, 257, 384});
    if (draw(random, 0, 15) == 0) spec.num_experts = one_of<int64_t>(random, {1024, 4096, 4097});
    const int64_t most = one_of<int64_t>(random, {9, 9, 18, 64, 70});
    spec.top_k = std::min<int64_t>(spec.num_experts, draw(random, 1, most));
    spec.score_function = static_cast<ScoreFunction>(draw(random, 1, 4));
    spec.selection_bias = static_cast<Choice>(draw(random, 1, 2));
    spec.normalise = static_cast<Choice>(draw(random, 1, 2));
    spec.normalise_single = static_cast<Choice>(draw(random, 1, 2));
    spec.weight_norm = static_cast<WeightNorm>(draw(random, 0, 1));
    spec.group_score = static_cast<GroupScore>(draw(random, 1, 3));
    spec.num_groups = one_of<int64_t>(random, {1, 1, 2, 3, 4, 8, 16, 32});
    spec.keep_groups = draw(random, 1, spec.num_groups);
    spec.routed_scaling_factor = one_of(random, {1.0f, 2.5f, 0.3f});
    spec.on_nonfinite = OnNonfinite::kUniform;
    if (validate(spec).ok()) return spec;
  }
}

// Rows that are hard to choose from.
float draw_logit(Random& random, int kind, float centre) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0:
      return normal(random);
    case 1:  // all equal
      return centre;
    case 2:  // within some ulps of each other
      return std::bit_cast<float>(std::bit_cast<uint32_t>(centre) +
                                  static_cast<uint32_t>(draw(random, 0, 40)));
    case 3:  // quantised as bf16 would: many ties
      return std::round(normal(random) * 16.0f) / 16.0f;
    case 4:  // saturated sigmoids
      return centre * 3.0f + 20.0f * normal(random);
    case 5:  // beyond the coarse range
      return 150.0f * normal(random);
    case 6:
      return 1e37f * normal(random);
    case 7:  // denormal
      return std::bit_cast<float>(static_cast<uint32_t>(draw(random, 0, 0x7FFFFF)) |
                                  (draw(random, 0, 1) != 0 ? 0x80000000u : 0u));
    case 8:  // any bits, NaN and Inf among them
      return std::bit_cast<float>(static_cast<uint32_t>(random()));
    case 9:  // underflowing sigmoids
      return -95.0f + 8.0f * normal(random);
    default:  // close to the bound of the approximations
      return centre + 1e-4f * normal(random);
  }
}
constexpr int kKinds = 11;

float draw_bias(Random& random, int kind) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0:
      return 0.2f * normal(random);
    case 1:
      return 0.0f;
    case 2:
      return 1000.0f + 0.01f * normal(random);
    case 3:
      return static_cast<float>(draw(random, -1, 1));
    case 4:
      return 1e30f * normal(random);
    default:
      return -3.0f + 1e-5f * normal(random);
  }
}

TEST(Fused, GivesTheBitsOfTheReference) {
  constexpr uint64_t kSeed = 81;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 1500; ++round) {
    Batch batch;
    batch.spec = draw_spec(random);
    const int64_t num_tokens = draw(random, 1, 40);
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int kind = static_cast<int>(draw(random, 0, kKinds - 1));
      std::normal_distribution<float> normal(0.0f, 2.0f);
      const float centre = normal(random);
      for (int64_t i = 0; i < batch.spec.num_experts; ++i) {
        batch.logits.push_back(draw_logit(random, kind, centre));
      }
    }
    if (batch.spec.selection_bias == Choice::kYes) {
      const int kind = static_cast<int>(draw(random, 0, 5));
      for (int64_t i = 0; i < batch.spec.num_experts; ++i) {
        batch.bias.push_back(draw_bias(random, kind));
      }
    }
    if (draw(random, 0, 3) == 0) {
      for (int64_t t = 0; t < num_tokens; ++t) {
        batch.mask.push_back(static_cast<uint8_t>(draw(random, 0, 2) != 0));
      }
    }
    expect_bits_of_reference(batch);
    if (HasFatalFailure()) return;
  }
}

// The best experts stand in one column of 16, or in one half of them; rows of any sign, with ties.
TEST(Fused, BestExpertsInOneColumn) {
  constexpr uint64_t kSeed = 85;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 150; ++round) {
    const char* const preset = one_of(random, {"qwen3_moe", "olmoe", "gpt_oss"});
    const int64_t num_experts = one_of<int64_t>(random, {60, 64, 128, 200, 256, 1024});
    Batch batch = {spec_of(preset, num_experts, draw(random, 1, 8)), {}, {}, {}};
    for (int64_t t = 0; t < 16; ++t) {
      std::vector<float> row = normal_logits(random, static_cast<size_t>(num_experts), 1.0f);
      const int64_t columns = one_of<int64_t>(random, {1, 2, 8});
      const int64_t first = draw(random, 0, 15);
      const float shift = one_of(random, {0.0f, -20.0f, 20.0f});
      const bool ties = draw(random, 0, 1) != 0;
      for (int64_t i = 0; i < num_experts; ++i) {
        float& z = row[static_cast<size_t>(i)];
        if ((i + 16 - first) % 16 < columns) z += 4.0f;
        z += shift;
        if (ties) z = std::round(z * 8.0f) / 8.0f;
      }
      batch.logits.insert(batch.logits.end(), row.begin(), row.end());
    }
    expect_bits_of_reference(batch);
    if (HasFatalFailure()) return;
  }
}

// A bias that lifts every score to the same sum: what is left is rounding.
TEST(Fused, CancellingBiases) {
  constexpr uint64_t kSeed = 82;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 60; ++round) {
    Batch batch = {spec_of("deepseek_v3", 256, 8), {}, {}, {}};
    batch.spec.num_groups = 8;
    batch.spec.keep_groups = 4;
    const std::vector<float> base = normal_logits(random, 256, 1.5f);
    for (const float z : base) batch.bias.push_back(1.0f - 1.0f / (1.0f + std::exp(-z)));
    for (int64_t t = 0; t < 16; ++t) {
      for (const float z : base) {
        const auto ulps = static_cast<uint32_t>(draw(random, 0, t));
        batch.logits.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(z) + ulps));
      }
    }
    expect_bits_of_reference(batch);
    if (HasFatalFailure()) return;
  }
}

// Two groups with the same sum, to the bit or to some ulps.
TEST(Fused, GroupsWithEqualSums) {
  constexpr uint64_t kSeed = 83;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 200; ++round) {
    const int64_t num_experts = one_of<int64_t>(random, {128, 256});
    const auto group_size = static_cast<size_t>(num_experts / 8);
    Batch batch = {spec_of("deepseek_v3", num_experts, 8), {}, {}, {}};
    batch.spec.num_groups = 8;
    batch.spec.keep_groups = draw(random, 4, 7);
    batch.spec.group_score = round % 2 == 0 ? GroupScore::kSumOfBestTwo : GroupScore::kMax;
    batch.bias.assign(static_cast<size_t>(num_experts), 0.0f);
    for (int64_t t = 0; t < 16; ++t) {
      const std::vector<float> group = normal_logits(random, group_size, 1.0f);
      for (int64_t g = 0; g < 8; ++g) {
        for (size_t i = 0; i < group_size; ++i) {
          const float z = group[(i + static_cast<size_t>(g) * 5) % group_size];
          const auto ulps = static_cast<uint32_t>(draw(random, 0, t / 4));
          batch.logits.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(z) + ulps));
        }
      }
    }
    expect_bits_of_reference(batch);
    if (HasFatalFailure()) return;
  }
}

// Where words of 16 bits do not decide: experts closer than their error at every rank, more candidates than a
// vector or a second look takes, logits beyond the fixed point; of the shapes that go by words.
TEST(Fused, WhereWordsDoNotDecide) {
  constexpr uint64_t kSeed = 86;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 300; ++round) {
    const bool groups = draw(random, 0, 2) == 0;
    const char* const preset = one_of(random, {"deepseek_v3", "qwen3_moe", "gpt_oss"});
    const int64_t num_experts = one_of<int64_t>(random, {32, 64, 128, 160, 256});
    Batch batch = {spec_of(preset, num_experts, draw(random, 1, 8)), {}, {}, {}};
    if (batch.spec.selection_bias == Choice::kYes) {
      const float spread = one_of(random, {0.0f, 0.02f, 0.3f});
      batch.bias = normal_logits(random, static_cast<size_t>(num_experts), spread);
      batch.spec.num_groups = groups && num_experts == 256 ? 8 : 1;
      batch.spec.keep_groups = batch.spec.num_groups == 8 ? draw(random, 4, 7) : 1;
    }
    for (int64_t t = 0; t < 16; ++t) {
      std::vector<float> row = normal_logits(random, static_cast<size_t>(num_experts), 1.0f);
      const int64_t many = one_of<int64_t>(random, {0, 9, 12, 17, 24, 33, 40});
      const float apart = one_of(random, {1e-6f, 1e-5f, 1e-4f, 1e-3f});
      const float top = one_of(random, {3.0f, 7.99f, 8.0f, 12.0f, 70.0f});
      for (int64_t i = 0; i < many; ++i) {
        const auto at = static_cast<size_t>(draw(random, 0, num_experts - 1));
        row[at] = top + apart * static_cast<float>(draw(random, 0, 12));
      }
      const auto one = static_cast<size_t>(draw(random, 0, num_experts - 1));
      row[one] = one_of(random, {row[one], -8.0f, -9.0f, -600.0f, 600.0f, 3e9f, -3e9f});
      batch.logits.insert(batch.logits.end(), row.begin(), row.end());
    }
    expect_bits_of_reference(batch);
    if (HasFatalFailure()) return;
  }
}

// Coverage of the pass itself: were it to leave every token, the tests above would show nothing.
TEST(Fused, LeavesFewOrdinaryTokens) {
  const router::FusedKernel* const kernel = router::fused_kernel();
  if (kernel == nullptr) GTEST_SKIP() << "this CPU has no fused pass";
  constexpr uint64_t kSeed = 84;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  for (const char* const preset : {"deepseek_v3", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2"}) {
    RouterSpec spec = spec_of(preset, 256, 8);
    if (spec.group_score != GroupScore::kUnset) {
      spec.num_groups = 8;
      spec.keep_groups = 4;
    }
    std::vector<float> bias;
    if (spec.selection_bias == Choice::kYes) bias = normal_logits(random, 256, 0.05f);
    alignas(64) float shifted[384];
    ASSERT_LE(router::shifted_bias_size(256), 384);
    router::FusedPlan plan;
    ASSERT_TRUE(
        router::make_fused_plan(spec, bias.empty() ? nullptr : bias.data(), true, shifted, &plan))
        << preset;
    // deepseek_v2 has other groups.
    EXPECT_EQ(plan.word_bias != nullptr, preset != std::string_view("deepseek_v2"));
    auto scratch = AlignedBuffer::allocate(router::kFusedScratchFloats * 4);
    ASSERT_TRUE(scratch.has_value());
    int64_t left = 0;
    constexpr int64_t kBlocks = 200;
    for (int64_t i = 0; i < kBlocks; ++i) {
      const std::vector<float> logits = normal_logits(random, 16 * 256, 1.0f);
      int32_t ids[16 * 8];
      float weights[16 * 8];
      router::FusedBlock block;
      block.num_tokens = 16;
      block.topk_idx = ids;
      block.weights = weights;
      block.scratch = reinterpret_cast<float*>(scratch->data());
      for (size_t t = 0; t < 16; ++t) {
        block.rows[t] = logits.data() + t * 256;
        block.tokens[t] = static_cast<int64_t>(t);
      }
      left += std::popcount(kernel->route(plan, block));
    }
    EXPECT_LT(left, kBlocks * 16 / 50) << preset;
    RecordProperty(std::string(preset) + "_left_per_mille",
                   static_cast<int>(left * 1000 / (kBlocks * 16)));
  }
}

double exact_sigmoid(float z) {
  const double below = z < 0.0f ? static_cast<double>(z) : -static_cast<double>(z);
  const double power = std::exp(below);
  return (z < 0.0f ? power : 1.0) / (1.0 + power);
}

// Scores whose fp64 value lies next to the middle of two fp32 numbers: of a sigmoid, and of a softmax of two.
TEST(Fused, ScoresNearATie) {
  constexpr uint64_t kSeed = 87;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  std::uniform_real_distribution<float> uniform(-18.0f, 18.0f);
  std::vector<float> close;
  while (close.size() < 32) {
    const float z = uniform(random);
    const uint64_t below = std::bit_cast<uint64_t>(exact_sigmoid(z)) & 0x1FFFFFFF;
    if (below - (0x10000000 - 0x400) < 0x800) close.push_back(z);
  }
  Batch sigmoids = {spec_of("deepseek_v3", 32, 8), {}, {}, {}};
  sigmoids.spec.num_groups = sigmoids.spec.keep_groups = 1;
  sigmoids.spec.normalise = Choice::kNo;
  sigmoids.bias.assign(32, 0.0f);
  Batch softmax = {spec_of("gpt_oss", 32, 2), {}, {}, {}};
  for (size_t t = 0; t < 32; ++t) {
    for (size_t i = 0; i < 32; ++i) {
      sigmoids.logits.push_back(close[(t + i) % 32] - (i < 8 ? 0.0f : 40.0f));
      softmax.logits.push_back(i > 1 ? -90.0f : (i == 1 ? close[t] : 0.0f));
    }
  }
  expect_bits_of_reference(sigmoids);
  expect_bits_of_reference(softmax);
}

// Every 4099th fp32 number; when the bounds were written, all of 2^-20 to 100 in magnitude and every 61st
// of the others.
TEST(Fused, ApproximationsKeepTheirBounds) {
  const router::FusedKernel* const kernel = router::fused_kernel();
  if (kernel == nullptr) GTEST_SKIP() << "this CPU has no fused pass";
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  float logits[16], coarse[16], fine[16];
  int filled = 0;
  for (uint64_t word = 0; word < (uint64_t{1} << 32); word += 4099) {
    const auto z = std::bit_cast<float>(static_cast<uint32_t>(word));
    if (!std::isfinite(z)) continue;
    logits[filled++] = z;
    if (filled < 16) continue;
    filled = 0;
    kernel->coarse_sigmoid(logits, 16, coarse);
    kernel->fine_sigmoid(logits, 16, fine);
    for (int i = 0; i < 16; ++i) {
      const double want = exact_sigmoid(logits[i]);
      ASSERT_LE(std::fabs(static_cast<double>(fine[i]) - want), router::kFineSigmoidError)
          << logits[i];
      if (std::fabs(logits[i]) > router::kCoarseRange) continue;
      ASSERT_LE(std::fabs(static_cast<double>(coarse[i]) - want), router::kCoarseSigmoidError)
          << logits[i];
    }
  }
}

// All words, and both ends of the logits that come to one.
TEST(Fused, WordsKeepTheirBound) {
  const router::FusedKernel* const kernel = router::fused_kernel();
  if (kernel == nullptr || kernel->word_sigmoid == nullptr) GTEST_SKIP() << "no words on this CPU";
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  for (int x = -32768 - 64; x < 32768 + 64; x += 32) {
    for (const float end : {-0.5f, 0.0f, 0.5f}) {
      float logits[32];
      int16_t words[32];
      for (int i = 0; i < 32; ++i) logits[i] = (static_cast<float>(x + i) + end) / 4096.0f;
      kernel->word_sigmoid(logits, words);
      for (int i = 0; i < 32; ++i) {
        const float z = logits[router::expert_of_word(i)];
        const double want = 16384.0 * (exact_sigmoid(z) - 0.5);
        ASSERT_LE(std::fabs(words[i] + 0.5 - want), router::kWordSigmoidError) << z;
      }
    }
  }
  const float far[32] = {9.0f, -9.0f, 80.0f, -80.0f, 200000.0f, -200000.0f};
  int16_t words[32];
  kernel->word_sigmoid(far, words);
  for (int i = 0; i < 32; ++i) {
    const double want = 16384.0 * (exact_sigmoid(far[router::expert_of_word(i)]) - 0.5);
    EXPECT_LE(std::fabs(words[i] + 0.5 - want), router::kWordSigmoidError) << i;
  }
}

}  // namespace
}  // namespace argosy::test
