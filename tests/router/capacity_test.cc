// Capacity against a naive twin that sorts all assignments of the scope, for both policies, scopes
// and orders over drawn splits; the named cases; the distributed form; gradients.
#include "argosy/capacity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>

#include "router/router_testing.h"
#include "support/router_dual.h"

namespace argosy::test {
namespace {

using Random = std::mt19937_64;

constexpr CapacityPolicy kPolicies[] = {CapacityPolicy::kPosition, CapacityPolicy::kWeight};

CapacitySpec capacity_spec(int64_t num, int64_t den, CapacityPolicy policy) {
  CapacitySpec spec;
  spec.factor_num = num;
  spec.factor_den = den;
  spec.policy = policy;
  return spec;
}

Routing routing_of(int64_t num_experts, int64_t top_k, std::vector<int32_t> ids,
                   std::vector<float> weights) {
  Routing routing;
  routing.num_tokens = static_cast<int64_t>(ids.size()) / top_k;
  routing.num_experts = num_experts;
  routing.top_k = top_k;
  routing.counts.assign(static_cast<size_t>(num_experts), 0);
  for (const int32_t id : ids) {
    if (id >= 0) ++routing.counts[static_cast<size_t>(id)];
  }
  for (int64_t t = 0; t < routing.num_tokens; ++t) {
    routing.num_valid_tokens += ids[static_cast<size_t>(t * top_k)] >= 0;
  }
  routing.topk_idx = std::move(ids);
  routing.topk_weights.values = std::move(weights);
  return routing;
}

Routing equal_weights(int64_t num_experts, int64_t top_k, std::vector<int32_t> ids) {
  std::vector<float> weights(ids.size(), 0.5f);
  return routing_of(num_experts, top_k, std::move(ids), std::move(weights));
}

// Skewed choices, weights with many ties, masked tokens.
Routing draw_routing(Random& random, int64_t num_tokens, int64_t num_experts, int64_t top_k) {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::vector<int32_t> experts(static_cast<size_t>(num_experts));
    std::iota(experts.begin(), experts.end(), 0);
    std::shuffle(experts.begin(), experts.end(), random);
    if (random() % 2 == 0) std::swap(experts[0], *std::find(experts.begin(), experts.end(), 0));
    const bool masked = random() % 6 == 0;
    for (int64_t k = 0; k < top_k; ++k) {
      ids.push_back(masked ? -1 : experts[static_cast<size_t>(k)]);
      weights.push_back(masked ? 0.0f : 0.125f * static_cast<float>(random() % 5));
    }
  }
  return routing_of(num_experts, top_k, std::move(ids), std::move(weights));
}

Routing rows_of(const Routing& whole, int64_t first, int64_t last) {
  const int64_t k = whole.top_k;
  return routing_of(whole.num_experts, k,
                    {whole.topk_idx.begin() + first * k, whole.topk_idx.begin() + last * k},
                    {whole.topk_weights.values.begin() + first * k,
                     whole.topk_weights.values.begin() + last * k});
}

std::vector<Routing> split(Random& random, const Routing& whole) {
  std::vector<int64_t> cuts = {0, whole.num_tokens};
  const auto ranks = random() % 7;
  for (uint64_t r = 0; r < ranks; ++r) {
    cuts.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(whole.num_tokens + 1)));
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<Routing> parts;
  for (size_t i = 0; i + 1 < cuts.size(); ++i)
    parts.push_back(rows_of(whole, cuts[i], cuts[i + 1]));
  return parts;
}

// The naive twin: ids that survive.
std::vector<int32_t> naive_kept(const CapacitySpec& spec, const Routing& routing,
                                int64_t capacity) {
  std::vector<int32_t> ids = routing.topk_idx;
  for (int32_t expert = 0; expert < routing.num_experts; ++expert) {
    std::vector<std::tuple<int64_t, float, size_t>> order;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != expert) continue;
      const bool by_choice = spec.choice_order == ChoiceOrder::kAllFirstChoicesFirst;
      const bool by_weight = spec.policy == CapacityPolicy::kWeight;
      order.emplace_back(by_choice ? static_cast<int64_t>(i) % routing.top_k : 0,
                         by_weight ? -routing.topk_weights.values[i] : 0.0f, i);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = static_cast<size_t>(capacity); i < order.size(); ++i) {
      ids[std::get<2>(order[i])] = -1;
    }
  }
  return ids;
}

