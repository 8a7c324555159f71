// Every survivor of a killed, stopped or throwing rank ends with an error that names it (contract 6.1; cases
// of K13). A sample of steps; all of them: make failures.
#include <gtest/gtest.h>

#include "failure/failure_run.h"

namespace argosy::testing {
namespace {

using std::chrono::milliseconds;
using transport::sim::Fault;

// Ranks and steps wander so that every rank is hit early and late; until the victim has no such step.
void run_sample(Fault fault, milliseconds deadline, int64_t stride) {
  int num_faults = 0;
  for (const int num_ranks : {2, 3, 4}) {
    for (int64_t step = 0;; step += stride) {
      FailureCase one;
      one.fault = fault;
      one.num_ranks = num_ranks;
      one.victim = static_cast<int>(step / stride) % num_ranks;
      one.step = step;
      one.deadline = deadline;
      const FailureOutcome outcome = run_failure(one);
      EXPECT_EQ(judge(one, outcome), "");
      if (!outcome.has_fault) break;
      ++num_faults;
    }
  }
  EXPECT_GE(num_faults, 9);
}

TEST(Failure, WithoutAFaultNothingFails) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    FailureCase one;
    one.num_ranks = num_ranks;
    const FailureOutcome outcome = run_failure(one);
    EXPECT_FALSE(outcome.has_fault);
    EXPECT_EQ(judge(one, outcome), "");
  }
}

TEST(Failure, AKilledRankIsNamedByAll) { run_sample(Fault::kKill, milliseconds(30'000), 7); }
TEST(Failure, AThrowingRankIsNamedByAll) { run_sample(Fault::kThrow, milliseconds(30'000), 7); }
TEST(Failure, AStoppedRankIsNamedByAll) { run_sample(Fault::kStop, milliseconds(700), 29); }

}  // namespace
}  // namespace argosy::testing
