// See runner.h. Test: tests/bench/runner_test.cc.
#include "tools/bench/runner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <system_error>
#include <thread>

#include "tools/table.h"

namespace argosy::tools::bench {
namespace {

using Json = nlohmann::ordered_json;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Result<BenchResult> sample_case(const BenchCase& bench_case, const BenchContext& context,
                                const RunLimits& limits) {
  if (bench_case.measure != nullptr) {
    ARGOSY_ASSIGN_OR_RETURN(MeasuredSamples measured, bench_case.measure(context, limits));
    BenchResult result = summarise(bench_case, context.kind, measured.samples);
    result.more = std::move(measured.more);
    return result;
  }
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<Bench> bench, bench_case.make(context));
  // Warm-up: buffers are touched, threads awake, clocks raised.
  const int64_t num_warm = limits.num_samples > 0 ? 1 : 2;
  for (int64_t i = 0; i < num_warm; ++i) {
    ARGOSY_ASSIGN_OR_RETURN([[maybe_unused]] const Sample sample, bench->sample());
  }
  const double begin = now_seconds();
  std::vector<Sample> samples;
  const auto wants_more = [&] {
    const auto count = static_cast<int64_t>(samples.size());
    if (limits.num_samples > 0) return count < limits.num_samples;
    return count < kLeastSamples ||
           (count < kMostSamples && now_seconds() - begin < limits.seconds);
  };
  while (wants_more()) {
    ARGOSY_ASSIGN_OR_RETURN(const Sample sample, bench->sample());
    samples.push_back(sample);
  }
  BenchResult result = summarise(bench_case, context.kind, samples);
  result.more = bench->more();
  return result;
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string percent(double share) { return fmt::format("{:.1f} %", share * 100); }

std::string params_text(const Json& params) {
  std::vector<std::string> words;
  for (const auto& [name, value] : params.items()) {
    words.push_back(fmt::format("{}={}", name, value.dump()));
  }
  return fmt::format("{}", fmt::join(words, " "));
}

std::string label(const std::string& name, const Json& params) {
  return fmt::format("{} {}", name, params_text(params));
}

std::string ratio_text(double ratio) { return fmt::format("{:.2f}", ratio); }

// Members of a result that have a column, where any result has them.
constexpr struct {
  const char* name;
  const char* heading;
  std::string (*text)(double);
} kMoreColumns[] = {
    {"p99_seconds", "p99", time_text},
    {"limit_p99_seconds", "limit p99", time_text},
    {"throughput_seconds", "throughput", time_text},
    {"over_throughput", "ratio", ratio_text},
    {"mpi_seconds", "MPI", time_text},
    {"over_mpi", "ratio", ratio_text},
    {"error_max", "error, max of peak", percent},
    {"error_rms", "rms", percent},
};

void add_more(std::span<const BenchResult> results, std::vector<std::vector<std::string>>* lines) {
  for (const auto& column : kMoreColumns) {
    const auto has = [&](const BenchResult& result) { return result.more.contains(column.name); };
    if (!std::ranges::any_of(results, has)) continue;
    lines->front().push_back(column.heading);
    for (size_t i = 0; i < results.size(); ++i) {
      (*lines)[i + 1].push_back(
          has(results[i]) ? column.text(results[i].more.at(column.name).get<double>()) : "");
    }
  }
}

// One line a name, under the table.
void add_limit(const std::string& name, const std::string& limit, std::vector<std::string>* lines) {
  const std::string line = fmt::format("limit of {}: {}\n", name, limit);
  if (std::find(lines->begin(), lines->end(), line) == lines->end()) lines->push_back(line);
}

}  // namespace

std::string_view name_of(CpuKind kind) {
  constexpr std::string_view kNames[] = {"amx", "avx512_bf16", "fma"};
  return kNames[static_cast<size_t>(kind)];
}

double Goals::of(CpuKind kind) const {
  switch (kind) {
    case CpuKind::kAmx:
      return amx;
    case CpuKind::kAvx512Bf16:
      return avx512_bf16;
    case CpuKind::kFma:
      return fma;
  }
  return fma;
}

std::string label_of(const BenchCase& bench_case) {
  return label(bench_case.name, bench_case.params);
}

BenchResult summarise(const BenchCase& bench_case, CpuKind kind, std::span<const Sample> samples) {
  std::vector<double> seconds, limit_seconds;
  for (const Sample& sample : samples) {
    seconds.push_back(sample.seconds);
    limit_seconds.push_back(sample.limit_seconds);
  }
  BenchResult result;
  result.name = bench_case.name;
  result.params = bench_case.params;
  result.limit = bench_case.limit;
  result.median_seconds = median(seconds);
  result.min_seconds = *std::min_element(seconds.begin(), seconds.end());
  result.max_seconds = *std::max_element(seconds.begin(), seconds.end());
  result.limit_seconds = median(limit_seconds);
  result.reached = result.limit_seconds / result.median_seconds;
  result.num_samples = static_cast<int64_t>(samples.size());
  result.goal = bench_case.goals.of(kind);
  return result;
}

Result<BenchResult> run_case(const BenchCase& bench_case, const BenchContext& context,
                             const RunLimits& limits) {
  std::optional<Result<BenchResult>> result;
  try {
    std::thread([&] { result.emplace(sample_case(bench_case, context, limits)); }).join();
  } catch (const std::system_error& error) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("the system refused a thread for the benchmark: {}", error.what()));
  }
  if (result->has_value()) return std::move(*result).value();
  const Status& status = result->error();
  return Status(status.code(), fmt::format("{}: {}", label_of(bench_case), status.message()));
}

