// Combine: the token's home rank reads its experts' rows where they lie and sums them in top-k
// order. In calls of several rounds rows are fetched round by round and summed after the last, so
// the bits are the same. Test: tests/exchange/exchange_test.cc.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "exchange/combine_kernel.h"
#include "exchange/state.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

using base::invalid;

constexpr int64_t kTokensPerTask = 16;

Status check_rows(const char* name, const ConstTensorView& view, DType dtype, int64_t rows,
                  int64_t columns) {
  const bool right = view.dtype == dtype && view.num_dims == 2 && view.dim(0) == rows &&
                     view.dim(1) == columns && (rows == 0 || columns == 1 || view.stride(1) == 1);
  if (right) return {};
  return invalid("{} is {}, combine needs {} [{}, {}] with unit stride in the last dimension", name,
                 describe(view), name_of(dtype), rows, columns);
}

Status check_input(const ExchangeOptions& options, int64_t num_tokens, const CombineInput& input,
                   const TensorView& output) {
  ARGOSY_RETURN_IF_ERROR(check_rows("output", output, options.dtype, num_tokens, options.hidden));
  ARGOSY_RETURN_IF_ERROR(
      check_rows("topk_weights", input.topk_weights, DType::kF32, num_tokens, options.top_k));
  for (const auto& [name, view] :
       {std::pair{"shared", &input.shared}, {"residual", &input.residual}}) {
    if (view->dtype == DType::kUnset) continue;
    ARGOSY_RETURN_IF_ERROR(check_rows(name, *view, options.dtype, num_tokens, options.hidden));
  }
  const ConstTensorView& bias = input.bias;
  if (bias.dtype != DType::kUnset && (bias.dtype != DType::kF32 || bias.num_dims != 1 ||
                                      bias.dim(0) != options.hidden || !bias.is_dense())) {
    return invalid("bias is {}, combine needs F32 [{}]", describe(bias), options.hidden);
  }
  return {};
}

// Typed calls of the kernel.
struct Ops {
  const CombineKernel& kernel = combine_kernel();
  bool is_bf16;
  int64_t n;

  void start(const std::byte* first, float scale, float* acc) const {
    if (is_bf16) {
      kernel.start_bf16(reinterpret_cast<const BFloat16*>(first), scale, n, acc);
    } else {
      kernel.start_f32(reinterpret_cast<const float*>(first), scale, n, acc);
    }
  }
  void add(const std::byte* addend, float* acc) const {
    if (is_bf16) {
      kernel.add_bf16(reinterpret_cast<const BFloat16*>(addend), n, acc);
    } else {
      kernel.add_f32(reinterpret_cast<const float*>(addend), n, acc);
    }
  }
  void accumulate(float weight, const std::byte* row, float* acc) const {
    if (is_bf16) {
      kernel.fma_bf16(weight, reinterpret_cast<const BFloat16*>(row), n, acc);
    } else {
      kernel.fma_f32(weight, reinterpret_cast<const float*>(row), n, acc);
    }
  }
  void store(const float* acc, std::byte* out) const {
    if (is_bf16) {
      kernel.store_bf16(acc, n, reinterpret_cast<BFloat16*>(out));
    } else {
      kernel.store_f32(acc, n, reinterpret_cast<float*>(out));
    }
  }
};

// Calls row_of(at) for the address of the result of (token, k), at = token * K + k.
template <typename RowOf>
void sum_token(const Ops& ops, const DispatchPlan& plan, const CombineInput& input,
               const TensorView& output, int64_t token, float* acc, const RowOf& row_of) {
  if (input.mask != nullptr && input.mask[token] == 0) {
    std::memset(output.row(token), 0, static_cast<size_t>(ops.n * size_of(output.dtype)));
    return;
  }
  const bool has_shared = input.shared.dtype != DType::kUnset;
  const float scale = input.shared_scale == nullptr ? 1.0f : input.shared_scale[token];
  ops.start(has_shared ? input.shared.row(token) : nullptr, scale, acc);
  if (input.residual.dtype != DType::kUnset) ops.add(input.residual.row(token), acc);
  if (input.bias.dtype != DType::kUnset) {
    ops.kernel.add_f32(input.bias.as<float>(), ops.n, acc);
  }
  const auto* weights = reinterpret_cast<const float*>(input.topk_weights.row(token));
  for (int64_t k = 0; k < plan.top_k; ++k) {
    const auto at = static_cast<size_t>(token * plan.top_k + k);
    if (plan.dest_rank[at] < 0) continue;
    ops.accumulate(weights[k], row_of(at), acc);
  }
  ops.store(acc, output.row(token));
}

