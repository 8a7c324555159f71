// One try of a group of processes in which one rank is killed, stopped or throws at one step: what the others
// saw, when, and what is left. Shared by failure_test.cc and by the table of docs/failures.md
// (failure_table.cc).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "argosy/status.h"
#include "transport/sim/sim.h"

namespace argosy::testing {

struct FailureCase {
  transport::sim::Fault fault = transport::sim::Fault::kNone;
  int num_ranks = 2;
  int victim = 0;
  int64_t step = 0;
  std::chrono::milliseconds deadline{20'000};  // of joining and of every step
};
std::string to_string(const FailureCase& one);

struct Survivor {
  int rank = 0;
  bool has_ended = false;
  Status status;
  double seconds = 0.0;  // from the fault to the error
};

struct FailureOutcome {
  bool has_fault = false;  // false: the rank has fewer steps, and all went well
  std::vector<Survivor> survivors;
  int num_left = 0;  // processes that had to be killed, the stopped one not counted
};

// Two calls of dispatch and combine in several rounds, then a barrier, on num_ranks processes. Precondition:
// the calling process has no children and no other threads.
FailureOutcome run_failure(const FailureCase& one);

// "" when every survivor ended with the right code and named the victim and nobody else; else what is wrong.
// Does not judge times.
std::string judge(const FailureCase& one, const FailureOutcome& outcome);

}  // namespace argosy::testing
