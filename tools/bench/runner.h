// Runs cases and sums up their samples. Test: tests/bench/runner_test.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "argosy/status.h"
#include "tools/bench/bench_case.h"

namespace argosy::tools::bench {

struct RunLimits {
  double seconds = 1.5;     // of one case, preparation apart
  int64_t num_samples = 0;  // exactly so many; 0: as many as fit, kLeastSamples at least
};
inline constexpr int64_t kLeastSamples = 5;
inline constexpr int64_t kMostSamples = 2000;

struct BenchResult {
  std::string name;
  nlohmann::ordered_json params;
  double median_seconds = 0;
  double min_seconds = 0;
  double max_seconds = 0;
  std::string limit;
  double limit_seconds = 0;  // median
  double reached = 0;        // limit_seconds / median_seconds
  int64_t num_samples = 0;
  double goal = 0;                                                 // 0: none
  nlohmann::ordered_json more = nlohmann::ordered_json::object();  // further members of the JSON
};

// Precondition: samples is not empty.
BenchResult summarise(const BenchCase& bench_case, CpuKind kind, std::span<const Sample> samples);

// Prepares and samples one case on a thread of its own, so that nothing it binds or sets outlives
// it. Errors: those of the case, its label before them; kOutOfMemory for the thread.
Result<BenchResult> run_case(const BenchCase& bench_case, const BenchContext& context,
                             const RunLimits& limits);

// The cases whose label holds `text`. Errors: kNotFound lists every label when there is none.
Result<std::vector<BenchCase>> matching(std::vector<BenchCase> cases, const std::string& text);

// What the run is held against, chosen by a short measurement: the fastest loop for bf16 products
// up to `wanted`, or up to what the CPU has. Errors: those of resolve_level and sample_peak.
Result<BenchContext> make_context(std::optional<Level> wanted, DotOrder dot_order);

// A list of {name, params, median_seconds, min_seconds, max_seconds, limit, limit_seconds,
// reached}.
nlohmann::ordered_json to_json(std::span<const BenchResult> results);
// A list of {name, params, limit, goals}: what there is to run.
nlohmann::ordered_json to_json(std::span<const BenchCase> cases);
std::string to_text(const BenchContext& context, std::span<const BenchResult> results);
std::string to_text(std::span<const BenchCase> cases);

}  // namespace argosy::tools::bench
