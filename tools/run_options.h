// The options of `argosy run` as the command line gives them. Test: tests/cli/run_test.cc, usage_test.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

namespace argosy::tools {

struct RunOptions {
  std::string model;
  int64_t layer = 0;
  std::string input;
  std::string router;
  std::string nan_scales = "nan";
  std::optional<int> ranks;
  std::string transport;
  int num_ranks = 1;  // `ranks`, or what the environment says
  int threads_per_rank = 1;
  std::string dot_order = "auto";
  std::string level;
  std::string pin = "auto";
  std::string floors = "on";
  std::string compare;
  std::string check = "64";
  std::optional<double> tolerance;
  std::string output;
  std::string json;
  std::string report;
  std::string trace;
  std::string record_routing;
  int64_t repeat = 1;
  std::optional<double> timeout_seconds;
  std::optional<int64_t> receive_budget;
  std::string mode = "throughput";
  std::string payload = "bf16";
  std::optional<int64_t> max_tokens;
  bool chunk = false;
  bool weights_inside = false;
  std::string dtype;
  bool backward = false;
  std::string recipe = "bf16";
  std::string grad_output;
  std::string grads;
  std::string compare_grads;
  std::string simulate;
};

// What to run and how; what to do with the result.
void add_layer_options(CLI::App& command, RunOptions& options);
void add_result_options(CLI::App& command, RunOptions& options);

}  // namespace argosy::tools
