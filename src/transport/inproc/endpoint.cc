// Endpoint over the memory of one process. All waits go through one function, wait_for, so that
// every wait has the same checks: reached, peer gone, poisoned, deadline. Test:
// tests/transport/endpoint_test.cc.
#include "transport/inproc/endpoint.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "platform/wait.h"
#include "transport/describe.h"
#include "transport/inproc/world.h"

namespace argosy::transport::inproc {
namespace {

// A block of a row that is written to several places stays in L1 meanwhile (32 KiB or more
// everywhere).
constexpr int64_t kBlockBytes = 8 * 1024;
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

  size_t size() const { return items.size(); }
  int peer(size_t i) const { return items[i].peer; }
  uint64_t want(size_t i) const { return items[i].value; }
  // Acquire, pairs with the release store in signal(): the puts before it are visible.
  uint64_t have(size_t i) const {
    return word_at(base + items[i].offset).load(std::memory_order_acquire);
  }
  bool reached(size_t i) const { return have(i) >= items[i].value; }
};

// Conditions of wait_for: every rank has come.
struct SeatConditions {
  InprocWorld::State& world;

  size_t size() const { return world.seats.size(); }
  int peer(size_t i) const { return static_cast<int>(i); }
  uint64_t want(size_t) const { return 0; }
  uint64_t have(size_t) const { return 0; }
  // Acquire, pairs with the release in take_seat(). A rank that has left again did come.
  bool reached(size_t i) const {
    return world.seats[i].state.load(std::memory_order_acquire) != SeatState::kAbsent;
  }
};

// Conditions of wait_for: every rank has asked for its part of a window.
struct PartConditions {
  const Allocation& allocation;

  size_t size() const { return allocation.parts.size(); }
  int peer(size_t i) const { return static_cast<int>(i); }
  uint64_t want(size_t) const { return 0; }
  uint64_t have(size_t) const { return 0; }
  // Acquire, pairs with the release in arrive(): the part is complete.
  bool reached(size_t i) const {
    return allocation.parts[i].arrived.load(std::memory_order_acquire);
  }
};

class InprocEndpoint final : public Endpoint {
 public:
  InprocEndpoint(std::shared_ptr<InprocWorld> world, int rank)
      : keep_alive_(std::move(world)), world_(keep_alive_->state()), rank_(rank) {}
  ~InprocEndpoint() override { world_.leave(rank_); }

  Status wait_for_seats(platform::Deadline deadline) {
    return wait_for(SeatConditions{world_}, deadline, "joining the group");
  }
  Status create_barrier(platform::Deadline deadline);

  std::string_view name() const override { return "inproc"; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return world_.num_ranks; }

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
                 int64_t bytes) override;
  void signal(int peer, Window window, int64_t offset, uint64_t value) override;
  Status wait_all(Window window, std::span<const WaitItem> items, platform::Deadline deadline,
                  std::string_view what) override;
  Status barrier(platform::Deadline deadline) override;
  void abort(const Status& reason) override { world_.poison(rank_, reason); }
  Status health() const override { return is_poisoned() ? world_.abort_status() : Status(); }

 private:
  // Acquire, pairs with the release in poison(): the reason is readable.
  bool is_poisoned() const { return world_.poisoned.load(std::memory_order_acquire); }

  std::byte* address(int peer, Window window, int64_t offset, int64_t bytes);
  std::shared_ptr<Allocation> arrive(uint32_t id, int64_t bytes);
  Status check_parts(uint32_t id, const Allocation& allocation) const;
  template <typename Conditions>
  int find_lost_peer(const Conditions& conditions, size_t first) const;
  template <typename Conditions>
  Status wait_for(const Conditions& conditions, platform::Deadline deadline, std::string_view what);
  template <typename Conditions>
  Status timed_out(const Conditions& conditions, platform::Deadline deadline,
                   std::string_view what);

  const std::shared_ptr<InprocWorld> keep_alive_;
  InprocWorld::State& world_;
  const int rank_;
  std::vector<std::shared_ptr<Allocation>> windows_;  // by id - 1; null when freed or never made
  Window barrier_window_;
  uint64_t barrier_epoch_ = 0;
  std::vector<WaitItem> barrier_items_;
};

// A peer, among those still owing something from condition `first` on, that is gone; or -1.
template <typename Conditions>
int InprocEndpoint::find_lost_peer(const Conditions& conditions, size_t first) const {
  // Acquire, pairs with the release in leave(): the seats of those counted are seen as left.
  if (world_.num_left.load(std::memory_order_acquire) == 0) return -1;
  for (size_t i = first; i < conditions.size(); ++i) {
    // Acquire, pairs with the release in leave(): after it the peer's last signals are visible, so
    // the condition is checked after the seat, not before.
    const SeatState state = world_.seat(conditions.peer(i)).state.load(std::memory_order_acquire);
    if (state == SeatState::kLeft && !conditions.reached(i)) return conditions.peer(i);
  }
  return -1;
}

