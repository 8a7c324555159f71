// The time line and the traffic of a report: against the stage times, the plan's own totals and
// each other.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <numeric>

#include "argosy/moe.h"
#include "moe/timeline.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

constexpr int64_t kTokens = 20;
constexpr int64_t kHidden = 32;
constexpr int64_t kTopK = 3;

struct Call {
  MoeReport report;
  DispatchPlan plan;
};

// One forward call of a random layer of 8 experts; report of every rank.
std::vector<Call> run_layer(int num_ranks, int64_t budget_rows, const std::vector<uint8_t>& mask) {
  const testing::NaiveLayer layer =
      testing::random_layer(7, DType::kF32, DotOrder::kVdpbf16, 8, kTopK, kHidden, 16, true, true);
  std::vector<Call> calls(static_cast<size_t>(num_ranks));
  testing::run_group(num_ranks, [&](Group& group) {
    std::mt19937_64 random(static_cast<uint64_t>(group.rank()));
    const Tensor hidden = testing::to_tensor(
        testing::random_matrix(random, kTokens, kHidden, 1.0f, false), DType::kF32);
    Tensor output = std::move(Tensor::zeros(DType::kF32, {kTokens, kHidden})).value();
    MoeOptions options;
    options.hidden_dtype = DType::kF32;
    options.receive_budget_bytes = budget_rows * kHidden * 4;
    Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), num_ranks);
    Result<std::unique_ptr<MoeLayer>> moe =
        MoeLayer::create(group, layer.router, std::move(*weights), options);
    ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
    Call& call = calls[static_cast<size_t>(group.rank())];
    // Twice: the second report must not add to the first.
    for (int i = 0; i < 2; ++i) {
      const Status status = (*moe)->forward(hidden.view(), mask.empty() ? nullptr : mask.data(),
                                            output.view(), &call.report);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    call.plan = (*moe)->plan();
  });
  return calls;
}

void expect_spans_tile_the_call(const MoeReport& report) {
  ASSERT_FALSE(report.spans.empty());
  std::map<MoeStage, double> sums;
  for (size_t i = 0; i < report.spans.size(); ++i) {
    const StageSpan& span = report.spans[i];
    EXPECT_LE(span.begin, span.end) << i;
    if (i > 0) {
      EXPECT_EQ(span.begin, report.spans[i - 1].end) << i;
    }
    sums[span.stage] += span.end - span.begin;
  }
  EXPECT_EQ(sums.size(), static_cast<size_t>(kNumMoeStages));
  for (const auto& [stage, seconds] : sums) {
    EXPECT_NEAR(seconds, seconds_of(report.seconds, stage), 1e-6) << name_of(stage);
  }
  EXPECT_NEAR(report.spans.back().end - report.spans.front().begin, report.seconds.total, 1e-6);
}

struct Sums {
  int64_t rows = 0;
  int64_t bytes = 0;
};

std::map<std::string, Sums> sums_of(const MoeReport& report) {
  std::map<std::string, Sums> sums;
  for (const StageSpan& span : report.spans) {
    sums[name_of(span.stage)].rows += span.rows;
    sums[name_of(span.stage)].bytes += span.bytes;
  }
  return sums;
}

void expect_traffic_adds_up(const std::vector<Call>& calls) {
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    SCOPED_TRACE(fmt::format("rank {} of {}", rank, calls.size()));
    const auto& [report, plan] = calls[rank];
    const int64_t all =
        std::accumulate(report.sent_rows.begin(), report.sent_rows.end(), int64_t{});
    const int64_t once =
        std::accumulate(report.sent_rows_dedup.begin(), report.sent_rows_dedup.end(), int64_t{});
    EXPECT_EQ(all - report.sent_rows[rank], plan.rows_leaving);
    EXPECT_EQ(once - report.sent_rows_dedup[rank], plan.rows_leaving_dedup);
    EXPECT_EQ(report.row_bytes, kHidden * 4);
    int64_t received = 0;
    for (const Call& other : calls) received += other.report.sent_rows[rank];
    EXPECT_EQ(received, report.rows_per_rank[rank]);

    std::map<std::string, Sums> sums = sums_of(report);
    EXPECT_EQ(sums["dispatch"].rows, once);
    EXPECT_EQ(sums["dispatch"].bytes, report.dispatch_bytes);
    EXPECT_EQ(sums["experts"].rows, received);
    EXPECT_EQ(sums["experts"].bytes, 0);
    EXPECT_EQ(sums["combine"].rows, all);
    EXPECT_EQ(sums["combine"].bytes, report.combine_bytes);
    EXPECT_EQ(sums["counts"].rows, 0);
    EXPECT_EQ(sums["shared"].rows, sums["route"].rows);
  }
}

