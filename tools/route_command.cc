// argosy route: routing alone, with the load of every expert and rank; or the load of a recorded
// trace. Order: usage, inputs, routing, text, files. Test: tests/cli/route_test.cc.
#include <fmt/format.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "argosy/cpu.h"
#include "argosy/plan.h"
#include "argosy/router_trace.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/output_files.h"
#include "tools/route_options.h"
#include "tools/route_report.h"
#include "tools/route_tokens.h"

namespace argosy::tools {
namespace {

std::string json_file(const RouteOptions& options) {
  return options.json == "-" ? "" : options.json;
}

Status check_files(const RouteOptions& options) {
  if (!options.record.empty()) {
    ARGOSY_RETURN_IF_ERROR(to_bytes(RouterTrace(), options.record).error());
  }
  const std::array<OptionFile, 4> targets = {{{"--output", options.output},
                                              {"--record", options.record},
                                              {"--json", json_file(options)},
                                              {"--report", options.report}}};
  const std::array<OptionFile, 9> inputs = {
      {file_of("--logits", options.logits), file_of("--input", options.input),
       file_of("--gate", options.gate), file_of("--gate-bias", options.gate_bias),
       file_of("--selection-bias", options.selection_bias), file_of("--mask", options.mask),
       file_of("--compare", options.compare), OptionFile{"--router", options.router},
       OptionFile{"--replay", options.replay}}};
  return check_targets(targets, inputs, options.model);
}

// Stdout first: it cannot be taken back.
Status write_common(const RouteOptions& options, const nlohmann::ordered_json& json,
                    const std::string& text, const std::string& page, OutputFiles* files) {
  ARGOSY_RETURN_IF_ERROR(write_stdout(options.json == "-" ? json_text(json) : text));
  if (!json_file(options).empty()) {
    ARGOSY_RETURN_IF_ERROR(files->add_text(options.json, json_text(json)));
  }
  return options.report.empty() ? Status() : files->add_text(options.report, page);
}

Status add_output(const RouteOptions& options, const RouteResult& result, OutputFiles* files) {
  if (options.output.empty()) return {};
  const Routing& kept = result.kept;
  const std::vector<int64_t>& counts = result.routing.counts;
  std::vector<NamedTensor> tensors = {
      {"topk_idx", {kept.topk_idx.data(), DType::kI32, {kept.num_tokens, kept.top_k}}},
      {"topk_weights",
       {kept.topk_weights.values.data(), DType::kF32, {kept.num_tokens, kept.top_k}}},
      {"counts", {counts.data(), DType::kI64, {kept.num_experts}}}};
  if (result.selection_bias_next.has_value()) {
    tensors.push_back({"selection_bias_next",
                       {result.selection_bias_next->data(), DType::kF32, {kept.num_experts}}});
  }
  return files->add_safetensors(options.output, tensors);
}

// One record a rank, of the tokens that it owns; before any drop, as counts are.
Status add_record(const RouteOptions& options, const RouteResult& result, OutputFiles* files) {
  if (options.record.empty()) return {};
  const int64_t num_tokens = result.routing.num_tokens;
  RouterTrace trace;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const int64_t first = owned_begin(num_tokens, options.num_ranks, rank);
    const int64_t count = owned_begin(num_tokens, options.num_ranks, rank + 1) - first;
    ARGOSY_RETURN_IF_ERROR(
        append_routing(0, options.layer, rank, part_of(result.routing, first, count), &trace));
  }
  ARGOSY_ASSIGN_OR_RETURN(const std::string bytes, to_bytes(trace, options.record));
  return files->add_text(options.record, bytes);
}

// What a user of the rule would want to know.
std::string notes_on(const RouterSpec& spec) {
  const bool is_softmax = spec.score_function == ScoreFunction::kSoftmax ||
                          spec.score_function == ScoreFunction::kSoftmaxTopK;
  const bool is_one = spec.score_function == ScoreFunction::kSoftmaxTopK ||
                      (is_softmax ? spec.normalise : spec.normalise_single) == Choice::kYes;
  if (spec.top_k != 1 || !is_one) return "";
  return "# top_k is 1 and the weight is normalised: it is always 1, no gradient reaches the "
         "gate\n";
}

// Weights that another system rounded to bf16 are within 2^-8; the rest is for its own arithmetic. Only where
// its logits are given: it may have rounded those of --input.
constexpr double kWeightsTolerance = 1e-2;

int exit_code_of(const RouteOptions& options, const RouteCompare& compare) {
  const double allowed =
      options.logits.empty() ? std::numeric_limits<double>::max() : kWeightsTolerance;
  const int64_t judged = compare.experts_equal + compare.experts_differ;
  if (compare.experts_differ > 0) {
    print_error(fmt::format("check failed: experts of {} tokens differ, first at token {}",
                            compare.experts_differ, compare.first_difference->token));
  } else if (!(compare.weights_max_rel <= allowed)) {
    print_error(fmt::format("check failed: weights differ by {:.3g}, {:.3g} allowed",
                            compare.weights_max_rel, allowed));
  } else if (judged == 0 && compare.ties > 0) {
    print_error(
        fmt::format("check failed: all {} tokens are ties, nothing was compared", compare.ties));
  } else {
    return kExitOk;
  }
  return kExitCheckFailed;
}

Result<int> route_and_write(const RouteOptions& options) {
  ARGOSY_ASSIGN_OR_RETURN(RouteRules rules, effective_rules(options));
  if (options.print_spec) {
    ARGOSY_RETURN_IF_ERROR(write_stdout(to_string(rules.spec) + notes_on(rules.spec)));
    return int{kExitOk};
  }
  ARGOSY_ASSIGN_OR_RETURN(const RouteResult result, route_tokens(options, rules));
  RouteReport report{&options, &rules, &result, {}};
  if (!options.compare.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(
        const OtherRouting other,
        read_other_routing(options.compare, rules.spec, result.routing.num_tokens));
    report.compare = compare_routing(rules.spec, result.logits, result.selection_bias, result.mask,
                                     result.kept, other);
  }
  OutputFiles files;
  ARGOSY_RETURN_IF_ERROR(write_common(options, route_json(report), route_text(report),
                                      options.report.empty() ? std::string() : route_page(report),
                                      &files));
  ARGOSY_RETURN_IF_ERROR(add_output(options, result, &files));
  ARGOSY_RETURN_IF_ERROR(add_record(options, result, &files));
  ARGOSY_RETURN_IF_ERROR(files.commit());
  return report.compare.has_value() ? exit_code_of(options, *report.compare) : int{kExitOk};
}

Result<int> replay_and_write(const RouteOptions& options) {
  ReplayReport report;
  report.path = options.replay;
  report.num_ranks = options.num_ranks;
  ARGOSY_ASSIGN_OR_RETURN(report.trace, read_router_trace(options.replay));
  if (report.trace.records.empty()) {
    return Status(StatusCode::kCorruptData,
                  fmt::format("--replay: {} holds no records", options.replay));
  }
  RouterSpec said;  // --experts alone
  for (const auto& [field, value] : options.fields) {
    ARGOSY_RETURN_IF_ERROR(set_router_field(field, value, &said));
  }
  ARGOSY_ASSIGN_OR_RETURN(report.layers,
                          replay_router_trace(report.trace, said.num_experts, options.num_ranks));
  OutputFiles files;
  ARGOSY_RETURN_IF_ERROR(write_common(options, replay_json(report), replay_text(report),
                                      options.report.empty() ? std::string() : replay_page(report),
                                      &files));
  ARGOSY_RETURN_IF_ERROR(files.commit());
  return int{kExitOk};
}

int run_route(const RouteOptions& options) {
  if (const Status status = check_combination(options); !status.ok()) return fail(status);
  if (const Status status = check_files(options); !status.ok()) return fail(status);
  if (const auto cpu = cpu_info(); !cpu.has_value()) return fail(cpu.error());
  const Result<int> exit_code =
      options.replay.empty() ? route_and_write(options) : replay_and_write(options);
  return exit_code.has_value() ? *exit_code : fail(exit_code.error());
}

}  // namespace

