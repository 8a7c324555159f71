// Latency mode against its floor, throughput mode and MPI: ranks as threads of this process, and as processes.
//
// One measurement gives dispatch, combine and both; its cases share it. Floor: docs/perf/latency.md. Test:
// tests/bench/bench_test.cc.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "argosy/launch.h"
#include "tools/bench/latency_rank.h"
#include "tools/bench/latency_work.h"
#include "tools/bench/rank_crew.h"
#include "tools/bench/runner.h"

namespace argosy::tools::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Setting {
  LatencyShape shape;
  bool processes = false;
};

// Fewer for many tokens: one call moves megabytes then.
int64_t iterations_for(const LatencyShape& shape, const RunLimits& limits) {
  if (limits.num_samples > 0) return limits.num_samples;
  const double share = limits.seconds / RunLimits().seconds;
  const double wanted = shape.num_tokens >= 128 ? 60 : shape.num_tokens >= 32 ? 150 : 400;
  return std::max(kLeastSamples, static_cast<int64_t>(wanted * share));
}

// A name for files and memory of one measurement.
std::string fresh_name() {
  static int count = 0;
  return fmt::format("argosy_bench_{}_{}", getpid(), count++);
}

Result<LatencyTimes> time_threads(const BenchContext& context, const LatencyShape& shape,
                                  int64_t iterations) {
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<RankCrew> crew,
                          RankCrew::create(context, shape.num_ranks, 1));
  LatencyTimes times;
  const std::string region = fresh_name();
  ARGOSY_RETURN_IF_ERROR(crew->run([&](Group& group) -> Status {
                               ARGOSY_ASSIGN_OR_RETURN(
                                   LatencyTimes mine,
                                   time_latency(group, shape, iterations, region));
                               if (group.rank() == 0) times = std::move(mine);
                               return {};
                             })
                             .error());
  return times;
}

// A file that goes with its owner.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / name) {}
  ~ScratchFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  std::string path() const { return path_.string(); }
  Result<Json> read_json() const {
    std::ifstream file(path_);
    Json json = Json::parse(file, nullptr, false);
    if (!json.is_discarded()) return json;
    return Status(StatusCode::kIo, fmt::format("{} holds no JSON", path_.string()));
  }

 private:
  std::filesystem::path path_;
};

Status run_program(std::vector<std::string> command, int num_ranks) {
  LaunchOptions options;
  options.num_ranks = num_ranks;
  options.command = std::move(command);
  options.label_output = false;
  options.timeout = std::chrono::minutes(5);
  ARGOSY_ASSIGN_OR_RETURN(const LaunchResult result, launch(options));
  if (result.exit_code == 0) return {};
  return Status(StatusCode::kInternal,
                fmt::format("{}: {}", options.command.front(), result.message));
}

Result<std::string> own_program() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return Status(StatusCode::kIo, "/proc/self/exe: " + error.message());
  return path.string();
}

Result<LatencyTimes> time_processes(const LatencyShape& shape, int64_t iterations) {
  ARGOSY_ASSIGN_OR_RETURN(const std::string program, own_program());
  const std::string name = fresh_name();
  const ScratchFile result(name + ".json");
  ARGOSY_RETURN_IF_ERROR(run_program({program, "bench", "latency", "--as-rank",
                                      to_text(LatencyJob{shape, iterations, name, result.path()})},
                                     shape.num_ranks));
  ARGOSY_ASSIGN_OR_RETURN(const Json json, result.read_json());
  return times_from(json);
}

// Open MPI's way, where mpirun and the program are: seconds of both phases.
Result<LatencyTimes> time_mpi(const std::string& program, const LatencyShape& shape,
                              int64_t iterations) {
  const std::string name = fresh_name();
  const ScratchFile routing(name + ".routing");
  const ScratchFile result(name + ".json");
  {
    std::ofstream file(routing.path(), std::ios::binary);
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      ARGOSY_ASSIGN_OR_RETURN(const Routing one, latency_routing(shape, rank));
      const auto bytes = static_cast<std::streamsize>(one.topk_idx.size() * sizeof(int32_t));
      file.write(reinterpret_cast<const char*>(one.topk_idx.data()), bytes);
      file.write(reinterpret_cast<const char*>(one.topk_weights.values.data()), bytes);
    }
    if (!file.flush()) return Status(StatusCode::kIo, "cannot write " + routing.path());
  }
  ARGOSY_RETURN_IF_ERROR(
      run_program({"mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca",
                   "mpi_yield_when_idle", "1", "-n", fmt::to_string(shape.num_ranks), program,
                   routing.path(), fmt::to_string(shape.num_tokens), fmt::to_string(shape.top_k),
                   fmt::to_string(shape.num_experts), fmt::to_string(shape.hidden),
                   fmt::to_string(iterations), result.path()},
                  1));
  ARGOSY_ASSIGN_OR_RETURN(const Json json, result.read_json());
  return times_from(json);
}

struct Measured {
  LatencyTimes times;
  std::optional<LatencyTimes> mpi;  // under kLatencyMode
};

// Measures each setting once, whichever of its cases comes first.
class Measurements {
 public:
  explicit Measurements(std::string mpi_program) : mpi_program_(std::move(mpi_program)) {}

