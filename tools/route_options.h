// The options of `argosy route`, and which of them go together. Test: tests/cli/route_test.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "argosy/status.h"

namespace argosy::tools {

struct RouteOptions {
  std::set<std::string> given;  // the options on the command line
  // Tokens.
  std::string logits;
  std::string input;
  std::string gate;
  std::string gate_bias;
  std::string selection_bias;
  std::string mask;
  std::string replay;
  // Rules. `fields`: names and values of single fields of RouterSpec, in the order given.
  std::string preset;
  std::string router;
  std::string model;
  int64_t layer = 0;
  std::vector<std::pair<std::string, std::string>> fields;
  int num_ranks = 1;
  // Training.
  std::vector<int64_t> sequence_lengths;
  std::optional<double> aux_loss;
  std::string aux_scope = "micro-batch";
  std::string aux_scale = "megatron";
  std::string aux_counts = "routed";
  std::optional<double> z_loss;
  std::optional<std::pair<int64_t, int64_t>> capacity;  // num, den
  std::string policy;
  std::string capacity_scope = "group";
  std::string choice_order = "interleaved";
  bool renormalise_kept = false;
  std::optional<double> bias_update;
  bool bias_centred = false;
  // Results.
  std::string compare;
  std::string output;
  std::string record;
  std::string json;
  std::string report;
  bool print_spec = false;

  bool has(std::string_view option) const { return given.count(std::string(option)) > 0; }
};

// `options` must outlive the command.
void add_route_options(CLI::App& command, RouteOptions& options);

// Fills `given` once the command line is read.
void note_given(const CLI::App& command, RouteOptions& options);

// kInvalidArgument naming both options of a pair that does not go together, or what is missing.
Status check_combination(const RouteOptions& options);

}  // namespace argosy::tools
