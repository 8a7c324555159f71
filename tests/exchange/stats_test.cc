// What exchanges count: rows of every local expert over all calls, and waits by peer, in both modes.
#include "argosy/exchange_stats.h"

#include <gtest/gtest.h>

#include <vector>

#include "argosy/exchange.h"
#include "argosy/latency.h"
#include "exchange/exchange_rows.h"
#include "exchange/latency_state.h"
#include "support/routing_cases.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(WaitHistogram, BucketsArePowersOfTwo) {
  WaitHistogram waits;
  EXPECT_EQ(waits.quantile_ns(0.5), 0);
  for (const int64_t ns : {0, 1, 2, 3, 4, 1023, 1024}) waits.add(ns);
  waits.add(int64_t{1} << 50);
  EXPECT_EQ(waits.num_waits, 8);
  EXPECT_EQ(waits.buckets[0], 2);
  EXPECT_EQ(waits.buckets[1], 2);
  EXPECT_EQ(waits.buckets[2], 1);
  EXPECT_EQ(waits.buckets[9], 1);
  EXPECT_EQ(waits.buckets[10], 1);
  EXPECT_EQ(waits.buckets[WaitHistogram::kNumBuckets - 1], 1);
  EXPECT_EQ(waits.max_ns, int64_t{1} << 50);
  EXPECT_EQ(waits.quantile_ns(0.25), 2);
  EXPECT_EQ(waits.quantile_ns(0.5), 4);
  EXPECT_EQ(waits.quantile_ns(0.75), 1024);
}

TEST(ExchangeStats, TheStragglerIsWhoWasWaitedForLongest) {
  ExchangeStats stats;
  EXPECT_EQ(stats.straggler(), -1);
  stats.waits.resize(3);
  EXPECT_EQ(stats.straggler(), -1);
  stats.waits[0].add(500);
  stats.waits[2].add(300);
  stats.waits[2].add(300);
  EXPECT_EQ(stats.straggler(), 2);
  const std::string text = describe(stats);
  EXPECT_NE(text.find("rank 2: 2 waits"), std::string::npos) << text;
  EXPECT_NE(text.find("straggler: rank 2"), std::string::npos) << text;
}

constexpr int kSlow = 1;
constexpr int kCalls = 3;

// Every rank saw that it waited for the slow one, and only the slow one, longer than half its sleep.
void expect_straggler(const ExchangeStats& stats, int rank, const RoutingCase& one) {
  EXPECT_EQ(stats.num_calls, kCalls);
  std::vector<int64_t> rows(stats.tokens_received.size());
  const int64_t first = owned_begin(one.num_experts, one.num_ranks, rank);
  for (const Expected& row : expected_rows(one, rank)) {
    rows[static_cast<size_t>(row.expert - first)] += kCalls;
  }
  EXPECT_EQ(stats.tokens_received, rows);
  EXPECT_EQ(stats.waits[static_cast<size_t>(rank)].num_waits, 0);
  if (rank == kSlow) return;
  EXPECT_EQ(stats.straggler(), kSlow);
  EXPECT_GT(stats.waits[kSlow].max_ns, 10'000'000);
  EXPECT_GE(stats.waits[kSlow].num_waits, kCalls);
}

