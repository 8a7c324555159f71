// See endpoint.h. All waits go through one function, wait_for, so that every wait has the same
// checks: reached, peer dead or gone, poisoned, deadline. Test: tests/transport/endpoint_test.cc.
#include "transport/shared/endpoint.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "platform/copy.h"
#include "platform/wait.h"
#include "transport/describe.h"
#include "transport/shared/page.h"

namespace argosy::transport::shared {
namespace {

// A block of a row that is written to several places stays in L1 meanwhile (32 KiB or more
// everywhere).
constexpr int64_t kBlockBytes = int64_t{8} * 1024;
// A waiter that has not looked around for so long, or for half the deadline, is taken for stopped. Sleeps of
// a wait are far shorter; a busy host delays them.
constexpr std::chrono::milliseconds kStaleWait{1000};
// So many turns of a wait are some 40 us of yields.
constexpr int kShortWaitLooks = 40;
constexpr int kLooksPerCheck = 8;
// One line per writer: flags of different peers do not share a cache line.
constexpr int64_t kLineBytes = 64;

// Windows are raw memory; signal words are only ever touched through this.
std::atomic_ref<uint64_t> word_at(std::byte* address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address));
}

// Conditions of wait_for: words of a window.
struct WordConditions {
  std::byte* base;
  std::span<const WaitItem> items;
  bool is_timed;  // some item wants to know how long it took
  platform::Clock::time_point start;

  // Notes the time of those that have come since the last look, also behind one that has not.
  void observe() const {
    if (!is_timed) return;
    int64_t now = -1;
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].waited_ns == nullptr || *items[i].waited_ns >= 0 || !reached(i)) continue;
      if (now < 0) now = std::chrono::nanoseconds(platform::Clock::now() - start).count();
      *items[i].waited_ns = now;
    }
  }

  size_t size() const { return items.size(); }
  int peer(size_t i) const { return items[i].peer; }
  uint64_t want(size_t i) const { return items[i].value; }
  uint64_t have(size_t i) const { return load_word(base + items[i].offset); }
  bool reached(size_t i) const { return have(i) >= items[i].value; }
};

// Conditions of wait_for: every rank has come.
struct SeatConditions {
  const Ranks& ranks;

  size_t size() const { return static_cast<size_t>(ranks.num_ranks()); }
  int peer(size_t i) const { return static_cast<int>(i); }
  uint64_t want(size_t) const { return 0; }
  uint64_t have(size_t) const { return 0; }
  void observe() const {}
  // A rank that has left again did come.
  bool reached(size_t i) const { return ranks.seat(peer(i)) != SeatState::kAbsent; }
};

// Conditions of wait_for: every rank has published its part of an allocation.
struct RequestConditions {
  const Ranks& ranks;
  uint64_t number;

  size_t size() const { return static_cast<size_t>(ranks.num_ranks()); }
  int peer(size_t i) const { return static_cast<int>(i); }
  uint64_t want(size_t) const { return 0; }
  uint64_t have(size_t) const { return 0; }
  void observe() const {}
  bool reached(size_t i) const {
    // Acquire, pairs with the release in publish(): the part is complete.
    return ranks.page(peer(i)).requests[number % 2].number.load(std::memory_order_acquire) >=
           number;
  }
};

// A window as this rank holds it. `number` 0: the slot is free here.
struct Slot {
  uint64_t number = 0;
  int64_t bytes = 0;
  std::vector<std::byte*> bases;  // [R]
};

// Own memory that peers may still use.
struct Retired {
  int slot = 0;
  uint64_t number = 0;
  uint64_t handle = 0;
  int64_t bytes = 0;
};

// The window's name: its slot, and its number so that a freed window is not taken for its successor.
uint32_t window_id(int slot, uint64_t number) {
  constexpr uint64_t kNumbers = 0xFFFF'FFFFu / kMaxWindows;
  return static_cast<uint32_t>(slot) + 1 + static_cast<uint32_t>(kMaxWindows * (number % kNumbers));
}

