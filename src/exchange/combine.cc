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
  constexpr auto kNumberBytes = static_cast<int64_t>(sizeof(float));
  state.group.pool().parallel_for(num_tasks, [&](int64_t task, int) {
    const int64_t end = std::min(plan.num_tokens * plan.top_k, (task + 1) * ids_per_task);
    for (int64_t id = task * ids_per_task; id < end; ++id) {
      const auto at = static_cast<size_t>(id);
      const int64_t slot = plan.dest_slot[at] - first_slot;
      if (plan.dest_rank[at] != peer || slot < 0 || slot >= plan.round_rows) continue;
      std::memcpy(state.returned.data() + id * state.row_bytes,
                  endpoint.peer_ptr(peer, state.results, slot * state.row_bytes),
                  static_cast<size_t>(state.row_bytes));
      if (!state.options.training) continue;
      std::memcpy(&state.returned_numbers[at],
                  endpoint.peer_ptr(peer, state.result_numbers, slot * kNumberBytes), kNumberBytes);
    }
  });
}

SumShape sum_shape(const Exchange::State& state, const DispatchPlan& plan) {
  return {state.options.dtype, state.options.hidden, plan.num_tokens, plan.top_k};
}

// One peer's results are copied while those of others are on their way; own ones first.
Status fetch_round(Exchange::State& state, const DispatchPlan& plan, int64_t round) {
  ARGOSY_RETURN_IF_ERROR(state.returned.reserve(plan.num_tokens * plan.top_k * state.row_bytes));
  if (state.options.training) state.returned_numbers.resize(plan.dest_rank.size());
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

Status Exchange::State::bring_results(const DispatchPlan& plan, int64_t round) {
  round_traffic(plan, round, &send_rows, &recv_rows);
  if (plan.num_rounds > 1) return fetch_round(*this, plan, round);
  return wait(FlagKind::kResults, round, send_rows, kWaitResults);
}

const std::byte* Exchange::State::address_of(const DispatchPlan& plan, size_t at) const {
  if (plan.dest_rank[at] < 0) return nullptr;
  if (plan.num_rounds > 1) return returned.data() + static_cast<int64_t>(at) * row_bytes;
  return group.endpoint().peer_ptr(plan.dest_rank[at], results, plan.dest_slot[at] * row_bytes);
}

float Exchange::State::number_of(const DispatchPlan& plan, size_t at) const {
  if (plan.dest_rank[at] < 0) return 0.0f;
  if (plan.num_rounds > 1) return returned_numbers[at];
  float number = 0.0f;
  std::memcpy(&number,
              group.endpoint().peer_ptr(plan.dest_rank[at], result_numbers,
                                        plan.dest_slot[at] * int64_t{sizeof(float)}),
              sizeof(float));
  return number;
}

Status Exchange::wait_combine(const DispatchPlan& plan, int64_t round, const CombineInput& input,
                              const TensorView& output) {
  State& state = *state_;
  ARGOSY_RETURN_IF_ERROR(state.check_call(plan, round, Step::kCombineIssued, "wait_combine"));
  ARGOSY_RETURN_IF_ERROR(check_combine(sum_shape(state, plan), input, output));
  ARGOSY_RETURN_IF_ERROR(state.bring_results(plan, round));
  if (round + 1 == plan.num_rounds) {
    weighted_sum(sum_shape(state, plan), &state.group.pool(), input, output, &state.sum_scratch,
                 [&](size_t at) { return state.address_of(plan, at); });
  }
  state.next_round = round + 1;
  state.step = round + 1 < plan.num_rounds ? Step::kCountsDone : Step::kIdle;
  return {};
}

Status Exchange::wait_returned(const DispatchPlan& plan, int64_t round, ReturnedRows* returned) {
  State& state = *state_;
  ARGOSY_RETURN_IF_ERROR(state.check_call(plan, round, Step::kCombineIssued, "wait_returned"));
  ARGOSY_RETURN_IF_ERROR(state.bring_results(plan, round));
  if (round + 1 == plan.num_rounds) {
    returned->rows.resize(plan.dest_rank.size());
    returned->numbers.assign(plan.dest_rank.size(), 0.0f);
    for (size_t at = 0; at < plan.dest_rank.size(); ++at) {
      returned->rows[at] = state.address_of(plan, at);
      if (state.options.training) returned->numbers[at] = state.number_of(plan, at);
    }
  }
  state.next_round = round + 1;
  state.step = round + 1 < plan.num_rounds ? Step::kCountsDone : Step::kIdle;
  return {};
}

}  // namespace argosy