struct Kept {
  std::vector<Routing> ranks;
  std::vector<int64_t> capacity;

  std::vector<int32_t> ids() const {
    std::vector<int32_t> all;
    for (const Routing& r : ranks) all.insert(all.end(), r.topk_idx.begin(), r.topk_idx.end());
    return all;
  }
  std::vector<float> weights() const {
    std::vector<float> all;
    for (const Routing& r : ranks) {
      all.insert(all.end(), r.topk_weights.values.begin(), r.topk_weights.values.end());
    }
    return all;
  }
};

Kept apply_ok(const CapacitySpec& spec, const std::vector<Routing>& ranks) {
  std::vector<const Routing*> pointers;
  for (const Routing& routing : ranks) pointers.push_back(&routing);
  Kept kept;
  const Status status = apply_capacity(spec, pointers, &kept.ranks, &kept.capacity);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return kept;
}

int64_t capacity_ok(int64_t num, int64_t den, int64_t tokens, int64_t top_k, int64_t experts) {
  const Result<int64_t> capacity =
      expert_capacity(capacity_spec(num, den, CapacityPolicy::kPosition), experts, top_k, tokens);
  EXPECT_TRUE(capacity.has_value()) << capacity.error().to_string();
  return capacity.has_value() ? *capacity : -1;
}

// C071, C074, C077, C078 and the table of systems whose floating-point products differ.
TEST(Capacity, IsAnExactInteger) {
  EXPECT_EQ(capacity_ok(1, 1, 10, 2, 4), 5);
  EXPECT_EQ(capacity_ok(5, 4, 10, 2, 4), 7);
  EXPECT_EQ(capacity_ok(11, 10, 4096, 8, 256), 141);
  EXPECT_EQ(capacity_ok(5, 4, 4097, 8, 256), 161);
  EXPECT_EQ(capacity_ok(1, 1, 7, 2, 16), 1);
  EXPECT_EQ(capacity_ok(11, 10, 200, 4, 8), 110);
  EXPECT_EQ(capacity_ok(11, 10, 120, 6, 8), 99);
  EXPECT_EQ(capacity_ok(1, 1, 5, 1, 4), 2);
  EXPECT_EQ(capacity_ok(16384, 1, 8, 1, 8), 8);
  EXPECT_EQ(capacity_ok(1, 10, 8, 1, 8), 1);
  EXPECT_EQ(capacity_ok(1, 1, 12, 1, 4), 3);
  EXPECT_EQ(capacity_ok(1, 1, 6, 2, 4), 3);
  EXPECT_EQ(capacity_ok(1, 1, 0, 2, 4), 0);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(capacity_ok(kMax32, 1, kMax, kMax32, kMax32), kMax);
  EXPECT_EQ(capacity_ok(1, kMax32, kMax, 1, kMax32), 3);  // ceil(2^63 / (2^31 - 1)^2)
}

// The oracle is one rank with all tokens; every split keeps the same assignments with the same
// bits.
TEST(Capacity, EqualsTheNaiveTwinForAnySplit) {
  constexpr uint64_t kSeed = 1101;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 400; ++round) {
    const auto experts = static_cast<int64_t>(1 + random() % 9);
    const auto top_k = static_cast<int64_t>(1 + random() % static_cast<uint64_t>(experts));
    const Routing whole = draw_routing(random, static_cast<int64_t>(random() % 60), experts, top_k);
    CapacitySpec spec =
        capacity_spec(static_cast<int64_t>(1 + random() % 12), 10, kPolicies[random() % 2]);
    spec.choice_order = static_cast<ChoiceOrder>(random() % 2);
    spec.renormalise = random() % 2 == 0 ? Choice::kNo : Choice::kYes;
    const Kept one = apply_ok(spec, {whole});
    ASSERT_EQ(one.ids(), naive_kept(spec, whole, one.capacity[0]));
    const Kept many = apply_ok(spec, split(random, whole));
    ASSERT_EQ(many.ids(), one.ids());
    ASSERT_TRUE(same_bits(many.weights(), one.weights()));
    for (const int64_t capacity : many.capacity) ASSERT_EQ(capacity, one.capacity[0]);
    // Kept + dropped = assigned, and no expert has more than C.
    for (size_t e = 0; e < static_cast<size_t>(experts); ++e) {
      ASSERT_EQ(one.ranks[0].counts[e], std::min(whole.counts[e], one.capacity[0]));
    }
  }
}

