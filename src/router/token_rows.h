// What the losses and the backward of the router share: checked logits, which rows count, loops
// over tokens, and how a gradient is written.
//
// A row is masked (never read), replaced (OnNonfinite::kUniform: its logits are constants, so it
// has no gradient) or ordinary. Test: tests/router/backward_test.cc.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>

#include "argosy/router.h"
#include "argosy/router_backward.h"
#include "argosy/status.h"
#include "base/error.h"
#include "router/gradient_kernel.h"
#include "router/kernel.h"

namespace argosy::router {

inline constexpr int64_t kRowsPerTask = 32;

// Calls body(first, last) for blocks of tokens that cover [0, num_tokens). Their bounds do not
// depend on the threads.
template <typename Body>
void for_rows(ThreadPool* pool, int64_t num_tokens, Body&& body) {
  const int64_t num_tasks = (num_tokens + kRowsPerTask - 1) / kRowsPerTask;
  const auto task_body = [&](int64_t task, int) {
    const int64_t first = task * kRowsPerTask;
    body(first, std::min(first + kRowsPerTask, num_tokens));
  };
  if (pool != nullptr) {
    pool->parallel_for(num_tasks, task_body);
  } else {
    for (int64_t task = 0; task < num_tasks; ++task) task_body(task, 0);
  }
}

// The same where body(first, last) may fail to get `scratch_bytes` for its thread and then returns
// false: kOutOfMemory.
template <typename Body>
Status run_rows(ThreadPool* pool, int64_t num_tokens, int64_t scratch_bytes, Body&& body) {
  std::atomic<bool> failed{false};
  for_rows(pool, num_tokens, [&](int64_t first, int64_t last) {
    // Relaxed: parallel_for makes what its tasks wrote visible when it returns.
    if (!body(first, last)) failed.store(true, std::memory_order_relaxed);
  });
  if (!failed.load(std::memory_order_relaxed)) return {};
  return base::error(StatusCode::kOutOfMemory, "no {} bytes of scratch for a thread",
                     scratch_bytes);
}

enum class RowKind { kMasked, kReplaced, kOrdinary };

// The logits of a rank's tokens. Precondition of its use: check_rows() was ok.
class TokenRows {
 public:
  TokenRows(const RouterSpec& spec, const RouterInput& input)
      : num_experts_(spec.num_experts), input_(input) {}

  int64_t num_tokens() const { return input_.logits.dim(0); }
  int64_t num_experts() const { return num_experts_; }
  bool is_masked(int64_t token) const { return input_.mask != nullptr && input_.mask[token] == 0; }
  const float* row(int64_t token) const {
    return reinterpret_cast<const float*>(input_.logits.row(token));
  }
  RowKind kind(int64_t token) const;

 private:
  int64_t num_experts_;
  const RouterInput& input_;
};

// validate(spec), dtype and shape of the logits, and with OnNonfinite::kError that unmasked rows
// are finite.
Status check_rows(const RouterSpec& spec, const RouterInput& input, ThreadPool* pool);

// `routing` fits spec and logits, and every unmasked row is a choice of K distinct experts: it is
// the routing before any drop. Precondition: check_rows() was ok.
Status check_routing(const RouterSpec& spec, const RouterInput& input, const Routing& routing);

// Terms whose ratio is that of the scores (kSoftmaxTopK: of a softmax).
ChosenTerms terms_of(ScoreFunction function);

// Null where the logarithm of a term is the logit itself: softmax.
ScoreSlopes slopes_of(ScoreFunction function);

// d_logits is dense fp32 [T, E] like `logits`.
Status check_d_logits(const ConstTensorView& logits, const TensorView& d_logits);

// *element = gradient, or += it; + 0, so that no -0 is written.
inline void put_gradient(GradientMode mode, double gradient, float* element) {
  const double before = mode == GradientMode::kAdd ? static_cast<double>(*element) : 0.0;
  const auto value = static_cast<float>(before + gradient);
  *element = value != value ? std::bit_cast<float>(0x7FC00000u) : value;
}

// A row without a gradient.
void put_zero_row(GradientMode mode, int64_t num_experts, float* row);

// Derivatives in the logarithm of `count` shares that sum to 1: out[i] = share[i] * (grad[i] -
// sum_j share[j] * grad[j]). The gradient of the largest share is taken off all others first, so
// that equal gradients give exactly 0 and one share close to 1 loses no digits. `out` may be
// `grad`. Returns nothing else; order of the sum: lanes.h.
void through_shares(const double* share, const double* grad, int64_t count, double* out);

}  // namespace argosy::router