// By token, destination and round, the way the words of the header say it.
int64_t distinct_rows(const DispatchPlan& plan, int dest) {
  std::vector<std::array<int64_t, 2>> seen;
  for (size_t at = 0; at < plan.dest_rank.size(); ++at) {
    if (plan.dest_rank[at] != dest) continue;
    seen.push_back({static_cast<int64_t>(at) / plan.top_k, plan.dest_slot[at] / plan.round_rows});
  }
  std::sort(seen.begin(), seen.end());
  return std::unique(seen.begin(), seen.end()) - seen.begin();
}

TEST(Timeline, SpansTileTheCallAndTrafficAddsUp) {
  for (const int num_ranks : {1, 2, 3, 5, 11}) {
    for (const int64_t budget_rows : {1000, 17, 6}) {
      SCOPED_TRACE(fmt::format("{} ranks, budget of {} rows", num_ranks, budget_rows));
      const std::vector<Call> calls = run_layer(num_ranks, budget_rows, {});
      for (const Call& call : calls) {
        expect_spans_tile_the_call(call.report);
        EXPECT_EQ(call.report.spans.size(), static_cast<size_t>(4 + 3 * call.report.num_rounds));
        EXPECT_EQ(call.report.dropped_spans, 0);
        EXPECT_EQ(call.report.spans[0].rows, kTokens);
        for (int dest = 0; dest < num_ranks; ++dest) {
          EXPECT_EQ(call.report.sent_rows_dedup[static_cast<size_t>(dest)],
                    distinct_rows(call.plan, dest));
        }
      }
      expect_traffic_adds_up(calls);
    }
  }
}

TEST(Timeline, EachRoundHasItsOwnRows) {
  const std::vector<Call> calls = run_layer(2, 6, {});
  const MoeReport& report = calls[0].report;
  ASSERT_GT(report.num_rounds, 5);
  std::vector<int64_t> offsets, sizes;
  for (int64_t round = 0; round < report.num_rounds; ++round) {
    const StageSpan& span = report.spans[static_cast<size_t>(4 + 3 * round + 1)];
    EXPECT_EQ(span.stage, MoeStage::kExperts);
    EXPECT_EQ(span.round, round);
    round_groups(calls[0].plan, round, &offsets, &sizes);
    EXPECT_EQ(span.rows, std::accumulate(sizes.begin(), sizes.end(), int64_t{})) << round;
  }
}

TEST(Timeline, MaskedTokensCountNowhere) {
  std::vector<uint8_t> mask(kTokens, 1);
  mask[0] = mask[7] = mask[19] = 0;
  const std::vector<Call> calls = run_layer(3, 1000, mask);
  expect_traffic_adds_up(calls);
  EXPECT_EQ(calls[1].report.spans[0].rows, kTokens - 3);
  EXPECT_EQ(sums_of(calls[1].report)["combine"].rows, (kTokens - 3) * kTopK);
}

TEST(Timeline, RoundsPastTheKeptOnesAreCountedAndStillTimed) {
  Timeline timeline;
  timeline.start();
  for (const MoeStage stage :
       {MoeStage::kRoute, MoeStage::kCounts, MoeStage::kShared, MoeStage::kCounts}) {
    timeline.lap(stage);
  }
  constexpr int64_t kRounds = MoeReport::kMaxTimedRounds + 10;
  for (int64_t round = 0; round < kRounds; ++round) {
    for (const MoeStage stage : {MoeStage::kDispatch, MoeStage::kExperts, MoeStage::kCombine}) {
      timeline.lap(stage, round);
    }
  }
  MoeReport report;
  timeline.write(&report);
  EXPECT_EQ(report.dropped_spans, 30);
  EXPECT_EQ(report.spans.size(), static_cast<size_t>(4 + 3 * MoeReport::kMaxTimedRounds));
  double sum = 0;
  for (int stage = 0; stage < kNumMoeStages; ++stage) {
    sum += seconds_of(report.seconds, static_cast<MoeStage>(stage));
  }
  EXPECT_NEAR(sum, report.seconds.total, 1e-6);
  EXPECT_LT(report.spans.back().end - report.spans.front().begin, report.seconds.total);

  // Rows of rounds that are not kept must not land elsewhere.
  DispatchPlan plan;
  plan.num_ranks = 1;
  plan.top_k = 1;
  plan.round_rows = 1;
  plan.num_rounds = kRounds;
  plan.num_tokens = kRounds;
  plan.group_sizes = {kRounds};
  plan.group_offsets = {0, kRounds};
  plan.dest_rank.assign(kRounds, 0);
  plan.dest_slot.resize(kRounds);
  std::iota(plan.dest_slot.begin(), plan.dest_slot.end(), 0);
  count_traffic(plan, kRounds, &report);
  EXPECT_EQ(report.sent_rows, std::vector<int64_t>{kRounds});
  for (size_t at = 4; at < report.spans.size(); ++at) EXPECT_EQ(report.spans[at].rows, 1) << at;
}

}  // namespace
}  // namespace argosy
