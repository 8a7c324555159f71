// The MoE layer, forward, in latency mode: route -> rows into slots -> experts straight from the slots -> results to where
// the home rank sums them. Shared experts run while the rows are on their way. A rank with more than max_tokens tokens
// brings them in several calls, all ranks together, when the layer was made to. Test: tests/moe/latency_layer_test.cc.
#include <algorithm>

#include "moe/layer_state.h"

namespace argosy {

using State = MoeLayer::State;

// Tokens [first, first + count); the whole routing where that is all.
const Routing& State::routing_of_part(const Routing& whole, int64_t first, int64_t count) {
  if (first == 0 && count == whole.num_tokens) return whole;
  part.num_tokens = part.num_valid_tokens = count;
  part.num_experts = whole.num_experts;
  part.top_k = whole.top_k;
  const auto begin = whole.topk_idx.begin() + first * whole.top_k;
  part.topk_idx.assign(begin, begin + count * whole.top_k);
  return part;
}

// Received rows -> h -> results, wherever these belong.
Status State::run_slot_experts() {
  const auto num_rows = static_cast<int64_t>(latency_rows.rows.size());
  if (num_rows == 0) return {};
  ARGOSY_RETURN_IF_ERROR(inner.reserve(num_rows * shape.intermediate * size_of(dtype)));
  const TensorView inner_view(inner.data(), dtype, {num_rows, shape.intermediate});
  if (quantised.format != BlockFormat::kUnset) {
    const int64_t bytes = num_rows * shape.hidden * size_of(dtype);
    ARGOSY_RETURN_IF_ERROR(slot_rows.reserve(bytes));
    ARGOSY_RETURN_IF_ERROR(slot_results.reserve(bytes));
    const TensorView rows(slot_rows.data(), dtype, {num_rows, shape.hidden});
    const TensorView results(slot_results.data(), dtype, {num_rows, shape.hidden});
    return run_gathered(rows, {}, {}, inner_view, results);
  }
  const ScatteredRows rows{latency->payload(), latency_rows.rows, latency_rows.group_offsets,
                           latency_rows.group_sizes};
  ARGOSY_RETURN_IF_ERROR(grouped_gemm(gemm(), rows, weights.gate_up, inner_view));
  const RaggedRows h{inner_view, latency_rows.group_offsets, latency_rows.group_sizes};
  return grouped_gemm(gemm(), h, weights.down, latency_rows.results);
}

// One call: tokens [first, first + max_tokens). Shared experts of all tokens run during the first.
Status State::run_part(const Status& local, const ConstTensorView& hidden, int64_t first,
                       const uint8_t* mask, const TensorView& output, CombineInput* input,
                       bool* is_last, bool* declined) {
  const int64_t num_tokens = routing.num_tokens;
  const int64_t max_tokens = latency->options().max_tokens;
  const auto round = static_cast<int64_t>(traffic.size());
  const int64_t begin = std::min(first, num_tokens);
  const int64_t most = chunk ? max_tokens : num_tokens;  // what is too much, the exchange refuses
  const int64_t count = std::min(most, num_tokens - begin);
  DispatchNote note;
  note.more = begin + count < num_tokens;
  note.context = number;
  note.decline = mode == MoeMode::kAuto && local.ok() && num_tokens > latency_tokens;
  const bool is_sent = local.ok() && !note.decline;
  const ConstTensorView rows = is_sent ? hidden.rows(begin, count) : ConstTensorView();
  ARGOSY_ASSIGN_OR_RETURN(
      const uint64_t call,
      latency->issue_dispatch(local, is_sent ? routing_of_part(routing, begin, count) : routing,
                              rows, note));
  timeline.lap(MoeStage::kDispatch, round);
  Status shared;
  if (first == 0 && is_sent) {
    shared = run_shared(hidden, mask, input);
    timeline.lap(MoeStage::kShared);
  }
  ARGOSY_RETURN_IF_ERROR(latency->wait_dispatch(call, &latency_rows));
  timeline.lap(MoeStage::kDispatch, round);
  *declined = latency_rows.declined;
  *is_last = !latency_rows.more;
  if (*declined) return {};
  // From here on a failure is this rank's alone.
  const auto finish = [&]() -> Status {
    ARGOSY_RETURN_IF_ERROR(shared);
    ARGOSY_RETURN_IF_ERROR(tape != nullptr ? run_slot_experts_kept(first == 0)
                                           : run_slot_experts());
    timeline.lap(MoeStage::kExperts, round);
    ARGOSY_RETURN_IF_ERROR(latency->issue_combine(call));
    CombineInput sums = *input;
    sums.topk_weights = ConstTensorView(routing.topk_weights.values.data() + begin * routing.top_k,
                                        DType::kF32, {count, routing.top_k});
    if (sums.shared.dtype != DType::kUnset) sums.shared = sums.shared.rows(begin, count);
    if (sums.shared_scale != nullptr) sums.shared_scale += begin;
    if (mask != nullptr) sums.mask = mask + begin;
    ARGOSY_RETURN_IF_ERROR(latency->wait_combine(call, sums, output.rows(begin, count)));
    timeline.lap(MoeStage::kCombine, round);
    return {};
  };
  Status status = finish();
  if (!status.ok()) {
    group.abort(status);
    return status;
  }
  count_part(latency->placement(), routing_of_part(routing, begin, count),
             static_cast<int64_t>(latency_rows.rows.size()), &traffic.emplace_back());
  return {};
}

Status State::run_latency(const Status& local, const ConstTensorView& hidden, const uint8_t* mask,
                          const TensorView& output, MoeReport* report, bool* declined) {
  timeline.lap(MoeStage::kRoute);
  traffic.clear();
  received_before = latency->stats().tokens_received;
  CombineInput input;
  bool is_last = false;
  *declined = false;
  for (int64_t first = 0; !is_last && !*declined; first += latency->options().max_tokens) {
    ARGOSY_RETURN_IF_ERROR(
        run_part(local, hidden, first, mask, output, &input, &is_last, declined));
  }
  if (!*declined && tape != nullptr) {
    // How many rows come is known only when they are there, and so is whether every rank's tape can hold them.
    ARGOSY_RETURN_IF_ERROR(
        agree_in_latency_mode(fill_slot_tape(mask), "a tape with " + to_string(tape->policy)));
  }
  if (!*declined && report != nullptr) fill_latency_report(report);
  return {};
}

void State::fill_latency_report(MoeReport* report) const {
  const Placement& placement = latency->placement();
  report->mode = MoeMode::kLatency;
  report->rows_per_expert.assign(static_cast<size_t>(router.num_experts), 0);
  report->rows_per_rank.assign(static_cast<size_t>(group.num_ranks()), 0);
  report->num_rounds = static_cast<int64_t>(traffic.size());
  report->row_bytes = shape.hidden * size_of(dtype);
  report->dispatch_row_bytes = latency->payload().num_bytes;
  report->num_nonfinite_rows = routing.num_nonfinite_rows;
  timeline.write(report);
  count_part_traffic(traffic, routing.num_valid_tokens, group.rank(), report);
  int64_t& own_rows = report->rows_per_rank[static_cast<size_t>(group.rank())];
  for (const PartTraffic& one : traffic) own_rows += one.received;
  const std::vector<int64_t>& now = latency->stats().tokens_received;
  for (size_t expert = 0; expert < now.size(); ++expert) {
    const auto at = static_cast<size_t>(placement.begin(group.rank())) + expert;
    report->rows_per_expert[at] = now[expert] - received_before[expert];
  }
}

}  // namespace argosy
