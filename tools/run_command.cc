// argosy run: one MoE layer of a checkpoint over R ranks, checked and measured. Test:
// tests/cli/run_test.cc.
//
// Order: usage, inputs (captures too), ranks, checks, table, files. Nothing is written before all
// work is done, so that exit codes 2 and 3 leave no files. Ranks are threads here, or this process
// is one of them, or it only starts them and waits.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/identity.h"
#include "argosy/launch.h"
#include "argosy/moe.h"
#include "argosy/reference.h"
#include "argosy/router_trace.h"
#include "tools/check.h"
#include "tools/commands.h"
#include "tools/compare.h"
#include "tools/console.h"
#include "tools/floors.h"
#include "tools/option_checks.h"
#include "tools/output_files.h"
#include "tools/pinning_text.h"
#include "tools/progress.h"
#include "tools/report_page.h"
#include "tools/run_gradients.h"
#include "tools/run_options.h"
#include "tools/run_ranks.h"
#include "tools/run_report.h"
#include "tools/table.h"
#include "tools/tensor_values.h"
#include "tools/trace.h"

namespace argosy::tools {
namespace {

constexpr double kToleranceF32 = 1e-5;
constexpr double kToleranceBf16 = 2e-2;
// Against captures, whose rows did not travel quantised: two e4m3 half steps of the peak.
constexpr double kToleranceQuantised = 8e-2;
constexpr double kWeightsToleranceF32 = 2e-6;
constexpr int64_t kMaxThreads = 1024;  // of all ranks together

bool json_is_file(const RunOptions& options) {
  return !options.json.empty() && options.json != "-";
}

Status check_targets(const RunOptions& options) {
  if (!options.record_routing.empty()) {
    ARGOSY_RETURN_IF_ERROR(to_bytes(RouterTrace(), options.record_routing).error());
  }
  const std::array<OptionFile, 6> targets = {{{"--output", options.output},
                                              {"--grads", options.grads},
                                              {"--json", json_is_file(options) ? options.json : ""},
                                              {"--report", options.report},
                                              {"--trace", options.trace},
                                              {"--record-routing", options.record_routing}}};
  const std::array<OptionFile, 5> inputs = {{file_of("--input", options.input),
                                             file_of("--grad-output", options.grad_output),
                                             {"--compare-grads", options.compare_grads},
                                             file_of("--compare", options.compare),
                                             {"--router", options.router}}};
  return check_targets(targets, inputs, options.model);
}

// What no option says alone, before anything runs.
Status check_options(const RunOptions& options) {
  const auto invalid = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, std::move(text));
  };
  const int64_t threads = int64_t{options.num_ranks} * options.threads_per_rank;
  if (threads > kMaxThreads) {
    return invalid(fmt::format("{} ranks with --threads-per-rank {} are {} threads, at most {} run",
                               options.num_ranks, options.threads_per_rank, threads, kMaxThreads));
  }
  if (options.mode == "throughput" && (options.max_tokens.has_value() || options.chunk)) {
    return invalid(fmt::format("{} is of latency mode, --mode is throughput",
                               options.chunk ? "--chunk" : "--max-tokens"));
  }
  // A long run would be lost with it.
  if (!options.compare_grads.empty()) {
    if (const Status status = SafetensorsFile::open(options.compare_grads).error(); !status.ok()) {
      return {status.code(), "--compare-grads: " + status.message()};
    }
  }
  return Status();
}

Result<CheckpointOptions> checkpoint_options(const RunOptions& options) {
  CheckpointOptions checkpoint;
  if (options.nan_scales == "error") checkpoint.on_nan_scale = OnNonFinite::kError;
  if (options.router.empty()) return checkpoint;
  ARGOSY_ASSIGN_OR_RETURN(checkpoint.router, read_router_file(options.router));
  return checkpoint;
}

