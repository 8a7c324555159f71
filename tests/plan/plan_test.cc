// The plan against a naive oracle that sorts all rows of all ranks by (rank, expert, source,
// token).
#include "argosy/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "support/routing_cases.h"

namespace argosy {
namespace {

using testing::counts_of;
using testing::RoutingCase;

struct Row {
  int dest;
  int64_t expert;
  int source;
  int64_t token;
  int64_t k;
  auto key() const { return std::tie(dest, expert, source, token); }
};

int naive_owner(int64_t expert, int64_t num_experts, int num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (expert >= rank * num_experts / num_ranks && expert < (rank + 1) * num_experts / num_ranks)
      return rank;
  }
  return -1;
}

std::vector<Row> sorted_rows(const RoutingCase& one) {
  std::vector<Row> rows;
  for (int source = 0; source < one.num_ranks; ++source) {
    const Routing& routing = one.routings[static_cast<size_t>(source)];
    for (int64_t token = 0; token < routing.num_tokens; ++token) {
      for (int64_t k = 0; k < one.top_k; ++k) {
        const int32_t expert = routing.topk_idx[static_cast<size_t>(token * one.top_k + k)];
        if (expert < 0) continue;
        rows.push_back(
            {naive_owner(expert, one.num_experts, one.num_ranks), expert, source, token, k});
      }
    }
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.key() < b.key(); });
  return rows;
}

