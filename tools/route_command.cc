// argosy route: routing alone, with the load of every expert and rank. Test:
// tests/cli/output_test.cc.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/plan.h"
#include "argosy/router.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/load_summary.h"
#include "tools/option_checks.h"
#include "tools/table.h"
#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

using Json = nlohmann::ordered_json;

struct RouteOptions {
  std::string input;
  std::string gate;
  std::string gate_bias;
  std::string preset;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int num_ranks = 1;
  std::string json;
};

struct RouteResult {
  int64_t tokens = 0;
  std::vector<int64_t> rows_per_expert;
  std::vector<int64_t> rows_per_rank;
};

Result<RouteResult> route_input(const RouteOptions& options) {
  ARGOSY_ASSIGN_OR_RETURN(const RouterSpec spec,
                          router_preset(options.preset, options.num_experts, options.top_k));
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor hidden, read_tensor_argument(options.input));
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor("--input", hidden.view(), {-1, -1}));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor gate, read_tensor_argument(options.gate));
  ARGOSY_RETURN_IF_ERROR(
      expect_float_tensor("--gate", gate.view(), {options.num_experts, hidden.view().dim(1)}));
  Tensor gate_bias;
  if (!options.gate_bias.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(gate_bias, read_tensor_argument(options.gate_bias));
    ARGOSY_RETURN_IF_ERROR(
        expect_float_tensor("--gate-bias", std::as_const(gate_bias).view(), {options.num_experts}));
  }
  RouteResult result;
  result.tokens = hidden.view().dim(0);
  ARGOSY_ASSIGN_OR_RETURN(Tensor logits,
                          Tensor::zeros(DType::kF32, {result.tokens, options.num_experts}));
  ARGOSY_RETURN_IF_ERROR(gate_logits(hidden.view(), gate.view(), std::as_const(gate_bias).view(),
                                     nullptr, logits.view()));
  RouterInput input;
  input.logits = logits.view();
  Routing routing;
  ARGOSY_RETURN_IF_ERROR(route(spec, input, nullptr, &routing));

  result.rows_per_expert = routing.counts;
  const Placement placement{options.num_experts, options.num_ranks, 0};
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    int64_t rows = 0;
    for (int64_t e = placement.begin(rank); e < placement.begin(rank + 1); ++e) {
      rows += routing.counts[static_cast<size_t>(e)];
    }
    result.rows_per_rank.push_back(rows);
  }
  return result;
}

Json to_json(const RouteOptions& options, const RouteResult& result) {
  return {{"preset", options.preset},
          {"experts", options.num_experts},
          {"top_k", options.top_k},
          {"ranks", options.num_ranks},
          {"tokens", result.tokens},
          {"rows_per_expert", result.rows_per_expert},
          {"rows_per_rank", result.rows_per_rank},
          {"balancedness", summarise(result.rows_per_rank).balancedness},
          {"expert_balancedness", summarise(result.rows_per_expert).balancedness}};
}

std::string bars(std::string_view name, const std::vector<int64_t>& loads) {
  constexpr int kBarWidth = 40;
  const int64_t most = summarise(loads).max;
  const size_t index_width = std::to_string(loads.size() - 1).size();
  const size_t load_width = std::to_string(most).size();
  std::string text;
  for (size_t i = 0; i < loads.size(); ++i) {
    const std::string bar = load_bar(loads[i], most, kBarWidth);
    text += fmt::format("{} {:>{}}  {:>{}}{}{}\n", name, i, index_width, loads[i], load_width,
                        bar.empty() ? "" : "  ", bar);
  }
  return text;
}

std::string to_text(const RouteOptions& options, const RouteResult& result) {
  std::string text = fmt::format("{}, {} tokens, {} experts, top-{}, {} rank{}\n\n", options.preset,
                                 result.tokens, options.num_experts, options.top_k,
                                 options.num_ranks, options.num_ranks == 1 ? "" : "s");
  text += bars("expert", result.rows_per_expert) + "\n";
  text += bars("rank", result.rows_per_rank) + "\n";
  return text + load_table(result.rows_per_expert, result.rows_per_rank);
}

int route_and_report(const RouteOptions& options) {
  if (!options.json.empty() && options.json != "-") {
    if (const Status status = check_target("--json", options.json); !status.ok()) {
      return fail(status);
    }
  }
  const Result<RouteResult> result = route_input(options);
  if (!result.has_value()) return fail(result.error());
  Status status;
  if (!options.json.empty()) status = write_json(options.json, to_json(options, *result));
  if (status.ok() && options.json != "-") status = write_stdout(to_text(options, *result));
  return status.ok() ? kExitOk : fail(status);
}

}  // namespace

void add_route_command(CLI::App& app, int* exit_code) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  CLI::App* const command =
      app.add_subcommand("route", "Route hidden states; show the load of every expert and rank");
  const auto options = std::make_shared<RouteOptions>();
  command->add_option("--input", options->input, "Hidden states [tokens, hidden], fp32 or bf16")
      ->required()
      ->type_name("FILE:TENSOR")
      ->check(file_and("TENSOR"));
  command->add_option("--gate", options->gate, "Router weights [experts, hidden]")
      ->required()
      ->type_name("FILE:TENSOR")
      ->check(file_and("TENSOR"));
  command->add_option("--gate-bias", options->gate_bias, "Router bias [experts] (default: none)")
      ->type_name("FILE:TENSOR")
      ->check(file_and("TENSOR"));
  command->add_option("--preset", options->preset, "Routing rules: mixtral, deepseek_v3, ...")
      ->required()
      ->type_name("NAME")
      ->check(preset_name());
  command->add_option("--experts", options->num_experts, "Number of experts")
      ->required()
      ->type_name("E")
      ->check(whole_number(1, kMost));
  command->add_option("--top-k", options->top_k, "Experts chosen per token")
      ->required()
      ->type_name("K")
      ->check(whole_number(1, kMost));
  command
      ->add_option("--ranks", options->num_ranks,
                   "Ranks that share the experts, 1 to 1024 (default: 1)")
      ->type_name("R")
      ->check(whole_number(1, 1024));
  command
      ->add_option("--json", options->json,
                   "Write JSON to this file; - is stdout, without the table")
      ->type_name("FILE|-");
  command->footer(
      "Example:\n"
      "  argosy route --input seed_example.safetensors:tokens \\\n"
      "    --gate seed_example.safetensors:gate.weight \\\n"
      "    --gate-bias seed_example.safetensors:gate.bias \\\n"
      "    --preset mixtral --experts 8 --top-k 2 --ranks 4");
  command->callback([options, exit_code] { *exit_code = route_and_report(*options); });
}

}  // namespace argosy::tools
