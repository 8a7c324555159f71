// All ranks' pages as one rank sees them: who is here, who left, who died, and why the group was poisoned.
//
// Test: tests/transport/endpoint_test.cc, tests/transport/group_test.cc.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "argosy/status.h"
#include "platform/wait.h"
#include "transport/shared/page.h"

namespace argosy::transport::shared {

class Ranks {
 public:
  // The pages must outlive it.
  explicit Ranks(std::vector<Page*> pages);

  int num_ranks() const { return static_cast<int>(pages_.size()); }
  Page& page(int rank) const { return *pages_[static_cast<size_t>(rank)]; }
  const platform::WaitPolicy& policy() const { return policy_; }

  SeatState seat(int rank) const {
    // Acquire, pairs with the releases in sit() and leave(): what the rank wrote before is visible.
    return page(rank).seat.load(std::memory_order_acquire);
  }
  void sit(int rank);
  void leave(int rank);
  // Cheap first question: has any rank left?
  bool has_leavers() const {
    // Acquire, pairs with the release in leave(): who sees the count sees the seat.
    return pages_[0]->num_left.load(std::memory_order_acquire) != 0;
  }

  // Called by whoever notices that a rank's process has ended. A rank that left in order is no loss.
  // Wakes `waiter`.
  void note_death(int rank, int waiter);
  bool has_dead() const {
    // Acquire, pairs with the release in note_death().
    return num_dead_.load(std::memory_order_acquire) != 0;
  }
  // Rising; only for error texts.
  std::vector<int> dead_ranks() const;
  bool is_dead(int rank) const;

  void ring_all();
  // Poisons the group on behalf of `rank`, once.
  void poison(int rank, const Status& why);
  bool is_poisoned() const {
    // Acquire, pairs with the release in poison(): the reason is readable.
    return pages_[0]->poison.state.load(std::memory_order_acquire) == 2;
  }
  // Precondition of both: is_poisoned(). The reason as its rank gave it, and as the others see it.
  Status abort_reason() const;
  Status abort_status() const;

 private:
  std::vector<Page*> pages_;
  std::unique_ptr<std::atomic<bool>[]> dead_;
  std::atomic<int> num_dead_{0};
  platform::WaitPolicy policy_;
};

}  // namespace argosy::transport::shared
