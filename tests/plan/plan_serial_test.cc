// A plan survives its bytes; bytes that lie are refused without a crash.
#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <random>

#include "argosy/plan.h"
#include "support/routing_cases.h"

namespace argosy {
namespace {

std::vector<std::byte> example(uint64_t seed, int64_t round_rows) {
  const testing::RoutingCase one = testing::routing_cases(3, 7, 2, seed)[2];
  PlanOptions options;
  options.rank = 1;
  options.group_id = 0xFEEDull;
  options.round_rows = round_rows;
  DispatchPlan plan;
  EXPECT_TRUE(make_plan(one.routings[1], testing::counts_of(one), {7, 3, 9}, options, &plan).ok());
  return serialize_plan(plan);
}

TEST(PlanSerial, RoundTrips) {
  for (const int64_t round_rows : {1, 5, 1000}) {
    const std::vector<std::byte> bytes = example(1, round_rows);
    const Result<DispatchPlan> plan = parse_plan(bytes);
    ASSERT_TRUE(plan.has_value()) << plan.error().to_string();
    EXPECT_EQ(serialize_plan(*plan), bytes);
    EXPECT_TRUE(check_plan(*plan, 0xFEED, 1, 3, 9).ok());
  }
}

TEST(PlanSerial, RefusesTruncation) {
  const std::vector<std::byte> bytes = example(2, 4);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(parse_plan(std::span(bytes).first(length)).has_value()) << length;
  }
}

// Any changed byte is refused, also when the hash is made to fit: then the meaning does not.
TEST(PlanSerial, RefusesLies) {
  const std::vector<std::byte> bytes = example(3, 4);
  std::mt19937_64 random(7);
  int accepted = 0;
  for (size_t at = 0; at + 8 < bytes.size(); ++at) {
    std::vector<std::byte> changed = bytes;
    changed[at] ^= static_cast<std::byte>(1 + random() % 255);
    EXPECT_FALSE(parse_plan(changed).has_value());
    const uint64_t hash = XXH3_64bits(changed.data(), changed.size() - 8);
    std::memcpy(changed.data() + changed.size() - 8, &hash, 8);
    const Result<DispatchPlan> plan = parse_plan(changed);
    if (plan.has_value()) {
      ++accepted;
    } else {
      EXPECT_EQ(plan.error().code(), StatusCode::kCorruptData);
    }
  }
  // Only facts that nothing in the plan contradicts: group id and placement epoch (8 bytes each),
  // the two leaving counters, and other ranks' receive counts.
  EXPECT_LE(accepted, 4 * 8 + 4 * 8);
}

}  // namespace
}  // namespace argosy
