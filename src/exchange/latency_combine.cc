// Combine in latency mode: the home rank sums its experts' rows in top-k order, from where the owners wrote them (pull) or
// from its own return slots (push). Floor: docs/perf/latency.md. Test: tests/exchange/latency_test.cc.
#include <cstring>

#include "exchange/latency_state.h"

namespace argosy {

using State = LatencyExchange::State;

Status State::issue_combine(uint64_t call_epoch) {
  ARGOSY_RETURN_IF_ERROR(check_call(call_epoch, Step::kDispatchDone, "issue_combine"));
  Call& call = call_of(call_epoch);
  for (const Parcel& parcel : call.parcels) {
    endpoint.put(parcel.home, results, parcel.to, outbox.data() + parcel.from, layout.result_bytes);
  }
  raise(LatencyLayout::kDone, call, 0, false);
  call.step = Step::kCombineIssued;
  return {};
}

Status State::wait_combine(uint64_t call_epoch, const CombineInput& input,
                           const TensorView& output) {
  ARGOSY_RETURN_IF_ERROR(check_call(call_epoch, Step::kCombineIssued, "wait_combine"));
  Call& call = call_of(call_epoch);
  const SumShape shape{options.dtype, options.hidden, call.num_tokens, options.top_k};
  ARGOSY_RETURN_IF_ERROR(check_combine(shape, input, output));
  ARGOSY_RETURN_IF_ERROR(wait(LatencyLayout::kDone, call, false, "results of the experts"));
  weighted_sum(shape, &pool, input, output, &sum_scratch,
               [&](size_t at) { return returned_row(call, at); });
  call.step = Step::kFree;
  return {};
}

const std::byte* State::returned_row(const Call& call, size_t at) const {
  const int32_t dest = call.dest_rank[at];
  if (dest < 0) return nullptr;
  const std::byte* const from = layout.push ? own_results : peer_results[static_cast<size_t>(dest)];
  return from + call.result_at[at];
}

Status State::wait_returned(uint64_t call_epoch, ReturnedRows* returned) {
  ARGOSY_RETURN_IF_ERROR(check_call(call_epoch, Step::kCombineIssued, "wait_returned"));
  Call& call = call_of(call_epoch);
  ARGOSY_RETURN_IF_ERROR(wait(LatencyLayout::kDone, call, false, "results of the experts"));
  const auto ids = static_cast<size_t>(call.num_tokens * options.top_k);
  returned->rows.resize(ids);
  returned->numbers.assign(ids, 0.0f);
  for (size_t at = 0; at < ids; ++at) {
    const std::byte* const row = returned_row(call, at);
    returned->rows[at] = row;
    if (row == nullptr || !options.training) continue;
    std::memcpy(&returned->numbers[at], row + layout.result_number_at, sizeof(float));
  }
  call.step = Step::kFree;
  return {};
}

}  // namespace argosy