TEST(Capacity, RankScopeIsEachRankAlone) {
  constexpr uint64_t kSeed = 1102;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 100; ++round) {
    const std::vector<Routing> parts = split(random, draw_routing(random, 50, 6, 2));
    CapacitySpec spec = capacity_spec(1, 2, kPolicies[round % 2]);
    spec.scope = CapacityScope::kRank;
    const Kept kept = apply_ok(spec, parts);
    for (size_t r = 0; r < parts.size(); ++r) {
      ASSERT_EQ(kept.capacity[r], capacity_ok(1, 2, parts[r].num_valid_tokens, 2, 6));
      ASSERT_EQ(kept.ranks[r].topk_idx, naive_kept(spec, parts[r], kept.capacity[r]));
    }
  }
}

// The rounds of CapacityCut with sums over ranks, as a group does them.
TEST(Capacity, DistributedRoundsGiveTheSame) {
  constexpr uint64_t kSeed = 1103;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 80; ++round) {
    const int64_t experts = round % 10 == 0 ? 300 : 7;
    const int64_t top_k = round % 10 == 0 ? 290 : 3;
    const Routing whole = draw_routing(random, 30, experts, top_k);
    const std::vector<Routing> parts = split(random, whole);
    CapacitySpec spec = capacity_spec(1, 2, kPolicies[round % 2]);
    spec.choice_order = static_cast<ChoiceOrder>(round / 2 % 2);
    auto cut = CapacityCut::create(spec, experts, top_k, whole.num_valid_tokens);
    ASSERT_TRUE(cut.has_value());
    int rounds = 0;
    for (; !cut->is_done(); ++rounds) {
      std::vector<int64_t> sum(static_cast<size_t>(experts * CapacityCut::kBins), 0);
      for (const Routing& part : parts) {
        std::vector<int64_t> bins;
        ASSERT_TRUE(cut->histogram(part, &bins).ok());
        for (size_t i = 0; i < bins.size(); ++i) sum[i] += bins[i];
      }
      ASSERT_TRUE(cut->refine(sum).ok());
    }
    const int choice_bytes = round / 2 % 2 == 0 ? 0 : (top_k > 256 ? 2 : 1);
    ASSERT_EQ(rounds, (round % 2 == 0 ? 0 : 4) + choice_bytes);
    std::vector<int64_t> before(static_cast<size_t>(experts), 0);
    std::vector<int32_t> ids;
    for (const Routing& part : parts) {
      std::vector<int64_t> ties;
      ASSERT_TRUE(cut->count_ties(part, &ties).ok());
      Routing kept;
      ASSERT_TRUE(cut->apply(part, before, &kept).ok());
      for (size_t e = 0; e < ties.size(); ++e) before[e] += ties[e];
      ids.insert(ids.end(), kept.topk_idx.begin(), kept.topk_idx.end());
    }
    ASSERT_EQ(ids, naive_kept(spec, whole, cut->capacity()));
  }
}

// C071: five tokens, all to expert 0, factor 1. C043: four of two experts, capacity 2.
TEST(Capacity, PositionKeepsTheFirstTokens) {
  const Kept kept = apply_ok(capacity_spec(1, 1, CapacityPolicy::kPosition),
                             {equal_weights(4, 1, {0, 0, 0, 0, 0})});
  EXPECT_EQ(kept.ids(), (std::vector<int32_t>{0, 0, -1, -1, -1}));
  EXPECT_EQ(kept.weights(), (std::vector<float>{0.5f, 0.5f, 0, 0, 0}));
  EXPECT_EQ(kept.ranks[0].counts, (std::vector<int64_t>{2, 0, 0, 0}));
  EXPECT_EQ(kept.ranks[0].num_valid_tokens, 5);
  const Kept four = apply_ok(capacity_spec(16, 5, CapacityPolicy::kPosition),
                             {equal_weights(4, 1, {0, 0, 0, 0, 0})});
  EXPECT_EQ(four.ids(), (std::vector<int32_t>{0, 0, 0, 0, -1}));
  const Kept two =
      apply_ok(capacity_spec(1, 1, CapacityPolicy::kPosition), {equal_weights(2, 1, {0, 0, 0, 0})});
  EXPECT_EQ(two.ids(), (std::vector<int32_t>{0, 0, -1, -1}));
}

