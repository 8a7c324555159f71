// argosy route: routing alone, with the load of every expert and rank. Test:
// tests/cli/output_test.cc.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>
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
#include "tools/output_files.h"
#include "tools/table.h"
#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

using Json = nlohmann::ordered_json;

struct RouteOptions {
  std::string input;
  std::string gate;
  std::string gate_bias;
  std::string selection_bias;
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

// A tensor that must be finite, so that it is named and not the logits that it would spoil.
Result<Tensor> read_finite(const char* option, const std::string& file_and_tensor,
                           std::initializer_list<int64_t> shape) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor tensor, read_tensor_argument(file_and_tensor));
  const ConstTensorView view = std::as_const(tensor).view();
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor(option, view, shape));
  ARGOSY_RETURN_IF_ERROR(expect_finite(option, view));
  return tensor;
}

// Empty when the preset has none.
Result<Tensor> read_selection_bias(const RouteOptions& options, const RouterSpec& spec) {
  const bool is_given = !options.selection_bias.empty();
  if (is_given != (spec.selection_bias == Choice::kYes)) {
    return Status(StatusCode::kInvalidArgument,
                  is_given
                      ? fmt::format("preset {} has no selection bias: leave --selection-bias out",
                                    options.preset)
                      : fmt::format("preset {} needs a selection bias: give --selection-bias "
                                    "FILE:TENSOR, fp32 [{}]",
                                    options.preset, options.num_experts));
  }
  if (!is_given) return Tensor();
  ARGOSY_ASSIGN_OR_RETURN(
      Tensor bias, read_finite("--selection-bias", options.selection_bias, {options.num_experts}));
  if (bias.view().dtype != DType::kF32) {
    return Status(StatusCode::kInvalidArgument, fmt::format("--selection-bias is {}, expected F32",
                                                            describe(std::as_const(bias).view())));
  }
  return bias;
}

Result<RouteResult> route_input(const RouteOptions& options) {
  ARGOSY_ASSIGN_OR_RETURN(const RouterSpec spec,
                          router_preset(options.preset, options.num_experts, options.top_k));
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor selection_bias, read_selection_bias(options, spec));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor hidden, read_finite("--input", options.input, {-1, -1}));
  if (hidden.view().dim(1) == 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--input is {}, expected a hidden size of at least 1",
                              describe(hidden.view())));
  }
  ARGOSY_ASSIGN_OR_RETURN(
      const Tensor gate,
      read_finite("--gate", options.gate, {options.num_experts, hidden.view().dim(1)}));
  Tensor gate_bias;
  if (!options.gate_bias.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(gate_bias,
                            read_finite("--gate-bias", options.gate_bias, {options.num_experts}));
  }
  RouteResult result;
  result.tokens = hidden.view().dim(0);
  ARGOSY_ASSIGN_OR_RETURN(Tensor logits,
                          Tensor::zeros(DType::kF32, {result.tokens, options.num_experts}));
  ARGOSY_RETURN_IF_ERROR(gate_logits(hidden.view(), gate.view(), std::as_const(gate_bias).view(),
                                     nullptr, logits.view()));
  RouterInput input;
  input.logits = logits.view();
  input.selection_bias = selection_bias.view();
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
  const bool json_is_file = !options.json.empty() && options.json != "-";
  const std::array<OptionFile, 1> target = {{{"--json", json_is_file ? options.json : ""}}};
  const std::array<OptionFile, 4> inputs = {{file_of("--input", options.input),
                                             file_of("--gate", options.gate),
                                             file_of("--gate-bias", options.gate_bias),
                                             file_of("--selection-bias", options.selection_bias)}};
  if (const Status status = check_targets(target, inputs, ""); !status.ok()) return fail(status);
  const Result<RouteResult> result = route_input(options);
  if (!result.has_value()) return fail(result.error());
  const std::string json = json_text(to_json(options, *result));
  Status status = write_stdout(options.json == "-" ? json : to_text(options, *result));
  OutputFiles files;
  if (status.ok() && json_is_file) status = files.add_text(options.json, json);
  if (status.ok()) status = files.commit();
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
  command
      ->add_option("--selection-bias", options->selection_bias,
                   "Bias [experts], fp32, added to scores for selection; for presets that have "
                   "one, as deepseek_v3")
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
      ->type_name("FILE|-")
      ->check(not_empty());
  command->footer(
      "Examples:\n"
      "  f=testdata/seed_example/seed_example.safetensors\n"
      "  argosy route --input $f:tokens --gate $f:gate.weight --gate-bias $f:gate.bias \\\n"
      "    --preset mixtral --experts 8 --top-k 2 --ranks 4\n"
      "  d=testdata/models/deepseek_v3_tiny m=model.layers.1.mlp.gate\n"
      "  argosy route --input $d/captures.safetensors:f32.layers.1.moe_input \\\n"
      "    --gate $d/model.safetensors:$m.weight \\\n"
      "    --selection-bias $d/model.safetensors:$m.e_score_correction_bias \\\n"
      "    --preset deepseek_v3 --experts 16 --top-k 4 --ranks 4");
  command->callback([options, exit_code] { *exit_code = route_and_report(*options); });
}

}  // namespace argosy::tools