Result<RunRanksOptions> ranks_options(const RunOptions& options) {
  ARGOSY_RETURN_IF_ERROR(check_options(options));
  RunRanksOptions ranks;
  ranks.model_dir = options.model;
  ranks.layer = options.layer;
  ARGOSY_ASSIGN_OR_RETURN(ranks.checkpoint, checkpoint_options(options));
  ranks.num_ranks = options.num_ranks;
  ranks.threads_per_rank = options.threads_per_rank;
  ARGOSY_ASSIGN_OR_RETURN(ranks.dot_order, parse_dot_order(options.dot_order));
  if (!options.level.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(ranks.level, parse_level(options.level));
    ARGOSY_RETURN_IF_ERROR(resolve_level(ranks.level).error());
  }
  if (options.timeout_seconds.has_value()) {
    ranks.deadline = std::chrono::milliseconds(std::llround(*options.timeout_seconds * 1e3));
  }
  ranks.pin = options.pin == "on" ? Pin::kOn : options.pin == "off" ? Pin::kOff : Pin::kAuto;
  ranks.receive_budget_bytes = options.receive_budget;
  ARGOSY_ASSIGN_OR_RETURN(ranks.mode, parse_moe_mode(options.mode));
  ARGOSY_ASSIGN_OR_RETURN(ranks.payload, parse_payload(options.payload));
  ranks.max_tokens = options.max_tokens;
  ranks.chunk = options.chunk;
  ranks.weights_inside = options.weights_inside;
  ranks.backward = options.backward;
  if (options.recipe != "bf16") {
    ARGOSY_ASSIGN_OR_RETURN(ranks.training_format, parse_block_format(options.recipe));
  }
  ranks.repeat = options.repeat;
  ranks.simulate = options.simulate;
  return ranks;
}

struct Inputs {
  ModelConfig config;
  Tensor hidden;
  Tensor d_output;  // with --backward
  std::optional<Captures> captures;
  SharedTensors shared;  // of the layer
};

// Captures only where results are judged, on rank 0.
Result<Inputs> read_inputs(const RunOptions& options, int rank) {
  ARGOSY_ASSIGN_OR_RETURN(const CheckpointOptions how, checkpoint_options(options));
  ARGOSY_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(options.model, how));
  Inputs inputs;
  inputs.config = checkpoint.config();
  ARGOSY_ASSIGN_OR_RETURN(inputs.shared, checkpoint.read_shared(options.layer));
  ARGOSY_ASSIGN_OR_RETURN(inputs.hidden, read_tensor_argument(options.input));
  if (!options.dtype.empty()) {
    const DType dtype = options.dtype == "bf16" ? DType::kBF16 : DType::kF32;
    ARGOSY_ASSIGN_OR_RETURN(inputs.hidden, converted("--input", std::move(inputs.hidden), dtype));
  }
  const ConstTensorView hidden = std::as_const(inputs.hidden).view();
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor("--input", hidden, {-1, inputs.config.hidden}));
  if (options.backward) {
    ARGOSY_ASSIGN_OR_RETURN(Tensor d_output, read_tensor_argument(options.grad_output));
    ARGOSY_ASSIGN_OR_RETURN(inputs.d_output,
                            converted("--grad-output", std::move(d_output), hidden.dtype));
    ARGOSY_RETURN_IF_ERROR(expect_float_tensor("--grad-output", inputs.d_output.view(),
                                               {hidden.dim(0), hidden.dim(1)}));
  }
  if (!options.compare.empty() && rank == 0) {
    ARGOSY_ASSIGN_OR_RETURN(inputs.captures,
                            read_captures(options.compare, inputs.config, hidden.dim(0)));
  }
  return inputs;
}

