// The shared state of inproc ranks. Test: tests/transport/endpoint_test.cc,
// tests/transport/group_test.cc.
#include "transport/inproc/world.h"

#include <utility>

#include "base/error.h"

namespace argosy {
namespace {

using transport::inproc::Seat;
using transport::inproc::SeatState;

constexpr int kMaxRanks = 1024;

}  // namespace

InprocWorld::InprocWorld(std::unique_ptr<State> state) : state_(std::move(state)) {}

InprocWorld::~InprocWorld() = default;

Result<std::shared_ptr<InprocWorld>> InprocWorld::create(int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    return base::invalid("a world of {} ranks; it can have 1 to {}", num_ranks, kMaxRanks);
  }
  return std::shared_ptr<InprocWorld>(new InprocWorld(std::make_unique<State>(num_ranks)));
}

void InprocWorld::State::ring_all() {
  for (Seat& each : seats) each.bell.ring();
}

void InprocWorld::State::poison(int rank, const Status& why) {
  {
    const std::lock_guard lock(mutex);
    // Relaxed: written under this mutex only.
    if (poisoned.load(std::memory_order_relaxed)) return;
    reason = why;
    aborted = base::error(StatusCode::kAborted, "rank {} aborted the group: {}", rank,
                          why.ok() ? "no reason given" : why.to_string());
    // Release, pairs with the acquire loads of waiters.
    poisoned.store(true, std::memory_order_release);
  }
  ring_all();
}

Status InprocWorld::State::abort_reason() {
  const std::lock_guard lock(mutex);
  return reason.ok() ? aborted : reason;
}

Status InprocWorld::State::abort_status() {
  const std::lock_guard lock(mutex);
  return aborted;
}

void InprocWorld::State::refuse(int rank, const Status& why) {
  {
    const std::lock_guard lock(mutex);
    if (num_taken == num_ranks) return;
  }
  poison(rank, why);
}

Status InprocWorld::State::take_seat(int rank, int as_num_ranks) {
  Status status;
  {
    const std::lock_guard lock(mutex);
    if (as_num_ranks != num_ranks) {
      status = base::error(StatusCode::kDisagree,
                           "num_ranks differs: rank {} has {}, the world was made for {}", rank,
                           as_num_ranks, num_ranks);
    } else if (rank < 0 || rank >= num_ranks) {
      status = base::invalid("rank {} is outside [0, {})", rank, num_ranks);
    } else if (seat(rank).state.load(std::memory_order_relaxed) != SeatState::kAbsent) {
      // Relaxed above: seats are taken under this mutex only.
      status =
          base::invalid("rank {} of {} is taken twice; a world serves one group", rank, num_ranks);
    } else {
      ++num_taken;
      // Release, pairs with the acquire of ranks that wait for this one to come.
      seat(rank).state.store(SeatState::kPresent, std::memory_order_release);
    }
  }
  if (status.ok()) {
    ring_all();
  } else {
    refuse(rank, status);
  }
  return status;
}

void InprocWorld::State::leave(int rank) {
  // Release, pairs with the acquire in waiters' checks: who sees the rank gone sees its last
  // signals too.
  seat(rank).state.store(SeatState::kLeft, std::memory_order_release);
  // Release, pairs with the acquire load of waiters: who sees the count sees the seat.
  num_left.fetch_add(1, std::memory_order_release);
  ring_all();
}

}  // namespace argosy
