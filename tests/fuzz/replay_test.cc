// The fuzz targets without a fuzzer: every kept input, 20,000 mutants of them per target and inputs of
// some 1 MB, the same for every compiler; and the watch that the heap bounds rest on.
//
// Each target's invariants stand in its *_fuzz.cc, what they mean in docs/fuzzing.md.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include "fuzz/fuzz_target.h"

namespace argosy::testing {
namespace {

constexpr int kMutants = 20000;
constexpr size_t kMaxBytes = 4096;

std::map<std::string, std::string> kept_inputs(const FuzzTarget& target) {
  std::map<std::string, std::string> inputs;
  const auto folder = std::filesystem::path(ARGOSY_FUZZ_CORPUS) / target.name;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs.emplace(entry.path().filename().string(),
                   std::string(std::istreambuf_iterator<char>(file), {}));
  }
  return inputs;
}

class ReplayTest : public ::testing::TestWithParam<const FuzzTarget*> {};

TEST_P(ReplayTest, KeptInputsHoldEveryInvariant) {
  const auto inputs = kept_inputs(*GetParam());
  EXPECT_GE(inputs.size(), 8u);
  for (const auto& [name, bytes] : inputs) EXPECT_EQ(GetParam()->check(bytes), "") << name;
}

TEST_P(ReplayTest, CorpusHoldsTheSeeds) {
  const auto inputs = kept_inputs(*GetParam());
  for (const auto& [name, bytes] : GetParam()->seeds()) {
    ASSERT_EQ(inputs.count(name), 1u) << name << ": run scripts/make_corpus";
    EXPECT_EQ(inputs.at(name), bytes) << name << ": run scripts/make_corpus";
  }
}

TEST_P(ReplayTest, MutantsHoldEveryInvariant) {
  constexpr uint64_t kSeed = 20240611;
  RecordProperty("seed", static_cast<int>(kSeed));
  const FuzzTarget& target = *GetParam();
  std::vector<std::string> kept;
  for (const auto& [name, bytes] : kept_inputs(target)) kept.push_back(bytes);
  std::vector<std::string> pool = kept;
  Random random(kSeed);
  for (int run = 0; run < kMutants; ++run) {
    const std::string& from = pool[random.below(pool.size())];
    std::string mutant = target.mutate(from, random, random_bytes);
    mutant.resize(std::min(mutant.size(), kMaxBytes));
    ASSERT_EQ(target.check(mutant), "")
        << "seed " << kSeed << " run " << run << ", input " << ::testing::PrintToString(mutant);
    // Mutants of mutants: what one edit refuses, a second may repair.
    if (random.one_in(4)) pool[random.below(pool.size())] = std::move(mutant);
    if (random.one_in(64)) pool[random.below(pool.size())] = kept[random.below(kept.size())];
  }
}

// Inputs so large that a factor on their size cannot hide behind the constant.
TEST_P(ReplayTest, LargeInputsHoldEveryInvariant) {
  ASSERT_NE(GetParam()->large, nullptr);
  const auto inputs = GetParam()->large();
  EXPECT_GE(inputs.size(), 3u);
  for (const auto& [name, bytes] : inputs) EXPECT_EQ(GetParam()->check(bytes), "") << name;
}

INSTANTIATE_TEST_SUITE_P(All, ReplayTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& one) { return std::string(one.param->name); });

template <typename Body>
HeapUse use_of(const Body& body) {
  start_heap_watch();
  body();
  return stop_heap_watch();
}

void* volatile escaped = nullptr;

TEST(HeapWatch, SeesEveryWayIntoTheHeap) {
  const auto expect_about = [](const HeapUse& use, size_t bytes) {
    EXPECT_GE(use.largest, bytes);
    EXPECT_LE(use.largest, bytes + 64);
    EXPECT_GE(use.peak, bytes);
    EXPECT_LE(use.peak, bytes + 64);
  };
  const auto gone = [](void* memory) {
    escaped = memory;
    std::free(memory);
  };
  expect_about(use_of([&] { gone(std::malloc(1000)); }), 1000);
  expect_about(use_of([&] { gone(std::calloc(10, 100)); }), 1000);
  expect_about(use_of([&] { gone(std::aligned_alloc(64, 1024)); }), 1024);
  expect_about(use_of([&] {
                 const auto words = std::make_unique<char[]>(1000);
                 escaped = words.get();
               }),
               1000);
  EXPECT_EQ(use_of([] {}).peak, 0u);
}

TEST(HeapWatch, CountsWhatLivesAtOnce) {
  const HeapUse one_by_one = use_of([] {
    for (int i = 0; i < 10; ++i) escaped = std::make_unique<char[]>(1000).get();
  });
  EXPECT_LE(one_by_one.peak, 1100u);
  const HeapUse together = use_of([] {
    std::vector<std::unique_ptr<char[]>> blocks;
    for (int i = 0; i < 10; ++i) blocks.push_back(std::make_unique<char[]>(1000));
  });
  EXPECT_GE(together.peak, 10000u);
  EXPECT_LE(together.largest, 1100u);
}

TEST(HeapBoundTest, NamesTheNumberThatIsTooLarge) {
  const HeapBound bound = {.peak = 3, .constant = 10};
  EXPECT_EQ(over_bound({.largest = 110, .peak = 310}, bound, 100), "");
  EXPECT_NE(over_bound({.largest = 111, .peak = 0}, bound, 100).find("111"), std::string::npos);
  EXPECT_NE(over_bound({.largest = 0, .peak = 311}, bound, 100).find("311"), std::string::npos);
  const HeapBound tight = {.peak = 3, .constant = 500, .small_largest = 2, .small_constant = 10};
  EXPECT_EQ(over_bound({.largest = 210, .peak = 0}, tight, 100), "");
  EXPECT_NE(over_bound({.largest = 211, .peak = 0}, tight, 100), "");
  EXPECT_EQ(over_bound({.largest = 1500, .peak = 0}, tight, 1000), "");
  EXPECT_NE(over_bound({.largest = 1501, .peak = 0}, tight, 1000), "");
}

TEST(RefusalTest, SeesEachFault) {
  const auto problem = [](StatusCode code, std::string message) {
    return refusal_problem(Status(code, std::move(message)), {StatusCode::kCorruptData});
  };
  EXPECT_EQ(problem(StatusCode::kCorruptData, "caf\xc3\xa9 is 4, want 5"), "");
  EXPECT_NE(problem(StatusCode::kInternal, "other code"), "");
  EXPECT_NE(problem(StatusCode::kCorruptData, ""), "");
  EXPECT_NE(problem(StatusCode::kCorruptData, "\x1b[2J"), "");
  EXPECT_NE(problem(StatusCode::kCorruptData, "cut \xc3"), "");
}

}  // namespace
}  // namespace argosy::testing
