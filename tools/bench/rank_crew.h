// The ranks of a benchmark: threads of this process that stay in one group and run one body after
// another.
//
// Invariants: rank r's threads are bound to the CPUs r * threads_per_rank and on, counted round;
// they sleep between bodies; a rank that fails aborts the group, so that none waits for it in vain.
// Test: tests/bench/rank_crew_test.cc.
#pragma once

#include <functional>
#include <memory>

#include "argosy/group.h"
#include "argosy/status.h"
#include "tools/bench/bench_case.h"

namespace argosy::tools::bench {

class RankCrew {
 public:
  // Errors: those of Group::join; kOutOfMemory for the threads.
  static Result<std::unique_ptr<RankCrew>> create(const BenchContext& context, int num_ranks,
                                                  int threads_per_rank);
  ~RankCrew();

  // Runs body(group) on every rank, started together; seconds from the first start to the last end.
  // Errors: the ranks' errors as one; after that the group is lost.
  using Body = std::function<Status(Group& group)>;
  Result<double> run(const Body& body);

 private:
  struct State;
  explicit RankCrew(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace argosy::tools::bench
