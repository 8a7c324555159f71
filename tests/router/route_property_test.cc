// route() over drawn specs and logits: laws that hold for any input, and the naive router as
// oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "router/router_testing.h"
#include "support/router_oracle.h"

namespace argosy::test {
namespace {

using Random = std::mt19937_64;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Any valid spec: every score function, group rule and flag turns up.
RouterSpec draw_spec(Random& random) {
  while (true) {
    RouterSpec spec;
    const int64_t sizes[] = {1, 2, 3, 4, 8, 12, 16, 31, 33, 60, 64, 128, 256};
    spec.num_experts = sizes[draw(random, 0, 12)];
    spec.top_k = std::min<int64_t>(spec.num_experts, draw(random, 1, 12));
    if (draw(random, 0, 9) == 0) spec.top_k = spec.num_experts;
    spec.score_function = static_cast<ScoreFunction>(draw(random, 1, 4));
    spec.selection_bias = static_cast<Choice>(draw(random, 1, 2));
    spec.group_score = static_cast<GroupScore>(draw(random, 1, 3));
    spec.normalise = static_cast<Choice>(draw(random, 1, 2));
    spec.normalise_single = static_cast<Choice>(draw(random, 1, 2));
    if (draw(random, 0, 1) == 1) {
      spec.num_groups = draw(random, 1, spec.num_experts);
      spec.keep_groups = draw(random, 1, spec.num_groups);
    }
    if (draw(random, 0, 1) == 1) spec.routed_scaling_factor = 2.5f;
    if (validate(spec).ok()) return spec;
  }
}

Batch draw_batch(Random& random, int64_t num_tokens, float spread) {
  Batch batch;
  batch.spec = draw_spec(random);
  batch.logits =
      normal_logits(random, static_cast<size_t>(num_tokens * batch.spec.num_experts), spread);
  if (batch.spec.selection_bias == Choice::kYes) {
    batch.bias = normal_logits(random, static_cast<size_t>(batch.spec.num_experts), 0.2f);
  }
  return batch;
}

void expect_same(const Routing& a, const Routing& b) {
  EXPECT_EQ(a.topk_idx, b.topk_idx);
  EXPECT_TRUE(same_bits(a.topk_weights.values, b.topk_weights.values));
  EXPECT_EQ(a.counts, b.counts);
  EXPECT_EQ(a.num_valid_tokens, b.num_valid_tokens);
  EXPECT_EQ(a.num_nonfinite_rows, b.num_nonfinite_rows);
}

// K01: any bits for logits, any K.
TEST(RouteProperty, AnyBitsGiveDistinctIdsFiniteWeightsAndExactCounts) {
  constexpr uint64_t kSeed = 61;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  const auto pool = make_pool(3);
  for (int round = 0; round < 400; ++round) {
    Batch batch = draw_batch(random, draw(random, 0, 70), 1.0f);
    batch.spec.on_nonfinite = OnNonfinite::kUniform;
    for (float& logit : batch.logits) {
      if (draw(random, 0, 2) != 0) logit = std::bit_cast<float>(static_cast<uint32_t>(random()));
    }
    for (int64_t t = 0; t < batch.num_tokens(); ++t) {
      batch.mask.push_back(static_cast<uint8_t>(draw(random, 0, 3) != 0));
    }
    const Routing routing = route_ok(batch, pool.get());
    const auto valid = std::count(batch.mask.begin(), batch.mask.end(), 1);
    ASSERT_EQ(routing.num_valid_tokens, valid);
    ASSERT_EQ(std::accumulate(routing.counts.begin(), routing.counts.end(), int64_t{0}),
              valid * batch.spec.top_k);
    int64_t nonfinite = 0;
    for (int64_t t = 0; t < batch.num_tokens(); ++t) {
      std::vector<int32_t> ids = ids_of(routing, t);
      if (batch.mask[static_cast<size_t>(t)] == 0) continue;
      const auto row = batch.row(t);
      nonfinite += !std::all_of(row.begin(), row.end(), [](float z) { return std::isfinite(z); });
      std::sort(ids.begin(), ids.end());
      ASSERT_EQ(std::adjacent_find(ids.begin(), ids.end()), ids.end());
      ASSERT_GE(ids.front(), 0);
      ASSERT_LT(ids.back(), batch.spec.num_experts);
      for (const float weight : weights_of(routing, t)) ASSERT_TRUE(std::isfinite(weight));
    }
    ASSERT_EQ(routing.num_nonfinite_rows, nonfinite);
    std::vector<int64_t> counts;
    const ConstTensorView ids(routing.topk_idx.data(), DType::kI32,
                              {batch.num_tokens(), routing.top_k});
    ASSERT_TRUE(count_topk(ids, routing.num_experts, &counts).ok());
    ASSERT_EQ(counts, routing.counts);
  }
}

// K01: a row's bits do not depend on the other rows, bad ones included.
TEST(RouteProperty, RowsAreIndependent) {
  constexpr uint64_t kSeed = 62;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 100; ++round) {
    Batch batch = draw_batch(random, 40, 2.0f);
    const Routing clean = route_ok(batch);
    Batch spoilt = batch;
    spoilt.spec.on_nonfinite = OnNonfinite::kUniform;
    const int64_t bad = draw(random, 0, 39);
    const int64_t expert = draw(random, 0, batch.spec.num_experts - 1);
    const auto at = static_cast<size_t>(bad * batch.spec.num_experts + expert);
    spoilt.logits[at] = std::numeric_limits<float>::quiet_NaN();
    const Routing routing = route_ok(spoilt);
    for (int64_t t = 0; t < 40; ++t) {
      if (t == bad) continue;
      ASSERT_EQ(ids_of(routing, t), ids_of(clean, t));
      ASSERT_TRUE(same_bits(weights_of(routing, t), weights_of(clean, t)));
    }
  }
}

// K02: threads, repetition, a dirty Routing.
TEST(RouteProperty, BitsDoNotDependOnThreadsOrHistory) {
  constexpr uint64_t kSeed = 63;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (const int threads : {1, 2, 5}) pools.push_back(make_pool(threads));
  Routing dirty;
  for (int round = 0; round < 30; ++round) {
    Batch batch = draw_batch(random, draw(random, 0, 500), 1.0f);
    for (float& logit : batch.logits) logit = std::round(logit * 4.0f) / 4.0f;
    const Routing want = route_ok(batch);
    for (const auto& pool : pools) {
      ASSERT_TRUE(route_batch(batch, pool.get(), &dirty).ok());
      expect_same(dirty, want);
    }
  }
}

// K02: integer-valued logits tie often; a stable sort by (-logit, id) is the oracle up to E = 2048.
TEST(RouteProperty, TiesFollowAStableSort) {
  constexpr uint64_t kSeed = 64;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const int64_t num_experts : {8, 33, 384, 1024, 2048}) {
    for (const int64_t top_k : {int64_t{1}, int64_t{8}, int64_t{64}}) {
      if (top_k > num_experts) continue;
      for (const char* preset : {"mixtral", "sigmoid", "sqrt_softplus", "gpt_oss"}) {
        Batch batch = {spec_of(preset, num_experts, top_k), {}, {}, {}};
        for (int64_t i = 0; i < 6 * num_experts; ++i) {
          batch.logits.push_back(static_cast<float>(draw(random, -7, 7)));
        }
        const Routing routing = route_ok(batch);
        for (int64_t t = 0; t < 6; ++t) {
          const auto row = batch.row(t);
          const std::vector<long double> values(row.begin(), row.end());
          auto want = oracle_order(values, std::vector<bool>(values.size(), true));
          want.resize(static_cast<size_t>(top_k));
          ASSERT_EQ(ids_of(routing, t), want) << preset << " " << num_experts;
        }
      }
    }
  }
}

