// Floors by given rates, against the formulas of docs/perf/layer.md worked by hand; the words about
// pinning; what table, JSON and page say of both. No figure here depends on the machine's speed.
#include "tools/floors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cli/cli_process.h"
#include "tools/pinning_text.h"
#include "tools/run_report.h"

namespace argosy::testing {
namespace {

using nlohmann::json;
using tools::FloorRates;
using tools::Floors;
using tools::LayerCosts;
using tools::RankWork;
using tools::StageWork;
using tools::StageWorks;
using Words = std::vector<std::string>;

constexpr size_t at(MoeStage stage) { return static_cast<size_t>(stage); }

// The layer of docs/perf/layer.md: 32 experts, H 2048, F 1024, bf16.
LayerCosts bench_layer() {
  LayerCosts layer;
  layer.hidden_dtype = DType::kBF16;
  layer.hidden = 2048;
  layer.intermediate = 1024;
  layer.num_experts = 32;
  layer.gate_bytes = 32 * 2048 * 2;
  layer.expert_bytes = 3 * 2048 * 1024 * 2;
  return layer;
}

FloorRates rates_of(double one, double all) {
  FloorRates rates;
  rates.one_rank = {1, 400e9 * one, 200e9 * one, 20e9 * one, 30e9 * one, 80e9 * one, 90e9 * one};
  rates.all_ranks = {2, 400e9 * all, 200e9 * all, 20e9 * all, 30e9 * all, 80e9 * all, 90e9 * all};
  rates.last_cache_bytes = 32 << 20;
  return rates;
}

TEST(FloorWork, FollowsTheFormulasOfTheDocument) {
  const int64_t tokens = 2048, top_k = 4;
  const StageWorks works =
      tools::works_of(bench_layer(), RankWork{tokens, tokens * top_k, tokens * top_k, 32});
  const StageWork& experts = works[at(MoeStage::kExperts)];
  EXPECT_EQ(experts.operations, 6.0 * 2048 * 4 * 2048 * 1024);
  EXPECT_EQ(experts.read_bytes, 384.0 * (1 << 20));  // the document's figure
  EXPECT_EQ(experts.moved_bytes, 0);
  EXPECT_TRUE(experts.is_bf16);
  EXPECT_EQ(works[at(MoeStage::kDispatch)].moved_bytes, 40.0 * (1 << 20));
  EXPECT_EQ(works[at(MoeStage::kDispatch)].operations, 0);
  EXPECT_EQ(works[at(MoeStage::kCombine)].moved_bytes, 40.0 * (1 << 20));
  EXPECT_EQ(works[at(MoeStage::kCombine)].operations, 2.0 * 2048 * 4 * 2048);
  EXPECT_EQ(works[at(MoeStage::kRoute)].operations, 2.0 * 2048 * 2048 * 32);
  EXPECT_EQ(works[at(MoeStage::kRoute)].read_bytes, 32.0 * 2048 * 2);
  EXPECT_FALSE(works[at(MoeStage::kRoute)].is_bf16);  // the gate's chain is fp32 always
  for (const MoeStage none : {MoeStage::kCounts, MoeStage::kShared}) {
    EXPECT_EQ(works[at(none)].operations + works[at(none)].read_bytes + works[at(none)].moved_bytes,
              0);
  }
}

TEST(FloorWork, SharedExpertsAreOneMoreExpertAndAnotherRowToAdd) {
  LayerCosts layer = bench_layer();
  layer.hidden_dtype = DType::kF32;
  layer.shared_intermediate = 512;
  layer.shared_gate = true;
  layer.shared_bytes = 12345;
  const StageWorks works = tools::works_of(layer, RankWork{10, 40, 7, 3});
  EXPECT_EQ(works[at(MoeStage::kShared)].operations, 6.0 * 10 * 2048 * 512 + 2.0 * 10 * 2048);
  EXPECT_EQ(works[at(MoeStage::kShared)].read_bytes, 12345);
  EXPECT_FALSE(works[at(MoeStage::kShared)].is_bf16);
  EXPECT_EQ(works[at(MoeStage::kDispatch)].moved_bytes, (10.0 + 40) * 2048 * 4);
  EXPECT_EQ(works[at(MoeStage::kCombine)].moved_bytes, (10.0 + 40 + 10) * 2048 * 4);
  EXPECT_EQ(works[at(MoeStage::kExperts)].read_bytes, 3.0 * 3 * 2048 * 1024 * 2);
}

TEST(FloorWork, ARankWithoutTokensOrRowsHasNone) {
  LayerCosts layer = bench_layer();
  layer.shared_intermediate = 512;
  layer.shared_bytes = 1;
  for (const StageWork& work : tools::works_of(layer, RankWork{})) {
    EXPECT_EQ(work.operations + work.read_bytes + work.moved_bytes, 0);
  }
}

TEST(FloorTime, IsTheGreaterOfArithmeticAndMemory) {
  StageWorks works = {};
  works[at(MoeStage::kExperts)] = {400e9, true, 10e9, 0};   // 1 s, 0.5 s
  works[at(MoeStage::kRoute)] = {400e9, false, 10e9, 0};    // fp32: 2 s, 0.5 s
  works[at(MoeStage::kDispatch)] = {0, false, 10e9, 30e9};  // read and moved add up: 1.5 s
  const Floors floors = tools::floors_of(std::vector{works}, rates_of(1, 1));
  EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kExperts)], 1);
  EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kRoute)], 2);
  EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kDispatch)], 1.5);
  EXPECT_EQ(floors.stages[at(MoeStage::kCounts)], 0);
  EXPECT_DOUBLE_EQ(floors.total, 4.5);
}

