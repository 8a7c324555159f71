// The grid of ranks: sizes that are resolved before anything compares them, sizes that are refused by their rule, groups that
// tile the world, and tokens that several ranks are given.
#include "argosy/rank_grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "argosy/plan.h"

namespace argosy {
namespace {

RankGrid grid_of(const RankGridOptions& options) {
  const Result<RankGrid> grid = RankGrid::create(options);
  EXPECT_TRUE(grid.has_value()) << grid.error().to_string();
  return *grid;
}

// Case C238: -1 on four ranks is 4 before anything is compared, the settings of an agreement included.
TEST(RankGrid, MinusOneIsTheWholeWorldBeforeAnyComparison) {
  for (int num_ranks = 1; num_ranks <= 64; ++num_ranks) {
    const RankGrid grid = grid_of({.num_ranks = num_ranks, .ep = -1});
    EXPECT_EQ(grid.ep(), num_ranks);
    EXPECT_EQ(grid.copies(), 1);
    const std::vector<Setting> given =
        grid_of({.num_ranks = num_ranks, .ep = num_ranks}).settings();
    const std::vector<Setting> resolved = grid.settings();
    ASSERT_EQ(given.size(), resolved.size());
    for (size_t i = 0; i < given.size(); ++i) {
      EXPECT_EQ(given[i].field, resolved[i].field);
      EXPECT_EQ(given[i].value, resolved[i].value);
    }
  }
  EXPECT_EQ(grid_of({.num_ranks = 4, .ep = -1}).settings()[1].value, "4");
}

// Case C240: 8 experts on 2 ranks are 4 each; 2 on 4 ranks stand by the rule of contiguous shares; an EP size of 3 does not divide 4.
TEST(RankGrid, SizesThatDoNotDivideTheWorldAreRefusedWithTheRule) {
  for (int num_ranks = 1; num_ranks <= 32; ++num_ranks) {
    for (int size = -3; size <= 40; ++size) {
      const bool divides = size >= 1 && num_ranks % size == 0;
      const auto by_ep = RankGrid::create({.num_ranks = num_ranks, .ep = size});
      EXPECT_EQ(by_ep.has_value(), divides || size == -1) << num_ranks << " " << size;
      const auto by_replicas = RankGrid::create({.num_ranks = num_ranks, .token_replicas = size});
      EXPECT_EQ(by_replicas.has_value(), divides) << num_ranks << " " << size;
    }
  }
  const Status status = RankGrid::create({.num_ranks = 4, .ep = 3}).error();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("groups of 3 ranks do not divide a world of 4"),
            std::string::npos)
      << status.to_string();
  const Status replicas = RankGrid::create({.num_ranks = 4, .token_replicas = 3}).error();
  EXPECT_NE(replicas.message().find("3 replicas of every token do not divide a world of 4 ranks"),
            std::string::npos)
      << replicas.to_string();
  EXPECT_FALSE(RankGrid::create({.num_ranks = 0}).has_value());
  EXPECT_FALSE(RankGrid::create({.num_ranks = 1025}).has_value());
}

TEST(RankGrid, ExpertsOfAGroupStandByOneRule) {
  const RankGrid two = grid_of({.num_ranks = 2});
  const Placement eight{8, two.ep(), 0};
  EXPECT_EQ(eight.num_local(0), 4);
  EXPECT_EQ(eight.num_local(1), 4);
  const RankGrid four = grid_of({.num_ranks = 4});
  const Placement fewer{2, four.ep(), 0};  // fewer experts than ranks
  EXPECT_EQ(fewer.num_local(0) + fewer.num_local(1), 1);
  EXPECT_EQ(fewer.num_local(2) + fewer.num_local(3), 1);
  EXPECT_EQ(fewer.owner(0), 1);
  EXPECT_EQ(fewer.owner(1), 3);
}

TEST(RankGrid, GroupsTileTheWorldAndAreNeverEmpty) {
  for (int num_ranks = 1; num_ranks <= 24; ++num_ranks) {
    for (int ep = 1; ep <= num_ranks; ++ep) {
      for (int replicas = 1; replicas <= num_ranks; ++replicas) {
        if (num_ranks % ep != 0 || num_ranks % replicas != 0) continue;
        const RankGrid grid =
            grid_of({.num_ranks = num_ranks, .ep = ep, .token_replicas = replicas});
        std::set<std::vector<int>> rows, columns, shares;
        for (int rank = 0; rank < num_ranks; ++rank) {
          const std::vector<int> row = grid.ep_ranks(rank), column = grid.copies_ranks(rank);
          ASSERT_EQ(row.size(), static_cast<size_t>(ep));
          ASSERT_EQ(column.size(), static_cast<size_t>(num_ranks / ep));
          EXPECT_EQ(row[static_cast<size_t>(grid.column(rank))], rank);
          EXPECT_EQ(column[static_cast<size_t>(grid.row(rank))], rank);
          const std::vector<int> same = grid.replica_ranks(rank);
          EXPECT_EQ(std::count(same.begin(), same.end(), rank), 1);
          rows.insert(row);
          columns.insert(column);
          shares.insert(same);
        }
        EXPECT_EQ(rows.size(), static_cast<size_t>(num_ranks / ep));
        EXPECT_EQ(columns.size(), static_cast<size_t>(ep));
        EXPECT_EQ(shares.size(), static_cast<size_t>(num_ranks / replicas));
      }
    }
  }
}

TEST(RankGrid, ReplicasBringEveryTokenOnce) {
  for (const int replicas : {1, 2, 3, 4, 8}) {
    const RankGrid grid = grid_of({.num_ranks = 2 * replicas, .token_replicas = replicas});
    for (const int64_t num_tokens : {0, 1, 2, 3, 7, 64, 1000}) {
      for (int first = 0; first < grid.num_ranks(); first += replicas) {
        int64_t next = 0;
        for (const int rank : grid.replica_ranks(first)) {
          const TokenRange share = grid.token_share(rank, num_tokens);
          EXPECT_EQ(share.first, next);
          EXPECT_GE(share.count, 0);
          EXPECT_LE(share.count, num_tokens / replicas + 1);
          next = share.first + share.count;
        }
        EXPECT_EQ(next, num_tokens);
      }
    }
  }
}

}  // namespace
}  // namespace argosy