RunReport report_of(const RunOptions& options, const Inputs& inputs, const RanksResult& result) {
  const ConstTensorView hidden = inputs.hidden.view();
  RunReport report;
  report.model = options.model;
  report.family = inputs.config.family;
  report.layer = options.layer;
  const bool is_f32 = hidden.dtype == DType::kF32;
  report.dtype = is_f32 ? "fp32" : "bf16";
  report.tokens = hidden.dim(0);
  report.hidden = hidden.dim(1);
  report.experts = inputs.config.router.num_experts;
  report.top_k = inputs.config.router.top_k;
  report.ranks = options.num_ranks;
  report.threads_per_rank = options.threads_per_rank;
  report.repeat = options.repeat;
  report.digest = digest_of(result.output.bytes());
  report.dot_order = name_of(result.dot_order);
  report.level = name_of(result.level);
  report.transport = result.transport;
  report.rows_per_expert = result.rows_per_expert;
  report.rows_per_rank = result.rows_per_rank;
  report.mode = options.mode;
  report.taken_mode = name_of(result.reports[0].mode);
  report.payload = is_f32 && options.payload == "bf16" ? "fp32" : options.payload;
  report.weights_inside = options.weights_inside;
  report.latency_tokens = result.latency_tokens;
  report.waits = result.waits;
  report.rounds = result.reports[0].num_rounds;
  report.rank_reports = result.reports;
  report.nonfinite_output = nonfinite_rows_of(result.output.view());
  for (size_t rank = 0; rank < result.reports.size(); ++rank) {
    const MoeReport& moe = result.reports[rank];
    report.bytes.push_back({moe.dispatch_bytes, moe.combine_bytes, moe.saved_by_dedup_bytes,
                            result.weight_bytes_read[rank]});
  }
  report.stages = stages_of(result.slowest_rank_seconds);
  report.total_seconds = median_of(result.slowest_rank_seconds, &StageTimes::total);
  report.pinned_cpus = result.pinned_cpus;
  const auto cpu = cpu_info();
  report.pinning = options.pin == "off" ? "threads not pinned: switched off"
                                        : pinning_text(result.pinned_cpus, options.threads_per_rank,
                                                       cpu.has_value() ? (*cpu)->num_cores : 1);
  report.recipe = options.recipe;
  const double exact = is_f32 ? kToleranceF32 : kToleranceBf16;
  const double usual = options.recipe == "bf16" ? exact : kToleranceQuantised;
  report.tolerance = options.tolerance.value_or(usual);
  report.compare_tolerance =
      options.tolerance.value_or(options.payload == "bf16" ? usual : kToleranceQuantised);
  report.weights_tolerance = is_f32 ? kWeightsToleranceF32 : HUGE_VAL;
  return report;
}

LayerCosts costs_of(const ModelConfig& config, const RanksResult& result) {
  LayerCosts costs;
  costs.hidden_dtype = std::as_const(result.output).view().dtype;
  costs.hidden = config.hidden;
  costs.intermediate = config.intermediate;
  costs.num_experts = config.router.num_experts;
  costs.shared_intermediate = config.shared_intermediate;
  costs.shared_gate = config.shared_gate;
  costs.gate_bytes = result.weight_bytes.gate;
  costs.expert_bytes = result.weight_bytes.expert;
  costs.shared_bytes = result.weight_bytes.shared;
  return costs;
}

RankWork work_of_rank(const RunReport& report, int rank) {
  const MoeReport& moe = report.rank_reports[static_cast<size_t>(rank)];
  const auto owned = [&](int64_t count, int at) { return owned_begin(count, report.ranks, at); };
  RankWork work;
  work.tokens = owned(report.tokens, rank + 1) - owned(report.tokens, rank);
  for (const int64_t rows : moe.sent_rows) work.sent_rows += rows;
  work.rows = report.rows_per_rank[static_cast<size_t>(rank)];
  for (int64_t expert = owned(report.experts, rank); expert < owned(report.experts, rank + 1);
       ++expert) {
    if (report.rows_per_expert[static_cast<size_t>(expert)] > 0) ++work.experts_hit;
  }
  return work;
}

