// The weighted sums of combine (contract 3.5) over rows wherever they lie, by threads. Test:
// tests/exchange/exchange_test.cc, latency_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "argosy/exchange.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "argosy/thread_pool.h"
#include "platform/copy.h"
#include "platform/float_env.h"

namespace argosy {

struct SumShape {
  DType dtype = DType::kUnset;
  int64_t hidden = 0;
  int64_t num_tokens = 0;
  int64_t top_k = 0;
};

// kInvalidArgument names the view of `input` or `output` that does not fit.
Status check_combine(const SumShape& shape, const CombineInput& input, const TensorView& output);

// [threads, 2, K]: a token's rows, and the next token's.
struct SumScratch {
  std::vector<const std::byte*> rows;
  std::vector<float> weights;

  void resize(int64_t num_threads, int64_t top_k) {
    rows.resize(static_cast<size_t>(2 * num_threads * top_k));
    weights.resize(rows.size());
  }
};

// The rows of one token's sum: the addresses and weights of its real entries, in top-k order.
struct TokenRows {
  const std::byte** rows = nullptr;  // [top_k]
  float* weights = nullptr;          // [top_k]
  int64_t count = 0;
};

// One token. `next`: what the next call will read.
void sum_token(const SumShape& shape, const CombineInput& input, const TensorView& output,
               int64_t token, const TokenRows& rows, const TokenRows& next);

template <typename RowOf>
void gather_rows(const SumShape& shape, const CombineInput& input, int64_t token,
                 const RowOf& row_of, TokenRows* rows) {
  rows->count = 0;
  if (token >= shape.num_tokens || (input.mask != nullptr && input.mask[token] == 0)) return;
  const auto* const weights = reinterpret_cast<const float*>(input.topk_weights.row(token));
  for (int64_t k = 0; k < shape.top_k; ++k) {
    const std::byte* const row = row_of(static_cast<size_t>(token * shape.top_k + k));
    if (row == nullptr) continue;
    rows->rows[rows->count] = row;
    rows->weights[rows->count++] = weights[k];
  }
}

// An output that no cache holds until it is read: past them, which spares a read of every line before it is written.
constexpr int64_t kStreamedSumBytes = int64_t{4} << 20;
inline bool is_streamed(const SumShape& shape) {
  return shape.num_tokens * shape.hidden * size_of(shape.dtype) >= kStreamedSumBytes;
}

// row_of(at) is the address of the result of (token, k), at = token * K + k; null where nobody has one.
template <typename RowOf>
void weighted_sum(const SumShape& shape, ThreadPool* pool, const CombineInput& input,
                  const TensorView& output, SumScratch* scratch, const RowOf& row_of) {
  constexpr int64_t kTokensPerTask = 16;
  const int64_t num_tasks = (shape.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  pool->parallel_for(num_tasks, [&](int64_t task, int thread) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    const auto first_of = [&](int which) {
      return static_cast<size_t>((2 * thread + which) * shape.top_k);
    };
    TokenRows rows{scratch->rows.data() + first_of(0), scratch->weights.data() + first_of(0)};
    TokenRows next{scratch->rows.data() + first_of(1), scratch->weights.data() + first_of(1)};
    const int64_t end = std::min(shape.num_tokens, (task + 1) * kTokensPerTask);
    gather_rows(shape, input, task * kTokensPerTask, row_of, &next);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      std::swap(rows, next);
      gather_rows(shape, input, token + 1, row_of, &next);
      sum_token(shape, input, output, token, rows, next);
    }
    if (is_streamed(shape)) platform::finish_streaming();
  });
}

}  // namespace argosy
