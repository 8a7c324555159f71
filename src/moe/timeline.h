// Where a call's time and rows went, per stage and receive round.
//
// Invariant: spans touch, so that the spans of a stage add up to its seconds. Memory is taken once;
// later rounds are counted, not kept. Test: tests/moe/timeline_test.cc.
#pragma once

#include <vector>

#include "argosy/moe.h"

namespace argosy {

class Timeline {
 public:
  Timeline();

  // A new call starts now.
  void start();
  // The time since the last lap (or the start) belonged to `stage`.
  void lap(MoeStage stage, int64_t round = -1);
  // Seconds, spans and dropped spans. The total ends with the last lap.
  void write(MoeReport* report) const;

 private:
  StageTimes seconds_;
  std::vector<StageSpan> spans_;
  int64_t dropped_spans_ = 0;
  double begin_ = 0;
  double mark_ = 0;
};

// Rows of one call of latency mode: sent by this rank, and received.
struct PartTraffic {
  std::vector<int64_t> slots;  // [R] rows to each rank, a token once
  std::vector<int64_t> rows;   // [R] its expert rows there
  int64_t received = 0;        // expert rows here
};
void count_part(const Placement& placement, const Routing& routing, int64_t received,
                PartTraffic* traffic);
// The same as count_traffic for calls of latency mode, which are its rounds. Precondition: report->spans, row_bytes and
// dispatch_row_bytes are there. Also fills the report's bytes.
void count_part_traffic(const std::vector<PartTraffic>& parts, int64_t num_valid_tokens, int rank,
                        MoeReport* report);

// Rows to every rank, and rows and bytes of every span. Precondition: report->spans, num_rounds and
// both row_bytes are those of the plan's call.
void count_traffic(const DispatchPlan& plan, int64_t num_valid_tokens, MoeReport* report);

}  // namespace argosy
