// What ranks send and expect in the tests of both exchanges: rows that name their rank, token and column, and an expert
// that changes them so that another expert's row shows.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "argosy/tensor.h"
#include "support/routing_cases.h"

namespace argosy::testing {

inline constexpr int64_t kHidden = 5;

// Each row carries its rank, token and a channel, exactly.
inline float element(int rank, int64_t token, int64_t column) {
  return static_cast<float>(rank * 100000 + token * 100 + column);
}

inline std::vector<float> hidden_of(int rank, int64_t num_tokens) {
  std::vector<float> hidden(static_cast<size_t>(num_tokens * kHidden));
  for (int64_t i = 0; i < num_tokens * kHidden; ++i) {
    hidden[static_cast<size_t>(i)] = element(rank, i / kHidden, i % kHidden);
  }
  return hidden;
}

// What "expert e" makes of a row.
inline float expert_value(float value, int64_t expert) {
  return value * 0.5f + static_cast<float>(expert);
}

inline void poison(const TensorView& view) {
  std::memset(view.data, 0xFF, static_cast<size_t>(view.num_elements() * size_of(view.dtype)));
}

// The rows of one rank in order: by local expert, source rank, token. Pairs (source, token) and
// expert.
struct Expected {
  int source;
  int64_t token;
  int64_t expert;
};
inline std::vector<Expected> expected_rows(const RoutingCase& one, int dest) {
  std::vector<Expected> rows;
  const int64_t end = (dest + 1) * one.num_experts / one.num_ranks;
  for (int64_t expert = dest * one.num_experts / one.num_ranks; expert < end; ++expert) {
    for (int source = 0; source < one.num_ranks; ++source) {
      const Routing& routing = one.routings[static_cast<size_t>(source)];
      for (int64_t token = 0; token < routing.num_tokens; ++token) {
        for (int64_t k = 0; k < one.top_k; ++k) {
          if (routing.topk_idx[static_cast<size_t>(token * one.top_k + k)] == expert) {
            rows.push_back({source, token, expert});
          }
        }
      }
    }
  }
  return rows;
}

inline void expect_sums(const Routing& routing, int rank, const std::vector<float>& output) {
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    for (int64_t column = 0; column < kHidden; ++column) {
      float want = 0.0f;
      for (int64_t k = 0; k < routing.top_k; ++k) {
        const auto at = static_cast<size_t>(token * routing.top_k + k);
        if (routing.topk_idx[at] < 0) continue;
        const float row = expert_value(element(rank, token, column), routing.topk_idx[at]);
        want = std::fma(routing.topk_weights.values[at], row, want);
      }
      ASSERT_EQ(output[static_cast<size_t>(token * kHidden + column)], want) << "token " << token;
    }
  }
}

}  // namespace argosy::testing