// Says on the own page that the rank is in a wait and alive, until it goes out of scope.
class Waiting {
 public:
  explicit Waiting(Page& page) : page_(page) {}
  // Release, pairs with the acquire in is_alive_waiter(): who sees the wait over sees the poison that ended
  // it, if any.
  ~Waiting() {
    if (is_marked_) page_.waiting_at.store(0, std::memory_order_release);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  void look_around(int missed) {
    is_marked_ = true;
    // Relaxed, both: nothing is published by them.
    page_.waiting_for.store(missed, std::memory_order_relaxed);
    page_.waiting_at.store(platform::Clock::now().time_since_epoch().count(),
                           std::memory_order_relaxed);
  }

 private:
  Page& page_;
  bool is_marked_ = false;
};

bool is_alive_waiter(const Page& page, std::chrono::milliseconds deadline) {
  using std::chrono::nanoseconds;
  // Acquire, pairs with the release in ~Waiting.
  const nanoseconds at(page.waiting_at.load(std::memory_order_acquire));
  if (at.count() == 0) return false;
  return platform::Clock::now().time_since_epoch() - at < std::min(kStaleWait, deadline / 2);
}

// Rising peers, each once, the one with numbers before the one without.
void keep_one_a_peer(std::vector<Silence>* silences) {
  // Not std::ranges::unique: clang 14 rejects its subrange with this standard library.
  std::ranges::stable_sort(*silences, {}, [](const Silence& silence) {
    return std::pair(silence.peer, silence.want == 0);
  });
  const auto same_peer = [](const Silence& a, const Silence& b) { return a.peer == b.peer; };
  silences->erase(std::unique(silences->begin(), silences->end(), same_peer), silences->end());
}

class SharedEndpoint final : public Endpoint {
 public:
  explicit SharedEndpoint(Attachment attachment)
      : attachment_(std::move(attachment)),
        ranks_(*attachment_.ranks),
        memory_(*attachment_.memory),
        rank_(attachment_.rank),
        slots_(kMaxWindows),
        handles_(kMaxWindows) {}
  ~SharedEndpoint() override { ranks_.leave(rank_); }

  Status wait_for_seats(platform::Deadline deadline) {
    return wait_for(SeatConditions{ranks_}, deadline, "joining the group");
  }
  Status create_barrier(platform::Deadline deadline);

  std::string_view name() const override { return attachment_.name; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return ranks_.num_ranks(); }

  Result<Window> alloc(int64_t bytes, platform::Deadline deadline) override;
  void free(Window window) override;

  std::byte* local_ptr(Window window, int64_t offset) override {
    return address(rank_, window, offset, 0);
  }
  std::byte* peer_ptr(int peer, Window window, int64_t offset) override {
    return address(peer, window, offset, 0);
  }
  void put(int peer, Window window, int64_t offset, const void* source, int64_t bytes) override;
  void put_multi(int peer, Window window, std::span<const int64_t> offsets, const void* source,
                 int64_t bytes, Reuse reuse) override;
  void signal(int peer, Window window, int64_t offset, uint64_t value) override;
  Status wait_all(Window window, std::span<const WaitItem> items, platform::Deadline deadline,
                  std::string_view what) override;
  Status barrier(platform::Deadline deadline) override;
  void abort(const Status& reason) override { ranks_.poison(rank_, reason); }
  Status health() const override { return ranks_.is_poisoned() ? ranks_.abort_status() : Status(); }

 private:
  std::byte* address(int peer, Window window, int64_t offset, int64_t bytes);
  bool all_freed(int slot, uint64_t number) const;
  void reclaim();
  int choose_slot() const;
  Result<uint64_t> publish(uint64_t number, int64_t bytes);
  Result<int> check_requests(uint64_t number) const;
  template <typename Conditions>
  int find_leaver(const Conditions& conditions, size_t first) const;
  template <typename Conditions>
  Status wait_for(const Conditions& conditions, platform::Deadline deadline, std::string_view what);
  template <typename Conditions>
  Status timed_out(const Conditions& conditions, platform::Deadline deadline,
                   std::string_view what);
  Status lost(std::string_view what, int leaver);
  int find_stalled(int peer, std::chrono::milliseconds deadline) const;