TEST(FloorTime, BytesThatFitTheLastCacheHaveItsRate) {
  const double cache = 32 << 20;
  for (const double bytes : {cache, cache + 1}) {
    StageWorks works = {};
    works[at(MoeStage::kExperts)] = {0, true, bytes, 0};
    works[at(MoeStage::kCombine)] = {0, false, 0, bytes};
    const Floors floors = tools::floors_of(std::vector{works}, rates_of(1, 1));
    EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kExperts)], bytes / (bytes > cache ? 20e9 : 80e9));
    EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kCombine)], bytes / (bytes > cache ? 30e9 : 90e9));
  }
  // A cache that came out slower than the memory must not raise a floor.
  FloorRates slow = rates_of(1, 1);
  slow.all_ranks.cache_read = slow.one_rank.cache_read = 1;
  StageWorks works = {};
  works[at(MoeStage::kExperts)] = {0, true, 1000, 0};
  EXPECT_DOUBLE_EQ(tools::floors_of(std::vector{works}, slow).stages[at(MoeStage::kExperts)],
                   1000 / 20e9);
}

TEST(FloorTime, AStageHasTheLargestRankTheTotalAlsoAllRanksTogether) {
  StageWorks small = {}, large = {};
  small[at(MoeStage::kExperts)] = {100e9, true, 0, 0};
  large[at(MoeStage::kExperts)] = {400e9, true, 0, 0};
  // Two ranks that get a core each: the larger one alone counts.
  Floors floors = tools::floors_of(std::vector{small, large}, rates_of(1, 2));
  EXPECT_DOUBLE_EQ(floors.ranks[0][at(MoeStage::kExperts)], 0.25);
  EXPECT_DOUBLE_EQ(floors.ranks[1][at(MoeStage::kExperts)], 1);
  EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kExperts)], 1);
  EXPECT_DOUBLE_EQ(floors.total, 1);
  // They share one. A rank may still have it for itself during a stage, but not all of them in all.
  floors = tools::floors_of(std::vector{small, large}, rates_of(1, 1));
  EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kExperts)], 1);
  EXPECT_DOUBLE_EQ(floors.total, 1.25);
  // Before the counts, one rank may be through before another begins.
  std::swap(small[at(MoeStage::kExperts)], small[at(MoeStage::kShared)]);
  std::swap(large[at(MoeStage::kExperts)], large[at(MoeStage::kShared)]);
  EXPECT_DOUBLE_EQ(tools::floors_of(std::vector{small, large}, rates_of(1, 1)).total, 1);
}

TEST(FloorTime, TheTotalIsOfOneRankNotOfTheWorstOfEveryStage) {
  StageWorks first = {}, second = {};
  first[at(MoeStage::kExperts)] = {400e9, true, 0, 0};
  second[at(MoeStage::kRoute)] = {200e9, false, 0, 0};
  const Floors floors = tools::floors_of(std::vector{first, second}, rates_of(1, 2));
  EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kExperts)], 1);
  EXPECT_DOUBLE_EQ(floors.stages[at(MoeStage::kRoute)], 1);
  EXPECT_DOUBLE_EQ(floors.total, 1);  // both wait for nobody: neither needs 2 s
}

