// See argosy/rank_grid.h. Test: tests/plan/rank_grid_test.cc.
#include "argosy/rank_grid.h"

#include "argosy/plan.h"
#include "base/error.h"

namespace argosy {
namespace {

constexpr int kMostRanks = 1024;

std::vector<int> every(int first, int step, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

}  // namespace

Result<RankGrid> RankGrid::create(const RankGridOptions& options) {
  const int num_ranks = options.num_ranks;
  if (num_ranks < 1 || num_ranks > kMostRanks) {
    return base::invalid("a world of {} ranks, expected 1 to {}", num_ranks, kMostRanks);
  }
  const int ep = options.ep == -1 ? num_ranks : options.ep;
  if (ep < 1 || num_ranks % ep != 0) {
    return base::invalid(
        "expert-parallel groups of {} ranks do not divide a world of {} (expected a divisor, or -1 "
        "for the whole world)",
        options.ep, num_ranks);
  }
  if (options.token_replicas < 1 || num_ranks % options.token_replicas != 0) {
    return base::invalid("{} replicas of every token do not divide a world of {} ranks",
                         options.token_replicas, num_ranks);
  }
  return RankGrid(num_ranks, ep, options.token_replicas);
}

std::vector<int> RankGrid::ep_ranks(int rank) const { return every(row(rank) * ep_, 1, ep_); }

std::vector<int> RankGrid::copies_ranks(int rank) const {
  return every(column(rank), ep_, copies());
}

std::vector<int> RankGrid::replica_ranks(int rank) const {
  return every(rank / token_replicas_ * token_replicas_, 1, token_replicas_);
}

TokenRange RankGrid::token_share(int rank, int64_t num_tokens) const {
  const int replica = rank % token_replicas_;
  const int64_t first = owned_begin(num_tokens, token_replicas_, replica);
  return {first, owned_begin(num_tokens, token_replicas_, replica + 1) - first};
}

std::vector<Setting> RankGrid::settings() const {
  return {{"grid.num_ranks", std::to_string(num_ranks_)},
          {"grid.ep", std::to_string(ep_)},
          {"grid.token_replicas", std::to_string(token_replicas_)}};
}

}  // namespace argosy
