// argosy bench: times what users wait for, each case against the limit of this machine. Test:
// tests/bench/bench_test.cc.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench/latency_rank.h"
#include "tools/bench/runner.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/option_checks.h"
#include "tools/output_files.h"
#include "tools/progress.h"

namespace argosy::tools {
namespace {

using bench::BenchCase;
using bench::BenchContext;
using bench::BenchResult;

struct BenchCommand {
  std::string area;
  std::string filter;
  std::string json_path;
  std::string level;
  std::string dot_order = "auto";
  int num_threads = 1;
  bench::RunLimits limits;
  bool quick = false;
  bool list = false;
  std::string rank_job;  // this process is a rank of a measurement
};

std::vector<BenchCase> cases_of(const BenchCommand& command) {
  const bench::BenchSizes sizes{command.quick, command.num_threads};
  if (command.area == "gemm") return bench::gemm_cases(sizes);
  if (command.area == "layer") return bench::layer_cases(sizes);
  if (command.area == "latency") return bench::latency_cases(sizes);
  if (command.area == "train") return bench::train_cases(sizes);
  if (command.area == "router") return bench::router_cases(sizes);
  if (command.area == "quantise") return bench::quantise_cases(sizes);
  return bench::exchange_cases(sizes);
}

Result<BenchContext> context_of(const BenchCommand& command) {
  std::optional<Level> level;
  if (!command.level.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(level, parse_level(command.level));
  }
  ARGOSY_ASSIGN_OR_RETURN(const DotOrder dot_order, parse_dot_order(command.dot_order));
  ARGOSY_ASSIGN_OR_RETURN(BenchContext context, bench::make_context(level, dot_order));
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  if (command.num_threads > cpu->num_cores) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format(
            "--threads is {}, but {} cores are usable: threads that take turns have no limit "
            "to be held against",
            command.num_threads, cpu->num_cores));
  }
  context.num_threads = command.num_threads;
  if (command.quick) {
    context.probe_bytes = 1 << 20;
    context.peak_seconds = 1e-4;
  }
  return context;
}

// JSON and text of a run, or of the list.
struct Answer {
  std::string json;
  std::string text;
};

Result<Answer> answer(const BenchCommand& command) {
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<BenchCase> cases,
                          bench::matching(cases_of(command), command.filter));
  if (command.list) return Answer{json_text(bench::to_json(cases)), bench::to_text(cases)};
  ARGOSY_ASSIGN_OR_RETURN(const BenchContext context, context_of(command));
  std::vector<BenchResult> results;
  Progress progress;
  progress.begin("bench", static_cast<int64_t>(cases.size()));
  for (const BenchCase& bench_case : cases) {
    ARGOSY_ASSIGN_OR_RETURN(BenchResult result,
                            bench::run_case(bench_case, context, command.limits));
    results.push_back(std::move(result));
    progress.step();
  }
  progress.clear();
  return Answer{json_text(bench::to_json(results)), bench::to_text(context, results)};
}

int run_bench(const BenchCommand& command) {
  if (!command.rank_job.empty()) {
    const Result<bench::LatencyJob> job = bench::job_from(command.rank_job);
    const Status status = job.has_value() ? bench::run_latency_rank(*job) : job.error();
    return status.ok() ? kExitOk : fail(status);
  }
  const bool json_is_stdout = command.json_path == "-";
  const bool json_is_file = !command.json_path.empty() && !json_is_stdout;
  if (json_is_file) {
    const Status status = check_target("--json", command.json_path);
    if (!status.ok()) return fail(status);
  }
  const Result<Answer> got = answer(command);
  if (!got.has_value()) return fail(got.error());
  Status status = write_stdout(json_is_stdout ? got->json : got->text);
  OutputFiles files;
  if (status.ok() && json_is_file) status = files.add_text(command.json_path, got->json);
  if (status.ok()) status = files.commit();
  return status.ok() ? kExitOk : fail(status);
}

void add_options(CLI::App& app, BenchCommand& options) {
  app.add_option("area", options.area,
                 "What to time: gemm, layer, train, exchange, latency, router or quantise")
      ->required()
      ->type_name("AREA")
      ->check(one_of({"gemm", "layer", "train", "exchange", "latency", "router", "quantise"}));
  app.add_option("--filter", options.filter,
                 "Only cases whose name and parameters, as --list prints them, hold this text")
      ->type_name("TEXT");
  app.add_option("--json", options.json_path,
                 "Write JSON to this file; - is stdout, without the table")
      ->type_name("FILE|-")
      ->check(not_empty());
  app.add_flag("--list", options.list, "Print the cases and their goals, run nothing");
  app.add_option("--level", options.level,
                 "CPU level of the kernels, and of the peak they are held against")
      ->type_name("NAME")
      ->check(level_name());
  app.add_option("--dot-order", options.dot_order, "Order of the bf16 dot product")
      ->type_name("NAME")
      ->check(dot_order_name());
  app.add_option("--threads", options.num_threads,
                 "Threads of the cases that have one, and of their limit")
      ->type_name("N")
      ->check(whole_number(1, 1024));
  app.add_option("--seconds", options.limits.seconds, "Time of one case, preparation apart")
      ->type_name("S")
      ->check(number(0, 3600));
  app.add_option("--samples", options.limits.num_samples, "Exactly so many samples of each case")
      ->type_name("N")
      ->check(whole_number(1, 1'000'000));
  app.add_flag("--quick", options.quick,
               "Tiny sizes: shows that the benchmarks run; the times mean nothing");
  // Not for users: how the bench starts its ranks.
  app.add_option("--as-rank", options.rank_job)->group("");
}

}  // namespace

void add_bench_command(CLI::App& app, int* exit_code) {
  CLI::App* const command = app.add_subcommand(
      "bench",
      "Time the grouped GEMM, the layer, a training step, the exchange in either mode, the "
      "router or the quantiser against this machine's limits");
  const auto options = std::make_shared<BenchCommand>();
  add_options(*command, *options);
  command->footer(
      "Every sample takes its limit first (a register loop, a read of memory, a copy) and the "
      "work\n"
      "right after it, on the same pinned threads. reached = limit / median.\n\n"
      "Examples:\n"
      "  argosy bench layer\n"
      "  argosy bench gemm --filter gemm_hot --level avx2\n"
      "  argosy bench layer --filter T=8 --json - | jq '.[].reached'");
  command->callback([options, exit_code] { *exit_code = run_bench(*options); });
}

}  // namespace argosy::tools
