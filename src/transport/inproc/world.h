// What the ranks of one process share: their pages, who has taken a seat, and memory that outlives its rank.
// Test: tests/transport/endpoint_test.cc.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "argosy/group.h"
#include "argosy/status.h"
#include "platform/memory.h"
#include "transport/shared/ranks.h"

namespace argosy {

struct InprocWorld::State {
  explicit State(int num);

  std::vector<std::unique_ptr<transport::shared::Page>> pages;
  std::shared_ptr<transport::shared::Ranks> ranks;

  std::mutex mutex;  // guards what follows
  int num_taken = 0;
  std::vector<platform::MappedMemory> left_behind;  // peers may still read a rank's last results

  // Poisons a group that is still joining: a rank that cannot join would keep the others waiting. A
  // complete group is not harmed by a stray joiner.
  void refuse(int rank, const Status& why);
  // Seats `rank`, or refuses it.
  Status take_seat(int rank, int as_num_ranks);
};

}  // namespace argosy