// Laws that hold for any work: more work or lower rates never lower a floor.
TEST(FloorTime, RisesWithWorkAndFallsWithRates) {
  constexpr uint64_t kSeed = 20260901;
  SCOPED_TRACE(fmt::format("seed {}", kSeed));
  std::mt19937_64 random(kSeed);
  std::uniform_real_distribution<double> size(0, 1e9);
  for (int i = 0; i < 200; ++i) {
    std::vector<StageWorks> ranks(1 + random() % 5);
    for (StageWorks& works : ranks) {
      for (StageWork& work : works) work = {size(random), random() % 2 == 0, size(random), 0};
    }
    std::vector<StageWorks> more = ranks;
    more[random() % more.size()][random() % kNumMoeStages].operations += size(random);
    const Floors floors = tools::floors_of(ranks, rates_of(1, 2));
    const Floors with_more = tools::floors_of(more, rates_of(1, 2));
    const Floors faster = tools::floors_of(ranks, rates_of(2, 3));
    for (size_t stage = 0; stage < kNumMoeStages; ++stage) {
      EXPECT_GE(with_more.stages[stage], floors.stages[stage]);
      EXPECT_LE(faster.stages[stage], floors.stages[stage]);
      EXPECT_TRUE(std::isfinite(floors.stages[stage]));
    }
    EXPECT_GE(with_more.total, floors.total);
    EXPECT_LE(faster.total, floors.total);
  }
}

TEST(FloorTime, RatesOfNothingGiveNoFloorInsteadOfInfinity) {
  StageWorks works = {};
  works[at(MoeStage::kExperts)] = {1, true, 1, 1};
  const Floors floors = tools::floors_of(std::vector{works}, FloorRates{});
  EXPECT_EQ(floors.total, 0);
  EXPECT_FALSE(tools::reached(floors.total, 1).has_value());
  EXPECT_FALSE(tools::reached(1, 0).has_value());
  EXPECT_DOUBLE_EQ(*tools::reached(1, 4), 0.25);
}

TEST(FloorRates, AreFiniteAndPositiveForAnyLevelAndNumberOfRanks) {
  tools::FloorOptions options;
  options.num_samples = 1;
  options.peak_seconds = 1e-4;
  options.memory_bytes = 1 << 20;
  for (const int ranks : {1, 2, 64}) {
    for (const Level level : {Level::kReference, Level::kGeneric, Level::kAvx512, Level::kAmx}) {
      options.num_ranks = ranks;
      options.level = level;
      const Result<FloorRates> rates = tools::measure_floor_rates(options);
      ASSERT_TRUE(rates.has_value()) << rates.error().to_string();
      EXPECT_EQ(rates->one_rank.num_threads, 1);
      EXPECT_LE(rates->all_ranks.num_threads, std::min(ranks, (*cpu_info())->num_cores));
      EXPECT_FALSE(rates->bf16_instruction.empty());
      for (const tools::Rates& one : {rates->one_rank, rates->all_ranks}) {
        for (const double rate : {one.bf16_peak, one.f32_peak, one.memory_read, one.memory_moved,
                                  one.cache_read, one.cache_moved}) {
          EXPECT_TRUE(std::isfinite(rate));
          EXPECT_GT(rate, 0);
        }
        EXPECT_GE(one.memory_moved, 0.5 * one.memory_read);
      }
    }
  }
  options.num_ranks = 0;
  EXPECT_EQ(tools::measure_floor_rates(options).error().code(), StatusCode::kInvalidArgument);
}

TEST(PinningText, SaysWhereOrWhyNot) {
  EXPECT_EQ(tools::pinning_text({{0, 1}, {2, 3}}, 2, 8), "threads pinned to cores 0-3");
  EXPECT_EQ(tools::pinning_text({{5}}, 1, 8), "threads pinned to core 5");
  EXPECT_EQ(tools::pinning_text({{0, 1}, {4, 8}}, 2, 8), "threads pinned to cores 0-1, 4, 8");
  EXPECT_EQ(tools::pinning_text({{0}, {1}, {0}}, 1, 2), "threads pinned to cores 0-1, 3 threads");
  EXPECT_EQ(tools::pinning_text({{}, {}, {}}, 2, 4),
            "threads not pinned: 6 threads, 4 usable cores");
  EXPECT_EQ(tools::pinning_text({{0, -1}}, 2, 4), "threads not pinned: the system bound 1 of 2");
}