std::vector<DispatchPlan> plans_of(const RoutingCase& one, int64_t alignment, int64_t round_rows) {
  const CountsMatrix counts = counts_of(one);
  const Placement placement{one.num_experts, one.num_ranks, 3};
  std::vector<DispatchPlan> plans(static_cast<size_t>(one.num_ranks));
  for (int rank = 0; rank < one.num_ranks; ++rank) {
    PlanOptions options;
    options.rank = rank;
    options.group_id = 77;
    options.group_alignment = alignment;
    options.round_rows = round_rows;
    const auto at = static_cast<size_t>(rank);
    const Status status = make_plan(one.routings[at], counts, placement, options, &plans[at]);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  return plans;
}

// Slots by the definition: expert-major, source-major, token-major, groups at multiples of the
// alignment.
void expect_layout(const RoutingCase& one, const std::vector<DispatchPlan>& plans,
                   int64_t alignment) {
  std::map<int, int64_t> next;
  std::map<int, int64_t> last_expert;
  std::map<int, int64_t> rows_at;
  for (const Row& row : sorted_rows(one)) {
    if (last_expert.count(row.dest) != 0 && last_expert[row.dest] != row.expert) {
      next[row.dest] = (next[row.dest] + alignment - 1) / alignment * alignment;
    }
    last_expert[row.dest] = row.expert;
    const DispatchPlan& source = plans[static_cast<size_t>(row.source)];
    const auto at = static_cast<size_t>(row.token * one.top_k + row.k);
    EXPECT_EQ(source.dest_rank[at], row.dest);
    EXPECT_EQ(source.dest_slot[at], next[row.dest])
        << "expert " << row.expert << " token " << row.token;
    const DispatchPlan& dest = plans[static_cast<size_t>(row.dest)];
    const int64_t first = row.dest * one.num_experts / one.num_ranks;
    const auto group = static_cast<size_t>(row.expert - first);
    EXPECT_GE(next[row.dest], dest.group_offsets[group]);
    EXPECT_LT(next[row.dest], dest.group_offsets[group] + dest.group_sizes[group]);
    EXPECT_EQ(dest.group_offsets[group] % alignment, 0);
    ++next[row.dest];
    ++rows_at[row.dest];
  }
  for (const DispatchPlan& plan : plans) {
    for (int rank = 0; rank < one.num_ranks; ++rank) {
      EXPECT_EQ(plan.receive_rows[static_cast<size_t>(rank)], rows_at[rank]);
      EXPECT_EQ(plan.receive_slots, plans[0].receive_slots);
    }
  }
}

// What one rank says it sends is what the other says it gets, in every round; windows hold their
// rows.
void expect_rounds(const std::vector<DispatchPlan>& plans) {
  std::vector<std::vector<int64_t>> send(plans.size());
  std::vector<std::vector<int64_t>> recv(plans.size());
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  std::vector<int64_t> rows_seen(plans.size(), 0);
  const int64_t num_rounds = plans[0].num_rounds;
  for (int64_t round = 0; round < num_rounds; ++round) {
    for (size_t rank = 0; rank < plans.size(); ++rank) {
      EXPECT_EQ(plans[rank].num_rounds, num_rounds);
      round_traffic(plans[rank], round, &send[rank], &recv[rank]);
      round_groups(plans[rank], round, &offsets, &sizes);
      int64_t total = 0;
      for (size_t group = 0; group < sizes.size(); ++group) {
        EXPECT_GE(sizes[group], 0);
        EXPECT_LE(offsets[group] + sizes[group], plans[rank].round_rows);
        total += sizes[group];
      }
      EXPECT_EQ(total, std::accumulate(recv[rank].begin(), recv[rank].end(), int64_t{0}));
      rows_seen[rank] += total;
    }
    for (size_t a = 0; a < plans.size(); ++a) {
      for (size_t b = 0; b < plans.size(); ++b) EXPECT_EQ(send[a][b], recv[b][a]);
    }
  }
  for (size_t rank = 0; rank < plans.size(); ++rank)
    EXPECT_EQ(rows_seen[rank], plans[rank].receive_rows[rank]);
}

TEST(Plan, EqualsTheNaiveOrderForDesignedRoutings) {
  int checked = 0;
  for (const int num_ranks : {1, 2, 3, 5, 7, 8, 16}) {
    for (const auto& [experts, top_k] :
         {std::pair<int64_t, int64_t>{1, 1}, {2, 2}, {5, 2}, {16, 4}, {13, 13}}) {
      const uint64_t seed = static_cast<uint64_t>(num_ranks * 1000 + experts);
      SCOPED_TRACE(::testing::Message()
                   << "R " << num_ranks << " E " << experts << " K " << top_k << " seed " << seed);
      for (const RoutingCase& one : testing::routing_cases(num_ranks, experts, top_k, seed)) {
        SCOPED_TRACE(one.name);
        for (const auto& [alignment, round_rows] : {std::pair<int64_t, int64_t>{1, 1 << 20},
                                                    {1, 1},
                                                    {1, 7},
                                                    {8, 8},
                                                    {8, 24},
                                                    {32, 1 << 20}}) {
          const std::vector<DispatchPlan> plans = plans_of(one, alignment, round_rows);
          expect_layout(one, plans, alignment);
          expect_rounds(plans);
          ++checked;
        }
      }
    }
  }
  EXPECT_EQ(checked, 7 * 5 * 10 * 6);
}

TEST(Plan, CountsLeavingRowsOncePerTokenAndRank) {
  // 2 ranks, 4 experts: experts 0, 1 on rank 0; 2, 3 on rank 1.
  RoutingCase one{"by hand", 2, 4, 3, {}};
  Routing a;
  a.num_tokens = 2;
  a.num_experts = 4;
  a.top_k = 3;
  a.topk_idx = {2, 3, 0, /**/ 1, 3, -1};
  testing::finish_routing(&a);
  Routing b = a;
  b.num_tokens = 0;
  b.topk_idx.clear();
  testing::finish_routing(&b);
  one.routings = {a, b};
  const std::vector<DispatchPlan> plans = plans_of(one, 1, 100);
  EXPECT_EQ(plans[0].rows_leaving, 3);
  EXPECT_EQ(plans[0].rows_leaving_dedup, 2);
  EXPECT_EQ(plans[1].rows_leaving, 0);
  EXPECT_EQ(plans[1].group_sizes, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(plans[1].group_offsets, (std::vector<int64_t>{0, 1, 3}));
  // With one row a round the copies of token 0 for rank 1 travel in different rounds.
  EXPECT_EQ(plans_of(one, 1, 1)[0].rows_leaving_dedup, 3);
}

TEST(Plan, OwnsContiguouslyForAnySizes) {
  for (const int64_t items : {0, 1, 2, 7, 16, 255, 256}) {
    for (const int ranks : {1, 2, 3, 7, 16, 300}) {
      EXPECT_EQ(owned_begin(items, ranks, 0), 0);
      EXPECT_EQ(owned_begin(items, ranks, ranks), items);
      const Placement placement{items, ranks, 0};
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(owned_begin(items, ranks, rank), rank * items / ranks);
        for (int64_t item = placement.begin(rank); item < placement.begin(rank + 1); ++item) {
          EXPECT_EQ(placement.owner(item), rank);
        }
      }
    }
  }
  // K16: no 64-bit product is formed.
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(owned_begin(huge, 16, 16), huge);
  EXPECT_EQ(owned_begin(huge, 2, 1), huge / 2);
}

// K10, C097: offsets equal a plain cumulative sum around every internal limit.
TEST(Plan, OffsetsEqualACumulativeSumForManyExperts) {
  for (const int64_t experts : {1, 2, 31, 32, 33, 1023, 1024, 1025, 2048}) {
    CountsMatrix counts;
    counts.num_ranks = 1;
    counts.num_experts = experts;
    counts.num_tokens = {experts};
    Routing routing;
    routing.num_tokens = experts;
    routing.num_experts = experts;
    routing.top_k = 1;
    for (int64_t token = 0; token < experts; ++token) {
      routing.topk_idx.push_back(static_cast<int32_t>((token * token + 3) % experts));
    }
    testing::finish_routing(&routing);
    counts.counts = routing.counts;
    PlanOptions options;
    options.round_rows = experts;
    DispatchPlan plan;
    ASSERT_TRUE(make_plan(routing, counts, {experts, 1, 0}, options, &plan).ok());
    int64_t sum = 0;
    for (int64_t expert = 0; expert < experts; ++expert) {
      ASSERT_EQ(plan.group_offsets[static_cast<size_t>(expert)], sum);
      sum += routing.counts[static_cast<size_t>(expert)];
    }
    EXPECT_EQ(plan.group_offsets.back(), sum);
  }
}

// C160: 65,536 tokens of top-8, all to one rank, padded: the bound is exact when the plan is made, in int64.
TEST(Plan, BoundsTheWorstCase) {
  Routing routing;
  routing.num_tokens = 65536;
  routing.num_experts = 16;
  routing.top_k = 8;
  routing.topk_idx.resize(65536 * 8);
  for (size_t i = 0; i < routing.topk_idx.size(); ++i)
    routing.topk_idx[i] = static_cast<int32_t>(i % 8);
  testing::finish_routing(&routing);
  CountsMatrix counts{2, 16, routing.counts, {65536, 65536}};
  counts.counts.insert(counts.counts.end(), routing.counts.begin(), routing.counts.end());
  PlanOptions options;
  options.group_alignment = 128;
  options.round_rows = 128 * 1000;
  DispatchPlan plan;
  ASSERT_TRUE(make_plan(routing, counts, {16, 2, 0}, options, &plan).ok());
  EXPECT_EQ(plan.receive_rows, (std::vector<int64_t>{2 * 65536 * 8, 0}));
  EXPECT_EQ(plan.receive_slots, plan.receive_rows);  // multiples of 128 already
  EXPECT_EQ(plan.num_rounds, (2 * 65536 * 8 + 127999) / 128000);
  // Bytes of those rows at inner 5120 in bf16 are beyond 32 bits.
  EXPECT_EQ(plan.receive_rows[0] * 5120 * 2, int64_t{10737418240});
}

// C089: 64 ranks, 10 real peers: only pairs with rows have work.
TEST(Plan, OnlyPairsWithRowsHaveWork) {
  RoutingCase one{"sparse", 64, 128, 1, {}};
  for (int rank = 0; rank < 64; ++rank) {
    Routing routing;
    routing.num_tokens = rank == 5 ? 10 : 0;
    routing.num_experts = 128;
    routing.top_k = 1;
    for (int32_t token = 0; token < routing.num_tokens; ++token)
      routing.topk_idx.push_back(token * 12);
    testing::finish_routing(&routing);
    one.routings.push_back(std::move(routing));
  }
  const std::vector<DispatchPlan> plans = plans_of(one, 1, 64);
  int64_t pairs = 0;
  std::vector<int64_t> send;
  std::vector<int64_t> recv;
  for (const DispatchPlan& plan : plans) {
    round_traffic(plan, 0, &send, &recv);
    pairs += std::count_if(send.begin(), send.end(), [](int64_t rows) { return rows > 0; });
  }
  EXPECT_EQ(pairs, 10);
}

class PlanErrors : public ::testing::Test {
 protected:
  PlanErrors() : one_(testing::routing_cases(2, 4, 2, 5)[0]), counts_(counts_of(one_)) {
    options_.round_rows = 64;
  }
  Status make() { return make_plan(one_.routings[0], counts_, placement_, options_, &plan_); }
  void expect(StatusCode code, std::initializer_list<const char*> words) {
    const Status status = make();
    EXPECT_EQ(status.code(), code) << status.to_string();
    for (const char* word : words)
      EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  }

  RoutingCase one_;
  CountsMatrix counts_;
  Placement placement_{4, 2, 0};
  PlanOptions options_;
  DispatchPlan plan_;
};

TEST_F(PlanErrors, NameValues) {
  EXPECT_TRUE(make().ok());
  one_.routings[0].topk_idx[3] = 9;
  expect(StatusCode::kInvalidArgument, {"topk_idx[1, 1]", "9", "[0, 4)"});
  one_.routings[0].topk_idx[3] = one_.routings[0].topk_idx[2];
  expect(StatusCode::kInvalidArgument, {"[1, 0]", "[1, 1]", "both expert"});
}

TEST_F(PlanErrors, CountsThatDoNotFit) {
  counts_.counts[0] += 1;
  expect(StatusCode::kInvalidArgument, {"expert 0", "the counts say"});
  counts_.counts[0] = -1;
  expect(StatusCode::kInvalidArgument, {"-1"});
  counts_.counts[0] = std::numeric_limits<int64_t>::max();
  expect(StatusCode::kInvalidArgument, {"overflow"});
  counts_ = counts_of(one_);
  counts_.num_tokens[0] = 99;
  expect(StatusCode::kInvalidArgument, {"99", "16"});
  placement_.num_experts = 8;
  expect(StatusCode::kInvalidArgument, {"8", "4"});
}

TEST_F(PlanErrors, Options) {
  options_.rank = 2;
  expect(StatusCode::kInvalidArgument, {"rank 2", "[0, 2)"});
  options_.rank = 0;
  options_.round_rows = 0;
  expect(StatusCode::kInvalidArgument, {"round_rows is 0"});
  options_.group_alignment = 48;
  options_.round_rows = 64;
  expect(StatusCode::kInvalidArgument, {"64", "48"});
}

TEST_F(PlanErrors, HardCapIsTheSameErrorOnEveryRank) {
  std::vector<Status> statuses;
  for (int rank = 0; rank < 2; ++rank) {
    options_.rank = rank;
    options_.max_receive_rows = 20;
    statuses.push_back(
        make_plan(one_.routings[static_cast<size_t>(rank)], counts_, placement_, options_, &plan_));
  }
  EXPECT_EQ(statuses[0].code(), StatusCode::kCapacity);
  EXPECT_EQ(statuses[0].message(), statuses[1].message());
  EXPECT_NE(statuses[0].message().find("max_receive_rows is 20"), std::string::npos);
}

TEST(PlanUse, ChecksWhoseItIs) {
  const RoutingCase one = testing::routing_cases(2, 4, 2, 5)[0];
  const DispatchPlan plan = plans_of(one, 1, 64)[1];
  EXPECT_TRUE(check_plan(plan, 77, 1, 2, 3).ok());
  EXPECT_EQ(check_plan(plan, 78, 1, 2, 3).code(), StatusCode::kStalePlan);
  EXPECT_NE(check_plan(plan, 77, 0, 2, 3).message().find("rank 1"), std::string::npos);
  EXPECT_EQ(check_plan(plan, 77, 1, 3, 3).code(), StatusCode::kStalePlan);
  EXPECT_NE(check_plan(plan, 77, 1, 2, 4).message().find("placement epoch 3"), std::string::npos);
  EXPECT_EQ(check_plan(DispatchPlan{}, 77, 1, 2, 3).code(), StatusCode::kStalePlan);
}

}  // namespace
}  // namespace argosy
