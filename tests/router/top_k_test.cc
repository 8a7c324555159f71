// TopK and select_experts against a full stable sort by (-score, id): same set, same order, no
// tolerance.
#include "router/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "router/router_testing.h"

namespace argosy::test {
namespace {

using router::TopK;

std::vector<int64_t> best_by_sort(const std::vector<float>& values, int64_t k) {
  std::vector<int64_t> ids(values.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  ids.resize(std::min(values.size(), static_cast<size_t>(k)));
  return ids;
}

std::vector<int64_t> best_by_top_k(const std::vector<float>& values, int64_t k) {
  std::vector<uint64_t> buffer(static_cast<size_t>(TopK::buffer_size(k)));
  TopK best(buffer.data(), k);
  for (size_t i = 0; i < values.size(); ++i) {
    best.offer(router::selection_key(values[i], static_cast<int64_t>(i)));
  }
  std::vector<int64_t> ids(static_cast<size_t>(best.finish()));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = router::id_of_key(buffer[i]);
  return ids;
}

TEST(SelectionKey, OrdersAsNumbersThenByFallingId) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> rising = {-inf,      -3e38f,    -1.0f, -0x1p-126f, -0x1p-149f, 0.0f,
                                     0x1p-149f, 0x1p-126f, 1.0f,  3e38f,      inf};
  for (size_t i = 1; i < rising.size(); ++i) {
    EXPECT_LT(router::selection_key(rising[i - 1], 0), router::selection_key(rising[i], 4000)) << i;
  }
  EXPECT_GT(router::selection_key(-inf, 0xFFFFFFFE), 0u);
  EXPECT_GT(router::selection_key(-0.0f, 3), router::selection_key(0.0f, 4));
  EXPECT_GT(router::selection_key(0.0f, 3), router::selection_key(-0.0f, 4));
  EXPECT_EQ(router::id_of_key(router::selection_key(-1.0f, 123456)), 123456);
}

TEST(TopKHelper, EqualsAStableSortForAnyOrderOfOffers) {
  constexpr uint64_t kSeed = 11;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (const int64_t n : {1, 2, 15, 16, 17, 33, 100, 1000, 2048}) {
    for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{8}, int64_t{64}, n}) {
      if (k > n) continue;
      std::vector<float> values(static_cast<size_t>(n));
      for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 9) - 4);
      EXPECT_EQ(best_by_top_k(values, k), best_by_sort(values, k)) << n << " " << k;
      std::sort(values.begin(), values.end());
      EXPECT_EQ(best_by_top_k(values, k), best_by_sort(values, k)) << "rising " << n << " " << k;
      std::reverse(values.begin(), values.end());
      EXPECT_EQ(best_by_top_k(values, k), best_by_sort(values, k)) << "falling " << n << " " << k;
    }
  }
}

// C010: every value in one coarse bucket.
TEST(TopKHelper, LosesNoCandidateOfANarrowRange) {
  constexpr uint64_t kSeed = 12;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  std::uniform_real_distribution<float> narrow(1.0f, 1.245f);
  std::vector<float> values(16385);
  for (float& value : values) value = narrow(random);
  EXPECT_EQ(best_by_top_k(values, 2048), best_by_sort(values, 2048));
  std::vector<float> bucket(1024);
  for (float& value : bucket) value = 1.0f + static_cast<float>(random() % 2048) * 0x1p-23f;
  EXPECT_EQ(best_by_top_k(bucket, 64), best_by_sort(bucket, 64));
}

TEST(TopKHelper, ReturnsFewerWhenFewerWereOffered) {
  EXPECT_EQ(best_by_top_k({1.0f, 2.0f}, 5), (std::vector<int64_t>{1, 0}));
}

}  // namespace
}  // namespace argosy::test
