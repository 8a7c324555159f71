// Dispatch and combine over ranks as threads: rows in the contract's order, sums in top-k order,
// bit for bit, whatever the budget, the alignment and the number of ranks; buffers poisoned, calls
// repeated.
#include "argosy/exchange.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <mutex>

#include "exchange/exchange_rows.h"
#include "exchange/state.h"
#include "support/routing_cases.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

// One round on one rank: checks what came, lets the experts write, poisons what has been read.
void run_round(Exchange& exchange, const DispatchPlan& plan, int64_t round,
               const ReceivedRows& rows, const std::vector<Expected>& expected, size_t* next) {
  const TensorView results = exchange.results();
  poison(results);
  const int64_t first_expert = exchange.placement().begin(plan.rank);
  for (size_t group = 0; group < rows.group_sizes.size(); ++group) {
    for (int64_t i = 0; i < rows.group_sizes[group]; ++i) {
      const int64_t at = rows.group_offsets[group] + i;
      ASSERT_LT(*next, expected.size());
      const Expected& want = expected[(*next)++];
      ASSERT_EQ(want.expert, first_expert + static_cast<int64_t>(group)) << "round " << round;
      const auto* row = reinterpret_cast<const float*>(rows.rows.row(at));
      auto* result = reinterpret_cast<float*>(results.row(at));
      for (int64_t column = 0; column < kHidden; ++column) {
        ASSERT_EQ(row[column], element(want.source, want.token, column)) << "row " << at;
        result[column] = expert_value(row[column], want.expert);
      }
    }
  }
}

void run_call(Exchange& exchange, const RoutingCase& one, int rank, int times_planned) {
  const Routing& routing = one.routings[static_cast<size_t>(rank)];
  const std::vector<float> hidden = hidden_of(rank, routing.num_tokens);
  const ConstTensorView hidden_view(hidden.data(), DType::kF32, {routing.num_tokens, kHidden});
  const std::vector<Expected> expected = expected_rows(one, rank);
  DispatchPlan plan;
  CountsMatrix counts;
  for (int use = 0; use < times_planned; ++use) {
    ASSERT_TRUE(exchange.issue_counts({}, routing).ok());
    Status status = exchange.wait_counts(&counts);
    ASSERT_TRUE(status.ok()) << status.to_string();
    // The second time the first plan is used again: it is a plain value.
    if (use == 0) status = exchange.plan(routing, counts, &plan);
    ASSERT_TRUE(status.ok()) << status.to_string();
    std::vector<float> output(static_cast<size_t>(routing.num_tokens * kHidden), -7.0f);
    const TensorView output_view(output.data(), DType::kF32, {routing.num_tokens, kHidden});
    CombineInput input;
    input.topk_weights = ConstTensorView(routing.topk_weights.values.data(), DType::kF32,
                                         {routing.num_tokens, routing.top_k});
    ReceivedRows rows;
    size_t next = 0;
    for (int64_t round = 0; round < plan.num_rounds; ++round) {
      status = exchange.issue_dispatch(plan, round, hidden_view);
      ASSERT_TRUE(status.ok()) << status.to_string();
      status = exchange.wait_dispatch(plan, round, &rows);
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_NO_FATAL_FAILURE(run_round(exchange, plan, round, rows, expected, &next));
      ASSERT_TRUE(exchange.issue_combine(plan, round).ok());
      status = exchange.wait_combine(plan, round, input, output_view);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    ASSERT_EQ(next, expected.size());
    ASSERT_NO_FATAL_FAILURE(expect_sums(routing, rank, output));
  }
}

struct Shape {
  int num_ranks;
  int64_t num_experts;
  int64_t top_k;
};

class ExchangeRanks : public ::testing::TestWithParam<Shape> {};

// K09, K12: empty ranks, experts and calls; sizes up and down on one exchange; prime and large R; E
// < R.
TEST_P(ExchangeRanks, RowsAndSumsAreExact) {
  const Shape shape = GetParam();
  const uint64_t seed = static_cast<uint64_t>(shape.num_ranks * 100 + shape.num_experts);
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  const std::vector<RoutingCase> cases =
      testing::routing_cases(shape.num_ranks, shape.num_experts, shape.top_k, seed);
  run_group(shape.num_ranks, [&](Group& group) {
    for (const auto& [alignment, budget_rows] :
         {std::pair<int64_t, int64_t>{1, 4096}, {1, 3}, {4, 8}}) {
      ExchangeOptions options;
      options.dtype = DType::kF32;
      options.hidden = kHidden;
      options.num_experts = shape.num_experts;
      options.top_k = shape.top_k;
      options.group_alignment = alignment;
      options.receive_budget_bytes = budget_rows * kHidden * 4;
      Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, options);
      ASSERT_TRUE(exchange.has_value()) << exchange.error().to_string();
      for (const RoutingCase& one : cases) {
        SCOPED_TRACE(one.name);
        ASSERT_NO_FATAL_FAILURE(run_call(**exchange, one, group.rank(), 2));
      }
      // Nobody may leave while a peer still reads its results.
      ASSERT_TRUE(group.barrier().ok());
    }
  });
}