  Attachment attachment_;
  Ranks& ranks_;
  WindowMemory& memory_;
  const int rank_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> handles_;  // of the own memory, by slot
  std::vector<Retired> retired_;
  uint64_t num_allocs_ = 0;
  Window barrier_window_;
  uint64_t barrier_epoch_ = 0;
  std::vector<WaitItem> barrier_items_;
};

// A peer, among those still owing something from condition `first` on, that has left; or -1.
template <typename Conditions>
int SharedEndpoint::find_leaver(const Conditions& conditions, size_t first) const {
  if (!ranks_.has_leavers()) return -1;
  for (size_t i = first; i < conditions.size(); ++i) {
    // After the seat is seen as left, the peer's last signals are visible: the condition is checked
    // after the seat, not before.
    const bool left = ranks_.seat(conditions.peer(i)) == SeatState::kLeft;
    if (left && !conditions.reached(i)) return conditions.peer(i);
  }
  return -1;
}

// A dead rank ends every wait, also one for others: they cannot finish the step either.
template <typename Conditions>
Status SharedEndpoint::wait_for(const Conditions& conditions, platform::Deadline deadline,
                                std::string_view what) {
  size_t next = 0;  // the first condition not reached; conditions never become false again
  int leaver = -1;
  int num_looks = 0;
  Waiting waiting(ranks_.page(rank_));
  const auto is_over = [&] {
    while (next < conditions.size() && conditions.reached(next)) ++next;
    conditions.observe();  // after it: what counts as reached has a time
    if (next == conditions.size()) return true;
    // A wait is short as a rule: peers' health is looked at seldom at first, then at every turn.
    if (++num_looks < kShortWaitLooks && num_looks % kLooksPerCheck != 0) return false;
    if (ranks_.has_dead()) return true;
    leaver = find_leaver(conditions, next);
    if (leaver >= 0 || ranks_.is_poisoned()) return true;
    waiting.look_around(conditions.peer(next));
    return false;
  };
  if (!platform::wait_until(ranks_.page(rank_).bell, ranks_.policy(), deadline, is_over)) {
    return timed_out(conditions, deadline, what);
  }
  if (next == conditions.size()) return health();
  const Status reason = ranks_.is_poisoned() ? ranks_.abort_reason() : Status();
  // A peer that told its reason and left then is not lost: the reason counts.
  const bool is_loss = reason.ok() || reason.code() == StatusCode::kPeerLost;
  if (!is_loss) return health();
  // Everybody who waits for a lost peer names it, not only the first who found out and poisoned.
  if (ranks_.has_dead()) return lost(what, leaver);
  if (leaver < 0) return health();
  // The leaver may have left since it lost another: that one is named.
  return reason.ok() ? lost(what, leaver) : reason;
}

Status SharedEndpoint::lost(std::string_view what, int leaver) {
  Status status;
  if (const std::vector<int> dead = ranks_.dead_ranks(); !dead.empty()) {
    status = base::error(StatusCode::kPeerLost, "{}: rank {} lost {} {}, whose process has ended",
                         what, rank_, dead.size() == 1 ? "rank" : "ranks", describe_ranks(dead));
  } else {
    status = base::error(StatusCode::kPeerLost, "{}: rank {} waits for rank {}, which has left",
                         what, rank_, leaver);
  }
  ranks_.poison(rank_, status);
  return status;
}

// Follows who waits for whom, from `peer` to a rank that does not wait; -1 when they wait in a circle.
int SharedEndpoint::find_stalled(int peer, std::chrono::milliseconds deadline) const {
  for (int steps = 0; steps < ranks_.num_ranks(); ++steps) {
    if (peer == rank_) return -1;
    const Page& page = ranks_.page(peer);
    if (!is_alive_waiter(page, deadline)) return peer;
    // Relaxed: as of some moment of its wait.
    peer = page.waiting_for.load(std::memory_order_relaxed);
  }
  return -1;
}

// Ranks that are silent because they wait themselves are not to blame, unless all are.
template <typename Conditions>
Status SharedEndpoint::timed_out(const Conditions& conditions, platform::Deadline deadline,
                                 std::string_view what) {
  std::vector<Silence> silences;
  for (size_t i = 0; i < conditions.size(); ++i) {
    const uint64_t have = conditions.have(i);
    const bool is_silent =
        conditions.want(i) != 0 ? have < conditions.want(i) : !conditions.reached(i);
    if (is_silent) silences.push_back({conditions.peer(i), have, conditions.want(i)});
  }
  if (silences.empty()) return health();  // the last one came just now
  std::vector<Silence> stalled;
  for (const Silence& silence : silences) {
    const int root = find_stalled(silence.peer, deadline.span());
    if (root == silence.peer) stalled.push_back(silence);
    if (root != silence.peer && root >= 0) stalled.push_back({root});
  }
  // After the look at the waiters: one that has just given up has said why.
  if (ranks_.is_poisoned()) return health();
  if (!stalled.empty()) silences = std::move(stalled);
  keep_one_a_peer(&silences);
  Status timeout = base::error(StatusCode::kTimeout, "{}: rank {} waited {} ms for {}", what, rank_,
                               deadline.span().count(), describe_silences(silences));
  ranks_.poison(rank_, timeout);
  return timeout;
}

std::byte* SharedEndpoint::address(int peer, Window window, int64_t offset, int64_t bytes) {
  const auto index = static_cast<size_t>((window.id - 1) % kMaxWindows);
  const Slot& slot = slots_[index];
  ARGOSY_CHECK(window.id > 0 && slot.number != 0 &&
                   window_id(static_cast<int>(index), slot.number) == window.id,
               "rank {}: no window {}", rank_, window.id);
  ARGOSY_CHECK(peer >= 0 && peer < ranks_.num_ranks(), "rank {}: no rank {} of {}", rank_, peer,
               ranks_.num_ranks());
  ARGOSY_CHECK(offset >= 0 && bytes >= 0 && offset <= slot.bytes && bytes <= slot.bytes - offset,
               "rank {}: bytes [{}, +{}) of window {} with {} bytes", rank_, offset, bytes,
               window.id, slot.bytes);
  return slot.bases[static_cast<size_t>(peer)] + offset;
}

bool SharedEndpoint::all_freed(int slot, uint64_t number) const {
  for (int peer = 0; peer < ranks_.num_ranks(); ++peer) {
    if (ranks_.seat(peer) == SeatState::kLeft || ranks_.is_dead(peer)) continue;
    // Acquire, pairs with the release in free(): the peer's last use of the window is over.
    const auto& freed = ranks_.page(peer).freed[static_cast<size_t>(slot)];
    if (freed.load(std::memory_order_acquire) < number) return false;
  }
  return true;
}

// Gives back own memory that no rank uses any more.
void SharedEndpoint::reclaim() {
  std::erase_if(retired_, [&](const Retired& old) {
    if (!all_freed(old.slot, old.number)) return false;
    memory_.release(old.handle, old.bytes);
    return true;
  });
}

// Rank 0's choice: a slot that no rank uses any more; -1 when all are in use. What rank 0 sees as freed,
// the others see too: they read its choice after it.
int SharedEndpoint::choose_slot() const {
  for (int slot = 0; slot < kMaxWindows; ++slot) {
    const auto at = static_cast<size_t>(slot);
    // Relaxed: the own word.
    const uint64_t last = ranks_.page(rank_).freed[at].load(std::memory_order_relaxed);
    if (slots_[at].number == 0 && all_freed(slot, last)) return slot;
  }
  return -1;
}

// Tells all ranks what this one asks for and where its memory is; returns the handle.
Result<uint64_t> SharedEndpoint::publish(uint64_t number, int64_t bytes) {
  AllocRequest& request = ranks_.page(rank_).requests[number % 2];
  Result<uint64_t> handle = memory_.create(bytes);
  request.bytes = bytes;
  request.handle = handle.has_value() ? *handle : 0;
  request.slot = rank_ == 0 ? choose_slot() : -1;
  Status status = handle.error();
  if (status.ok() && rank_ == 0 && request.slot < 0) {
    status = base::error(StatusCode::kOutOfMemory, "all {} windows are in use", kMaxWindows);
  }
  request.code = static_cast<int32_t>(status.code());
  const size_t length = std::min(status.message().size(), sizeof(request.text) - 1);
  std::memcpy(request.text, status.message().data(), length);
  request.text[length] = '\0';
  // Release, pairs with the acquire in RequestConditions: publishes the part.
  request.number.store(number, std::memory_order_release);
  ranks_.ring_all();
  return handle;
}

// The slot; or the same verdict on every rank, so that a refused window leaves the group usable.
Result<int> SharedEndpoint::check_requests(uint64_t number) const {
  const auto request = [&](int rank) -> const AllocRequest& {
    return ranks_.page(rank).requests[number % 2];
  };
  for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
    if (request(rank).bytes != request(0).bytes) {
      return base::error(StatusCode::kDisagree,
                         "window {}: rank 0 asks for {} bytes, rank {} for {} bytes", number,
                         request(0).bytes, rank, request(rank).bytes);
    }
    if (request(rank).code != 0) {
      return base::error(static_cast<StatusCode>(request(rank).code), "window {}: rank {}: {}",
                         number, rank, std::string_view(request(rank).text));
    }
  }
  return request(0).slot;
}

