// The weight gradients of a layer as a list, and the sum of their squares over a group. Test: tests/moe/gradient_sync_test.cc.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "argosy/moe_backward.h"
#include "argosy/thread_pool.h"
#include "moe/row_gather.h"

namespace argosy {

struct WeightGradient {
  const char* name;
  TensorView view;
  bool is_expert;  // [L, ..] of this rank's experts; else held by every rank

  bool is_given() const { return view.dtype != DType::kUnset; }
};

// Experts first.
std::array<WeightGradient, 12> weight_gradients(const MoeGradients& gradients);

// Experts of this rank: the first dimension of their gradients; 0 where none is given.
int64_t num_local_experts(const MoeGradients& gradients);

// kInvalidArgument unless each is dense fp32 with data, and all of experts have the same number of them.
Status check_weight_gradients(const MoeGradients& gradients);

// Squares in fp64: 16 chains over the elements of a matrix, added in pairs; the matrices of an expert one after the other;
// experts by their ids; what every rank holds at last, once. So the bits depend on the gradients alone.
//
// Collective: yes. Errors: those of a wait; kOutOfMemory.
struct SquareSums {
  double sum = 0;            // the same on every rank
  int64_t first_expert = 0;  // id of this rank's first
};
Result<SquareSums> sum_squares(RowGather& rows, int rank, int num_ranks, ThreadPool& pool,
                               const MoeGradients& gradients);

// "d_expert_up of expert 5 is nan at [3, 7]": the first value of this rank that is not finite; empty: none.
std::string find_nonfinite(const MoeGradients& gradients, int64_t first_expert);

}  // namespace argosy
