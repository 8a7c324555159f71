// The count exchange: what one rank gets wrong is the same typed error on every rank, and the group
// goes on.
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "argosy/exchange.h"
#include "support/routing_cases.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::RoutingCase;
using testing::run_group;

ExchangeOptions options_of(int64_t experts, int64_t top_k) {
  ExchangeOptions options;
  options.dtype = DType::kBF16;
  options.hidden = 8;
  options.num_experts = experts;
  options.top_k = top_k;
  options.receive_budget_bytes = 4096;
  return options;
}

// Runs `spoil` on rank 1 of 3; returns the statuses of all ranks, then checks that a good call
// works.
std::vector<Status> spoiled_call(const std::function<Status(Routing*)>& spoil) {
  const RoutingCase one = testing::routing_cases(3, 8, 2, 21)[0];
  std::vector<Status> statuses(3);
  run_group(3, [&](Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, options_of(8, 2));
    ASSERT_TRUE(exchange.has_value()) << exchange.error().to_string();
    Routing routing = one.routings[rank];
    Status local;
    if (rank == 1) local = spoil(&routing);
    CountsMatrix counts;
    ASSERT_TRUE((*exchange)->issue_counts(local, routing).ok());
    statuses[rank] = (*exchange)->wait_counts(&counts);
    ASSERT_TRUE((*exchange)->issue_counts({}, one.routings[rank]).ok());
    const Status good = (*exchange)->wait_counts(&counts);
    ASSERT_TRUE(good.ok()) << good.to_string();
    EXPECT_EQ(counts.counts, testing::counts_of(one).counts);
    EXPECT_EQ(counts.num_tokens, testing::counts_of(one).num_tokens);
    ASSERT_TRUE(group.barrier().ok());
  });
  return statuses;
}

void expect_everywhere(const std::vector<Status>& statuses, StatusCode code,
                       std::initializer_list<const char*> words) {
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_EQ(status.message(), statuses[0].message());
    for (const char* word : words) {
      EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    }
  }
}

// K10: ids out of range, twice in a row.
TEST(Counts, BadIdsAreAnErrorOnEveryRank) {
  for (const int32_t bad : {8, -2, 2147483647, -2147483647 - 1}) {
    expect_everywhere(spoiled_call([bad](Routing* routing) {
                        routing->topk_idx[5] = bad;
                        return Status();
                      }),
                      StatusCode::kInvalidArgument, {"rank 1", std::to_string(bad).c_str()});
  }
  expect_everywhere(spoiled_call([](Routing* routing) {
                      routing->topk_idx[5] = routing->topk_idx[4];
                      return Status();
                    }),
                    StatusCode::kInvalidArgument, {"rank 1", "a second time"});
}

TEST(Counts, ALocalErrorIsAnErrorOnEveryRank) {
  expect_everywhere(spoiled_call([](Routing*) {
                      return Status(StatusCode::kNonFinite, "token 3: logit 2 is NaN");
                    }),
                    StatusCode::kNonFinite, {"rank 1", "token 3: logit 2 is NaN"});
}

TEST(Counts, LongMessagesAreCutNotLost) {
  const std::string text(1000, 'x');
  expect_everywhere(spoiled_call([&](Routing*) { return Status(StatusCode::kUnsupported, text); }),
                    StatusCode::kUnsupported, {"rank 1", "xxxxxxxx"});
}

TEST(Counts, ARoutingOfAnotherShapeIsAnErrorOnEveryRank) {
  expect_everywhere(spoiled_call([](Routing* routing) {
                      routing->topk_idx.pop_back();
                      return Status();
                    }),
                    StatusCode::kInvalidArgument, {"rank 1", "ids for"});
  expect_everywhere(spoiled_call([](Routing* routing) {
                      routing->num_experts = 9;
                      return Status();
                    }),
                    StatusCode::kInvalidArgument, {"rank 1", "9 experts"});
}

// K12, C119: options that differ are refused when the exchange is made, by name, with both values.
TEST(Counts, OptionsThatDifferAreRefused) {
  struct Row {
    const char* field;
    std::function<void(ExchangeOptions*)> change;
  };
  const std::vector<Row> rows = {
      {"num_experts", [](ExchangeOptions* o) { o->num_experts = 9; }},
      {"top_k", [](ExchangeOptions* o) { o->top_k = 3; }},
      {"hidden", [](ExchangeOptions* o) { o->hidden = 16; }},
      {"dtype", [](ExchangeOptions* o) { o->dtype = DType::kF32; }},
      {"receive_budget_bytes", [](ExchangeOptions* o) { o->receive_budget_bytes = 8192; }},
      {"max_receive_rows", [](ExchangeOptions* o) { o->max_receive_rows = 5; }},
      {"group_alignment", [](ExchangeOptions* o) { o->group_alignment = 2; }},
  };
  for (const Row& row : rows) {
    run_group(3, [&](Group& group) {
      ExchangeOptions options = options_of(8, 2);
      if (group.rank() == 2) row.change(&options);
      const Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, options);
      ASSERT_FALSE(exchange.has_value());
      EXPECT_EQ(exchange.error().code(), StatusCode::kDisagree);
      EXPECT_NE(exchange.error().message().find(row.field), std::string::npos)
          << exchange.error().message();
    });
  }
}

// C086: a rank idle in one step, busy in the next; epochs stay aligned.
TEST(Counts, IdleThenBusy) {
  const std::vector<RoutingCase> cases = testing::routing_cases(3, 8, 2, 4);
  run_group(3, [&](Group& group) {
    Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, options_of(8, 2));
    ASSERT_TRUE(exchange.has_value());
    for (int repeat = 0; repeat < 30; ++repeat) {
      for (const RoutingCase& one : cases) {
        CountsMatrix counts;
        ASSERT_TRUE(
            (*exchange)->issue_counts({}, one.routings[static_cast<size_t>(group.rank())]).ok());
        ASSERT_TRUE((*exchange)->wait_counts(&counts).ok());
        ASSERT_EQ(counts.counts, testing::counts_of(one).counts);
      }
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

}  // namespace
}  // namespace argosy