// K02, K03: group ties, by biases that are exact in fp32 over equal scores of 1/2.
TEST(RouteProperty, GroupTiesGoToTheLowestGroup) {
  constexpr uint64_t kSeed = 65;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 400; ++round) {
    Batch batch = {spec_of("deepseek_v3", 24, 4), std::vector<float>(24, 0.0f), {}, {}};
    batch.spec.num_groups = 6;
    batch.spec.keep_groups = draw(random, 1, 2);
    batch.spec.group_score = static_cast<GroupScore>(draw(random, 1, 3));
    for (int i = 0; i < 24; ++i) batch.bias.push_back(static_cast<float>(draw(random, -3, 3)));
    const OracleRow want = oracle_route(batch.spec, batch.row(0), batch.bias);
    ASSERT_EQ(ids_of(route_ok(batch), 0), want.experts) << to_string(batch.spec);
  }
}

// K03: the order agrees with the oracle whenever the gap exceeds what fp32 rounding can move.
TEST(RouteProperty, ChoiceAgreesWithTheOracle) {
  constexpr uint64_t kSeed = 66;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  int64_t compared = 0;
  int64_t close = 0;
  for (int round = 0; round < 300; ++round) {
    const float spreads[] = {1e-4f, 0.1f, 1.0f, 8.0f, 50.0f};
    const Batch batch = draw_batch(random, 12, spreads[draw(random, 0, 4)]);
    const Routing routing = route_ok(batch);
    // One ulp for the rounded scores alone; a sum with the bias, and of a group, rounds once more
    // each.
    const bool sums = !batch.bias.empty() || batch.spec.num_groups > 1;
    for (int64_t t = 0; t < 12; ++t) {
      const OracleRow want = oracle_route(batch.spec, batch.row(t), batch.bias);
      if (!(want.gap_ulps > (sums ? 3.0 : 1.0 + 1e-6))) {
        ++close;
        continue;
      }
      ++compared;
      ASSERT_EQ(ids_of(routing, t), want.experts) << to_string(batch.spec) << "token " << t;
    }
  }
  EXPECT_GT(compared, 4 * close);
}

