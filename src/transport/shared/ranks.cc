// See ranks.h. Test: tests/transport/endpoint_test.cc.
#include "transport/shared/ranks.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace argosy::transport::shared {

Ranks::Ranks(std::vector<Page*> pages)
    : pages_(std::move(pages)),
      dead_(std::make_unique<std::atomic<bool>[]>(pages_.size())),
      policy_(platform::WaitPolicy::for_threads(static_cast<int>(pages_.size()))) {}

void Ranks::sit(int rank) {
  // Release, pairs with the acquire in seat().
  page(rank).seat.store(SeatState::kPresent, std::memory_order_release);
  ring_all();
}

void Ranks::leave(int rank) {
  // Release, pairs with the acquire in seat(): who sees the rank gone sees its last signals too.
  page(rank).seat.store(SeatState::kLeft, std::memory_order_release);
  // Release, pairs with the acquire in has_leavers().
  pages_[0]->num_left.fetch_add(1, std::memory_order_release);
  ring_all();
}

void Ranks::note_death(int rank, int waiter) {
  if (seat(rank) == SeatState::kLeft) return;
  // Relaxed: published by the count below.
  if (dead_[static_cast<size_t>(rank)].exchange(true, std::memory_order_relaxed)) return;
  // Release, pairs with the acquire in has_dead().
  num_dead_.fetch_add(1, std::memory_order_release);
  page(waiter).bell.ring();
}

bool Ranks::is_dead(int rank) const {
  // Relaxed: read after has_dead().
  return has_dead() && dead_[static_cast<size_t>(rank)].load(std::memory_order_relaxed);
}

std::vector<int> Ranks::dead_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (is_dead(rank)) ranks.push_back(rank);
  }
  return ranks;
}

void Ranks::ring_all() {
  for (Page* page : pages_) page->bell.ring();
}

void Ranks::poison(int rank, const Status& why) {
  Poison& poison = pages_[0]->poison;
  uint32_t none = 0;
  // Acquire-release: one rank wins the right to write; nothing is read from the losers.
  if (!poison.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) return;
  poison.rank = rank;
  poison.code = static_cast<int32_t>(why.code());
  const std::string& text = why.message();
  const size_t bytes = std::min(text.size(), sizeof(poison.text) - 1);
  std::memcpy(poison.text, text.data(), bytes);
  poison.text[bytes] = '\0';
  // Release, pairs with the acquire in is_poisoned(): publishes the reason.
  poison.state.store(2, std::memory_order_release);
  ring_all();
}

Status Ranks::abort_reason() const {
  const Poison& poison = pages_[0]->poison;
  if (poison.code == 0) return abort_status();
  return Status(static_cast<StatusCode>(poison.code), poison.text);
}

Status Ranks::abort_status() const {
  const Poison& poison = pages_[0]->poison;
  const std::string reason =
      poison.code == 0 ? "no reason given"
                       : Status(static_cast<StatusCode>(poison.code), poison.text).to_string();
  return base::error(StatusCode::kAborted, "rank {} aborted the group: {}", poison.rank, reason);
}

}  // namespace argosy::transport::shared
