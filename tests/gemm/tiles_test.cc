// Tiles: every row of every group by every panel exactly once, big ones first, at any size; and the table
// of heuristics they are cut by.
#include "gemm/tiles.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "argosy/cpu.h"
#include "gemm/heuristics.h"
#include "gemm/kernels.h"

namespace argosy::gemm {
namespace {

TEST(Parts, CoverEverythingInNearlyEqualPieces) {
  for (int64_t total = 0; total < 40; ++total) {
    for (int64_t parts = 1; parts < 12; ++parts) {
      int64_t end = 0;
      for (int64_t at = 0; at < parts; ++at) {
        const Part part = part_of(total, parts, at);
        EXPECT_EQ(part.first, end);
        EXPECT_GE(part.count, total / parts);
        EXPECT_LE(part.count, ceil_div(total, parts));
        end += part.count;
      }
      EXPECT_EQ(end, total);
    }
  }
}

std::vector<int64_t> random_sizes(std::mt19937& rng) {
  std::vector<int64_t> sizes(1 + rng() % 9);
  for (int64_t& size : sizes) size = rng() % 3 == 0 ? 0 : static_cast<int64_t>(rng() % 300);
  return sizes;
}

TEST(Tiles, CoverEveryRowAndPanelOnce) {
  constexpr uint32_t kSeed = 20250101;
  std::mt19937 rng(kSeed);
  for (int round = 0; round < 300; ++round) {
    const std::vector<int64_t> sizes = random_sizes(rng);
    const Tiles::Limits limits{.tile_rows = 1 + static_cast<int64_t>(rng() % 100),
                               .num_panels = 1 + static_cast<int64_t>(rng() % 20),
                               .num_threads = 1 + static_cast<int64_t>(rng() % 4),
                               .tasks_per_thread = 1 + static_cast<int64_t>(rng() % 20)};
    SCOPED_TRACE(fmt::format("seed {} round {}", kSeed, round));
    const Tiles tiles(sizes, limits);
    std::vector<std::vector<int>> seen;
    for (const int64_t size : sizes) {
      seen.emplace_back(static_cast<size_t>(size * limits.num_panels), 0);
    }
    // Each task by one of two cursors, as two threads would take them.
    Tiles::Cursor cursors[2];
    for (int64_t task = 0; task < tiles.num_tasks(); ++task) {
      const Tile tile = tiles.at(task, &cursors[rng() % 2]);
      ASSERT_GE(tile.rows.count, 1);
      ASSERT_LE(tile.rows.count, limits.tile_rows);
      ASSERT_GE(tile.panels.count, 1);
      for (int64_t row = tile.rows.first; row < tile.rows.first + tile.rows.count; ++row) {
        for (int64_t p = tile.panels.first; p < tile.panels.first + tile.panels.count; ++p) {
          ++seen.at(static_cast<size_t>(tile.group))
                .at(static_cast<size_t>(row * limits.num_panels + p));
        }
      }
    }
    for (const std::vector<int>& group : seen) {
      for (const int count : group) ASSERT_EQ(count, 1);
    }
  }
}

TEST(Tiles, BigOnesComeFirstForSeveralThreads) {
  const std::vector<int64_t> sizes = {3, 96 * 20, 0, 40, 500, 1};
  const Tiles tiles(sizes,
                    {.tile_rows = 96, .num_panels = 64, .num_threads = 2, .tasks_per_thread = 16});
  Tiles::Cursor cursor;
  std::vector<int64_t> groups;
  for (int64_t task = 0; task < tiles.num_tasks(); ++task) {
    const int64_t group = tiles.at(task, &cursor).group;
    if (groups.empty() || groups.back() != group) groups.push_back(group);
  }
  EXPECT_EQ(groups, (std::vector<int64_t>{1, 4, 3, 0, 5}));
}

TEST(Tiles, OneThreadTakesGroupsInOrderAndWholePanels) {
  const std::vector<int64_t> sizes = {3, 200, 0, 40};
  const Tiles tiles(sizes,
                    {.tile_rows = 96, .num_panels = 64, .num_threads = 1, .tasks_per_thread = 16});
  ASSERT_EQ(tiles.num_tasks(), 5);
  Tiles::Cursor cursor;
  int64_t last = 0;
  for (int64_t task = 0; task < 5; ++task) {
    const Tile tile = tiles.at(task, &cursor);
    EXPECT_GE(tile.group, last);
    last = tile.group;
    EXPECT_EQ(tile.panels.count, 64);
  }
}

// K16: one token for two threads still keeps both busy; more tasks than panels there cannot be.
TEST(Tiles, FewRowsAreCutByPanels) {
  const std::vector<int64_t> sizes = {0, 1, 0, 1};
  const Tiles tiles(sizes,
                    {.tile_rows = 96, .num_panels = 64, .num_threads = 2, .tasks_per_thread = 16});
  EXPECT_EQ(tiles.num_tasks(), 32);
  const Tiles narrow(sizes,
                     {.tile_rows = 96, .num_panels = 3, .num_threads = 2, .tasks_per_thread = 16});
  EXPECT_EQ(narrow.num_tasks(), 6);
}

// K16: sizes on both sides of every width boundary, by exact arithmetic; nothing is allocated.
TEST(Tiles, CountsAndPlacesAreExactBeyond32Bits) {
  for (const int bits : {15, 16, 31, 32, 33, 47}) {
    for (const int64_t off : {-1, 0, 1}) {
      const int64_t size = (int64_t{1} << bits) + off;
      const std::vector<int64_t> sizes = {5, size};
      const Tiles tiles(sizes, {.tile_rows = 96, .num_panels = 1});
      const int64_t count = ceil_div(size, 96);
      ASSERT_EQ(tiles.num_tasks(), 1 + count);
      Tiles::Cursor cursor;
      const Tile last = tiles.at(count, &cursor);
      EXPECT_EQ(last.group, 1);
      EXPECT_EQ(last.rows.first + last.rows.count, size);
      EXPECT_EQ(last.rows.count, size / count);
    }
  }
}

TEST(Heuristics, ATileIsWholeRowBlocksThatFit) {
  const GemmHeuristics some{.tile_rows = 96, .tile_bytes = 512 * 1024};
  EXPECT_EQ(tile_rows_for(some, 4096, 12), 96);
  EXPECT_EQ(tile_rows_for(some, 4096, 7), 91);
  EXPECT_EQ(tile_rows_for(some, 14336, 12), 36);
  EXPECT_EQ(tile_rows_for(some, int64_t{1} << 40, 12), 12);
  EXPECT_EQ(tile_rows_for(some, 2, 12), 96);
  EXPECT_EQ(tile_rows_for(some, 2, 256), 256);
}

TEST(Heuristics, TheTableHasEveryBuiltLevel) {
  const std::vector<GemmHeuristics> table = gemm_heuristics();
  ASSERT_EQ(table.size(), built_levels().size());
  for (size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(table[i].level, built_levels()[i]);
    const GemmHeuristics& used = heuristics_for(table[i].level);
    EXPECT_EQ(used.level, table[i].level);
    EXPECT_EQ(table[i].tile_rows, used.tile_rows);
    EXPECT_GE(used.tile_rows, 1);
    EXPECT_GE(used.tile_bytes, 1);
    EXPECT_GE(used.tasks_per_thread, 1);
    for (const int64_t rows :
         {table[i].row_block_amx, table[i].row_block_vdpbf16, table[i].row_block_f32}) {
      EXPECT_GE(rows, 1);
      EXPECT_LE(rows, kMaxRowBlock);
    }
  }
}

}  // namespace
}  // namespace argosy::gemm
