// The meeting place of inproc ranks. Test: tests/transport/endpoint_test.cc,
// tests/transport/group_test.cc.
#include "transport/inproc/world.h"

#include <utility>

#include "base/error.h"

namespace argosy {
namespace {

using transport::shared::Page;
using transport::shared::Ranks;
using transport::shared::SeatState;

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

InprocWorld::State::State(int num) {
  std::vector<Page*> addresses;
  for (int rank = 0; rank < num; ++rank) {
    pages.push_back(std::make_unique<Page>(platform::Doorbell::Scope::kThreads));
    addresses.push_back(pages.back().get());
  }
  ranks = std::make_shared<Ranks>(std::move(addresses));
}

void InprocWorld::State::refuse(int rank, const Status& why) {
  {
    const std::lock_guard lock(mutex);
    if (num_taken == ranks->num_ranks()) return;
  }
  ranks->poison(rank, why);
}

Status InprocWorld::State::take_seat(int rank, int as_num_ranks) {
  const int num_ranks = ranks->num_ranks();
  Status status;
  {
    const std::lock_guard lock(mutex);
    if (as_num_ranks != num_ranks) {
      status = base::error(StatusCode::kDisagree,
                           "num_ranks differs: rank {} has {}, the world was made for {}", rank,
                           as_num_ranks, num_ranks);
    } else if (rank < 0 || rank >= num_ranks) {
      status = base::invalid("rank {} is outside [0, {})", rank, num_ranks);
    } else if (ranks->seat(rank) != SeatState::kAbsent) {
      status =
          base::invalid("rank {} of {} is taken twice; a world serves one group", rank, num_ranks);
    } else {
      ++num_taken;
      ranks->sit(rank);
    }
  }
  if (!status.ok()) refuse(rank, status);
  return status;
}

}  // namespace argosy
