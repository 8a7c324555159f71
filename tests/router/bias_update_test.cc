// update_selection_bias(): exact signs, one step, errors that change nothing.
#include "argosy/bias_update.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace argosy::test {
namespace {

constexpr float kRate = 1e-3f;

std::vector<float> stepped(const BiasUpdateSpec& spec, const std::vector<int64_t>& counts,
                           std::vector<float> bias) {
  const Status status = update_selection_bias(spec, counts, bias);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return bias;
}

TEST(BiasUpdate, PlainAndCentred) {
  const std::vector<int64_t> counts = {10, 20, 30, 100};  // mean 40
  const std::vector<float> zero(4, 0.0f);
  EXPECT_EQ(stepped({kRate, false}, counts, zero),
            (std::vector<float>{kRate, kRate, kRate, -kRate}));
  EXPECT_EQ(stepped({kRate, true}, counts, zero),
            (std::vector<float>{0.5f * kRate, 0.5f * kRate, 0.5f * kRate, -1.5f * kRate}));
  EXPECT_EQ(stepped({kRate, false}, {7, 7, 7, 7}, zero), zero);
  EXPECT_EQ(stepped({kRate, false}, {0, 0, 0, 0}, zero), zero);
  EXPECT_EQ(stepped({kRate, false}, {40, 0, 80, 40}, {1.0f, 1.0f, 1.0f, 1.0f}),
            (std::vector<float>{1.0f, 1.0f + kRate, 1.0f - kRate, 1.0f}));
}

// C060: 64 ranks, one expert 120 below the mean of 40,960; any order of reduction.
TEST(BiasUpdate, SignIsThatOfExactArithmetic) {
  std::vector<int64_t> counts(8, 40960);
  counts[3] = 40840;
  counts[4] = 41080;
  std::vector<float> bias = stepped({kRate, false}, counts, std::vector<float>(8, 0.0f));
  EXPECT_EQ(bias[3], kRate);
  EXPECT_EQ(bias[4], -kRate);
  EXPECT_EQ(bias[0], 0.0f);
  // One token in 2^62: a double's mean would call them equal.
  constexpr int64_t kHuge = int64_t{1} << 62;
  bias = stepped({kRate, false}, {kHuge, kHuge - 1, kHuge + 1, kHuge}, std::vector<float>(4, 0.0f));
  EXPECT_EQ(bias, (std::vector<float>{0.0f, kRate, -kRate, 0.0f}));
  // The mean is no integer: 3 of 7 tokens.
  EXPECT_EQ(stepped({kRate, false}, {3, 4}, {0.0f, 0.0f}), (std::vector<float>{kRate, -kRate}));
}

// K07: counts of drawn ranks, summed in any order, give one update; C061: counting twice over (a
// recompute) gives the same signs.
TEST(BiasUpdate, NoOrderOfReductionChangesIt) {
  constexpr uint64_t kSeed = 1001;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::vector<int64_t>> ranks(1 + random() % 9, std::vector<int64_t>(6));
    for (auto& rank : ranks) {
      for (int64_t& count : rank) count = static_cast<int64_t>(random() % 5);
    }
    const auto total = [&] {
      std::vector<int64_t> sum(6, 0);
      for (const auto& rank : ranks) {
        for (size_t e = 0; e < 6; ++e) sum[e] += rank[e];
      }
      return sum;
    };
    const std::vector<float> bias = {0.1f, -0.2f, 0.3f, 0.0f, 5.0f, -7.0f};
    const std::vector<float> want = stepped({kRate, round % 2 == 0}, total(), bias);
    std::shuffle(ranks.begin(), ranks.end(), random);
    EXPECT_EQ(stepped({kRate, round % 2 == 0}, total(), bias), want);
    const auto once = ranks;
    ranks.insert(ranks.end(), once.begin(), once.end());
    EXPECT_EQ(stepped({kRate, round % 2 == 0}, total(), bias), want);
  }
}

TEST(BiasUpdate, CentredStepsSumToNothing) {
  std::mt19937_64 random(1002);
  std::vector<int64_t> counts(61);
  for (int64_t& count : counts) count = static_cast<int64_t>(random() % 1000);
  const std::vector<float> bias = stepped({kRate, true}, counts, std::vector<float>(61, 0.0f));
  EXPECT_NEAR(std::accumulate(bias.begin(), bias.end(), 0.0), 0.0, 61 * 1e-10);
}

TEST(BiasUpdate, ErrorsChangeNothing) {
  const std::vector<float> before = {0.5f, std::numeric_limits<float>::max()};
  const auto message_of = [&](const BiasUpdateSpec& spec, const std::vector<int64_t>& counts,
                              std::vector<float> bias) {
    const std::vector<float> kept = bias;
    const Status status = update_selection_bias(spec, counts, bias);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    for (size_t e = 0; e < bias.size(); ++e) {
      EXPECT_TRUE(bias[e] == kept[e] || std::isnan(kept[e]));
    }
    return status.message();
  };
  EXPECT_EQ(message_of({kRate, false}, {1, 2, 3}, before), "3 counts for a bias of 2 experts");
  EXPECT_EQ(message_of({kRate, false}, {1, -2}, before), "count of expert 1 is -2");
  EXPECT_EQ(message_of({-1.0f, false}, {1, 2}, before),
            "rate is -1, expected finite and not negative");
  EXPECT_EQ(message_of({kRate, false}, {1, 2}, {NAN, 0.0f}), "selection_bias of expert 0 is nan");
  EXPECT_NE(message_of({1e38f, false}, {2, 1}, before).find("leaves fp32"), std::string::npos);
}

}  // namespace
}  // namespace argosy::test
