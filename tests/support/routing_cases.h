// Designed routings over several ranks: the cases that break exchanges, each by name, and random
// ones. Used by the tests of plan, exchange and moe alike.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "argosy/plan.h"

namespace argosy::testing {

struct RoutingCase {
  std::string name;
  int num_ranks = 1;
  int64_t num_experts = 1;
  int64_t top_k = 1;
  std::vector<Routing> routings;  // [R]
};

// Fills counts and weights of a routing whose topk_idx is set.
inline void finish_routing(Routing* routing) {
  routing->counts.assign(static_cast<size_t>(routing->num_experts), 0);
  routing->topk_weights.values.assign(routing->topk_idx.size(), 0.0f);
  routing->num_valid_tokens = routing->num_tokens;
  for (size_t i = 0; i < routing->topk_idx.size(); ++i) {
    if (routing->topk_idx[i] < 0) continue;
    ++routing->counts[static_cast<size_t>(routing->topk_idx[i])];
    routing->topk_weights.values[i] = 0.25f + 0.125f * static_cast<float>(i % 7);
  }
}

// Draws T tokens. `pick(token)` gives the expert wanted first; the others are random and distinct.
// Each entry becomes -1 with probability drop.
template <typename Pick>
Routing draw_routing(std::mt19937_64& random, int64_t num_tokens, int64_t num_experts,
                     int64_t top_k, double drop, const Pick& pick) {
  Routing routing;
  routing.num_tokens = num_tokens;
  routing.num_experts = num_experts;
  routing.top_k = top_k;
  routing.topk_idx.assign(static_cast<size_t>(num_tokens * top_k), -1);
  std::vector<int32_t> experts(static_cast<size_t>(num_experts));
  std::bernoulli_distribution dropped(drop);
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::iota(experts.begin(), experts.end(), 0);
    const int64_t first = pick(token);
    if (first >= 0) std::swap(experts[0], experts[static_cast<size_t>(first)]);
    for (size_t k = first >= 0 ? 1 : 0; k < static_cast<size_t>(top_k); ++k) {
      std::uniform_int_distribution<size_t> other(k, experts.size() - 1);
      std::swap(experts[k], experts[other(random)]);
    }
    for (int64_t k = 0; k < top_k; ++k) {
      const bool skip = dropped(random);
      routing.topk_idx[static_cast<size_t>(token * top_k + k)] =
          skip ? -1 : experts[static_cast<size_t>(k)];
    }
  }
  finish_routing(&routing);
  return routing;
}

inline std::vector<RoutingCase> routing_cases(int num_ranks, int64_t num_experts, int64_t top_k,
                                              uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<RoutingCase> cases;
  const auto add = [&](std::string name, double drop, const auto& tokens_of, const auto& pick) {
    RoutingCase one{std::move(name), num_ranks, num_experts, top_k, {}};
    for (int rank = 0; rank < num_ranks; ++rank) {
      one.routings.push_back(draw_routing(random, tokens_of(rank), num_experts, top_k, drop, pick));
    }
    cases.push_back(std::move(one));
  };
  const auto any = [](int64_t) { return int64_t{-1}; };
  std::uniform_int_distribution<int64_t> uneven(0, 23);
  add(
      "even", 0.0, [](int) { return 16; }, any);
  add(
      "uneven", 0.0, [&](int) { return uneven(random); }, any);
  add(
      "entries dropped anywhere", 0.4, [](int) { return 13; }, any);
  add(
      "all entries dropped", 1.0, [](int) { return 5; }, any);
  add(
      "one hot expert", 0.0, [](int) { return 19; }, [&](int64_t) { return num_experts - 1; });
  add(
      "only rank 0 has tokens", 0.0, [](int rank) { return rank == 0 ? 31 : 0; }, any);
  add(
      "last rank has none", 0.0, [&](int rank) { return rank == num_ranks - 1 ? 0 : 7; }, any);
  add(
      "no tokens at all", 0.0, [](int) { return 0; }, any);
  add(
      "a single token", 0.0, [&](int rank) { return rank == num_ranks / 2 ? 1 : 0; }, any);
  // Everything lands on the experts of one rank: the first top_k experts.
  RoutingCase hot{"one hot rank", num_ranks, num_experts, top_k, {}};
  for (int rank = 0; rank < num_ranks; ++rank) {
    Routing routing = draw_routing(random, 9, top_k, top_k, 0.0, any);
    routing.num_experts = num_experts;
    finish_routing(&routing);
    hot.routings.push_back(std::move(routing));
  }
  cases.push_back(std::move(hot));
  return cases;
}

inline CountsMatrix counts_of(const RoutingCase& one) {
  CountsMatrix counts;
  counts.num_ranks = one.num_ranks;
  counts.num_experts = one.num_experts;
  for (const Routing& routing : one.routings) {
    counts.counts.insert(counts.counts.end(), routing.counts.begin(), routing.counts.end());
    counts.num_tokens.push_back(routing.num_tokens);
  }
  return counts;
}

}  // namespace argosy::testing