Result<Window> SharedEndpoint::alloc(int64_t bytes, platform::Deadline deadline) {
  reclaim();
  const uint64_t number = ++num_allocs_;
  const Result<uint64_t> handle = publish(number, bytes);
  ARGOSY_RETURN_IF_ERROR(
      wait_for(RequestConditions{ranks_, number}, deadline,
               fmt::format("allocation of window {} of {} bytes", number, bytes)));
  const Result<int> slot = check_requests(number);
  if (!slot.has_value()) {
    // Nobody uses a refused window.
    if (handle.has_value()) memory_.release(*handle, bytes);
    return slot.error();
  }
  const auto at = static_cast<size_t>(*slot);
  Slot& made = slots_[at];
  made.number = number;
  made.bytes = bytes;
  made.bases.clear();
  for (int peer = 0; peer < ranks_.num_ranks(); ++peer) {
    made.bases.push_back(memory_.address(peer, ranks_.page(peer).requests[number % 2].handle));
  }
  handles_[at] = *handle;
  return Window{window_id(*slot, number), bytes};
}

void SharedEndpoint::free(Window window) {
  if (window.id == 0) return;
  address(rank_, window, 0, 0);  // checks the name
  const auto at = static_cast<size_t>((window.id - 1) % kMaxWindows);
  Slot& slot = slots_[at];
  retired_.push_back({static_cast<int>(at), slot.number, handles_[at], slot.bytes});
  // Release, pairs with the acquire in all_freed().
  ranks_.page(rank_).freed[at].store(slot.number, std::memory_order_release);
  slot.number = 0;
}

