// Everything `argosy run` has to say, once; table, JSON, page and trace are views of it.
//
// Test: tests/cli/run_test.cc.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "argosy/moe.h"
#include "tools/check.h"
#include "tools/compare.h"
#include "tools/floors.h"
#include "tools/rank_record.h"
#include "tools/run_gradients.h"

namespace argosy::tools {

struct Stage {
  std::string name;
  double seconds = 0;        // slowest rank, median over the repeats
  double floor_seconds = 0;  // 0: none, or not measured
};

// Median over the repeats of one of the slowest rank's times.
double median_of(const std::vector<StageTimes>& repeats, double StageTimes::*stage);
// Stages in the order they run, of the slowest rank's times per repeat.
std::vector<Stage> stages_of(const std::vector<StageTimes>& repeats);

// The floor's share of the time: 1 is as fast as can be. Unset where there is no floor.
std::optional<double> reached(double floor_seconds, double seconds);

struct RankBytes {
  int64_t dispatch = 0;
  int64_t combine = 0;
  int64_t saved_by_dedup = 0;
  int64_t weights_read = 0;
};

struct RunReport {
  std::string model;
  std::string family;
  int64_t layer = 0;
  std::string dtype;
  int64_t tokens = 0;
  int64_t hidden = 0;
  int64_t experts = 0;
  int64_t top_k = 0;
  int ranks = 1;
  int threads_per_rank = 1;
  int64_t repeat = 1;
  int64_t rounds = 1;
  std::string digest;
  std::string dot_order;
  std::string level;
  std::string transport;
  std::string mode;        // asked for
  std::string taken_mode;  // of the last call: throughput or latency
  std::string payload;     // of dispatch
  bool weights_inside = false;
  std::string recipe;  // of the experts' products
  int64_t latency_tokens =
      0;  // mode auto: the most tokens of a rank that latency mode is faster for
  std::vector<std::vector<PeerWait>> waits;  // [R] by rank that waited
  std::vector<int64_t> rows_per_expert;
  std::vector<int64_t> rows_per_rank;
  std::vector<RankBytes> bytes;         // [R]
  std::vector<MoeReport> rank_reports;  // [R], of the last repeat
  std::vector<Stage> stages;
  double total_seconds = 0;
  std::optional<Floors> floors;
  std::string floors_note;                        // why they are missing, if they were wanted
  std::vector<std::vector<int32_t>> pinned_cpus;  // [R][threads], as in RanksResult
  std::string pinning;                            // the same in words, and why not
  double tolerance = 0;            // of outputs against the fp64 reference, by their peak
  double compare_tolerance = 0;    // of outputs against captures
  double weights_tolerance = 0;    // relative; infinite when weights are not judged
  NonfiniteRows nonfinite_output;  // shown, not judged: weights or input may hold NaN
  std::optional<CheckResult> check;
  std::optional<CompareResult> compare;
  std::vector<GradientError> gradients;  // of --compare-grads; judged by `tolerance`
};

// The rank that others waited for longest in sum, and how long; unset where nobody waited.
struct Straggler {
  int64_t rank = 0;
  int64_t total_ns = 0;
};
std::optional<Straggler> straggler_of(const RunReport& report);

// How rows travelled and who was waited for, on one line.
std::string mode_text(const RunReport& report);

// Tokens that on_nonfinite = uniform routed as if all their logits were 0.
int64_t nonfinite_logit_rows_of(const RunReport& report);

// What makes a comparison say less than it seems to. No failure: exit codes judge experts, weights, output.
std::vector<std::string> warnings_of(const RunReport& report);

// The checks that failed, one sentence each, with seen and allowed values. Empty: all held.
std::vector<std::string> failures_of(const RunReport& report);

nlohmann::ordered_json to_json(const RunReport& report);

}  // namespace argosy::tools