Result<std::vector<BenchCase>> matching(std::vector<BenchCase> cases, const std::string& text) {
  std::vector<std::string> labels;
  for (const BenchCase& bench_case : cases) labels.push_back(label_of(bench_case));
  std::erase_if(cases, [&](const BenchCase& bench_case) {
    return label_of(bench_case).find(text) == std::string::npos;
  });
  if (!cases.empty()) return cases;
  return Status(StatusCode::kNotFound,
                fmt::format("--filter '{}' matches no case; there are:\n  {}", text,
                            fmt::join(labels, "\n  ")));
}

Result<BenchContext> make_context(std::optional<Level> wanted, DotOrder dot_order) {
  BenchContext context;
  ARGOSY_ASSIGN_OR_RETURN(context.level, resolve_level(wanted));
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  context.dot_order = dot_order;
  if (dot_order == DotOrder::kAuto) {
    context.dot_order = cpu->has(Level::kAmx) ? DotOrder::kAmx : DotOrder::kVdpbf16;
  }
  // Without a level asked for, the limit is the CPU's, whatever kernels this build has.
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<PeakLoop> loops,
                          peak_loops(wanted.value_or(Level::kAmx)));
  double best = 0;
  for (const PeakLoop& loop : loops) {
    std::vector<double> rates;
    for (int i = 0; i < 5; ++i) {
      ARGOSY_ASSIGN_OR_RETURN(const double rate, sample_peak(loop, 1, 1e-3));
      rates.push_back(rate);
    }
    const double rate = median(rates);
    if (rate > best) {
      best = rate;
      context.peak = loop;
    }
  }
  context.kind = context.peak.level == Level::kAmx          ? CpuKind::kAmx
                 : context.peak.level == Level::kAvx512Bf16 ? CpuKind::kAvx512Bf16
                                                            : CpuKind::kFma;
  return context;
}

Json to_json(std::span<const BenchResult> results) {
  Json list = Json::array();
  for (const BenchResult& result : results) {
    list.push_back({{"name", result.name},
                    {"params", result.params},
                    {"median_seconds", result.median_seconds},
                    {"min_seconds", result.min_seconds},
                    {"max_seconds", result.max_seconds},
                    {"limit", result.limit},
                    {"limit_seconds", result.limit_seconds},
                    {"reached", result.reached}});
    list.back().update(result.more);
  }
  return list;
}

Json to_json(std::span<const BenchCase> cases) {
  Json list = Json::array();
  for (const BenchCase& bench_case : cases) {
    Json goals;
    for (const CpuKind kind : {CpuKind::kAmx, CpuKind::kAvx512Bf16, CpuKind::kFma}) {
      goals[std::string(name_of(kind))] = bench_case.goals.of(kind);
    }
    list.push_back({{"name", bench_case.name},
                    {"params", bench_case.params},
                    {"limit", bench_case.limit},
                    {"goals", goals}});
  }
  return list;
}

std::string to_text(const BenchContext& context, std::span<const BenchResult> results) {
  std::vector<std::vector<std::string>> lines = {
      {"case", "median", "min", "max", "samples", "limit", "reached", "goal", ""}};
  std::vector<std::string> limits;
  for (const BenchResult& result : results) {
    lines.push_back({label(result.name, result.params), time_text(result.median_seconds),
                     time_text(result.min_seconds), time_text(result.max_seconds),
                     std::to_string(result.num_samples), time_text(result.limit_seconds),
                     percent(result.reached), result.goal > 0 ? percent(result.goal) : "",
                     result.goal <= 0                ? ""
                     : result.reached >= result.goal ? "met"
                                                     : "below"});
    add_limit(result.name, result.limit, &limits);
  }
  add_more(results, &lines);
  return fmt::format("level {}, dot_order {}, peak by {}; goals for {}\n\n{}\n{}",
                     name_of(context.level), name_of(context.dot_order), context.peak.instruction,
                     name_of(context.kind), aligned(lines), fmt::join(limits, ""));
}

std::string to_text(std::span<const BenchCase> cases) {
  std::vector<std::vector<std::string>> lines = {{"case", "goal: amx", "avx512_bf16", "fma"}};
  std::vector<std::string> limits;
  for (const BenchCase& bench_case : cases) {
    const auto goal = [](double share) { return share > 0 ? percent(share) : std::string(); };
    lines.push_back({label_of(bench_case), goal(bench_case.goals.amx),
                     goal(bench_case.goals.avx512_bf16), goal(bench_case.goals.fma)});
    add_limit(bench_case.name, bench_case.limit, &limits);
  }
  return fmt::format("{}\n{}", aligned(lines), fmt::join(limits, ""));
}

}  // namespace argosy::tools::bench