template <typename Conditions>
Status InprocEndpoint::wait_for(const Conditions& conditions, platform::Deadline deadline,
                                std::string_view what) {
  size_t next = 0;  // the first condition not reached; conditions never become false again
  int lost_peer = -1;
  const auto is_over = [&] {
    while (next < conditions.size() && conditions.reached(next)) ++next;
    if (next == conditions.size()) return true;
    lost_peer = find_lost_peer(conditions, next);
    return lost_peer >= 0 || is_poisoned();
  };
  if (!platform::wait_until(world_.seat(rank_).bell, world_.policy, deadline, is_over)) {
    return timed_out(conditions, deadline, what);
  }
  // Everybody who waits for a lost peer names it, not only the first who found out and poisoned.
  // But a peer that told its reason and left then is not lost: the reason counts.
  const bool has_reason = is_poisoned() && world_.abort_reason().code() != StatusCode::kPeerLost;
  if (lost_peer >= 0 && !has_reason) {
    Status lost =
        base::error(StatusCode::kPeerLost, "{}: rank {} waits for rank {}, which has left", what,
                    rank_, lost_peer);
    world_.poison(rank_, lost);
    return lost;
  }
  return health();
}

template <typename Conditions>
Status InprocEndpoint::timed_out(const Conditions& conditions, platform::Deadline deadline,
                                 std::string_view what) {
  std::vector<Silence> silences;
  for (size_t i = 0; i < conditions.size(); ++i) {
    const uint64_t have = conditions.have(i);
    const bool is_silent =
        conditions.want(i) != 0 ? have < conditions.want(i) : !conditions.reached(i);
    if (is_silent) silences.push_back({conditions.peer(i), have, conditions.want(i)});
  }
  if (silences.empty()) return health();  // the last one came just now
  // Not std::ranges::unique: clang 14 rejects its subrange with this standard library.
  std::ranges::stable_sort(silences, {}, &Silence::peer);
  const auto same_peer = [](const Silence& a, const Silence& b) { return a.peer == b.peer; };
  silences.erase(std::unique(silences.begin(), silences.end(), same_peer), silences.end());
  Status timeout = base::error(StatusCode::kTimeout, "{}: rank {} waited {} ms for {}", what, rank_,
                               deadline.span().count(), describe_silences(silences));
  world_.poison(rank_, timeout);
  return timeout;
}

std::byte* InprocEndpoint::address(int peer, Window window, int64_t offset, int64_t bytes) {
  const size_t index = static_cast<size_t>(window.id) - 1;
  ARGOSY_CHECK(window.id > 0 && index < windows_.size() && windows_[index] != nullptr,
               "rank {}: no window {}", rank_, window.id);
  ARGOSY_CHECK(peer >= 0 && peer < world_.num_ranks, "rank {}: no rank {} of {}", rank_, peer,
               world_.num_ranks);
  const Allocation::Part& part = windows_[index]->parts[static_cast<size_t>(peer)];
  ARGOSY_CHECK(offset >= 0 && bytes >= 0 && offset <= part.bytes && bytes <= part.bytes - offset,
               "rank {}: bytes [{}, +{}) of window {} with {} bytes", rank_, offset, bytes,
               window.id, part.bytes);
  return part.memory.data() + offset;
}

// Registers this rank's part of window `id`.
std::shared_ptr<Allocation> InprocEndpoint::arrive(uint32_t id, int64_t bytes) {
  std::shared_ptr<Allocation> allocation;
  {
    const std::lock_guard lock(world_.mutex);
    std::shared_ptr<Allocation>& entry = world_.allocations[id];
    if (entry == nullptr) entry = std::make_shared<Allocation>(world_.num_ranks);
    allocation = entry;
    // The table only serves to meet; afterwards the ranks that use the window keep it.
    if (++allocation->num_collected == world_.num_ranks) world_.allocations.erase(id);
  }
  Allocation::Part& part = allocation->parts[static_cast<size_t>(rank_)];
  part.bytes = bytes;
  Result<platform::MappedMemory> memory = platform::MappedMemory::map(bytes);
  if (memory.has_value()) {
    part.memory = std::move(memory).value();
  } else {
    part.status = memory.error();
  }
  // Release, pairs with the acquire in PartConditions: publishes the part.
  part.arrived.store(true, std::memory_order_release);
  world_.ring_all();
  return allocation;
}