void SharedEndpoint::put(int peer, Window window, int64_t offset, const void* source,
                         int64_t bytes) {
  std::byte* target = address(peer, window, offset, bytes);
  if (bytes > 0) std::memcpy(target, source, static_cast<size_t>(bytes));
}

void SharedEndpoint::put_multi(int peer, Window window, std::span<const int64_t> offsets,
                               const void* source, int64_t bytes, Reuse reuse) {
  const auto* from = static_cast<const std::byte*>(source);
  const platform::CopyBlock copy = platform::copy_block(reuse == Reuse::kLater);
  for (int64_t begin = 0; begin < bytes; begin += kBlockBytes) {
    const int64_t block = std::min(kBlockBytes, bytes - begin);
    for (const int64_t offset : offsets) {
      copy(address(peer, window, offset + begin, block), from + begin, block);
    }
  }
  if (reuse == Reuse::kLater) platform::finish_streaming();
}

void SharedEndpoint::signal(int peer, Window window, int64_t offset, uint64_t value) {
  ARGOSY_CHECK(offset % 8 == 0, "rank {}: signal word at {}, not a multiple of 8", rank_, offset);
  std::byte* word = address(peer, window, offset, 8);
  // seq_cst, pairs with load_word(): publishes every earlier put, and comes before the look for sleepers.
  word_at(word).store(value, std::memory_order_seq_cst);
  ranks_.page(peer).bell.ring_sleepers();
}

Status SharedEndpoint::wait_all(Window window, std::span<const WaitItem> items,
                                platform::Deadline deadline, std::string_view what) {
  bool is_timed = false;
  for (const WaitItem& item : items) {
    ARGOSY_CHECK(item.offset % 8 == 0 && item.peer >= 0 && item.peer < ranks_.num_ranks(),
                 "rank {}: waits for rank {} at offset {}", rank_, item.peer, item.offset);
    address(rank_, window, item.offset, 8);
    if (item.waited_ns != nullptr) {
      is_timed = true;
      *item.waited_ns = -1;
    }
  }
  const auto start = is_timed ? platform::Clock::now() : platform::Clock::time_point();
  return wait_for(WordConditions{local_ptr(window, 0), items, is_timed, start}, deadline, what);
}

Status SharedEndpoint::create_barrier(platform::Deadline deadline) {
  ARGOSY_ASSIGN_OR_RETURN(barrier_window_, alloc(ranks_.num_ranks() * kLineBytes, deadline));
  for (int peer = 0; peer < ranks_.num_ranks(); ++peer) {
    barrier_items_.push_back({.peer = peer, .offset = peer * kLineBytes, .value = 0});
  }
  return {};
}

Status SharedEndpoint::barrier(platform::Deadline deadline) {
  ++barrier_epoch_;
  for (WaitItem& item : barrier_items_) {
    item.value = barrier_epoch_;
    signal(item.peer, barrier_window_, rank_ * kLineBytes, barrier_epoch_);
  }
  return wait_all(barrier_window_, barrier_items_, deadline, "barrier");
}

}  // namespace

Result<std::unique_ptr<Endpoint>> attach(Attachment attachment, platform::Deadline deadline) {
  const std::shared_ptr<Ranks> ranks = attachment.ranks;
  auto endpoint = std::make_unique<SharedEndpoint>(std::move(attachment));
  Status status = endpoint->wait_for_seats(deadline);
  if (status.ok()) status = endpoint->create_barrier(deadline);
  if (!status.ok()) {
    // Every rank gets the reason as it is, not only the one that found it.
    return status.code() == StatusCode::kAborted ? ranks->abort_reason() : status;
  }
  return std::unique_ptr<Endpoint>(std::move(endpoint));
}

}  // namespace argosy::transport::shared
