// Combine: the token's home rank reads its experts' rows where they lie and sums them in top-k
// order. In calls of several rounds rows are fetched round by round and summed after the last, so
// the bits are the same. Test: tests/exchange/exchange_test.cc.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "exchange/combine_kernel.h"
#include "exchange/state.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

using base::invalid;

constexpr int64_t kTokensPerTask = 16;
constexpr const char* kWaitResults = "results of the experts";

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

// The rows of one token's sum: the addresses and weights of its real entries, in top-k order.
struct TokenRows {
  const std::byte** rows;  // [top_k]
  float* weights;          // [top_k]
  int64_t count = 0;
};

// Calls row_of(at) for the address of the result of (token, k), at = token * K + k.
template <typename RowOf>
void gather_rows(const DispatchPlan& plan, const CombineInput& input, int64_t token,
                 const RowOf& row_of, TokenRows* rows) {
  rows->count = 0;
  if (token >= plan.num_tokens || (input.mask != nullptr && input.mask[token] == 0)) return;
  const auto* const weights = reinterpret_cast<const float*>(input.topk_weights.row(token));
  for (int64_t k = 0; k < plan.top_k; ++k) {
    const auto at = static_cast<size_t>(token * plan.top_k + k);
    if (plan.dest_rank[at] < 0) continue;
    rows->rows[rows->count] = row_of(at);
    rows->weights[rows->count++] = weights[k];
  }
}

void sum_token(const ExchangeOptions& options, const CombineInput& input, const TensorView& output,
               int64_t token, const TokenRows& rows, const TokenRows& next) {
  if (input.mask != nullptr && input.mask[token] == 0) {
    std::memset(output.row(token), 0, static_cast<size_t>(options.hidden * size_of(options.dtype)));
    return;
  }
  CombineArgs args;
  args.rows = rows.rows;
  args.weights = rows.weights;
  args.num_rows = rows.count;
  args.next_rows = next.rows;
  args.num_next = next.count;
  if (input.shared.dtype != DType::kUnset) args.shared = input.shared.row(token);
  if (input.shared_scale != nullptr) args.shared_scale = input.shared_scale[token];
  if (input.residual.dtype != DType::kUnset) args.residual = input.residual.row(token);
  if (input.bias.dtype != DType::kUnset) args.bias = input.bias.as<float>();
  args.n = options.hidden;
  args.out = output.row(token);
  const CombineKernel& kernel = combine_kernel();
  (options.dtype == DType::kBF16 ? kernel.combine_bf16 : kernel.combine_f32)(args);
}

template <typename RowOf>
void sum_all(Exchange::State& state, const DispatchPlan& plan, const CombineInput& input,
             const TensorView& output, const RowOf& row_of) {
  const int64_t num_tasks = (plan.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  state.group.pool().parallel_for(num_tasks, [&](int64_t task, int thread) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    const auto first_of = [&](int which) {
      return static_cast<size_t>((2 * thread + which) * plan.top_k);
    };
    TokenRows rows{state.row_addresses.data() + first_of(0),
                   state.row_weights.data() + first_of(0)};
    TokenRows next{state.row_addresses.data() + first_of(1),
                   state.row_weights.data() + first_of(1)};
    const int64_t end = std::min(plan.num_tokens, (task + 1) * kTokensPerTask);
    gather_rows(plan, input, task * kTokensPerTask, row_of, &next);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      std::swap(rows, next);
      gather_rows(plan, input, token + 1, row_of, &next);
      sum_token(state.options, input, output, token, rows, next);
    }
  });
}

// Copies this rank's results of one round that lie at `peer` to [T, K, H].
void fetch_from(Exchange::State& state, const DispatchPlan& plan, int64_t round, int peer) {
  transport::Endpoint& endpoint = state.group.endpoint();
  const int64_t first_slot = round * plan.round_rows;
  const int64_t num_tasks = (plan.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const int64_t ids_per_task = kTokensPerTask * plan.top_k;
  state.group.pool().parallel_for(num_tasks, [&](int64_t task, int) {
    const int64_t end = std::min(plan.num_tokens * plan.top_k, (task + 1) * ids_per_task);
    for (int64_t id = task * ids_per_task; id < end; ++id) {
      const auto at = static_cast<size_t>(id);
      const int64_t slot = plan.dest_slot[at] - first_slot;
      if (plan.dest_rank[at] != peer || slot < 0 || slot >= plan.round_rows) continue;
      std::memcpy(state.returned.data() + id * state.row_bytes,
                  endpoint.peer_ptr(peer, state.results, slot * state.row_bytes),
                  static_cast<size_t>(state.row_bytes));
    }
  });
}

// One peer's results are copied while those of others are on their way; own ones first.
Status fetch_round(Exchange::State& state, const DispatchPlan& plan, int64_t round) {
  ARGOSY_RETURN_IF_ERROR(state.returned.reserve(plan.num_tokens * plan.top_k * state.row_bytes));
  std::vector<int64_t>& only = state.only_rows;
  for (int i = 0; i < state.num_ranks(); ++i) {
    const int peer = (state.rank() + i) % state.num_ranks();
    const auto at = static_cast<size_t>(peer);
    if (state.send_rows[at] == 0) continue;
    only.assign(state.send_rows.size(), 0);
    only[at] = state.send_rows[at];
    ARGOSY_RETURN_IF_ERROR(state.wait(FlagKind::kResults, round, only, kWaitResults));
    fetch_from(state, plan, round, peer);
    state.raise(FlagKind::kPulled, round, only);
  }
  return {};
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
  if (plan.num_rounds == 1) {
    ARGOSY_RETURN_IF_ERROR(state.wait(FlagKind::kResults, round, state.send_rows, kWaitResults));
    transport::Endpoint& endpoint = state.group.endpoint();
    sum_all(state, plan, input, output, [&](size_t at) {
      return endpoint.peer_ptr(plan.dest_rank[at], state.results,
                               plan.dest_slot[at] * state.row_bytes);
    });
  } else {
    ARGOSY_RETURN_IF_ERROR(fetch_round(state, plan, round));
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