// Right after the run, while the machine is as it was. Results stand without: where the machine
// cannot be measured, the report says why.
void add_floors(const Inputs& inputs, const RanksResult& result, RunReport* report) {
  FloorOptions options;
  options.num_ranks = report->ranks;
  options.threads_per_rank = report->threads_per_rank;
  options.level = result.level;
  const Result<FloorRates> rates = measure_floor_rates(options);
  if (!rates.has_value()) {
    report->floors_note = rates.error().message();
    return;
  }
  const LayerCosts costs = costs_of(inputs.config, result);
  std::vector<StageWorks> works;
  for (int rank = 0; rank < report->ranks; ++rank) {
    works.push_back(works_of(costs, work_of_rank(*report, rank)));
  }
  report->floors = floors_of(works, *rates);
  for (Stage& stage : report->stages) {
    for (size_t i = 0; i < kNumMoeStages; ++i) {
      if (stage.name == name_of(static_cast<MoeStage>(i))) {
        stage.floor_seconds = report->floors->stages[i];
      }
    }
  }
}

Result<std::vector<OwnedTensor>> gradients_of(const RunOptions& options,
                                              const RanksResult& result) {
  ARGOSY_ASSIGN_OR_RETURN(const CheckpointOptions how, checkpoint_options(options));
  ARGOSY_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(options.model, how));
  return gradient_tensors(checkpoint, options.layer, result);
}

// Adds the results of --check, --compare and --compare-grads.
Status judge(const RunOptions& options, const Inputs& inputs, const RanksResult& result,
             Progress& progress, RunReport* report) {
  const ConstTensorView output = result.output.view();
  const ConstTensorView topk_idx = result.topk_idx.view();
  if (options.check != "none") {
    ARGOSY_ASSIGN_OR_RETURN(const CheckpointOptions how, checkpoint_options(options));
    ARGOSY_ASSIGN_OR_RETURN(const ReferenceLayer reference,
                            ReferenceLayer::open(options.model, options.layer, how));
    ARGOSY_ASSIGN_OR_RETURN(const BlockFormat payload, parse_payload(options.payload));
    ARGOSY_ASSIGN_OR_RETURN(const PayloadLayout layout,
                            payload_layout(output.dtype, payload, output.dim(1)));
    report->check =
        check_tokens(reference, tokens_to_check(options.check, output.dim(0)), inputs.hidden.view(),
                     layout, options.weights_inside, topk_idx, output, progress);
  }
  if (inputs.captures.has_value()) {
    ARGOSY_ASSIGN_OR_RETURN(const Tensor logits,
                            router_logits(inputs.shared, inputs.hidden.view()));
    report->compare = compare(*inputs.captures, inputs.config.router, inputs.shared.selection_bias,
                              logits, output, topk_idx, result.topk_weights.view());
  }
  if (!options.compare_grads.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(const std::vector<OwnedTensor> tensors, gradients_of(options, result));
    ARGOSY_ASSIGN_OR_RETURN(report->gradients, compare_gradients(tensors, options.compare_grads));
  }
  return Status();
}

// One record a rank, of the tokens that it owns.
RouterTrace routing_of(const RunOptions& options, const RunReport& report,
                       const RanksResult& result) {
  const auto* const ids = result.topk_idx.view().as<int32_t>();
  const auto* const weights = result.topk_weights.view().as<float>();
  const int64_t size = report.tokens * report.top_k;
  RouterTrace trace{report.experts, report.top_k, {}, {ids, ids + size}, {weights, weights + size}};
  for (int rank = 0; rank < report.ranks; ++rank) {
    const int64_t first = owned_begin(report.tokens, report.ranks, rank);
    trace.records.push_back({0, options.layer, rank, first,
                             owned_begin(report.tokens, report.ranks, rank + 1) - first});
  }
  return trace;
}

