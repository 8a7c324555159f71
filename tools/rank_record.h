// What one rank tells rank 0 at the end of a run, as bytes. Test: tests/cli/rank_record_test.cc.
//
// Ranks run the same build on the same kind of machine (joining compares versions), so fields are
// copied as they lie in memory; lengths are checked all the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "argosy/moe.h"
#include "argosy/status.h"

namespace argosy::tools {

// What the weights of a layer hold, without padding. The same on every rank.
struct WeightBytes {
  int64_t gate = 0;    // the router's
  int64_t expert = 0;  // of one expert
  int64_t shared = 0;  // of all shared experts and their gate
};

// How long one rank waited for one peer, over all its waits.
struct PeerWait {
  int64_t peer = 0;
  int64_t num_waits = 0;
  int64_t total_ns = 0;
  int64_t p50_ns = 0;
  int64_t p99_ns = 0;
  int64_t max_ns = 0;
};

// fp32, as MoeGradients has them.
struct RankGradients {
  std::vector<float> gate, gate_bias;
  std::vector<float> expert_gate, expert_up, expert_down;
  std::vector<float> expert_gate_bias, expert_up_bias, expert_down_bias;
  std::vector<float> shared_gate, shared_up, shared_down, shared_scale;
};

struct RankRecord {
  int64_t weight_bytes_read = 0;
  WeightBytes weight_bytes;
  MoeReport report;                  // of the last repeat
  std::vector<StageTimes> seconds;   // [repeat]
  std::vector<std::byte> output;     // [the rank's tokens, H] in the input's dtype
  std::vector<int32_t> topk_idx;     // [the rank's tokens, K]
  std::vector<float> topk_weights;   // [the rank's tokens, K]
  std::vector<int32_t> pinned_cpus;  // Group::pinned_cpus()
  int64_t latency_tokens = 0;        // MoeLayer::latency_tokens()
  std::vector<PeerWait> waits;       // peers that were waited for
  // Of a backward run; else empty. The rank's own experts and tokens; what all ranks hold: of rank 0.
  std::vector<std::byte> d_hidden;
  RankGradients gradients;
};

std::vector<std::byte> to_bytes(const RankRecord& record);
// Errors: kCorruptData unless `bytes` are exactly what to_bytes makes.
Result<RankRecord> rank_record_from(std::span<const std::byte> bytes);

}  // namespace argosy::tools
