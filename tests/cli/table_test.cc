// The tool's small parts: tables, load summaries, merged rank errors.
#include <gtest/gtest.h>

#include "tools/load_summary.h"
#include "tools/run_ranks.h"
#include "tools/table.h"

namespace argosy::tools {
namespace {

TEST(Table, ColumnsAreAlignedWithoutTrailingBlanks) {
  EXPECT_EQ(aligned({{"rows", "min", "max"}, {"per expert", "3", "12345"}, {"x"}}),
            "rows        min    max\n"
            "per expert    3  12345\n"
            "x\n");
}

TEST(Table, BarsScaleToTheMostLoaded) {
  EXPECT_EQ(load_bar(10, 10, 4), "####");
  EXPECT_EQ(load_bar(5, 10, 4), "##");
  EXPECT_EQ(load_bar(1, 1000, 4), "#");  // loaded at all shows
  EXPECT_EQ(load_bar(0, 1000, 4), "");
  EXPECT_EQ(load_bar(0, 0, 4), "");
}

TEST(LoadSummary, NamesExtremesMeanAndBalance) {
  const std::vector<int64_t> loads = {2, 9, 4};
  const LoadSummary summary = summarise(loads);
  EXPECT_EQ(summary.min, 2);
  EXPECT_EQ(summary.max, 9);
  EXPECT_DOUBLE_EQ(summary.mean, 5);
  EXPECT_DOUBLE_EQ(summary.balancedness, 5.0 / 9.0);
  EXPECT_EQ(summarise(std::vector<int64_t>{0, 0}).balancedness, 1);
  EXPECT_EQ(summarise({}).balancedness, 1);
}

TEST(RankErrors, AllOkIsOk) { EXPECT_TRUE(merge_rank_errors(std::vector<Status>(3)).ok()); }

TEST(RankErrors, TheRootCauseComesFirstAndGivesTheCode) {
  const std::vector<Status> statuses = {Status(StatusCode::kAborted, "rank 2 gave up"), Status(),
                                        Status(StatusCode::kNonFinite, "token 7 holds NaN"),
                                        Status(StatusCode::kTimeout, "rank 2 is silent"),
                                        Status(StatusCode::kAborted, "rank 2 gave up")};
  const Status merged = merge_rank_errors(statuses);
  EXPECT_EQ(merged.code(), StatusCode::kNonFinite);
  EXPECT_EQ(merged.message(),
            "rank 2: token 7 holds NaN\n"
            "  then rank 3: rank 2 is silent\n"
            "  then ranks 0, 4: rank 2 gave up");
}

TEST(RankErrors, OneMessageOfAllRanksIsSaidOnce) {
  const std::vector<Status> statuses(4, Status(StatusCode::kInvalidArgument, "no layer 9"));
  const Status merged = merge_rank_errors(statuses);
  EXPECT_EQ(merged.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(merged.message(), "no layer 9");
}

TEST(RankErrors, RanksThatOnlyRepeatTheCauseAreLeftOut) {
  const std::vector<Status> statuses = {
      Status(StatusCode::kAborted, "rank 1 aborted the group: NonFinite: token 7 holds NaN"),
      Status(StatusCode::kNonFinite, "token 7 holds NaN")};
  EXPECT_EQ(merge_rank_errors(statuses).message(), "rank 1: token 7 holds NaN");
}

TEST(RankErrors, ATimeoutStaysATimeoutWhenOthersWereAborted) {
  const std::vector<Status> statuses = {Status(StatusCode::kAborted, "a"),
                                        Status(StatusCode::kTimeout, "b")};
  EXPECT_EQ(merge_rank_errors(statuses).code(), StatusCode::kTimeout);
}

TEST(RankErrors, ManyDifferentMessagesAreCut) {
  std::vector<Status> statuses;
  for (int i = 0; i < 20; ++i) statuses.emplace_back(StatusCode::kAborted, std::to_string(i));
  const std::string message = merge_rank_errors(statuses).message();
  EXPECT_NE(message.find("and 15 more messages"), std::string::npos) << message;
}

}  // namespace
}  // namespace argosy::tools
