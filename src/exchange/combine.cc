// Combine: the token's home rank reads its experts' rows where they lie and sums them in top-k
// order. In calls of several rounds rows are fetched round by round and summed after the last, so
// the bits are the same. Test: tests/exchange/exchange_test.cc.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "exchange/state.h"
#include "exchange/weighted_sum.h"

namespace argosy {
namespace {

constexpr int64_t kTokensPerTask = 16;
constexpr const char* kWaitResults = "results of the experts";

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

SumShape sum_shape(const Exchange::State& state, const DispatchPlan& plan) {
  return {state.options.dtype, state.options.hidden, plan.num_tokens, plan.top_k};
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
  ARGOSY_RETURN_IF_ERROR(check_combine(sum_shape(state, plan), input, output));
  round_traffic(plan, round, &state.send_rows, &state.recv_rows);
  if (plan.num_rounds == 1) {
    ARGOSY_RETURN_IF_ERROR(state.wait(FlagKind::kResults, round, state.send_rows, kWaitResults));
    transport::Endpoint& endpoint = state.group.endpoint();
    weighted_sum(sum_shape(state, plan), &state.group.pool(), input, output, &state.sum_scratch,
                 [&](size_t at) -> const std::byte* {
                   if (plan.dest_rank[at] < 0) return nullptr;
                   return endpoint.peer_ptr(plan.dest_rank[at], state.results,
                                            plan.dest_slot[at] * state.row_bytes);
                 });
  } else {
    ARGOSY_RETURN_IF_ERROR(fetch_round(state, plan, round));
    if (round + 1 == plan.num_rounds) {
      weighted_sum(sum_shape(state, plan), &state.group.pool(), input, output, &state.sum_scratch,
                   [&](size_t at) -> const std::byte* {
                     if (plan.dest_rank[at] < 0) return nullptr;
                     return state.returned.data() + static_cast<int64_t>(at) * state.row_bytes;
                   });
    }
  }
  state.next_round = round + 1;
  state.step = round + 1 < plan.num_rounds ? Step::kCountsDone : Step::kIdle;
  return {};
}

}  // namespace argosy