// The same verdict on every rank, so a refused window leaves the group usable.
Status InprocEndpoint::check_parts(uint32_t id, const Allocation& allocation) const {
  for (size_t i = 0; i < allocation.parts.size(); ++i) {
    const Allocation::Part& part = allocation.parts[i];
    if (part.bytes != allocation.parts[0].bytes) {
      return base::error(StatusCode::kDisagree,
                         "window {}: rank 0 asks for {} bytes, rank {} for {} bytes", id,
                         allocation.parts[0].bytes, i, part.bytes);
    }
    if (!part.status.ok()) {
      return base::error(part.status.code(), "window {}: rank {}: {}", id, i,
                         part.status.message());
    }
  }
  return {};
}

Result<Window> InprocEndpoint::alloc(int64_t bytes, platform::Deadline deadline) {
  const auto id = static_cast<uint32_t>(windows_.size() + 1);
  windows_.push_back(nullptr);  // a refused window keeps its number: the ranks' numbers stay equal
  std::shared_ptr<Allocation> allocation = arrive(id, bytes);
  ARGOSY_RETURN_IF_ERROR(wait_for(PartConditions{*allocation}, deadline,
                                  fmt::format("allocation of window {} of {} bytes", id, bytes)));
  ARGOSY_RETURN_IF_ERROR(check_parts(id, *allocation));
  windows_.back() = std::move(allocation);
  return Window{id, bytes};
}

void InprocEndpoint::free(Window window) {
  if (window.id == 0) return;
  address(rank_, window, 0, 0);  // checks the number
  windows_[window.id - 1] = nullptr;
}

void InprocEndpoint::put(int peer, Window window, int64_t offset, const void* source,
                         int64_t bytes) {
  std::byte* target = address(peer, window, offset, bytes);
  if (bytes > 0) std::memcpy(target, source, static_cast<size_t>(bytes));
}

void InprocEndpoint::put_multi(int peer, Window window, std::span<const int64_t> offsets,
                               const void* source, int64_t bytes) {
  const auto* from = static_cast<const std::byte*>(source);
  for (int64_t begin = 0; begin < bytes; begin += kBlockBytes) {
    const int64_t block = std::min(kBlockBytes, bytes - begin);
    for (const int64_t offset : offsets) {
      std::memcpy(address(peer, window, offset + begin, block), from + begin,
                  static_cast<size_t>(block));
    }
  }
}

void InprocEndpoint::signal(int peer, Window window, int64_t offset, uint64_t value) {
  ARGOSY_CHECK(offset % 8 == 0, "rank {}: signal word at {}, not a multiple of 8", rank_, offset);
  std::byte* word = address(peer, window, offset, 8);
  // Release, pairs with the acquire in WordConditions: publishes every earlier put.
  word_at(word).store(value, std::memory_order_release);
  world_.seat(peer).bell.ring();
}

Status InprocEndpoint::wait_all(Window window, std::span<const WaitItem> items,
                                platform::Deadline deadline, std::string_view what) {
  for (const WaitItem& item : items) {
    ARGOSY_CHECK(item.offset % 8 == 0 && item.peer >= 0 && item.peer < world_.num_ranks,
                 "rank {}: waits for rank {} at offset {}", rank_, item.peer, item.offset);
    address(rank_, window, item.offset, 8);
  }
  return wait_for(WordConditions{local_ptr(window, 0), items}, deadline, what);
}

Status InprocEndpoint::create_barrier(platform::Deadline deadline) {
  ARGOSY_ASSIGN_OR_RETURN(barrier_window_, alloc(world_.num_ranks * kLineBytes, deadline));
  for (int peer = 0; peer < world_.num_ranks; ++peer) {
    barrier_items_.push_back({.peer = peer, .offset = peer * kLineBytes, .value = 0});
  }
  return {};
}

Status InprocEndpoint::barrier(platform::Deadline deadline) {
  ++barrier_epoch_;
  for (WaitItem& item : barrier_items_) {
    item.value = barrier_epoch_;
    signal(item.peer, barrier_window_, rank_ * kLineBytes, barrier_epoch_);
  }
  return wait_all(barrier_window_, barrier_items_, deadline, "barrier");
}

}  // namespace

Result<std::unique_ptr<Endpoint>> attach(std::shared_ptr<InprocWorld> world, int rank,
                                         int num_ranks, platform::Deadline deadline) {
  InprocWorld::State& state = world->state();
  ARGOSY_RETURN_IF_ERROR(state.take_seat(rank, num_ranks));
  auto endpoint = std::make_unique<InprocEndpoint>(std::move(world), rank);
  if (Status status = endpoint->wait_for_seats(deadline); !status.ok()) {
    // Every rank gets the reason as it is, not only the one that found it.
    return status.code() == StatusCode::kAborted ? state.abort_reason() : status;
  }
  ARGOSY_RETURN_IF_ERROR(endpoint->create_barrier(deadline));
  return std::unique_ptr<Endpoint>(std::move(endpoint));
}

}  // namespace argosy::transport::inproc