// K03: one constant on all biases, a large negative one too, changes nothing beyond fp32 rounding;
// the logits and biases here are such that all sums are exact.
TEST(RouteProperty, AConstantOnAllBiasesChangesNothing) {
  constexpr uint64_t kSeed = 67;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 200; ++round) {
    Batch batch = {spec_of("softmax_post", 32, 4), {}, {}, {}};
    batch.spec.selection_bias = Choice::kYes;
    batch.spec.num_groups = 8;
    batch.spec.keep_groups = 2;
    batch.spec.group_score = static_cast<GroupScore>(draw(random, 1, 3));
    for (int i = 0; i < 32; ++i) {
      batch.logits.push_back(static_cast<float>(draw(random, -64, 64)) / 8.0f);
      batch.bias.push_back(static_cast<float>(draw(random, -64, 64)) / 16.0f);
    }
    const Routing want = route_ok(batch);
    for (const float constant : {1.0f, -1.0f, 1000.0f, -65536.0f}) {
      Batch moved = batch;
      for (float& bias : moved.bias) bias += constant;
      expect_same(route_ok(moved), want);
    }
  }
}

TEST(RouteProperty, ALargeNegativeConstantKeepsTheOrderOfSigmoidScores) {
  constexpr uint64_t kSeed = 68;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 100; ++round) {
    Batch batch = {spec_of("deepseek_v3", 16, 3), normal_logits(random, 16, 1.0f), {}, {}};
    batch.spec.num_groups = 4;
    batch.spec.keep_groups = 2;
    batch.bias.assign(16, -1000.0f);
    std::vector<float> no_bias(16, 0.0f);
    const OracleRow want = oracle_route(batch.spec, batch.row(0), no_bias);
    if (want.gap_ulps < 3.0 * 65536.0)
      continue;  // ulp(1000) is 2^10 ulps of a score above 1/2, or more
    const Routing routing = route_ok(batch);
    ASSERT_EQ(ids_of(routing, 0), want.experts);
  }
}

