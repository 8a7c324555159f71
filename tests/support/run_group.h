// Runs a body on every rank of an in-process group, one thread a rank, and joins them all.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "argosy/group.h"
#include "support/rank_threads.h"

namespace argosy::testing {

// `change` may alter one rank's options before it joins.
inline void run_group(int num_ranks, const std::function<void(Group&)>& body,
                      const std::function<void(GroupOptions&)>& change = {}) {
  Result<std::shared_ptr<InprocWorld>> world = InprocWorld::create(num_ranks);
  ASSERT_TRUE(world.has_value()) << world.error().to_string();
  run_ranks(num_ranks, [&](int rank) {
    GroupOptions options;
    options.rank = rank;
    options.num_ranks = num_ranks;
    options.inproc = *world;
    options.step_deadline = std::chrono::seconds(60);
    if (change) change(options);
    Result<std::unique_ptr<Group>> group = Group::join(options);
    ASSERT_TRUE(group.has_value()) << group.error().to_string();
    body(**group);
  });
}

}  // namespace argosy::testing