// K11: no order of arrival that the endpoint allows, and no slow rank, changes a bit or hangs.
TEST(Exchange, LateAndReorderedMessagesChangeNothing) {
  for (const uint64_t seed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const std::vector<RoutingCase> cases = testing::routing_cases(4, 7, 2, seed);
    run_group(
        4,
        [&](Group& group) {
          ExchangeOptions options;
          options.dtype = DType::kF32;
          options.hidden = kHidden;
          options.num_experts = 7;
          options.top_k = 2;
          options.receive_budget_bytes = 5 * kHidden * 4;
          Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, options);
          ASSERT_TRUE(exchange.has_value()) << exchange.error().to_string();
          for (size_t i = seed % 2; i < cases.size(); i += 2) {
            SCOPED_TRACE(cases[i].name);
            ASSERT_NO_FATAL_FAILURE(run_call(**exchange, cases[i], group.rank(), 2));
          }
          ASSERT_TRUE(group.barrier().ok());
        },
        [&](GroupOptions& options) {
          options.simulate = fmt::format("seed={},delay_us=120,pause_us=60", seed);
        });
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExchangeRanks,
                         ::testing::Values(Shape{1, 4, 2}, Shape{2, 4, 2}, Shape{3, 7, 3},
                                           Shape{4, 16, 4}, Shape{5, 2, 1}, Shape{7, 9, 9},
                                           Shape{8, 3, 2}, Shape{16, 33, 4}),
                         [](const auto& shape) {
                           return "R" + std::to_string(shape.param.num_ranks) + "E" +
                                  std::to_string(shape.param.num_experts) + "K" +
                                  std::to_string(shape.param.top_k);
                         });

ExchangeOptions small_options() {
  ExchangeOptions options;
  options.dtype = DType::kF32;
  options.hidden = kHidden;
  options.num_experts = 4;
  options.top_k = 2;
  options.receive_budget_bytes = 1 << 16;
  return options;
}