TEST(Capacity, WeightKeepsTheLargestAndTiesGoToTheFirstToken) {
  const Routing routing =
      routing_of(3, 1, {0, 0, 0, 0, 0, 0}, {0.25f, 0.5f, 0.25f, 1e-45f, 0.25f, 0.0f});
  EXPECT_EQ(apply_ok(capacity_spec(3, 2, CapacityPolicy::kWeight), {routing}).ids(),
            (std::vector<int32_t>{0, 0, 0, -1, -1, -1}));
  EXPECT_EQ(apply_ok(capacity_spec(5, 2, CapacityPolicy::kWeight), {routing}).ids(),
            (std::vector<int32_t>{0, 0, 0, 0, 0, -1}));
}

TEST(Capacity, SecondChoicesCompeteAsTheSpecSays) {
  // Token 0: first 1, second 0. Token 1: first 0, second 1. One place each.
  const Routing routing = equal_weights(2, 2, {1, 0, 0, 1});
  CapacitySpec spec = capacity_spec(1, 2, CapacityPolicy::kPosition);
  EXPECT_EQ(apply_ok(spec, {routing}).ids(), (std::vector<int32_t>{1, 0, -1, -1}));
  spec.choice_order = ChoiceOrder::kAllFirstChoicesFirst;
  EXPECT_EQ(apply_ok(spec, {routing}).ids(), (std::vector<int32_t>{1, -1, 0, -1}));
}

// C073, C077, C078: huge is dropless bit for bit, tiny is 1.
TEST(Capacity, HugeIsDroplessAndTinyIsOne) {
  Random random(1104);
  for (const CapacityPolicy policy : kPolicies) {
    for (const Choice renormalise : {Choice::kNo, Choice::kYes}) {
      CapacitySpec spec = capacity_spec(16384, 1, policy);
      spec.renormalise = renormalise;
      const Routing routing = draw_routing(random, 64, 8, 3);
      const Kept kept = apply_ok(spec, {routing});
      EXPECT_EQ(kept.ids(), routing.topk_idx);
      EXPECT_TRUE(same_bits(kept.weights(), routing.topk_weights.values));
      EXPECT_EQ(kept.ranks[0].counts, routing.counts);
    }
    const Kept tiny =
        apply_ok(capacity_spec(1, 10, policy), {equal_weights(8, 1, {3, 3, 3, 3, 1, 3, 1, 3})});
    EXPECT_EQ(tiny.ids(), (std::vector<int32_t>{3, -1, -1, -1, 1, -1, -1, -1}));
  }
}

TEST(Capacity, MaskedTokensTakeNoPlace) {
  const Kept kept = apply_ok(capacity_spec(1, 1, CapacityPolicy::kPosition),
                             {equal_weights(2, 1, {-1, 0, -1, 0, 0, 0})});
  EXPECT_EQ(kept.capacity[0], 2);  // four valid tokens
  EXPECT_EQ(kept.ids(), (std::vector<int32_t>{-1, 0, -1, 0, -1, -1}));
}

TEST(Capacity, RenormalisedWeightsKeepTheSumOfTheRow) {
  CapacitySpec spec = capacity_spec(1, 2, CapacityPolicy::kPosition);
  spec.renormalise = Choice::kYes;
  // C = 2. Token 2 loses its choice of expert 0, token 3 both.
  const Routing routing =
      routing_of(4, 2, {0, 1, 0, 2, 0, 3, 0, 1, 1, 2, 2, 1, -1, -1, -1, -1},
                 {0.75f, 0.25f, 0.5f, 0.5f, 0.6f, 0.2f, 0.9f, 0.1f, 1, 0, 0, 1, 0, 0, 0, 0});
  const Kept kept = apply_ok(spec, {routing});
  ASSERT_EQ(kept.capacity[0], 2);
  EXPECT_EQ(kept.ids(),
            (std::vector<int32_t>{0, 1, 0, 2, -1, 3, -1, 1, -1, 2, -1, -1, -1, -1, -1, -1}));
  const std::vector<float> weights = kept.weights();
  EXPECT_EQ(weights[0], 0.75f);
  EXPECT_FLOAT_EQ(weights[5], 0.8f);
  EXPECT_FLOAT_EQ(weights[7], 1.0f);
  EXPECT_EQ(weights[9], 0.0f);  // what is left has weight 0
}

