// A benchmark: what is timed, and the limit it is held against, measured in turn with it.
//
// Invariant: every sample takes the yardstick first and the work right after it, on the same pinned
// threads, so that a machine that changes speed changes both. Test: tests/bench/.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/measure.h"
#include "argosy/status.h"

namespace argosy::tools::bench {

// What bounds products of bf16 on a CPU: goals differ by it.
enum class CpuKind { kAmx, kAvx512Bf16, kFma };
// "amx", "avx512_bf16", "fma".
std::string_view name_of(CpuKind kind);

// Least share of the limit's speed to reach, by kind.
struct Goals {
  double amx = 0;
  double avx512_bf16 = 0;
  double fma = 0;

  static constexpr Goals same(double goal) { return {goal, goal, goal}; }
  double of(CpuKind kind) const;
};

// What every case of one run shares.
struct BenchContext {
  Level level = Level::kGeneric;            // of the kernels
  DotOrder dot_order = DotOrder::kVdpbf16;  // kAmx or kVdpbf16
  PeakLoop peak;                            // the fastest for bf16 products
  CpuKind kind = CpuKind::kFma;             // by `peak`
  int num_threads = 1;                      // of cases that do not fix it
  int64_t probe_bytes = 0;                  // as for MemoryProbe
  double peak_seconds = 0.002;              // of one sample of the peak
};

struct Sample {
  double seconds = 0;        // of the work
  double limit_seconds = 0;  // what the limit allows for it
};

class Bench {
 public:
  virtual ~Bench() = default;
  virtual Result<Sample> sample() = 0;
  // Further members of the case's result, known once it is made.
  virtual nlohmann::ordered_json more() const { return nlohmann::ordered_json::object(); }
};

// What a case that takes all its samples itself gives.
struct MeasuredSamples {
  std::vector<Sample> samples;
  nlohmann::ordered_json more = nlohmann::ordered_json::object();  // further members of its result
};
struct RunLimits;

struct BenchCase {
  std::string name;
  nlohmann::ordered_json params;  // an object of numbers
  std::string limit;
  Goals goals;
  // Prepares, runs the work once and holds its result against a reference in fp64. kInternal: the
  // result was wrong. Called, like sample(), on a thread of the case's own.
  std::function<Result<std::unique_ptr<Bench>>(const BenchContext& context)> make;
  // In place of `make`, for work that is timed call by call.
  std::function<Result<MeasuredSamples>(const BenchContext& context, const RunLimits& limits)>
      measure = nullptr;
};

// "layer_decode T=8 threads=1".
std::string label_of(const BenchCase& bench_case);

struct BenchSizes {
  bool quick = false;   // tiny: the path is walked, the numbers mean nothing
  int num_threads = 1;  // as in BenchContext
};
std::vector<BenchCase> gemm_cases(const BenchSizes& sizes);
std::vector<BenchCase> gemm_backward_cases(const BenchSizes& sizes);  // part of them
std::vector<BenchCase> layer_cases(const BenchSizes& sizes);
std::vector<BenchCase> exchange_cases(const BenchSizes& sizes);
std::vector<BenchCase> latency_cases(const BenchSizes& sizes);
std::vector<BenchCase> train_cases(const BenchSizes& sizes);
std::vector<BenchCase> router_cases(const BenchSizes& sizes);
std::vector<BenchCase> quantise_cases(const BenchSizes& sizes);

}  // namespace argosy::tools::bench
