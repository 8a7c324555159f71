// Puts together what a process needs to be a rank. Order: own memfd with its page, the meeting, everybody's
// pages, the watch over the peers, the heaps, the seat. Test: tests/transport/endpoint_test.cc.
#include "transport/shm/endpoint.h"

#include <new>
#include <utility>
#include <vector>

#include "base/error.h"
#include "platform/process_watch.h"
#include "platform/shared_memory.h"
#include "transport/shared/endpoint.h"
#include "transport/shm/heap.h"

namespace argosy::transport::shm {
namespace {

using platform::Descriptor;
using platform::SharedMapping;
using shared::Page;

// The page stands at the front of each memfd; windows begin behind it.
constexpr int64_t kPageBytes = int64_t{64} * 1024;
static_assert(sizeof(Page) <= kPageBytes);

// What must live as long as the endpoint. The watch is destroyed first: it uses the ranks.
struct Holdings {
  std::vector<SharedMapping> pages;
  std::shared_ptr<shared::Ranks> ranks;
  std::unique_ptr<platform::ProcessWatch> watch;
};

Result<Descriptor> make_memory(const Seat& seat) {
  if (seat.num_ranks < 1 || seat.num_ranks > kMaxRanks) {
    return base::invalid("a group of {} processes; it can have 1 to {}", seat.num_ranks, kMaxRanks);
  }
  if (seat.rank < 0 || seat.rank >= seat.num_ranks) {
    return base::invalid("rank {} is outside [0, {})", seat.rank, seat.num_ranks);
  }
  ARGOSY_ASSIGN_OR_RETURN(Descriptor memory,
                          platform::create_shared_memory("argosy", seat.heap_bytes));
  ARGOSY_ASSIGN_OR_RETURN(const SharedMapping mapping, SharedMapping::map(memory, kPageBytes));
  new (mapping.data()) Page(platform::Doorbell::Scope::kProcesses);
  return memory;
}

Result<std::shared_ptr<Holdings>> hold(const Seat& seat, Meeting& meeting) {
  auto holdings = std::make_shared<Holdings>();
  std::vector<Page*> pages;
  for (const Descriptor& memory : meeting.memories) {
    ARGOSY_ASSIGN_OR_RETURN(SharedMapping mapping, SharedMapping::map(memory, kPageBytes));
    pages.push_back(std::launder(reinterpret_cast<Page*>(mapping.data())));
    holdings->pages.push_back(std::move(mapping));
  }
  holdings->ranks = std::make_shared<shared::Ranks>(std::move(pages));
  shared::Ranks* const ranks = holdings->ranks.get();
  const int own = seat.rank;
  ARGOSY_ASSIGN_OR_RETURN(
      holdings->watch,
      platform::ProcessWatch::start(std::move(meeting.pidfds), [ranks, own](size_t rank) {
        ranks->note_death(static_cast<int>(rank), own);
      }));
  return holdings;
}

}  // namespace

Result<std::unique_ptr<Endpoint>> attach(const Seat& seat, const Status& own,
                                         platform::Deadline deadline) {
  Status status = own;
  Descriptor memory;
  Descriptor pidfd;
  if (status.ok()) {
    Result<Descriptor> made = make_memory(seat);
    status = made.error();
    if (made.has_value()) memory = std::move(*made);
  }
  if (status.ok()) {
    Result<Descriptor> opened = platform::open_own_pidfd();
    status = opened.error();
    if (opened.has_value()) pidfd = std::move(*opened);
  }
  ARGOSY_ASSIGN_OR_RETURN(Meeting meeting,
                          meet(seat, status, std::move(memory), std::move(pidfd), deadline));
  ARGOSY_ASSIGN_OR_RETURN(const std::shared_ptr<Holdings> holdings, hold(seat, meeting));
  Result<std::unique_ptr<Heap>> heap =
      Heap::map(std::move(meeting.memories), seat.rank, kPageBytes, seat.heap_bytes);
  if (!heap.has_value()) {
    holdings->ranks->poison(seat.rank, heap.error());
    return heap.error();
  }
  holdings->ranks->sit(seat.rank);
  shared::Attachment attachment;
  attachment.name = "shm";
  attachment.rank = seat.rank;
  attachment.ranks = holdings->ranks;
  attachment.memory = std::move(*heap);
  attachment.keep_alive = holdings;
  return shared::attach(std::move(attachment), deadline);
}

}  // namespace argosy::transport::shm
