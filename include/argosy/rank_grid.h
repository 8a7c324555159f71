// Where ranks stand when the world is larger than an expert-parallel group, and when several ranks are given the same tokens.
//
// Rank r stands in row r / ep, column r % ep. A row is an expert-parallel group: every expert once. A column holds the same
// experts in every row (argosy/gradient_sync.h). Plain values and pure functions; nothing here communicates. Test:
// tests/plan/rank_grid_test.cc, tests/moe/layout_test.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "argosy/group.h"
#include "argosy/status.h"

namespace argosy {

struct RankGridOptions {
  int num_ranks = 1;  // of the world
  int ep = -1;        // ranks of an expert-parallel group; -1: the whole world
  // So many ranks in a row, from a multiple of it on, are given the same tokens: tensor-parallel ranks behind attention.
  int token_replicas = 1;
};

// A contiguous range of tokens.
struct TokenRange {
  int64_t first = 0;
  int64_t count = 0;
};

class RankGrid {
 public:
  // Errors: kInvalidArgument names the numbers and the rule: 1 <= num_ranks <= 1024; ep is -1 or divides num_ranks;
  // token_replicas divides num_ranks. More ranks in a row than experts are normal (contract 3.7).
  static Result<RankGrid> create(const RankGridOptions& options);

  int num_ranks() const { return num_ranks_; }
  int ep() const { return ep_; }                   // resolved: at least 1
  int copies() const { return num_ranks_ / ep_; }  // of every expert: rows
  int token_replicas() const { return token_replicas_; }

  // Precondition: 0 <= rank < num_ranks().
  int row(int rank) const { return rank / ep_; }
  int column(int rank) const { return rank % ep_; }
  // World ranks in the order of their ranks in the group. Never empty; rank itself is among them.
  std::vector<int> ep_ranks(int rank) const;
  std::vector<int> copies_ranks(int rank) const;
  std::vector<int> replica_ranks(int rank) const;

  // What `rank` brings of `num_tokens` tokens that its replicas are given too: contiguous, by the rule of owned_begin(); together
  // the replicas bring every token once. So each is routed, sent, counted for load, losses and capacity, and has its gradient,
  // once; the outputs of the replicas, one after the other, are that of all tokens. Precondition: num_tokens >= 0.
  TokenRange token_share(int rank, int64_t num_tokens) const;

  // For Group::agree over the world: resolved numbers, so that -1 on one rank and the number on another agree.
  std::vector<Setting> settings() const;

 private:
  RankGrid(int num_ranks, int ep, int token_replicas)
      : num_ranks_(num_ranks), ep_(ep), token_replicas_(token_replicas) {}

  int num_ranks_;
  int ep_;
  int token_replicas_;
};

}  // namespace argosy