// --- the command ---

Words run_words(const Words& more) {
  Words words = {"--json", "-"};
  words.insert(words.end(), more.begin(), more.end());
  return run_arguments("deepseek_v3_tiny", 1, "bf16", words);
}

void expect_floors(const json& report, size_t ranks) {
  ASSERT_TRUE(report["floors"].is_object()) << report["floors_note"];
  EXPECT_GT(report["floors"]["total_seconds"].get<double>(), 0);
  EXPECT_GT(report["floors"]["reached"].get<double>(), 0);
  for (const json& stage : report["stages"]) {
    if (stage["name"] == "counts") {
      EXPECT_TRUE(stage["floor_seconds"].is_null());
      EXPECT_TRUE(stage["reached"].is_null());
      continue;
    }
    const double floor = stage["floor_seconds"].get<double>();
    EXPECT_GT(floor, 0) << stage;
    EXPECT_DOUBLE_EQ(stage["reached"].get<double>(), floor / stage["seconds"].get<double>());
    const json& per_rank =
        report["floors"]["per_rank"][stage["name"].get<std::string>() + "_seconds"];
    ASSERT_EQ(per_rank.size(), ranks);
    for (const json& rank : per_rank) EXPECT_LE(rank.get<double>(), floor);
  }
}

TEST(RunFloors, EveryStageHasOneWhateverTheRanksAre) {
  for (const Words& ranks : {Words{"--ranks", "1"}, Words{"--ranks", "3", "--repeat", "2"},
                             Words{"--ranks", "2", "--transport", "shm"}}) {
    Words more = ranks;
    more.insert(more.end(), {"--floors", "on"});
    const CliResult result = run_cli(run_words(more));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    expect_floors(result.json(), std::stoul(ranks[1]));
  }
}

TEST(RunFloors, OffLeavesThemOutEverywhere) {
  const CliResult result = run_cli(run_words({"--floors", "off"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(result.json()["floors"].is_null());
  EXPECT_TRUE(result.json()["stages"][0]["floor_seconds"].is_null());
  const CliResult table =
      run_cli(run_arguments("deepseek_v3_tiny", 1, "bf16", {"--floors", "off"}));
  EXPECT_EQ(table.out.find("reached"), std::string::npos) << table.out;
  const CliResult with = run_cli(run_arguments("deepseek_v3_tiny", 1, "bf16", {"--floors", "on"}));
  EXPECT_NE(with.out.find("reached"), std::string::npos) << with.out;
}

TEST(RunPinning, IsSaidAndChangesNoBit) {
  const json off = run_cli(run_words({"--ranks", "3", "--pin", "off"})).json();
  EXPECT_EQ(off["pinning"]["text"], "threads not pinned: switched off");
  EXPECT_EQ(off["pinning"]["cpus"], json::parse("[[], [], []]"));
  for (const char* const transport : {"inproc", "shm"}) {
    const json on = run_cli(run_words({"--ranks", "3", "--threads-per-rank", "2", "--pin", "on",
                                       "--transport", transport}))
                        .json();
    EXPECT_EQ(on["pinning"]["text"].get<std::string>().rfind("threads pinned to core", 0), 0u)
        << on;
    ASSERT_EQ(on["pinning"]["cpus"].size(), 3u);
    for (const json& rank : on["pinning"]["cpus"]) EXPECT_EQ(rank.size(), 2u);
    EXPECT_EQ(on["digest"], off["digest"]);
  }
  // More threads than any machine of this kind has cores: auto leaves them free, and says so.
  const json many =
      run_cli(run_words({"--ranks", "64", "--threads-per-rank", "16", "--pin", "auto"})).json();
  if ((*cpu_info())->num_cores < 1024) {
    EXPECT_EQ(many["pinning"]["text"],
              fmt::format("threads not pinned: 1024 threads, {} usable core{}",
                          (*cpu_info())->num_cores, (*cpu_info())->num_cores == 1 ? "" : "s"));
  }
  EXPECT_EQ(many["digest"], off["digest"]);
  const json one = run_cli(run_words({"--pin", "auto"})).json();
  EXPECT_EQ(one["pinning"]["cpus"].size(), 1u);
  EXPECT_EQ(one["pinning"]["cpus"][0].size(), 1u);
}

}  // namespace
}  // namespace argosy::testing