// Several exchanges in flight on one group: all issued before any is waited for.
TEST(Exchange, SeveralInFlight) {
  const std::vector<RoutingCase> cases = testing::routing_cases(3, 4, 2, 8);
  run_group(3, [&](Group& group) {
    std::vector<std::unique_ptr<Exchange>> exchanges;
    std::vector<CountsMatrix> counts(3);
    std::vector<DispatchPlan> plans(3);
    for (int i = 0; i < 3; ++i) {
      Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, small_options());
      ASSERT_TRUE(exchange.has_value());
      exchanges.push_back(std::move(*exchange));
    }
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto routing_of = [&](size_t i) -> const Routing& {
        return cases[i].routings[static_cast<size_t>(group.rank())];
      };
      for (size_t i = 0; i < 3; ++i)
        ASSERT_TRUE(exchanges[i]->issue_counts({}, routing_of(i)).ok());
      for (size_t i = 3; i-- > 0;) {
        ASSERT_TRUE(exchanges[i]->wait_counts(&counts[i]).ok());
        ASSERT_TRUE(exchanges[i]->plan(routing_of(i), counts[i], &plans[i]).ok());
        const std::vector<float> hidden = hidden_of(group.rank(), routing_of(i).num_tokens);
        ASSERT_TRUE(exchanges[i]
                        ->issue_dispatch(plans[i], 0,
                                         ConstTensorView(hidden.data(), DType::kF32,
                                                         {routing_of(i).num_tokens, kHidden}))
                        .ok());
      }
      ReceivedRows rows;
      for (size_t i = 0; i < 3; ++i) {
        ASSERT_TRUE(exchanges[i]->wait_dispatch(plans[i], 0, &rows).ok());
        size_t next = 0;
        ASSERT_NO_FATAL_FAILURE(run_round(*exchanges[i], plans[i], 0, rows,
                                          expected_rows(cases[i], group.rank()), &next));
        ASSERT_TRUE(exchanges[i]->issue_combine(plans[i], 0).ok());
      }
      for (size_t i = 3; i-- > 0;) {
        const Routing& routing = routing_of(i);
        std::vector<float> output(static_cast<size_t>(routing.num_tokens * kHidden));
        CombineInput input;
        input.topk_weights = ConstTensorView(routing.topk_weights.values.data(), DType::kF32,
                                             {routing.num_tokens, routing.top_k});
        ASSERT_TRUE(exchanges[i]
                        ->wait_combine(
                            plans[i], 0, input,
                            TensorView(output.data(), DType::kF32, {routing.num_tokens, kHidden}))
                        .ok());
        ASSERT_NO_FATAL_FAILURE(expect_sums(routing, group.rank(), output));
      }
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

TEST(Exchange, SumStartsFromSharedResidualAndBias) {
  RoutingCase one = testing::routing_cases(2, 4, 2, 3)[2];
  run_group(2, [&](Group& group) {
    Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, small_options());
    ASSERT_TRUE(exchange.has_value());
    const Routing& routing = one.routings[static_cast<size_t>(group.rank())];
    const int64_t tokens = routing.num_tokens;
    const std::vector<float> hidden = hidden_of(group.rank(), tokens);
    CountsMatrix counts;
    DispatchPlan plan;
    ReceivedRows rows;
    ASSERT_TRUE((*exchange)->issue_counts({}, routing).ok());
    ASSERT_TRUE((*exchange)->wait_counts(&counts).ok());
    ASSERT_TRUE((*exchange)->plan(routing, counts, &plan).ok());
    ASSERT_TRUE((*exchange)
                    ->issue_dispatch(plan, 0,
                                     ConstTensorView(hidden.data(), DType::kF32, {tokens, kHidden}))
                    .ok());
    ASSERT_TRUE((*exchange)->wait_dispatch(plan, 0, &rows).ok());
    size_t next = 0;
    ASSERT_NO_FATAL_FAILURE(
        run_round(**exchange, plan, 0, rows, expected_rows(one, group.rank()), &next));
    ASSERT_TRUE((*exchange)->issue_combine(plan, 0).ok());
    std::vector<float> shared(hidden.size());
    std::vector<float> residual(hidden.size());
    std::vector<float> scale(static_cast<size_t>(tokens));
    std::vector<float> bias(kHidden);
    std::vector<uint8_t> mask(static_cast<size_t>(tokens), 1);
    for (size_t i = 0; i < shared.size(); ++i) {
      shared[i] = 0.1f * static_cast<float>(i);
      residual[i] = 1e6f + static_cast<float>(i);
    }
    for (size_t i = 0; i < scale.size(); ++i) scale[i] = 0.3f + static_cast<float>(i);
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = 0.01f * static_cast<float>(i);
    mask[1] = 0;
    CombineInput input;
    input.topk_weights =
        ConstTensorView(routing.topk_weights.values.data(), DType::kF32, {tokens, 2});
    input.shared = ConstTensorView(shared.data(), DType::kF32, {tokens, kHidden});
    input.shared_scale = scale.data();
    input.residual = ConstTensorView(residual.data(), DType::kF32, {tokens, kHidden});
    input.bias = ConstTensorView(bias.data(), DType::kF32, {kHidden});
    input.mask = mask.data();
    std::vector<float> output(hidden.size(), -1.0f);
    ASSERT_TRUE((*exchange)
                    ->wait_combine(plan, 0, input,
                                   TensorView(output.data(), DType::kF32, {tokens, kHidden}))
                    .ok());
    for (int64_t i = 0; i < tokens * kHidden; ++i) {
      const int64_t token = i / kHidden;
      const auto at = static_cast<size_t>(i);
      float want = shared[at] * scale[static_cast<size_t>(token)];
      want += residual[at];
      want += bias[static_cast<size_t>(i % kHidden)];
      for (int64_t k = 0; k < 2; ++k) {
        const auto id = static_cast<size_t>(token * 2 + k);
        if (routing.topk_idx[id] < 0) continue;
        want = std::fma(routing.topk_weights.values[id],
                        expert_value(hidden[at], routing.topk_idx[id]), want);
      }
      EXPECT_EQ(output[at], token == 1 ? 0.0f : want) << i;
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

TEST(Exchange, RefusesCallsOutOfOrderAndForeignPlans) {
  const RoutingCase one = testing::routing_cases(1, 4, 2, 3)[0];
  run_group(1, [&](Group& group) {
    Result<std::unique_ptr<Exchange>> exchange = Exchange::create(group, small_options());
    ASSERT_TRUE(exchange.has_value());
    CountsMatrix counts;
    DispatchPlan plan;
    const Routing& routing = one.routings[0];
    EXPECT_EQ((*exchange)->wait_counts(&counts).code(), StatusCode::kInvalidArgument);
    ASSERT_TRUE((*exchange)->issue_counts({}, routing).ok());
    EXPECT_EQ((*exchange)->issue_counts({}, routing).code(), StatusCode::kInvalidArgument);
    ASSERT_TRUE((*exchange)->wait_counts(&counts).ok());
    ASSERT_TRUE((*exchange)->plan(routing, counts, &plan).ok());
    const std::vector<float> hidden = hidden_of(0, routing.num_tokens);
    const ConstTensorView view(hidden.data(), DType::kF32, {routing.num_tokens, kHidden});
    ReceivedRows rows;
    EXPECT_EQ((*exchange)->wait_dispatch(plan, 0, &rows).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ((*exchange)->issue_combine(plan, 0).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ((*exchange)->issue_dispatch(plan, 1, view).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ((*exchange)->issue_dispatch(plan, 0, view.rows(0, 3)).code(),
              StatusCode::kInvalidArgument);
    DispatchPlan foreign = plan;
    foreign.group_id ^= 1;
    EXPECT_EQ((*exchange)->issue_dispatch(foreign, 0, view).code(), StatusCode::kStalePlan);
    foreign = plan;
    foreign.round_rows += 1;
    EXPECT_EQ((*exchange)->issue_dispatch(foreign, 0, view).code(), StatusCode::kStalePlan);
    EXPECT_TRUE((*exchange)->issue_dispatch(plan, 0, view).ok());
  });
}

TEST(ExchangeSizing, RefusesImpossibleNumbersOfRanks) {
  for (const int num_ranks : {0, -1, 1025, std::numeric_limits<int>::max()}) {
    const Status status = size_exchange(small_options(), num_ranks).error();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(fmt::format("num_ranks is {}", num_ranks)), std::string::npos);
  }
  EXPECT_TRUE(size_exchange(small_options(), 1024).has_value());
}

TEST(ExchangeSizing, OneFunctionForPlanningAndCreation) {
  ExchangeOptions options = small_options();
  options.group_alignment = 16;
  options.receive_budget_bytes = 1000;
  const Result<ExchangeSize> size = size_exchange(options, 4);
  ASSERT_TRUE(size.has_value());
  EXPECT_EQ(size->round_rows, 48);  // 1000 / 20 bytes = 50 rows, down to a multiple of 16
  EXPECT_EQ(size->rows_bytes, 48 * 20);
  EXPECT_EQ(size->total_bytes, 2 * 48 * 20 + size->flags_bytes + 2 * 4 * size->counts_bytes);
  options.receive_budget_bytes = 319;
  const Result<ExchangeSize> small = size_exchange(options, 4);
  ASSERT_FALSE(small.has_value());
  EXPECT_NE(small.error().message().find("319"), std::string::npos);
  EXPECT_NE(small.error().message().find("320"), std::string::npos);
  options = small_options();
  options.top_k = 5;
  EXPECT_NE(size_exchange(options, 4).error().message().find("top_k is 5"), std::string::npos);
  options = small_options();
  options.receive_budget_bytes = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(size_exchange(options, 4).error().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace argosy