void add_route_command(CLI::App& app, int* exit_code) {
  CLI::App* const command =
      app.add_subcommand("route", "Route tokens alone; show the load of every expert and rank");
  const auto options = std::make_shared<RouteOptions>();
  add_route_options(*command, *options);
  command->footer(
      "With --compare, exit code 1 says that experts differ where fp32 sees no tie, or, of\n"
      "--logits, weights by more than 1e-2. Rows are those that experts compute, after any drop; "
      "counts in\n"
      "--output are before.\n\n"
      "Examples:\n"
      "  f=testdata/seed_example/seed_example.safetensors\n"
      "  argosy route --input $f:tokens --gate $f:gate.weight --gate-bias $f:gate.bias \\\n"
      "    --preset mixtral --experts 8 --top-k 2 --ranks 4\n"
      "  d=testdata/models/deepseek_v3_tiny\n"
      "  argosy route --model $d --layer 1 --input $d/captures.safetensors:f32.layers.1.moe_input "
      "\\\n"
      "    --ranks 4 --compare $d/captures.safetensors:f32.layers.1\n"
      "  argosy route --replay testdata/router/trace.npz --experts 64 --ranks 8");
  command->callback([command, options, exit_code] {
    note_given(*command, *options);
    *exit_code = run_route(*options);
  });
}

}  // namespace argosy::tools
