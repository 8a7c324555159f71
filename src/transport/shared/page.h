// What ranks share besides their windows: one page a rank, in memory that every rank has mapped. The same
// layout serves ranks as threads (inproc/) and as processes (shm/), so one protocol is tested as both.
//
// Invariants: a seat only goes from absent to present to left; the first poison stays; numbers only grow.
// All zero bytes are the initial state but for the doorbell's scope. Test: tests/transport/endpoint_test.cc.
#pragma once

#include <atomic>
#include <cstdint>

#include "platform/wait.h"

namespace argosy::transport::shared {

enum class SeatState : uint32_t { kAbsent, kPresent, kLeft };

inline constexpr int kMaxWindows = 256;  // in use at a time

// One rank's part of a collective allocation. Written by its rank, then published by `number`.
struct AllocRequest {
  std::atomic<uint64_t> number{0};  // of the allocation, from 1
  int64_t bytes = 0;
  uint64_t handle = 0;  // where the rank's memory is; WindowMemory knows how to read it
  int32_t slot = -1;    // rank 0's choice, which all follow
  int32_t code = 0;     // StatusCode
  char text[232] = {};  // of the status, ends with 0
};

// Why the group was poisoned. Only rank 0's page is used, so that there is one first reason.
struct Poison {
  std::atomic<uint32_t> state{0};  // 0 none, 1 being written, 2 set
  int32_t rank = 0;                // who poisoned it
  int32_t code = 0;
  char text[4084] = {};
};

struct Page {
  explicit Page(platform::Doorbell::Scope scope) : bell(scope) {}

  platform::Doorbell bell;
  std::atomic<SeatState> seat{SeatState::kAbsent};
  // While the rank is in a wait: the monotonic clock, in ns, at its last look around, and the first rank it
  // misses; else 0. Who times out does not blame a rank that is alive and waiting itself.
  std::atomic<int64_t> waiting_at{0};
  std::atomic<int32_t> waiting_for{0};
  std::atomic<uint32_t> num_left{0};  // rank 0's page only
  // Two, by parity: a rank starts the next allocation only after everybody's part of the one before.
  AllocRequest requests[2];
  // By slot: the newest allocation in it that this rank has given up.
  std::atomic<uint64_t> freed[kMaxWindows] = {};
  alignas(64) Poison poison;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace argosy::transport::shared
