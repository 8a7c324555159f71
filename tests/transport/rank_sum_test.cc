// Sums over ranks, a chunk at a time: the bits of a loop in rank order on every rank, for sizes around a chunk and calls
// close behind each other.
#include "transport/rank_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "transport/backends.h"

namespace argosy::transport {
namespace {

class RankSumTest : public BackendTest {};

INSTANTIATE_TEST_SUITE_P(All, RankSumTest, ::testing::ValuesIn(all_backends_and_ranks()),
                         name_of_param);

// Magnitudes far apart, so that another order of adding gives other bits; some sums are denormal.
std::vector<float> values_of(int rank, int call, size_t size) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 1000 + static_cast<uint64_t>(call));
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(size);
  for (size_t i = 0; i < size; ++i) {
    const float scale = i % 7 == 3 ? 0x1p-140f : (random() % 2 == 0 ? 1.0f : 1e6f);
    values[i] = scale * uniform(random);
  }
  return values;
}

std::vector<float> naive_sum(int num_ranks, int call, size_t size) {
  std::vector<float> sum = values_of(0, call, size);
  for (int rank = 1; rank < num_ranks; ++rank) {
    const std::vector<float> more = values_of(rank, call, size);
    for (size_t i = 0; i < size; ++i) sum[i] += more[i];
  }
  return sum;
}

TEST_P(RankSumTest, AddsInRankOrder) {
  run([&](Endpoint& endpoint) {
    std::mt19937_64 random = testing::rank_rng(7, endpoint.rank());
    Result<std::unique_ptr<RankSum>> sum = RankSum::create(endpoint, ample(), 20);
    ASSERT_TRUE(sum.has_value()) << sum.error().to_string();
    int call = 0;
    for (const size_t size : {1, 0, 2, 19, 20, 21, 3, 100, 41, 0, 7, 20, 60}) {
      std::vector<float> values = values_of(endpoint.rank(), ++call, size);
      testing::random_pause(random);
      ASSERT_TRUE((*sum)->run(values, milliseconds(60'000)).ok());
      ASSERT_EQ(values, naive_sum(num_ranks(), call, size)) << size;
    }
  });
}

TEST(RankSum, NeedsAChunk) {
  run_inproc(1, [](Endpoint& endpoint) {
    EXPECT_EQ(RankSum::create(endpoint, ample(), 0).error().code(), StatusCode::kInvalidArgument);
  });
}

}  // namespace
}  // namespace argosy::transport
