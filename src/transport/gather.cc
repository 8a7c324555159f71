// Two flags per pair (rank, root), both counts of chunks that only grow: `sent`, in the root's
// window, raised by the rank; `taken`, in the rank's window, raised by the root. A rank writes
// chunk c into its slot of the root's window once chunk c - 1 is taken; the last one is not
// acknowledged, so that nothing touches the window of a rank that has returned. Test:
// tests/transport/gather_test.cc.
#include "transport/gather.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "base/error.h"
#include "transport/collectives.h"

namespace argosy::transport {
namespace {

using platform::Deadline;

constexpr int64_t kLineBytes = 64;

// What every rank tells all others first.
struct Announcement {
  int64_t bytes = 0;
  int64_t root = 0;
  int64_t has_place = 0;  // 1: the caller gave somewhere to put the bytes
};

// One line per rank for its `sent` flag, one for the own `taken` flag, then a slot per rank.
struct Layout {
  int64_t num_ranks = 0;
  int64_t slot_bytes = 0;

  int64_t sent_offset(int rank) const { return rank * kLineBytes; }
  int64_t taken_offset() const { return num_ranks * kLineBytes; }
  int64_t slot_offset(int rank) const { return (num_ranks + 1) * kLineBytes + rank * slot_bytes; }
  int64_t window_bytes() const { return slot_offset(static_cast<int>(num_ranks)); }
  int64_t num_chunks(int64_t bytes) const { return (bytes + slot_bytes - 1) / slot_bytes; }
  int64_t chunk_bytes(int64_t bytes, int64_t chunk) const {
    return std::min(slot_bytes, bytes - chunk * slot_bytes);
  }
};

Status check(const std::vector<Announcement>& ranks) {
  const int64_t root = ranks[0].root;
  const auto num_ranks = static_cast<int64_t>(ranks.size());
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    if (ranks[rank].root != root) {
      return base::error(StatusCode::kDisagree, "gather: root is {} on rank 0, {} on rank {}", root,
                         ranks[rank].root, rank);
    }
  }
  if (root < 0 || root >= num_ranks) {
    return base::invalid("gather: root is {}, it can be 0 to {}", root, num_ranks - 1);
  }
  if (ranks[static_cast<size_t>(root)].has_place == 0) {
    return base::invalid("gather: root {} gave no place for the bytes", root);
  }
  return {};
}

Result<std::vector<Announcement>> announce(Endpoint& endpoint, const Announcement& mine,
                                           Deadline deadline) {
  ARGOSY_ASSIGN_OR_RETURN(auto all, AllGather::create(endpoint, sizeof(mine), deadline));
  ARGOSY_RETURN_IF_ERROR(all->issue(std::as_bytes(std::span(&mine, 1))));
  ARGOSY_RETURN_IF_ERROR(all->wait(deadline, "gather: sizes"));
  std::vector<Announcement> ranks(static_cast<size_t>(endpoint.num_ranks()));
  for (int rank = 0; rank < endpoint.num_ranks(); ++rank) {
    const std::span<const std::byte> bytes = all->from(rank);
    Announcement& theirs = ranks[static_cast<size_t>(rank)];
    if (bytes.size() == sizeof(theirs)) std::memcpy(&theirs, bytes.data(), sizeof(theirs));
    if (bytes.size() != sizeof(theirs) || theirs.bytes < 0) {
      return base::error(StatusCode::kCorruptData, "gather: rank {} announces {} bytes in {} bytes",
                         rank, theirs.bytes, bytes.size());
    }
  }
  return ranks;
}

Layout layout_for(const std::vector<Announcement>& ranks) {
  const auto num_ranks = static_cast<int64_t>(ranks.size());
  int64_t largest = 0;
  for (const Announcement& rank : ranks) largest = std::max(largest, rank.bytes);
  const int64_t share = std::max(kLineBytes, kGatherWindowBytes / num_ranks);
  const int64_t slot = std::min(largest, share);
  return {num_ranks, std::max(kLineBytes, (slot + kLineBytes - 1) / kLineBytes * kLineBytes)};
}

// Own windows are freed when the call ends, however it ends.
class ScopedWindow {
 public:
  ScopedWindow(Endpoint& endpoint, Window window) : endpoint_(endpoint), window_(window) {}
  ~ScopedWindow() { endpoint_.free(window_); }
  ScopedWindow(const ScopedWindow&) = delete;
  ScopedWindow& operator=(const ScopedWindow&) = delete;