TEST(ExchangeStats, BothModesNameASlowRank) {
  const RoutingCase one = routing_cases(3, 4, 2, 3)[0];
  run_group(3, [&](Group& group) {
    const Routing& routing = one.routings[static_cast<size_t>(group.rank())];
    const std::vector<float> hidden = hidden_of(group.rank(), routing.num_tokens);
    const ConstTensorView rows(hidden.data(), DType::kF32, {routing.num_tokens, kHidden});
    std::vector<float> sums(hidden.size());
    const TensorView output(sums.data(), DType::kF32, {routing.num_tokens, kHidden});
    CombineInput input;
    input.topk_weights = ConstTensorView(routing.topk_weights.values.data(), DType::kF32,
                                         {routing.num_tokens, routing.top_k});
    ExchangeOptions options{DType::kF32, kHidden, 4, 2};
    Result<std::unique_ptr<Exchange>> throughput = Exchange::create(group, options);
    ASSERT_TRUE(throughput.has_value());
    LatencyOptions slots{DType::kF32, kHidden, 4, 2, 32};
    Result<std::unique_ptr<LatencyExchange>> latency = LatencyExchange::create(group, slots);
    ASSERT_TRUE(latency.has_value());
    for (int call = 0; call < kCalls; ++call) {
      if (group.rank() == kSlow) sleep_ms(20);
      CountsMatrix counts;
      DispatchPlan plan;
      ReceivedRows received;
      ASSERT_TRUE((*throughput)->issue_counts({}, routing).ok());
      ASSERT_TRUE((*throughput)->wait_counts(&counts).ok());
      ASSERT_TRUE((*throughput)->plan(routing, counts, &plan).ok());
      ASSERT_TRUE((*throughput)->issue_dispatch(plan, 0, rows).ok());
      ASSERT_TRUE((*throughput)->wait_dispatch(plan, 0, &received).ok());
      ASSERT_TRUE((*throughput)->issue_combine(plan, 0).ok());
      ASSERT_TRUE((*throughput)->wait_combine(plan, 0, input, output).ok());
      if (group.rank() == kSlow) sleep_ms(20);
      LatencyRows slot_rows;
      const Result<uint64_t> number = (*latency)->issue_dispatch({}, routing, rows);
      ASSERT_TRUE(number.has_value());
      ASSERT_TRUE((*latency)->wait_dispatch(*number, &slot_rows).ok());
      ASSERT_TRUE((*latency)->issue_combine(*number).ok());
      ASSERT_TRUE((*latency)->wait_combine(*number, input, output).ok());
    }
    expect_straggler((*throughput)->stats(), group.rank(), one);
    expect_straggler((*latency)->stats(), group.rank(), one);
    ASSERT_TRUE(group.barrier().ok());
  });
}

// What is predicted is what is asked of the endpoint, for every rank.
TEST(LatencySize, IsWhatIsAllocated) {
  for (const int ranks : {1, 2, 5}) {
    for (const ReturnPath path : {ReturnPath::kPull, ReturnPath::kPush}) {
      for (const int64_t in_flight : {1, 3, 4}) {
        LatencyOptions options{DType::kBF16, 33, 7, 3, 11};
        options.training = in_flight == 4;
        options.payload = BlockFormat::kMxfp8;
        options.return_path = path;
        options.num_in_flight = in_flight;
        const Result<ExchangeSize> size = size_exchange(options, ranks);
        ASSERT_TRUE(size.has_value());
        run_group(ranks, [&](Group& group) {
          const Result<std::unique_ptr<LatencyExchange::State>> state =
              LatencyExchange::State::create(group.endpoint(), group.pool(), options, group.id(),
                                             group.step_deadline());
          ASSERT_TRUE(state.has_value());
          int64_t bytes = 0;
          for (const transport::Window window :
               {(*state)->slots, (*state)->results, (*state)->notices, (*state)->flags}) {
            bytes += window.bytes;
          }
          EXPECT_EQ(bytes, size->total_bytes);
          // The last byte of each region is inside its window.
          const LatencyLayout& layout = (*state)->layout;
          EXPECT_EQ(layout.slot(in_flight, 0, 0), (*state)->slots.bytes);
          EXPECT_EQ(path == ReturnPath::kPush ? layout.return_slot(in_flight, 0, 0)
                                              : layout.result(in_flight, 0, 0, 0),
                    (*state)->results.bytes);
          if (options.training) {
            EXPECT_LE(layout.numbers_at + layout.max_entries * 4, layout.header_bytes);
            EXPECT_LE(layout.result_number_at + 4, layout.row_stride);
          }
          EXPECT_EQ(layout.notice(in_flight, 0), (*state)->notices.bytes);
          EXPECT_EQ(layout.flag(in_flight, LatencyLayout::kRows, 0), (*state)->flags.bytes);
          ASSERT_TRUE(group.barrier().ok());
        });
      }
    }
  }
}

}  // namespace
}  // namespace argosy