template <typename RowOf>
void sum_all(Exchange::State& state, const DispatchPlan& plan, const CombineInput& input,
             const TensorView& output, const RowOf& row_of) {
  const Ops ops{.is_bf16 = state.options.dtype == DType::kBF16, .n = state.options.hidden};
  const int64_t num_tasks = (plan.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  state.group.pool().parallel_for(num_tasks, [&](int64_t task, int thread) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    float* acc = reinterpret_cast<float*>(state.accumulator.data()) + thread * ops.n;
    const int64_t end = std::min(plan.num_tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      sum_token(ops, plan, input, output, token, acc, row_of);
    }
  });
}

// Copies this rank's results of one round to [T, K, H].
void fetch_round(Exchange::State& state, const DispatchPlan& plan, int64_t round) {
  transport::Endpoint& endpoint = state.group.endpoint();
  const int64_t first_slot = round * plan.round_rows;
  const int64_t num_tasks = (plan.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const int64_t ids_per_task = kTokensPerTask * plan.top_k;
  state.group.pool().parallel_for(num_tasks, [&](int64_t task, int) {
    const int64_t end = std::min(plan.num_tokens * plan.top_k, (task + 1) * ids_per_task);
    for (int64_t id = task * ids_per_task; id < end; ++id) {
      const auto at = static_cast<size_t>(id);
      const int64_t slot = plan.dest_slot[at] - first_slot;
      if (plan.dest_rank[at] < 0 || slot < 0 || slot >= plan.round_rows) continue;
      std::memcpy(state.returned.data() + id * state.row_bytes,
                  endpoint.peer_ptr(plan.dest_rank[at], state.results, slot * state.row_bytes),
                  static_cast<size_t>(state.row_bytes));
    }
  });
}

}  // namespace

Status Exchange::issue_combine(const DispatchPlan& plan, int64_t round) {
  State& state = *state_;
  ARGOSY_RETURN_IF_ERROR(state.check_call(plan, round, Step::kDispatchDone, "issue_combine"));
  round_traffic(plan, round, &state.send_rows, &state.recv_rows);
  state.raise(FlagKind::kResults, round, state.recv_rows);
  if (round + 1 < plan.num_rounds) {
    round_traffic(plan, round + 1, &state.send_rows, &state.recv_rows);
    state.raise(FlagKind::kConsumed, round, state.recv_rows);
  }
  state.step = Step::kCombineIssued;
  return {};
}

Status Exchange::wait_combine(const DispatchPlan& plan, int64_t round, const CombineInput& input,
                              const TensorView& output) {
  State& state = *state_;
  ARGOSY_RETURN_IF_ERROR(state.check_call(plan, round, Step::kCombineIssued, "wait_combine"));
  ARGOSY_RETURN_IF_ERROR(check_input(state.options, plan.num_tokens, input, output));
  round_traffic(plan, round, &state.send_rows, &state.recv_rows);
  ARGOSY_RETURN_IF_ERROR(
      state.wait(FlagKind::kResults, round, state.send_rows, "results of the experts"));
  transport::Endpoint& endpoint = state.group.endpoint();
  if (plan.num_rounds == 1) {
    sum_all(state, plan, input, output, [&](size_t at) {
      return endpoint.peer_ptr(plan.dest_rank[at], state.results,
                               plan.dest_slot[at] * state.row_bytes);
    });
  } else {
    ARGOSY_RETURN_IF_ERROR(state.returned.reserve(plan.num_tokens * plan.top_k * state.row_bytes));
    fetch_round(state, plan, round);
    state.raise(FlagKind::kPulled, round, state.send_rows);
    if (round + 1 == plan.num_rounds) {
      sum_all(state, plan, input, output, [&](size_t at) {
        return state.returned.data() + static_cast<int64_t>(at) * state.row_bytes;
      });
    }
  }
  state.next_round = round + 1;
  state.step = round + 1 < plan.num_rounds ? Step::kCountsDone : Step::kIdle;
  return {};
}

}  // namespace argosy