 private:
  Endpoint& endpoint_;
  Window window_;
};

Status send(Endpoint& endpoint, Window window, const Layout& layout, int root,
            std::span<const std::byte> mine, std::chrono::milliseconds step) {
  const int self = endpoint.rank();
  const auto size = static_cast<int64_t>(mine.size());
  for (int64_t chunk = 0; chunk < layout.num_chunks(size); ++chunk) {
    const WaitItem taken{root, layout.taken_offset(), static_cast<uint64_t>(chunk)};
    ARGOSY_RETURN_IF_ERROR(
        endpoint.wait_all(window, std::span(&taken, 1), Deadline::after(step), "gather: my slot"));
    endpoint.put_signal(root, window, layout.slot_offset(self),
                        mine.data() + chunk * layout.slot_bytes, layout.chunk_bytes(size, chunk),
                        layout.sent_offset(self), static_cast<uint64_t>(chunk) + 1);
  }
  return {};
}

Status reserve(const std::vector<Announcement>& ranks, std::vector<std::vector<std::byte>>* all) {
  size_t rank = 0;
  try {
    all->assign(ranks.size(), {});
    for (; rank < ranks.size(); ++rank) {
      (*all)[rank].resize(static_cast<size_t>(ranks[rank].bytes));
    }
  } catch (const std::exception&) {
    all->clear();
    return base::error(StatusCode::kOutOfMemory, "gather: no memory for the {} bytes of rank {}",
                       ranks[rank].bytes, rank);
  }
  return {};
}

Status receive(Endpoint& endpoint, Window window, const Layout& layout,
               const std::vector<Announcement>& ranks, std::vector<std::vector<std::byte>>* all,
               std::chrono::milliseconds step) {
  int64_t num_chunks = 0;
  for (const Announcement& rank : ranks) {
    num_chunks = std::max(num_chunks, layout.num_chunks(rank.bytes));
  }
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    std::vector<WaitItem> items;
    for (int peer = 0; peer < endpoint.num_ranks(); ++peer) {
      if (peer == endpoint.rank()) continue;
      if (chunk >= layout.num_chunks(ranks[static_cast<size_t>(peer)].bytes)) continue;
      items.push_back({peer, layout.sent_offset(peer), static_cast<uint64_t>(chunk) + 1});
    }
    ARGOSY_RETURN_IF_ERROR(
        endpoint.wait_all(window, items, Deadline::after(step), "gather: bytes of the ranks"));
    for (const WaitItem& item : items) {
      const int64_t size = ranks[static_cast<size_t>(item.peer)].bytes;
      std::memcpy((*all)[static_cast<size_t>(item.peer)].data() + chunk * layout.slot_bytes,
                  endpoint.local_ptr(window, layout.slot_offset(item.peer)),
                  static_cast<size_t>(layout.chunk_bytes(size, chunk)));
      if (chunk + 1 < layout.num_chunks(size)) {
        endpoint.signal(item.peer, window, layout.taken_offset(), static_cast<uint64_t>(chunk) + 1);
      }
    }
  }
  return {};
}

}  // namespace

Status gather(Endpoint& endpoint, int root, std::span<const std::byte> mine,
              std::vector<std::vector<std::byte>>* all, std::chrono::milliseconds step) {
  const Announcement announcement{static_cast<int64_t>(mine.size()), root, all != nullptr ? 1 : 0};
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<Announcement> ranks,
                          announce(endpoint, announcement, Deadline::after(step)));
  ARGOSY_RETURN_IF_ERROR(check(ranks));
  const Layout layout = layout_for(ranks);
  ARGOSY_ASSIGN_OR_RETURN(const Window window,
                          endpoint.alloc(layout.window_bytes(), Deadline::after(step)));
  const ScopedWindow scoped(endpoint, window);
  const int self = endpoint.rank();
  if (self != root) return send(endpoint, window, layout, root, mine, step);
  if (Status status = reserve(ranks, all); !status.ok()) {
    endpoint.abort(status);  // the others wait for their slots
    return status;
  }
  std::copy(mine.begin(), mine.end(), (*all)[static_cast<size_t>(self)].begin());
  return receive(endpoint, window, layout, ranks, all, step);
}

}  // namespace argosy::transport