  Result<const Measured*> get(const BenchContext& context, const RunLimits& limits,
                              const Setting& setting) {
    const std::string key =
        fmt::format("{} {} {} {} {}", setting.shape.num_ranks, setting.shape.num_tokens,
                    static_cast<int>(setting.shape.payload), setting.shape.push, setting.processes);
    if (const auto at = done_.find(key); at != done_.end()) return &at->second;
    const int64_t iterations = iterations_for(setting.shape, limits);
    Measured measured;
    ARGOSY_ASSIGN_OR_RETURN(measured.times, setting.processes
                                                ? time_processes(setting.shape, iterations)
                                                : time_threads(context, setting.shape, iterations));
    // MPI's rows are bf16 and its ranks are processes: measured once for each number of them.
    if (setting.processes && setting.shape.payload == BlockFormat::kUnset &&
        !mpi_program_.empty()) {
      ARGOSY_ASSIGN_OR_RETURN(measured.mpi, time_mpi(mpi_program_, setting.shape, iterations));
    }
    return &(done_[key] = std::move(measured));
  }

 private:
  const std::string mpi_program_;
  std::map<std::string, Measured> done_;
};

// Which phases a case adds up.
std::vector<double> seconds_of(const LatencyTimes& times, LatencySubject subject, bool dispatch,
                               bool combine) {
  const auto& phases = times.seconds[static_cast<size_t>(subject)];
  std::vector<double> sums(phases[kDispatchPhase].size());
  for (size_t i = 0; i < sums.size(); ++i) {
    sums[i] = (dispatch ? phases[kDispatchPhase][i] : 0) + (combine ? phases[kCombinePhase][i] : 0);
  }
  return sums;
}

struct Part {
  std::string name;
  bool dispatch, combine;
  Goals goals;
  double mpi_goal;
};

BenchCase make_case(const std::shared_ptr<Measurements>& measurements, const Setting& setting,
                    const Part& part) {
  BenchCase made;
  made.name = part.name;
  made.params = {{"R", setting.shape.num_ranks},   {"T", setting.shape.num_tokens},
                 {"E", setting.shape.num_experts}, {"K", setting.shape.top_k},
                 {"H", setting.shape.hidden},      {"processes", setting.processes ? 1 : 0}};
  made.limit = "a flag to and from every rank and a memcpy of the rows that change rank";
  made.goals = part.goals;
  made.measure = [=](const BenchContext& context,
                     const RunLimits& limits) -> Result<MeasuredSamples> {
    ARGOSY_ASSIGN_OR_RETURN(const Measured* const measured,
                            measurements->get(context, limits, setting));
    MeasuredSamples samples;
    const auto of = [&](const LatencyTimes& times, LatencySubject subject) {
      return seconds_of(times, subject, part.dispatch, part.combine);
    };
    const std::vector<double> mine = of(measured->times, kLatencyMode);
    const std::vector<double> floor = of(measured->times, kFloor);
    for (size_t i = 0; i < mine.size(); ++i) samples.samples.push_back({mine[i], floor[i]});
    const double median = quantile(mine, 0.5);
    samples.more["p99_seconds"] = quantile(mine, 0.99);
    samples.more["limit_p99_seconds"] = quantile(floor, 0.99);
    const double throughput = quantile(of(measured->times, kThroughputMode), 0.5);
    samples.more["throughput_seconds"] = throughput;
    samples.more["over_throughput"] = throughput / median;
    if (measured->mpi.has_value()) {
      const std::vector<double> mpi = of(*measured->mpi, kLatencyMode);
      samples.more["mpi_seconds"] = quantile(mpi, 0.5);
      samples.more["mpi_p99_seconds"] = quantile(mpi, 0.99);
      samples.more["over_mpi"] = quantile(mpi, 0.5) / median;
      if (part.mpi_goal > 0) samples.more["over_mpi_goal"] = part.mpi_goal;
    }
    return samples;
  };
  return made;
}

}  // namespace

std::vector<BenchCase> latency_cases(const BenchSizes& sizes) {
  std::string mpi_program;
  if (const Result<std::string> self = own_program(); self.has_value()) {
    const std::filesystem::path beside =
        std::filesystem::path(*self).parent_path() / "argosy_mpi_latency";
    if (std::filesystem::exists(beside) && !sizes.quick) mpi_program = beside.string();
  }
  const auto measurements = std::make_shared<Measurements>(mpi_program);
  std::vector<BenchCase> cases;
  const std::vector<int> ranks = sizes.quick ? std::vector<int>{2} : std::vector<int>{2, 4, 8};
  const std::vector<int64_t> tokens =
      sizes.quick ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{1, 8, 32, 128};
  for (const bool processes : {false, true}) {
    for (const int num_ranks : ranks) {
      for (const int64_t num_tokens : tokens) {
        LatencyShape shape{num_ranks, num_tokens};
        if (sizes.quick) shape = {num_ranks, num_tokens, 16, 4, 96};
        // The goals are those of 4 ranks on 2 cores.
        const bool counts = num_ranks == 4;
        const auto goal = [&](double times) { return Goals::same(counts ? 1 / times : 0); };
        const double over_mpi = !counts ? 0 : num_tokens >= 128 ? 3 : 5;
        const Setting bf16{shape, processes};
        cases.push_back(make_case(measurements, bf16,
                                  {"latency_dispatch_bf16", true, false, goal(1.3), over_mpi}));
        cases.push_back(
            make_case(measurements, bf16, {"latency_combine", false, true, goal(1.3), over_mpi}));
        cases.push_back(
            make_case(measurements, bf16, {"latency_both_bf16", true, true, goal(1.3), over_mpi}));
        Setting fp8 = bf16;
        fp8.shape.payload = BlockFormat::kE4M3Row128;
        cases.push_back(
            make_case(measurements, fp8, {"latency_dispatch_fp8", true, false, goal(2.0), 0}));
        cases.push_back(
            make_case(measurements, fp8, {"latency_both_fp8", true, true, Goals::same(0), 0}));
      }
    }
  }
  return cases;
}

}  // namespace argosy::tools::bench
