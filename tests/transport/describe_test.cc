// Texts of ranks: ranges, bounds.
#include "transport/describe.h"

#include <gtest/gtest.h>

#include <vector>

namespace argosy::transport {
namespace {

TEST(Describe, RanksAsRanges) {
  EXPECT_EQ(describe_ranks(std::vector<int>{}), "");
  EXPECT_EQ(describe_ranks(std::vector<int>{3}), "3");
  EXPECT_EQ(describe_ranks(std::vector<int>{0, 2, 3, 4, 7}), "0, 2-4, 7");
  EXPECT_EQ(describe_ranks(std::vector<int>{0, 1, 2}), "0-2");
}

TEST(Describe, SilencesWithNumbers) {
  EXPECT_EQ(describe_silences(std::vector<Silence>{{2, 4, 5}, {7, 0, 5}}),
            "rank 2 (have 4, want 5), rank 7 (have 0, want 5)");
  EXPECT_EQ(describe_silences(std::vector<Silence>{{2, 0, 0}}), "rank 2");
}

TEST(Describe, ManySilencesStayShortAndNameAll) {
  std::vector<Silence> silences;
  for (int peer = 0; peer < 1024; ++peer) silences.push_back({peer, 1, 2});
  const std::string text = describe_silences(silences);
  EXPECT_LT(text.size(), 600u);
  EXPECT_NE(text.find("rank 15 (have 1, want 2) and 1008 more: 16-1023"), std::string::npos)
      << text;
}

}  // namespace
}  // namespace argosy::transport
