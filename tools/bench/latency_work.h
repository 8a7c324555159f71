// Dispatch and combine of a few tokens, timed call by call on every rank of a group: in latency mode, in throughput mode,
// and the floor: a flag to and from every rank, and a memcpy of the rows that change rank.
//
// The three take turns, each after a barrier. A time runs from the first rank's start to the last one's end. Floor:
// docs/perf/latency.md. Test: tests/bench/latency_work_test.cc.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "argosy/group.h"
#include "argosy/payload.h"
#include "argosy/router.h"
#include "argosy/status.h"

namespace argosy::tools::bench {

struct LatencyShape {
  int num_ranks = 4;
  int64_t num_tokens = 1;  // T of each rank
  int64_t num_experts = 256;
  int64_t top_k = 8;
  int64_t hidden = 7168;
  BlockFormat payload = BlockFormat::kUnset;  // of dispatch in latency mode
  bool push = false;                          // expert rows home: pushed, not pulled
};

enum LatencySubject { kFloor = 0, kLatencyMode, kThroughputMode, kNumSubjects };
enum LatencyPhase { kDispatchPhase = 0, kCombinePhase, kNumPhases };

// Seconds of each iteration.
struct LatencyTimes {
  std::array<std::array<std::vector<double>, kNumPhases>, kNumSubjects> seconds;
};

// The routing of one rank: the same for the same shape anywhere.
Result<Routing> latency_routing(const LatencyShape& shape, int rank);

// Collective: yes. `region`: a name that no other run of this host uses, the same on every rank. The times are on rank
// 0; elsewhere they are empty. Checks the sums of both modes once: kInternal when they are wrong.
Result<LatencyTimes> time_latency(Group& group, const LatencyShape& shape, int64_t iterations,
                                  const std::string& region);

// By the values in order: 0 <= q <= 1. Precondition: not empty.
double quantile(std::vector<double> values, double q);

}  // namespace argosy::tools::bench
