// count_topk: K10. -1 is the only "nobody"; anything else outside [0, E), or an expert twice in a
// row, is an error that names token, position, value and range.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "router/router_testing.h"

namespace argosy::test {
namespace {

constexpr const void* kNoData = nullptr;

Status count_ids(const std::vector<int32_t>& ids, int64_t top_k, int64_t num_experts,
                 std::vector<int64_t>* counts) {
  const auto tokens = static_cast<int64_t>(ids.size()) / top_k;
  return count_topk(ConstTensorView(ids.data(), DType::kI32, {tokens, top_k}), num_experts, counts);
}

TEST(CountTopk, NobodyMayStandAnywhere) {
  std::vector<int64_t> counts;
  ASSERT_TRUE(count_ids({0, -1, -1, -1}, 2, 2, &counts).ok());  // C091
  EXPECT_EQ(counts, (std::vector<int64_t>{1, 0}));
  ASSERT_TRUE(count_ids({1, 3}, 2, 4, &counts).ok());  // C090: expert 0 gets nothing
  EXPECT_EQ(counts, (std::vector<int64_t>{0, 1, 0, 1}));
  ASSERT_TRUE(count_ids({-1, 2, -1, 0}, 4, 3, &counts).ok());
  EXPECT_EQ(counts, (std::vector<int64_t>{1, 0, 1}));
}

TEST(CountTopk, EqualsANaiveCountForManyExpertNumbers) {
  constexpr uint64_t kSeed = 21;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (const int32_t num_experts : {1, 2, 31, 32, 33, 1023, 1024, 1025, 2048}) {  // C097
    const int32_t top_k = std::min(num_experts, 7);
    std::vector<int32_t> ids;
    std::vector<int64_t> want(static_cast<size_t>(num_experts), 0);
    for (int token = 0; token < 300; ++token) {
      const auto start = static_cast<int32_t>(random() % static_cast<uint64_t>(num_experts));
      for (int32_t k = 0; k < top_k; ++k) {
        const bool nobody = random() % 5 == 0;
        const int32_t expert = (start + k) % num_experts;
        ids.push_back(nobody ? -1 : expert);
        if (!nobody) ++want[static_cast<size_t>(expert)];
      }
    }
    std::vector<int64_t> counts = {99};
    ASSERT_TRUE(count_ids(ids, top_k, num_experts, &counts).ok());
    EXPECT_EQ(counts, want) << num_experts;
  }
}

TEST(CountTopk, RefusesValuesOutsideTheRange) {
  constexpr auto kMin = std::numeric_limits<int32_t>::min();
  constexpr auto kMax = std::numeric_limits<int32_t>::max();
  for (const int32_t bad : {-2, 4, 5, -999999, kMin, kMax}) {
    for (size_t at = 0; at < 6; ++at) {
      std::vector<int32_t> ids = {0, 1, 2, 3, 0, -1};
      ids[at] = bad;
      std::vector<int64_t> counts = {7};
      const Status status = count_ids(ids, 2, 4, &counts);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      const std::string where = "topk_idx[" + std::to_string(at / 2) + ", " +
                                std::to_string(at % 2) + "] is " + std::to_string(bad) +
                                ", expected -1 or 0 to 3";
      EXPECT_EQ(status.message(), where);
      EXPECT_TRUE(counts.empty());
    }
  }
}

TEST(CountTopk, RefusesAnExpertTwiceInARow) {
  std::vector<int64_t> counts;
  const Status status = count_ids({0, 1, 2, 3, -1, 3}, 3, 4, &counts);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "topk_idx[1, 2] names expert 3 a second time in the row of token 1");
  EXPECT_TRUE(count_ids({3, 1, 3, 1}, 2, 4, &counts).ok());  // in two rows it is fine
}

// C094, C095: another dtype is refused by name, never reinterpreted.
TEST(CountTopk, RefusesOtherDtypesAndShapes) {
  const std::vector<int64_t> ids(6, -999999);
  std::vector<int64_t> counts;
  for (const DType dtype : {DType::kI64, DType::kU32, DType::kF32, DType::kI16, DType::kUnset}) {
    const Status status = count_topk(ConstTensorView(ids.data(), dtype, {2, 2}), 4, &counts);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(name_of(dtype)), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("I32"), std::string::npos);
  }
  ConstTensorView strided(ids.data(), DType::kI32, {2, 2});
  strided.strides[0] = 3;
  EXPECT_EQ(count_topk(strided, 4, &counts).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(count_topk(ConstTensorView(ids.data(), DType::kI32, {4}), 4, &counts).ok());
  EXPECT_FALSE(count_topk(ConstTensorView(kNoData, DType::kI32, {2, 2}), 4, &counts).ok());
  EXPECT_FALSE(count_ids({0, 0}, 1, 0, &counts).ok());
  EXPECT_FALSE(count_ids({0, 0}, 1, 1, nullptr).ok());
  EXPECT_TRUE(count_topk(ConstTensorView(kNoData, DType::kI32, {0, 2}), 4, &counts).ok());
  EXPECT_EQ(counts, (std::vector<int64_t>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace argosy::test