// K03: a chosen expert always lies in a kept group, whatever the signs.
TEST(RouteProperty, ChosenExpertsLieInAtMostTheKeptGroups) {
  constexpr uint64_t kSeed = 69;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 300; ++round) {
    Batch batch = draw_batch(random, 8, 60.0f);
    for (float& bias : batch.bias) bias -= 100.0f;
    const Routing routing = route_ok(batch);
    const int64_t size = batch.spec.num_experts / batch.spec.num_groups;
    for (int64_t t = 0; t < 8; ++t) {
      std::vector<int64_t> groups;
      for (const int32_t id : ids_of(routing, t)) groups.push_back(id / size);
      std::sort(groups.begin(), groups.end());
      groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
      ASSERT_LE(static_cast<int64_t>(groups.size()), batch.spec.keep_groups);
    }
  }
}

// The logits whose largest bounds the error asked for (contract 1.7).
float peak_of(const RouterSpec& spec, std::span<const float> row, std::span<const int32_t> ids,
              int64_t own, bool normalised) {
  if (normalised) {
    float peak = row[static_cast<size_t>(ids[0])];
    for (const int32_t id : ids) peak = std::max(peak, row[static_cast<size_t>(id)]);
    return peak;
  }
  if (spec.score_function == ScoreFunction::kSoftmax)
    return *std::max_element(row.begin(), row.end());
  return row[static_cast<size_t>(own)];
}

void check_weights(const Batch& batch, const Routing& routing) {
  for (int64_t t = 0; t < batch.num_tokens(); ++t) {
    const auto row = batch.row(t);
    const auto ids = ids_of(routing, t);
    const auto want = oracle_weights(batch.spec, row, ids);
    long double sum = 0.0L;
    for (size_t k = 0; k < ids.size(); ++k) {
      const float peak = peak_of(batch.spec, row, ids, ids[k], routing.topk_weights.normalised);
      const long double distance =
          std::fabs(static_cast<long double>(row[static_cast<size_t>(ids[k])]) - peak);
      const long double got = weights_of(routing, t)[k];
      const long double bound = std::max(1e-7L * (8 + distance) * want[k], 0x1p-149L);
      ASSERT_LE(std::fabs(got - want[k]), bound)
          << to_string(batch.spec) << "logit " << row[static_cast<size_t>(ids[k])];
      sum += got;
    }
    if (routing.topk_weights.normalised) {
      ASSERT_NEAR(static_cast<double>(sum / batch.spec.routed_scaling_factor), 1.0, 1e-6);
    }
  }
}

// K04, contract 1.7: the accuracy of every weight, over wide ranges.
TEST(RouteProperty, WeightsHaveTheAccuracyAsked) {
  constexpr uint64_t kSeed = 70;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 600; ++round) {
    const float spreads[] = {0.1f, 1.0f, 20.0f, 100.0f, 1e3f, 1e4f, 1e30f};
    Batch batch = draw_batch(random, 6, spreads[draw(random, 0, 6)]);
    const float shift = static_cast<float>(draw(random, -400, 100));
    for (float& logit : batch.logits) logit += shift;
    check_weights(batch, route_ok(batch));
  }
}

TEST(RouteProperty, WeightsHaveTheAccuracyAskedForManyExperts) {
  constexpr uint64_t kSeed = 71;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const char* preset : {"mixtral", "softmax_pre", "gpt_oss", "sigmoid", "sqrt_softplus"}) {
    for (const float spread : {0.5f, 40.0f}) {
      for (const float shift : {0.0f, -150.0f}) {
        Batch batch = {spec_of(preset, 4096, 64), normal_logits(random, 4096 * 2, spread), {}, {}};
        for (float& logit : batch.logits) logit += shift;
        check_weights(batch, route_ok(batch));
      }
    }
  }
}

// The switch between plain division and the other path, at scores around 2^-100, leaves no step.
TEST(RouteProperty, WeightsAreContinuousAcrossTheSwitch) {
  for (const char* preset : {"sigmoid", "sqrt_softplus", "mixtral"}) {
    for (float low = -145.0f; low < -60.0f; low += 0.0625f) {
      Batch batch = {spec_of(preset, 3, 3), {low, low - 0.5f, low + 40.0f}, {}, {}};
      check_weights(batch, route_ok(batch));
      batch.logits[2] = 3.0f;
      check_weights(batch, route_ok(batch));
    }
  }
}

}  // namespace
}  // namespace argosy::test
