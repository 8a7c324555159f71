// What the ranks of one process share: seats with doorbells, windows, and the reason of an abort.
//
// Invariants: a seat only goes from absent to present to left; the first poison stays. Only
// endpoint.cc and world.cc of this folder touch it. Test: tests/transport/endpoint_test.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "argosy/group.h"
#include "argosy/status.h"
#include "platform/memory.h"
#include "platform/wait.h"

namespace argosy::transport::inproc {

enum class SeatState : uint32_t { kAbsent, kPresent, kLeft };

struct alignas(64) Seat {
  platform::Doorbell bell;
  std::atomic<SeatState> state{SeatState::kAbsent};
};

// One window: what every rank asked for and got. Fields of a rank are written by it before
// `arrived`.
struct Allocation {
  struct Part {
    int64_t bytes = 0;
    Status status;
    platform::MappedMemory memory;
    std::atomic<bool> arrived{false};
  };
  explicit Allocation(int num_ranks) : parts(static_cast<size_t>(num_ranks)) {}

  std::vector<Part> parts;
  int num_collected = 0;  // guarded by the world's mutex
};

}  // namespace argosy::transport::inproc

namespace argosy {

struct InprocWorld::State {
  explicit State(int num)
      : num_ranks(num),
        policy(platform::WaitPolicy::for_threads(num)),
        seats(static_cast<size_t>(num)) {}

  const int num_ranks;
  platform::WaitPolicy policy;
  std::vector<transport::inproc::Seat> seats;
  std::atomic<int> num_left{0};
  std::atomic<bool> poisoned{false};

  std::mutex mutex;  // guards what follows
  int num_taken = 0;
  Status reason;   // why it was poisoned; does not change afterwards
  Status aborted;  // `reason` as the other ranks see it
  std::map<uint32_t, std::shared_ptr<transport::inproc::Allocation>> allocations;

  transport::inproc::Seat& seat(int rank) { return seats[static_cast<size_t>(rank)]; }
  void ring_all();
  // Poisons the group on behalf of `rank`, once.
  void poison(int rank, const Status& why);
  // Precondition of both: poisoned.
  Status abort_reason();
  Status abort_status();
  // Poisons a group that is still joining: a rank that cannot join would keep the others waiting. A
  // complete group is not harmed by a stray joiner.
  void refuse(int rank, const Status& why);
  // Seats `rank`, or refuses it.
  Status take_seat(int rank, int as_num_ranks);
  void leave(int rank);
};

}  // namespace argosy
