// One MoE layer over R ranks: load, join, run, gather to rank 0. run_rank is one rank, a thread or
// a process; run_ranks makes all of them threads of this process.
//
// Invariants: a rank that fails joins nevertheless and aborts the group, so that the others end
// with its reason and not with a deadline; every thread is joined; of all errors the one that came
// first in cause is reported. Test: tests/cli/run_test.cc, tests/cli/table_test.cc,
// tests/cli/launch_test.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/cpu.h"
#include "argosy/group.h"
#include "argosy/moe.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "tools/progress.h"
#include "tools/rank_record.h"

namespace argosy::tools {

// Whether the threads of the ranks are bound to cores: rank r's to [r * t, (r + 1) * t) of the usable
// ones, counted round.
enum class Pin {
  kAuto,  // when every thread of every rank gets a core of its own
  kOn,
  kOff,
};

struct RunRanksOptions {
  std::string model_dir;
  CheckpointOptions checkpoint;
  int64_t layer = 0;
  int num_ranks = 1;
  int threads_per_rank = 1;
  Pin pin = Pin::kAuto;
  DotOrder dot_order = DotOrder::kAuto;
  std::optional<Level> level;
  std::optional<std::chrono::milliseconds> deadline;  // of start-up and of every step
  std::optional<int64_t> receive_budget_bytes;
  MoeMode mode = MoeMode::kThroughput;
  BlockFormat payload = BlockFormat::kUnset;
  std::optional<int64_t>
      max_tokens;  // of one rank in latency mode; unset: what the largest share has
  bool chunk = false;
  bool weights_inside = false;
  bool backward = false;
  BlockFormat training_format = BlockFormat::kUnset;
  int64_t repeat = 1;
  std::string simulate;  // GroupOptions::simulate
};

struct RanksResult {
  Tensor output;        // [T, H] of the input's dtype, global token order
  Tensor topk_idx;      // int32 [T, K]
  Tensor topk_weights;  // fp32 [T, K]
  DotOrder dot_order = DotOrder::kAuto;
  Level level = Level::kGeneric;
  std::string transport;
  std::vector<MoeReport> reports;            // [R], of the last repeat
  std::vector<int64_t> rows_per_expert;      // [E] over all ranks, in every mode
  std::vector<int64_t> rows_per_rank;        // [R]
  int64_t latency_tokens = 0;                // MoeLayer::latency_tokens()
  Tensor d_hidden;                           // [T, H] of the input's dtype; of a backward run
  RankGradients gradients;                   // of all experts
  std::vector<std::vector<PeerWait>> waits;  // [R] of all repeats
  std::vector<int64_t> weight_bytes_read;    // [R]
  // [R][threads], -1 = not bound; empty lists: nobody tried.
  std::vector<std::vector<int32_t>> pinned_cpus;
  WeightBytes weight_bytes;
  std::vector<StageTimes> slowest_rank_seconds;  // [repeat]
};

// How one rank finds the others.
struct RankSeat {
  int rank = 0;
  TransportKind transport = TransportKind::kAuto;
  std::string job;
  std::shared_ptr<InprocWorld> inproc;
};

// What the layer runs on, the same on every rank. hidden: fp32 or bf16 [T, H], dense; rank r takes
// its contiguous share.
struct RankInput {
  const ModelConfig* config = nullptr;
  ConstTensorView hidden;
  ConstTensorView d_output;  // the output's gradient, like hidden; with `backward`
};

struct RankOutcome {
  Status status;
  // Rank 0 has, or gets, the same reason to report.
  bool is_known_to_others = false;
  std::optional<RanksResult> result;  // on rank 0 when ok
};

// Runs one rank. An error in `input` (this rank could not read something) is told to the others.
// Other ranks than 0 return when their results are sent.
RankOutcome run_rank(const RunRanksOptions& options, const RankSeat& seat,
                     const Result<RankInput>& input, Progress& progress);

// Runs every rank as a thread. Blocks: until all ranks ended.
Result<RanksResult> run_ranks(const RunRanksOptions& options, const RankInput& input,
                              Progress& progress);

// The ranks' errors as one: the code of the root cause (a rank that failed on its own before one
// that waited for it), its message first, then what the others said. Ok when all are ok.
Status merge_rank_errors(std::span<const Status> statuses);

}  // namespace argosy::tools
