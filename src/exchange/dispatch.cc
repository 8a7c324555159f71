// Dispatch: every row is read once and written to all its places at each peer. Test:
// tests/exchange/exchange_test.cc.
#include <algorithm>
#include <array>
#include <numeric>

#include "base/error.h"
#include "exchange/state.h"
#include "quant/payload_encoder.h"

namespace argosy {
namespace {

using base::invalid;

constexpr int64_t kTokensPerTask = 16;
// From so many bytes for a rank on, rows are written past the caches. Measured: docs/perf/exchange.md.
constexpr int64_t kStreamBytes = int64_t{4} << 20;
constexpr size_t kMaxPlaces = 64;  // places of one row at one peer sent by one put

// Sends the copies of one token that lie in the round. Each peer is served when its first copy is
// met.
void push_token(Exchange::State& state, const DispatchPlan& plan, int64_t round, int64_t token,
                const std::byte* row, transport::Reuse reuse) {
  transport::Endpoint& endpoint = state.group.endpoint();
  const auto begin = static_cast<size_t>(token * plan.top_k);
  const size_t end = begin + static_cast<size_t>(plan.top_k);
  const int64_t first_slot = round * plan.round_rows;
  const int64_t row_bytes = state.payload.num_bytes;
  const auto in_round = [&](size_t at) {
    return plan.dest_rank[at] >= 0 && plan.dest_slot[at] >= first_slot &&
           plan.dest_slot[at] - first_slot < plan.round_rows;
  };
  for (size_t k = begin; k < end; ++k) {
    if (!in_round(k)) continue;
    const int peer = plan.dest_rank[k];
    bool served = false;
    for (size_t before = begin; before < k && !served; ++before) {
      served = plan.dest_rank[before] == peer && in_round(before);
    }
    if (served) continue;
    std::array<int64_t, kMaxPlaces> offsets;
    size_t places = 0;
    for (size_t other = k; other < end; ++other) {
      if (plan.dest_rank[other] != peer || !in_round(other)) continue;
      offsets[places++] = (plan.dest_slot[other] - first_slot) * state.payload_stride;
      if (places == kMaxPlaces) {
        endpoint.put_multi(peer, state.rows, {offsets.data(), places}, row, row_bytes, reuse);
        places = 0;
      }
    }
    if (places > 0) {
      endpoint.put_multi(peer, state.rows, {offsets.data(), places}, row, row_bytes, reuse);
    }
  }
}

void push_numbers(Exchange::State& state, const DispatchPlan& plan, int64_t round, int64_t token,
                  const float* numbers) {
  for (int64_t k = 0; k < plan.top_k; ++k) {
    const auto at = static_cast<size_t>(token * plan.top_k + k);
    if (plan.dest_rank[at] < 0 || plan.dest_slot[at] / plan.round_rows != round) continue;
    const int64_t slot = plan.dest_slot[at] - round * plan.round_rows;
    state.group.endpoint().put(plan.dest_rank[at], state.row_numbers,
                               slot * static_cast<int64_t>(sizeof(float)), &numbers[at],
                               sizeof(float));
  }
}

// Whether any copy of the token lies in the round: only then is it worth encoding, and its row read.
bool has_rows(const DispatchPlan& plan, int64_t round, int64_t token) {
  for (int64_t k = 0; k < plan.top_k; ++k) {
    const auto at = static_cast<size_t>(token * plan.top_k + k);
    if (plan.dest_rank[at] >= 0 && plan.dest_slot[at] / plan.round_rows == round) return true;
  }
  return false;
}

}  // namespace

Status Exchange::issue_dispatch(const DispatchPlan& plan, int64_t round,
                                const ConstTensorView& hidden, const float* numbers) {
  State& state = *state_;
  ARGOSY_RETURN_IF_ERROR(state.check_call(plan, round, Step::kCountsDone, "issue_dispatch"));
  if (hidden.dtype != state.options.dtype || hidden.num_dims != 2 ||
      hidden.dim(0) != plan.num_tokens || hidden.dim(1) != state.options.hidden ||
      (state.options.hidden > 1 && plan.num_tokens > 0 && hidden.stride(1) != 1)) {
    return invalid(
        "hidden is {}, the plan and exchange need {} [{}, {}] with unit stride in hidden",
        describe(hidden), name_of(state.options.dtype), plan.num_tokens, state.options.hidden);
  }
  if (numbers != nullptr && !state.options.has_numbers()) {
    return invalid("numbers beside the rows, but the exchange was made without them");
  }
  if (round > 0) {
    // The buffers I write now held the rows of the round before.
    round_traffic(plan, round, &state.send_rows, &state.recv_rows);
    ARGOSY_RETURN_IF_ERROR(state.wait(FlagKind::kConsumed, round - 1, state.send_rows,
                                      "receive buffer of the round before"));
  }
  round_traffic(plan, round, &state.send_rows, &state.recv_rows);
  const int64_t rows_to_come =
      std::accumulate(state.recv_rows.begin(), state.recv_rows.end(), int64_t{0});
  const transport::Reuse reuse = rows_to_come * state.payload_stride >= kStreamBytes
                                     ? transport::Reuse::kLater
                                     : transport::Reuse::kSoon;
  const int64_t num_tasks = (plan.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  state.group.pool().parallel_for(num_tasks, [&](int64_t task, int thread) {
    const quant::PayloadEncoder encoder(state.payload);
    std::byte* const encoded = state.encoded.data() + thread * state.payload_stride;
    const int64_t end = std::min(plan.num_tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      const std::byte* row = hidden.row(token);
      if (state.payload.is_quantised()) {
        if (!has_rows(plan, round, token)) continue;
        encoder.encode(row, encoded);
        row = encoded;
      }
      push_token(state, plan, round, token, row, reuse);
      if (numbers != nullptr) push_numbers(state, plan, round, token, numbers);
    }
  });
  state.raise(FlagKind::kRows, round, state.send_rows);
  state.step = Step::kDispatchIssued;
  return {};
}

Status Exchange::wait_dispatch(const DispatchPlan& plan, int64_t round, ReceivedRows* rows) {
  State& state = *state_;
  ARGOSY_RETURN_IF_ERROR(state.check_call(plan, round, Step::kDispatchIssued, "wait_dispatch"));
  if (round > 0) {
    // The results buffer is written next; its readers of the round before must be through.
    round_traffic(plan, round - 1, &state.send_rows, &state.recv_rows);
    ARGOSY_RETURN_IF_ERROR(state.wait(FlagKind::kPulled, round - 1, state.recv_rows,
                                      "results of the round before to be read"));
  }
  round_traffic(plan, round, &state.send_rows, &state.recv_rows);
  ARGOSY_RETURN_IF_ERROR(state.wait(FlagKind::kRows, round, state.recv_rows, "dispatched rows"));
  round_groups(plan, round, &rows->group_offsets, &rows->group_sizes);
  const std::byte* const first = state.group.endpoint().local_ptr(state.rows, 0);
  rows->rows =
      state.payload.is_quantised()
          ? ConstTensorView(first, DType::kU8, {state.size.round_rows, state.payload_stride})
          : ConstTensorView(first, state.options.dtype,
                            {state.size.round_rows, state.options.hidden});
  if (state.options.has_numbers()) {
    rows->numbers =
        reinterpret_cast<const float*>(state.group.endpoint().local_ptr(state.row_numbers, 0));
  }
  for (size_t group = 0; group < rows->group_sizes.size(); ++group) {
    state.stats.tokens_received[group] += rows->group_sizes[group];
  }
  state.step = Step::kDispatchDone;
  return {};
}

}  // namespace argosy
