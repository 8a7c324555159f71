// The record that a rank sends to rank 0: what goes in comes out; anything else is refused.
#include "tools/rank_record.h"

#include <gtest/gtest.h>

namespace argosy::tools {
namespace {

RankRecord full_record() {
  RankRecord record;
  record.weight_bytes_read = 1;
  record.weight_bytes = {31, 32, 33};
  record.pinned_cpus = {34, -1};
  record.report.rows_per_expert = {2, 3};
  record.report.rows_per_rank = {4};
  record.report.num_rounds = 5;
  record.report.dispatch_bytes = 6;
  record.report.combine_bytes = 7;
  record.report.saved_by_dedup_bytes = 8;
  record.report.num_nonfinite_rows = 9;
  record.report.seconds.combine = 10;
  record.report.sent_rows = {21, 22};
  record.report.sent_rows_dedup = {23};
  record.report.row_bytes = 24;
  record.report.dropped_spans = 25;
  record.report.spans = {{MoeStage::kCombine, 26, 27, 28, 29, 30}};
  record.seconds = {StageTimes{11, 12, 13, 14, 15, 16, 17}, StageTimes{}};
  record.output = {std::byte{18}, std::byte{19}};
  record.topk_idx = {20, -1};
  record.topk_weights = {0.5f};
  return record;
}

TEST(RankRecord, ComesBackWhole) {
  const Result<RankRecord> back = rank_record_from(to_bytes(full_record()));
  ASSERT_TRUE(back.has_value()) << back.error().message();
  EXPECT_EQ(back->weight_bytes_read, 1);
  EXPECT_EQ(back->weight_bytes.gate, 31);
  EXPECT_EQ(back->weight_bytes.expert, 32);
  EXPECT_EQ(back->weight_bytes.shared, 33);
  EXPECT_EQ(back->pinned_cpus, (std::vector<int32_t>{34, -1}));
  EXPECT_EQ(back->report.rows_per_expert, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(back->report.rows_per_rank, (std::vector<int64_t>{4}));
  EXPECT_EQ(back->report.num_rounds, 5);
  EXPECT_EQ(back->report.dispatch_bytes, 6);
  EXPECT_EQ(back->report.combine_bytes, 7);
  EXPECT_EQ(back->report.saved_by_dedup_bytes, 8);
  EXPECT_EQ(back->report.num_nonfinite_rows, 9);
  EXPECT_EQ(back->report.seconds.combine, 10);
  EXPECT_EQ(back->report.sent_rows, (std::vector<int64_t>{21, 22}));
  EXPECT_EQ(back->report.sent_rows_dedup, (std::vector<int64_t>{23}));
  EXPECT_EQ(back->report.row_bytes, 24);
  EXPECT_EQ(back->report.dropped_spans, 25);
  ASSERT_EQ(back->report.spans.size(), 1u);
  EXPECT_EQ(back->report.spans[0].stage, MoeStage::kCombine);
  EXPECT_EQ(back->report.spans[0].bytes, 30);
  ASSERT_EQ(back->seconds.size(), 2u);
  EXPECT_EQ(back->seconds[0].total, 17);
  EXPECT_EQ(back->output, full_record().output);
  EXPECT_EQ(back->topk_idx, (std::vector<int32_t>{20, -1}));
  EXPECT_EQ(back->topk_weights, (std::vector<float>{0.5f}));
}

TEST(RankRecord, TruncatedLongerAndLyingBytesAreRefused) {
  std::vector<std::byte> bytes = to_bytes(full_record());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(rank_record_from(std::span(bytes).first(size)).has_value()) << size;
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(rank_record_from(bytes).has_value());
  bytes = to_bytes(full_record());
  for (size_t at = 0; at < 8; ++at) bytes[at] = std::byte{0x7F};  // a count near 2^63
  EXPECT_FALSE(rank_record_from(bytes).has_value());
}

TEST(RankRecord, AnUnknownStageIsRefused) {
  for (const int32_t stage : {-1, kNumMoeStages}) {
    RankRecord record = full_record();
    record.report.spans[0].stage = static_cast<MoeStage>(stage);
    EXPECT_FALSE(rank_record_from(to_bytes(record)).has_value()) << stage;
  }
}

}  // namespace
}  // namespace argosy::tools
