// A plan survives its bytes; bytes that lie are refused without a crash.
#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

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

// One rank of two, one token at each of its K positions for the other rank's only expert, whose
// slots end where int64 ends.
DispatchPlan plan_at_the_end_of_int64(int64_t send_rows, int64_t num_tokens) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  DispatchPlan plan;
  plan.version = DispatchPlan::kVersion;
  plan.num_ranks = 2;
  plan.num_experts = 2;
  plan.num_tokens = num_tokens;
  plan.top_k = 1;
  plan.round_rows = kMax / 2 + 1;
  plan.num_rounds = 2;
  plan.topk_idx.assign(static_cast<size_t>(num_tokens), 1);
  plan.dest_rank.assign(static_cast<size_t>(num_tokens), 1);
  for (int64_t token = 0; token < num_tokens; ++token) {
    plan.dest_slot.push_back(kMax - send_rows + std::min<int64_t>(token, 1));
  }
  plan.group_sizes = {0};
  plan.group_offsets = {0, 0};
  plan.source_rows = {0, 0};
  plan.receive_rows = {0, send_rows};
  plan.receive_slots = {0, kMax};
  plan.send_slots = {0, kMax - send_rows};
  plan.send_rows = {0, send_rows};
  return plan;
}

// Three tokens for an expert that takes one: the third slot would not fit int64.
TEST(PlanSerial, RefusesMoreRowsThanAnExpertTakes) {
  const Result<DispatchPlan> plan = parse_plan(serialize_plan(plan_at_the_end_of_int64(1, 3)));
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code(), StatusCode::kCorruptData);
  EXPECT_NE(plan.error().message().find("send_rows is 1, want 2"), std::string::npos)
      << plan.error().message();
}

// Contract 1.8 holds for a plan from outside too.
TEST(PlanSerial, RefusesOneExpertTwiceInARow) {
  DispatchPlan plan;
  plan.version = DispatchPlan::kVersion;
  plan.num_ranks = 1;
  plan.num_experts = 1;
  plan.num_tokens = 1;
  plan.top_k = 2;
  plan.round_rows = 2;
  plan.num_rounds = 1;
  plan.topk_idx = {0, 0};
  plan.dest_rank = {0, 0};
  plan.dest_slot = {0, 1};
  plan.group_sizes = {2};
  plan.group_offsets = {0, 2};
  plan.source_rows = {2};
  plan.receive_rows = {2};
  plan.receive_slots = {2};
  plan.send_slots = {0};
  plan.send_rows = {2};
  const Result<DispatchPlan> parsed = parse_plan(serialize_plan(plan));
  ASSERT_FALSE(parsed.has_value());
  EXPECT_EQ(parsed.error().code(), StatusCode::kCorruptData);
  EXPECT_NE(parsed.error().message().find("token 0 has expert 0 twice"), std::string::npos)
      << parsed.error().message();
  // As two tokens of one expert each it is a plan.
  plan.num_tokens = 2;
  plan.top_k = 1;
  EXPECT_TRUE(parse_plan(serialize_plan(plan)).has_value());
}

// The last round ends beyond int64; its rows do not.
TEST(PlanSerial, RoundsAtTheEndOfInt64Count) {
  const Result<DispatchPlan> plan = parse_plan(serialize_plan(plan_at_the_end_of_int64(1, 1)));
  ASSERT_TRUE(plan.has_value()) << plan.error().message();
  std::vector<int64_t> send;
  std::vector<int64_t> receive;
  round_traffic(*plan, 0, &send, &receive);
  EXPECT_EQ(send, (std::vector<int64_t>{0, 0}));
  round_traffic(*plan, 1, &send, &receive);
  EXPECT_EQ(send, (std::vector<int64_t>{0, 1}));
}

}  // namespace
}  // namespace argosy