// Stdout first: it cannot be taken back. Then all files or none.
Status write_results(const RunOptions& options, const RanksResult& result,
                     const RunReport& report) {
  const std::string json = json_text(to_json(report));
  ARGOSY_RETURN_IF_ERROR(write_stdout(options.json == "-" ? json : run_table(report)));
  OutputFiles files;
  if (!options.output.empty()) {
    const std::array<NamedTensor, 3> tensors = {{{"output", result.output.view()},
                                                 {"topk_idx", result.topk_idx.view()},
                                                 {"topk_weights", result.topk_weights.view()}}};
    ARGOSY_RETURN_IF_ERROR(files.add_safetensors(options.output, tensors));
  }
  if (!options.grads.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(const std::vector<OwnedTensor> owned, gradients_of(options, result));
    std::vector<NamedTensor> tensors;
    for (const OwnedTensor& one : owned) tensors.push_back({one.name, one.tensor.view()});
    ARGOSY_RETURN_IF_ERROR(files.add_safetensors(options.grads, tensors));
  }
  if (json_is_file(options)) ARGOSY_RETURN_IF_ERROR(files.add_text(options.json, json));
  if (!options.report.empty()) {
    ARGOSY_RETURN_IF_ERROR(files.add_text(options.report, report_page(report)));
  }
  if (!options.trace.empty()) {
    ARGOSY_RETURN_IF_ERROR(files.add_text(options.trace, trace_text(report)));
  }
  if (!options.record_routing.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(const std::string bytes,
                            to_bytes(routing_of(options, report, result), options.record_routing));
    ARGOSY_RETURN_IF_ERROR(files.add_text(options.record_routing, bytes));
  }
  return files.commit();
}

// All of it on rank 0, or with ranks as threads; after the ranks' part.
Result<RunReport> judge_and_write(const RunOptions& options, const Inputs& inputs,
                                  const RanksResult& result, Progress& progress) {
  RunReport report = report_of(options, inputs, result);
  if (options.floors == "on") add_floors(inputs, result, &report);
  ARGOSY_RETURN_IF_ERROR(judge(options, inputs, result, progress, &report));
  progress.clear();
  ARGOSY_RETURN_IF_ERROR(write_results(options, result, report));
  return report;
}

int print_failures(const RunReport& report) {
  const std::vector<std::string> failures = failures_of(report);
  for (const std::string& failure : failures) print_error("check failed: " + failure);
  return failures.empty() ? kExitOk : kExitCheckFailed;
}

RankInput rank_input(const Inputs& inputs) {
  return {&inputs.config, inputs.hidden.view(), inputs.d_output.view()};
}

Result<RunReport> run_threads_and_write(const RunOptions& options, Progress& progress) {
  ARGOSY_RETURN_IF_ERROR(check_targets(options));
  ARGOSY_ASSIGN_OR_RETURN(const RunRanksOptions ranks, ranks_options(options));
  ARGOSY_ASSIGN_OR_RETURN(const Inputs inputs, read_inputs(options, 0));
  ARGOSY_ASSIGN_OR_RETURN(const RanksResult result, run_ranks(ranks, rank_input(inputs), progress));
  return judge_and_write(options, inputs, result, progress);
}

int run_threads(const RunOptions& options) {
  Progress progress;
  const Result<RunReport> report = run_threads_and_write(options, progress);
  progress.clear();
  return report.has_value() ? print_failures(*report) : fail(report.error());
}

// Starts the ranks as copies of this command; the variables that they get make them ranks.
int launch_ranks(const RunOptions& options, const std::vector<std::string>& arguments) {
  // Before any process starts.
  if (const Status status = check_options(options); !status.ok()) return fail(status);
  LaunchOptions launch_options;
  launch_options.num_ranks = options.num_ranks;
  launch_options.command = {"/proc/self/exe"};
  launch_options.command.insert(launch_options.command.end(), arguments.begin(), arguments.end());
  launch_options.label_output = false;
  const Result<LaunchResult> result = launch(launch_options);
  if (!result.has_value()) return fail(result.error());
  // Ranks that end by themselves have said why.
  const std::optional<RankExit>& failure = result->first_failure;
  if (failure.has_value() && failure->signal != 0) print_error(result->message);
  return result->exit_code;
}

