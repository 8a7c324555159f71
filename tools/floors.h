// The floor of a stage: the least time that arithmetic and memory allow for its work.
//
// Invariant: a floor is a bound, never a forecast. It counts only work that any implementation has
// to do, at rates measured in the same process right after the run. Formulas and what is left out:
// docs/perf/layer.md. Test: tests/cli/floors_test.cc.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/moe.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy::tools {

// What is known of a layer before any token comes. Bytes are those of the values, without padding.
struct LayerCosts {
  DType hidden_dtype = DType::kUnset;  // kBF16 or kF32
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t num_experts = 0;
  int64_t shared_intermediate = 0;  // 0: no shared experts
  bool shared_gate = false;
  int64_t gate_bytes = 0;    // the router's weights
  int64_t expert_bytes = 0;  // the weights of one expert
  int64_t shared_bytes = 0;  // of all shared experts
};

// One rank's share of a call.
struct RankWork {
  int64_t tokens = 0;       // that are at home here
  int64_t sent_rows = 0;    // expert rows that these tokens make, on whatever rank
  int64_t rows = 0;         // expert rows computed here
  int64_t experts_hit = 0;  // experts of this rank with rows
};

// Arithmetic and memory traffic of one stage. A stage may need either alone.
struct StageWork {
  double operations = 0;   // a multiply-add is two
  bool is_bf16 = false;    // products of bf16, which have an instruction of their own
  double read_bytes = 0;   // weights: only read
  double moved_bytes = 0;  // rows: read or written
};
using StageWorks = std::array<StageWork, kNumMoeStages>;  // by MoeStage; counts has none

StageWorks works_of(const LayerCosts& layer, const RankWork& rank);

// What some threads reach together; operations and bytes a second.
struct Rates {
  int num_threads = 1;
  double bf16_peak = 0;
  double f32_peak = 0;
  double memory_read = 0;
  double memory_moved = 0;  // bytes read plus bytes written, by whatever is fastest
  double cache_read = 0;    // the same in the last cache
  double cache_moved = 0;
};

struct FloorRates {
  Rates one_rank;   // the threads of a rank while no other rank works
  Rates all_ranks;  // those of all ranks, at most one a core
  std::string bf16_instruction;
  std::string f32_instruction;
  int64_t last_cache_bytes = 0;
  int64_t memory_bytes = 0;  // that the memory's rates were measured over
};

// Seconds; 0 where a stage has no work.
struct Floors {
  FloorRates rates;
  std::vector<std::array<double, kNumMoeStages>> ranks;  // each rank alone on the machine
  std::array<double, kNumMoeStages> stages = {};         // the largest of any rank
  double total = 0;
};

// No rank is faster than alone on the machine: a stage's floor is the largest of any rank's. (All
// work at the rates of all ranks is no bound of a stage: ranks that share cores may go through it
// one after the other.) A rank's stages follow each other, so the total has the sum of a rank's
// floors. Neither is it less than what all ranks do after the counts at the rates of all: the rank
// that ends last was there when the last counts came, and all of that work came later.
Floors floors_of(std::span<const StageWorks> ranks, const FloorRates& rates);

struct FloorOptions {
  int num_ranks = 1;
  int threads_per_rank = 1;
  Level level = Level::kGeneric;  // that ran: its instructions count
  int num_samples = 5;
  double peak_seconds = 0.0005;  // of one sample of a peak
  // Of the probe; 0: twice the last cache, at least 64 MiB and 4 MiB a thread.
  int64_t memory_bytes = 0;
};

// The best of samples taken in turn, by threads bound to the first cores: whatever disturbs a sample
// makes it slower, and a floor must not rise by it. Takes about 0.1 s, more where the last cache is
// very large. Errors: those of sample_peak and MemoryProbe.
Result<FloorRates> measure_floor_rates(const FloorOptions& options);

}  // namespace argosy::tools
