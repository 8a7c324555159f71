// One thread for every rank of a grid, in its expert-parallel group and among the copies of its experts.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "argosy/gradient_sync.h"
#include "argosy/group.h"
#include "argosy/moe.h"
#include "argosy/rank_grid.h"
#include "support/naive_layer.h"
#include "support/rank_threads.h"

namespace argosy::testing {

struct Seat {
  int rank;
  Group& ep;
  Group* copies;  // null without copies
};

inline std::unique_ptr<Group> join(const std::shared_ptr<InprocWorld>& world, int rank,
                                   int num_ranks) {
  GroupOptions options;
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.inproc = world;
  options.dot_order = DotOrder::kVdpbf16;
  options.threads_per_rank = 1 + rank % 2;
  options.step_deadline = std::chrono::seconds(60);
  Result<std::unique_ptr<Group>> group = Group::join(options);
  EXPECT_TRUE(group.has_value()) << group.error().to_string();
  return std::move(*group);
}

inline RankGrid grid_of(int ep, int copies, int token_replicas = 1) {
  return *RankGrid::create({.num_ranks = ep * copies, .ep = ep, .token_replicas = token_replicas});
}

// What a rank needs for a step: its part of the layer, and the sums over the grid.
struct Trainer {
  std::unique_ptr<MoeLayer> layer;
  std::unique_ptr<GradientSync> sync;

  Trainer(const Seat& seat, const NaiveLayer& naive) {
    MoeOptions options;
    options.hidden_dtype = naive.dtype;
    options.training = true;
    auto made = MoeLayer::create(
        seat.ep, naive.router,
        std::move(*weights_for_rank(naive, seat.ep.rank(), seat.ep.num_ranks())), options);
    EXPECT_TRUE(made.has_value()) << made.error().to_string();
    layer = std::move(*made);
    auto sums = GradientSync::create(seat.ep, seat.copies);
    EXPECT_TRUE(sums.has_value()) << sums.error().to_string();
    sync = std::move(*sums);
  }
};

inline void run_grid(const RankGrid& grid, const std::function<void(const Seat&)>& body) {
  std::vector<std::shared_ptr<InprocWorld>> rows, columns;
  for (int row = 0; row < grid.copies(); ++row) rows.push_back(*InprocWorld::create(grid.ep()));
  for (int column = 0; column < grid.ep(); ++column) {
    columns.push_back(*InprocWorld::create(grid.copies()));
  }
  run_ranks(grid.num_ranks(), [&](int rank) {
    const int row = grid.row(rank), column = grid.column(rank);
    const auto ep = join(rows[static_cast<size_t>(row)], column, grid.ep());
    const auto copies = join(columns[static_cast<size_t>(column)], row, grid.copies());
    body({rank, *ep, grid.copies() > 1 ? copies.get() : nullptr});
  });
}

}  // namespace argosy::testing