// The end of a rank that is a process. Of errors that all ranks share, rank 0 speaks.
int fail_rank(int rank, const Status& status, bool is_known_to_others) {
  if (rank == 0 || !is_known_to_others) {
    print_error(fmt::format("rank {}: {}", rank, status.message()));
  }
  return exit_code_of(status);
}

// This process is one rank of a job.
int run_as_rank(const RunOptions& options, const RankIdentity& identity) {
  const int rank = identity.rank;
  // What follows from the command line alone is the same on every rank.
  const Result<RunRanksOptions> ranks = ranks_options(options);
  if (!ranks.has_value()) return fail_rank(rank, ranks.error(), true);
  Progress progress;
  if (rank == 0) progress.begin("run", options.repeat);
  Result<Inputs> inputs = read_inputs(options, rank);
  if (rank == 0) {
    if (Status status = check_targets(options); !status.ok()) inputs = std::move(status);
  }
  const Result<RankInput> input =
      inputs.has_value() ? Result<RankInput>(rank_input(*inputs)) : inputs.error();
  const RankSeat seat{rank, TransportKind::kShm, identity.job, nullptr};
  const RankOutcome outcome = run_rank(*ranks, seat, input, progress);
  progress.clear();
  if (!outcome.status.ok()) return fail_rank(rank, outcome.status, outcome.is_known_to_others);
  if (rank != 0) return kExitOk;
  const Result<RunReport> report = judge_and_write(options, *inputs, *outcome.result, progress);
  progress.clear();
  return report.has_value() ? print_failures(*report) : fail(report.error());
}

int run(RunOptions options, const std::vector<std::string>& arguments) {
  options.num_ranks = options.ranks.value_or(1);
  if (options.transport == "inproc") return run_threads(options);
  const Result<RankIdentity> identity = rank_identity();
  if (!identity.has_value()) return fail(identity.error());
  if (identity->source == "none") {
    return options.transport == "shm" ? launch_ranks(options, arguments) : run_threads(options);
  }
  if (options.ranks.has_value() && *options.ranks != identity->num_ranks) {
    print_error(
        fmt::format("--ranks is {}, but {} in the environment is {}; leave --ranks out, or "
                    "give --transport inproc to run without the other processes",
                    *options.ranks, identity->size_variable, identity->num_ranks));
    return kExitBadInput;
  }
  options.num_ranks = identity->num_ranks;
  return run_as_rank(options, *identity);
}

}  // namespace

void add_run_command(CLI::App& app, const std::vector<std::string>& arguments, int* exit_code) {
  CLI::App* const command = app.add_subcommand(
      "run", "Run one MoE layer of a checkpoint over ranks; check and measure it");
  const auto options = std::make_shared<RunOptions>();
  add_layer_options(*command, *options);
  add_result_options(*command, *options);
  command->footer(
      "A check fails (exit code 1) when experts differ other than in ties, when the output is off "
      "by\n"
      "more than the tolerance, or when fp32 weights are off by more than 2e-6 relative. JSON has\n"
      "no infinity: an error without bound is the text \"inf\" there.\n\n"
      "Examples:\n"
      "  argosy run --model testdata/models/deepseek_v3_tiny --layer 1 --ranks 4 \\\n"
      "    --input testdata/models/deepseek_v3_tiny/captures.safetensors:f32.layers.1.moe_input "
      "\\\n"
      "    --compare testdata/models/deepseek_v3_tiny/captures.safetensors:f32.layers.1\n"
      "  argosy run --model DIR --layer 0 --input FILE:TENSOR --ranks 8 --check all --json - | jq "
      ".error");
  command->callback([options, arguments, exit_code] { *exit_code = run(*options, arguments); });
}

}  // namespace argosy::tools
