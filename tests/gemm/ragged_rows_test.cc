// The padding contract (3.3): rows outside groups are never read and their outputs never written,
// empty groups are normal, and a NaN in a live row stays in its row and is not hidden. Nothing is
// allocated.
#include <gtest/gtest.h>

#include "gemm/gemm_case.h"
#include "support/alloc_counter.h"

namespace argosy {
namespace {

using testing::all_arithmetics;
using testing::GemmCase;
using testing::GemmSpec;

const std::vector<Level> kLevels = testing::usable_levels();

void expect_live_rows_only(GemmSpec spec) {
  for (const GemmSpec& arithmetic : all_arithmetics()) {
    spec.kind = arithmetic.kind;
    spec.rows = arithmetic.rows;
    spec.weights = arithmetic.weights;
    spec.order = arithmetic.order;
    spec.n = 20;
    spec.k = 36;
    SCOPED_TRACE(spec.text());
    const GemmCase gemm(spec);
    const std::vector<std::byte> want = gemm.expected();
    for (const Level level : kLevels) EXPECT_TRUE(gemm.run(level) == want) << name_of(level);
  }
}

TEST(RaggedRows, EmptyGroupInTheMiddle) { expect_live_rows_only({.sizes = {8, 0, 8}}); }  // C084

TEST(RaggedRows, EmptyGroupsFirstMiddleLast) {  // C134
  expect_live_rows_only({.sizes = {8, 0, 8, 0}});
  expect_live_rows_only({.sizes = {0, 8, 0, 8, 0}});
  expect_live_rows_only({.sizes = {0, 0, 0}, .tail = 3});
}

TEST(RaggedRows, PoisonedTail) { expect_live_rows_only({.sizes = {2, 3}, .tail = 3}); }  // C135

TEST(RaggedRows, RowsOfNobodyInWholeTilesAndAtTheEnd) {  // C142
  expect_live_rows_only({.sizes = {33, 5, 1}, .gaps = {64, 31, 32}, .tail = 29});
}

TEST(RaggedRows, OneGroupWithEverythingAndNoRowsAtAll) {
  expect_live_rows_only({.sizes = {70}});
  expect_live_rows_only({.sizes = {0}});
  expect_live_rows_only({.sizes = {0, 0, 0, 0}});
}

TEST(RaggedRows, NoGroups) { expect_live_rows_only({.sizes = {}, .tail = 2}); }

TEST(RaggedRows, OffsetsMayCarryTheTotal) {
  const GemmSpec spec{.n = 5, .k = 9, .sizes = {3, 0, 2}};
  const GemmCase gemm(spec);
  std::vector<int64_t> offsets = gemm.offsets();
  offsets.push_back(5);
  std::vector<std::byte> out(gemm.expected().size());
  const TensorView view(out.data(), DType::kBF16, {5, 5});
  GemmOptions options;
  options.dot_order = DotOrder::kAmx;
  RaggedRows rows = gemm.ragged();
  rows.offsets = offsets;
  ASSERT_TRUE(grouped_gemm(options, rows, gemm.weights(), view).ok());
  EXPECT_TRUE(out == gemm.expected());
}

// C139: the NaN reaches every output of its row, and no other row's bits change.
TEST(RaggedRows, ANaNOrInfinityStaysInItsRow) {
  for (GemmSpec spec : all_arithmetics()) {
    for (const uint32_t bits : {0x7FC00000u, 0xFFA50000u, 0x7F800000u}) {
      spec.n = 35;
      spec.k = 33;
      spec.sizes = {6, 5};
      SCOPED_TRACE(spec.text());
      GemmCase gemm(spec);
      const std::vector<std::byte> clean = gemm.run(Level::kGeneric);
      constexpr int64_t kBadRow = 7;
      gemm.set_element(kBadRow, 32, std::bit_cast<float>(bits));
      const int64_t row_bytes = spec.n * size_of(spec.rows);
      for (const Level level : kLevels) {
        const std::vector<std::byte> got = gemm.run(level);
        ASSERT_TRUE(got == gemm.expected());
        for (int64_t row = 0; row < 11; ++row) {
          const bool equal =
              std::equal(got.begin() + row * row_bytes, got.begin() + (row + 1) * row_bytes,
                         clean.begin() + row * row_bytes);
          EXPECT_EQ(equal, row != kBadRow);
        }
        for (int64_t n = 0; bits != 0x7F800000u && n < spec.n; ++n) {
          const float value =
              GemmCase::load(got.data() + kBadRow * row_bytes + n * size_of(spec.rows), spec.rows);
          EXPECT_EQ(testing::bits_of(value), 0x7FC00000u) << n;
        }
      }
    }
  }
}

// The first call of a thread may grow what it keeps for staged rows.
TEST(RaggedRows, ASecondCallAllocatesNothing) {
  if (!testing::is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  ASSERT_TRUE(resolve_level({}).has_value());  // detects once, with allocations
  for (GemmSpec spec : all_arithmetics()) {
    spec.n = 40;
    spec.k = 40;
    spec.sizes = {40, 0, 3};
    const GemmCase gemm(spec);
    std::vector<std::byte> out(gemm.expected().size());
    const TensorView view(out.data(), spec.rows, {43, 40});
    for (const Level level : kLevels) {
      GemmOptions options;
      options.level = level;
      options.dot_order = spec.order;
      const RaggedRows rows = gemm.ragged();
      ASSERT_TRUE(grouped_gemm(options, rows, gemm.weights(), view).ok());
      const int64_t before = testing::num_allocations();
      const Status status = grouped_gemm(options, rows, gemm.weights(), view);
      EXPECT_EQ(testing::num_allocations() - before, 0) << name_of(level);
      EXPECT_TRUE(status.ok());
    }
  }
}

}  // namespace
}  // namespace argosy
