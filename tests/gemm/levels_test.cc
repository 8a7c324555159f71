// Level by level, each counted as skipped where this CPU lacks it: equal to the naive twin where blocks
// of rows, of columns and of k end, at any number of threads; refused by name where it is missing.
#include <gtest/gtest.h>

#include "gemm/gemm_case.h"

namespace argosy {
namespace {

using testing::all_arithmetics;
using testing::below;
using testing::GemmCase;
using testing::GemmSpec;
using testing::kAllValues;

class Levels : public ::testing::TestWithParam<Level> {
 protected:
  void SetUp() override {
    if (!resolve_level(GetParam()).has_value()) {
      GTEST_SKIP() << "this CPU lacks level " << name_of(GetParam());
    }
  }
};

std::string test_name(const ::testing::TestParamInfo<Level>& info) {
  return std::string(name_of(info.param));
}

INSTANTIATE_TEST_SUITE_P(Gemm, Levels, ::testing::ValuesIn(built_levels()), test_name);

void expect_equal_to_twin(Level level, const GemmSpec& spec) {
  SCOPED_TRACE(spec.text());
  const GemmCase gemm(spec);
  ASSERT_TRUE(gemm.run(level) == gemm.expected());
}

// Around 32 k, around chunks of 512 k, and past both.
TEST_P(Levels, EveryEndOfK) {
  std::mt19937 rng(20250102);
  for (GemmSpec spec : all_arithmetics()) {
    for (const int64_t k : {1, 2, 31, 32, 33, 63, 64, 65, 511, 512, 513, 543, 544, 1057}) {
      spec.n = 17;
      spec.k = k;
      spec.sizes = {1, 3, 35};
      spec.values = kAllValues[rng() % 4];
      spec.seed = static_cast<uint32_t>(rng());
      expect_equal_to_twin(GetParam(), spec);
      if (HasFatalFailure()) return;
    }
  }
}

// Every number of rows that a kernel takes at once, and the widest tile with its neighbours.
TEST_P(Levels, EveryNumberOfRows) {
  std::mt19937 rng(20250103);
  for (GemmSpec spec : all_arithmetics()) {
    for (int64_t rows = 1; rows <= 34; ++rows) {
      spec.n = 33;
      spec.k = 67;
      spec.sizes = {rows};
      spec.values = kAllValues[rng() % 4];
      spec.seed = static_cast<uint32_t>(rng());
      expect_equal_to_twin(GetParam(), spec);
      if (HasFatalFailure()) return;
    }
    for (const int64_t rows : {95, 96, 97, 255, 256, 257, 290}) {
      spec.n = 3;
      spec.k = 40;
      spec.sizes = {rows};
      expect_equal_to_twin(GetParam(), spec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Levels, OneHotGroupOnOneToFourThreads) {
  for (GemmSpec spec : all_arithmetics()) {
    spec.n = 100;
    spec.k = 34;
    spec.sizes = {2, 0, 270, 1, 1, 13};
    spec.gaps = {0, 1, 2};
    spec.tail = 3;
    SCOPED_TRACE(spec.text());
    const GemmCase gemm(spec);
    const std::vector<std::byte> want = gemm.expected();
    for (int threads = 1; threads <= 4; ++threads) {
      auto pool = ThreadPool::create(threads);
      ASSERT_TRUE(pool.has_value());
      ASSERT_TRUE(gemm.run(GetParam(), pool->get()) == want) << threads << " threads";
    }
  }
}

TEST(LevelsMissing, AreRefusedWithAListOfWhatThereIs) {
  const GemmCase gemm({.sizes = {2}});
  std::vector<std::byte> out(4);
  int missing = 0;
  for (const Level level : built_levels()) {
    if (resolve_level(level).has_value()) continue;
    ++missing;
    GemmOptions options;
    options.level = level;
    options.dot_order = DotOrder::kAmx;
    const Status status = grouped_gemm(options, gemm.ragged(), gemm.weights(),
                                       TensorView(out.data(), DType::kBF16, {2, 1}));
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    for (const std::string_view part : {name_of(level), std::string_view("reference, generic")}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
  if (missing == 0) GTEST_SKIP() << "this CPU has every level";
}

}  // namespace
}  // namespace argosy
