// One MoE layer over R ranks that are threads of this process: load, join, run, gather.
//
// Invariant: whatever happens on one rank, every thread ends and is joined, and the error that came
// first in cause is the one reported. Test: tests/cli/run_test.cc, tests/cli/table_test.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/moe.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "tools/progress.h"

namespace argosy::tools {

struct RunRanksOptions {
  std::string model_dir;
  int64_t layer = 0;
  int num_ranks = 1;
  int threads_per_rank = 1;
  DotOrder dot_order = DotOrder::kAuto;
  std::optional<Level> level;
  std::optional<std::chrono::milliseconds> deadline;  // of start-up and of every step
  std::optional<int64_t> receive_budget_bytes;
  int64_t repeat = 1;
};

struct RanksResult {
  Tensor output;        // [T, H] of the input's dtype, global token order
  Tensor topk_idx;      // int32 [T, K]
  Tensor topk_weights;  // fp32 [T, K]
  DotOrder dot_order = DotOrder::kAuto;
  Level level = Level::kGeneric;
  std::string transport;
  std::vector<MoeReport> reports;                // [R], of the last repeat
  std::vector<int64_t> weight_bytes_read;        // [R]
  std::vector<StageTimes> slowest_rank_seconds;  // [repeat]
};

// hidden: fp32 or bf16 [T, H], dense; rank r gets its contiguous share. Blocks: until all ranks
// ended.
Result<RanksResult> run_ranks(const RunRanksOptions& options, const ModelConfig& config,
                              const ConstTensorView& hidden, Progress& progress);

// The ranks' errors as one: the code of the root cause (a rank that failed on its own before one
// that waited for it), its message first, then what the others said. Ok when all are ok.
Status merge_rank_errors(std::span<const Status> statuses);

}  // namespace argosy::tools