TEST(Capacity, BackwardEqualsDualNumbers) {
  constexpr uint64_t kSeed = 1105;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const Choice renormalise : {Choice::kNo, Choice::kYes}) {
    const Routing routing = draw_routing(random, 80, 5, 3);
    CapacitySpec spec = capacity_spec(1, 2, CapacityPolicy::kWeight);
    spec.renormalise = renormalise;
    const Routing kept = apply_ok(spec, {routing}).ranks[0];
    std::vector<float> d_kept = normal_logits(random, 240, 1.0f);
    for (size_t i = 0; i < 240; ++i) {
      if (kept.topk_idx[i] < 0) d_kept[i] = std::numeric_limits<float>::quiet_NaN();
    }
    std::vector<float> d_weights = d_kept;
    const TensorView out(d_weights.data(), DType::kF32, {80, 3});  // in place
    ASSERT_TRUE(capacity_backward(spec, routing, kept, out, out).ok());
    for (size_t t = 0; t < 80; ++t) {
      const std::span<const float> row(routing.topk_weights.values.data() + t * 3, 3);
      const auto want = dual_gradient(row, [&](std::span<const Dual> w) {
        Dual all;
        Dual left;
        Dual loss;
        bool lost = false;
        for (size_t k = 0; k < 3; ++k) {
          if (routing.topk_idx[t * 3 + k] < 0) continue;
          const bool stays = kept.topk_idx[t * 3 + k] >= 0;
          all = all + w[k];
          left = left + (stays ? w[k] : constant(0));
          lost |= !stays;
          if (stays) loss = loss + w[k] * constant(d_kept[t * 3 + k]);
        }
        const bool scaled = renormalise == Choice::kYes && lost && left.value > 0;
        return scaled ? loss * all / left : loss;
      });
      for (size_t k = 0; k < 3; ++k) {
        ASSERT_NEAR(d_weights[t * 3 + k], static_cast<double>(want[k]), 1e-6) << "token " << t;
      }
    }
  }
}

TEST(Capacity, RefusesWhatDoesNotFit) {
  const auto message_of = [](const CapacitySpec& spec, const Routing& routing) {
    const Routing* pointer = &routing;
    std::vector<Routing> kept;
    std::vector<int64_t> capacity;
    const Status status = apply_capacity(spec, {&pointer, 1}, &kept, &capacity);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  const Routing good = equal_weights(2, 1, {0, 1});
  CapacitySpec spec = capacity_spec(1, 1, CapacityPolicy::kUnset);
  EXPECT_EQ(message_of(spec, good), "capacity policy is unset, expected position or weight");
  spec.policy = static_cast<CapacityPolicy>(9);
  EXPECT_EQ(message_of(spec, good), "capacity policy is unknown, expected position or weight");
  spec = capacity_spec(0, 1, CapacityPolicy::kWeight);
  EXPECT_EQ(message_of(spec, good), "capacity factor is 0/1, expected both in 1 to 2147483647");
  spec = capacity_spec(1, 1, CapacityPolicy::kWeight);
  Routing bad = good;
  bad.topk_idx[1] = 2;
  EXPECT_EQ(message_of(spec, bad), "topk_idx[1, 0] is 2, expected -1 or 0 to 1");
  bad = good;
  bad.topk_weights.values[1] = -0.5f;
  EXPECT_EQ(message_of(spec, bad), "topk_weights[1, 0] is -0.5, expected finite and not negative");
  bad.topk_weights.values[1] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(message_of(spec, bad), "topk_weights[1, 0] is inf, expected finite and not negative");
  bad = good;
  bad.topk_weights.values.pop_back();
  EXPECT_NE(message_of(spec, bad).find("2 ids and 1 weights"), std::string::npos);

  bad = good;
  bad.num_tokens = int64_t{1} << 62;
  EXPECT_NE(message_of(spec, bad).find("4611686018427387904 tokens"), std::string::npos);

  auto cut = CapacityCut::create(spec, 2, 1, 2);
  ASSERT_TRUE(cut.has_value());
  std::vector<int64_t> ties;
  EXPECT_EQ(cut->count_ties(good, &ties).message(), "the cut needs 4 more rounds");
  EXPECT_EQ(cut->refine(ties).message(), "0 bins, expected 2 x 256");
  Routing other = good;
  other.topk_idx[0] = 1;
  std::vector<float> d(2);
  const TensorView view(d.data(), DType::kF32, {2, 1});
  EXPECT_EQ(capacity_backward(spec, good, other, view, view).message(),
            "kept id 0 is 1, in routing it is 0");
}

}  // namespace
}  // namespace argosy::test
