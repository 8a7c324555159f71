// Trouble on purpose: an endpoint over any back end that delays, reorders and pauses by a seed, and that
// kills, stops, pauses or throws at a chosen step of a chosen rank.
//
// Nothing it does breaks what an endpoint promises (endpoint.h): puts and signals to one peer keep their
// order, those to different peers overtake each other. A step is one call of alloc, put, put_multi, signal,
// wait_all or barrier after the rank has taken its seat, counted from 0 (a put_signal is two). Decisions depend on seed,
// rank and step only. Test: tests/transport/sim_test.cc, tests/transport/failure_test.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "argosy/status.h"
#include "transport/endpoint.h"

namespace argosy::transport::sim {

enum class Fault {
  kNone,
  kKill,   // the process gets SIGKILL
  kStop,   // the process gets SIGSTOP
  kThrow,  // the call throws std::runtime_error, as code between two calls might
  kPause,  // the call comes `pause` later
};

struct Trouble {
  uint64_t seed = 0;
  std::chrono::microseconds max_delay{0};  // of a put or signal, on its way
  std::chrono::microseconds max_pause{0};  // of a rank, before a step
  Fault fault = Fault::kNone;
  int rank = -1;      // of the fault
  int64_t step = -1;  // of the fault
  std::chrono::milliseconds pause{0};
};

// "" is no trouble. Else a list, such as "seed=7,delay_us=200,pause_us=50,kill=1@12": kill=RANK@STEP,
// stop=RANK@STEP, throw=RANK@STEP, pause=RANK@STEP:MS, at most one of these. Errors: kInvalidArgument naming
// the word.
Result<Trouble> parse(std::string_view text);
// kInvalidArgument for a rank that the group has not, and for a fault of processes among threads.
Status check(const Trouble& trouble, int num_ranks, bool are_processes);
std::string to_string(const Trouble& trouble);

// Errors of the endpoint name `trouble` and the step.
std::unique_ptr<Endpoint> wrap(std::unique_ptr<Endpoint> endpoint, const Trouble& trouble);

}  // namespace argosy::transport::sim
