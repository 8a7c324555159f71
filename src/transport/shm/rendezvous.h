// Where processes of one job meet: rank 0 listens on a socket named by the job, the others bring their
// memfd and pidfd, everybody gets everybody's. The sockets are gone once the group stands.
//
// Test: tests/transport/shm_test.cc.
#pragma once

#include <string>
#include <vector>

#include "argosy/status.h"
#include "platform/clock.h"
#include "platform/descriptor.h"

namespace argosy::transport::shm {

inline constexpr int kMaxRanks = 64;  // two descriptors a rank fit one message

struct Seat {
  std::string job;
  uint64_t generation = 0;  // number of the group within the job, the same on every rank
  int rank = 0;
  int num_ranks = 1;
  int64_t heap_bytes = 0;
};

struct Meeting {
  std::vector<platform::Descriptor> memories;  // [R] memfds
  std::vector<platform::Descriptor> pidfds;    // [R]; the own one is not open
};

// Collective. `own` is what this rank could do by itself: when it is an error, it comes only to say so.
// Errors, the same on every rank that has come: kTimeout naming the ranks that did not come; kInvalidArgument
// for a rank outside or taken twice; kDisagree naming field and values; kPeerLost for one that ended
// meanwhile; another rank's `own`. kTimeout or kCorruptData when rank 0 or its socket is not ours.
Result<Meeting> meet(const Seat& seat, const Status& own, platform::Descriptor memory,
                     platform::Descriptor pidfd, platform::Deadline deadline);

// The socket's name, without the leading 0 byte.
std::string socket_name(const Seat& seat);

}  // namespace argosy::transport::shm
