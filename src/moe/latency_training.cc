// Training in latency mode. Forward: the calls' rows are collected as they come and brought into the order of one call,
// which is that of throughput mode; then the tape takes them. Backward: gradients of the output go into the fixed slots by
// the same routing, each with the weight of its expert beside it; gradients of rows and of weights come home. The first
// call says how every rank fares, so nothing is asked. Test: tests/moe/latency_backward_test.cc.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "moe/backward.h"
#include "moe/row_order.h"

namespace argosy {

using State = MoeLayer::State;

namespace {

// Rows wherever they lie to `to`, side by side; or the other way. `row_of(i)`: the address of the i-th.
template <typename RowOf>
void gather_rows(ThreadPool& pool, int64_t num_rows, int64_t row_bytes, const RowOf& row_of,
                 std::byte* to) {
  pool.parallel_for(num_rows, [&](int64_t row, int) {
    std::memcpy(to + row * row_bytes, row_of(row), static_cast<size_t>(row_bytes));
  });
}
void scatter_rows(ThreadPool& pool, const ConstTensorView& rows, int64_t row_bytes,
                  const std::vector<std::byte*>& to) {
  pool.parallel_for(static_cast<int64_t>(to.size()), [&](int64_t row, int) {
    std::memcpy(to[static_cast<size_t>(row)], rows.row(row), static_cast<size_t>(row_bytes));
  });
}

int64_t num_rows_of(const LatencyRows& slots) { return static_cast<int64_t>(slots.rows.size()); }

// The groups of a call, as a round's.
void take_groups(const LatencyRows& slots, ReceivedRows* received) {
  received->group_sizes = slots.group_sizes;
  received->group_offsets.assign(slots.group_offsets.begin(), slots.group_offsets.end() - 1);
}

// Appends how many rows came for each local expert from each rank, [L, R].
void count_rows(const LatencyRows& slots, int num_ranks, std::vector<int64_t>* counts) {
  const size_t first = counts->size();
  const auto ranks = static_cast<size_t>(num_ranks);
  counts->resize(first + slots.group_sizes.size() * ranks, 0);
  for (size_t expert = 0; expert < slots.group_sizes.size(); ++expert) {
    const auto begin = static_cast<size_t>(slots.group_offsets[expert]);
    const auto end = static_cast<size_t>(slots.group_offsets[expert + 1]);
    for (size_t row = begin; row < end; ++row) {
      ++(*counts)[first + expert * ranks + static_cast<size_t>(slots.source_rank[row])];
    }
  }
}

}  // namespace

// Received rows -> h -> results, as run_slot_experts; kept behind what the calls before brought.
Status State::run_slot_experts_kept(bool is_first) {
  MoeTape::State& t = *tape;
  if (is_first) {
    t.is_filled = false;
    t.shape = tape_shape();
    t.call_rows.clear();
  }
  const int64_t base = t.shape.num_slots, count = num_rows_of(latency_rows), end = base + count;
  const int64_t h = shape.hidden, f = shape.intermediate;
  count_rows(latency_rows, group.num_ranks(), &t.call_rows);
  ++t.shape.num_calls;
  t.shape.num_slots = end;
  t.shape.call_slots = std::max(t.shape.call_slots, count);
  if (count == 0) return {};
  Status grown;
  const auto room = [&](AlignedBuffer& buffer, DType type, int64_t cols) {
    const int64_t bytes = cols * size_of(type);
    if (grown.ok()) grown = grow(&buffer, base * bytes, end * bytes);
    return TensorView(buffer.data(), type, {end, cols}).rows(base, count);
  };
  const TensorView rows = room(slot_rows, dtype, h), results = room(slot_results, dtype, h);
  const TensorView inner_rows = room(slot_h, dtype, f);
  TensorView gates, ups;
  if (t.policy.preactivation != Keep::kRecompute) {
    gates = room(slot_gate, DType::kF32, f);
    ups = room(slot_up, DType::kF32, f);
  }
  ARGOSY_RETURN_IF_ERROR(grown);
  return run_gathered(rows, gates, ups, inner_rows, results);
}

Status State::run_gathered(const TensorView& rows, const TensorView& gates, const TensorView& ups,
                           const TensorView& h, const TensorView& results) {
  const int64_t row_bytes = shape.hidden * size_of(dtype);
  gather_rows(
      group.pool(), rows.dim(0), row_bytes,
      [&](int64_t row) { return latency_rows.rows[static_cast<size_t>(row)]; }, rows.data);
  take_groups(latency_rows, &received);
  const RaggedRows x{rows, received.group_offsets, received.group_sizes};
  ARGOSY_RETURN_IF_ERROR(gates.dtype == DType::kUnset
                             ? experts().gate_up(gemm(), x, h)
                             : experts().preactivation(gemm(), x, gates, ups, h));
  ARGOSY_RETURN_IF_ERROR(
      experts().down(gemm(), {h, received.group_offsets, received.group_sizes}, results));
  scatter_rows(group.pool(), results, row_bytes, latency_rows.results);
  return {};
}

namespace {

// What this rank knows of the plan. round_rows 0: no Exchange takes it.
void fill_plan(const Group& group, const Placement& placement, const MoeTape::State& t,
               DispatchPlan* plan) {
  const auto ranks = static_cast<size_t>(group.num_ranks());
  const auto num_local = static_cast<size_t>(placement.num_local(group.rank()));
  *plan = {};
  plan->version = DispatchPlan::kVersion;
  plan->group_id = group.id();
  plan->placement_epoch = placement.epoch;
  plan->num_ranks = group.num_ranks();
  plan->rank = group.rank();
  plan->num_tokens = t.routing.num_tokens;
  plan->num_experts = t.routing.num_experts;
  plan->top_k = t.routing.top_k;
  plan->topk_idx = t.routing.topk_idx;
  plan->source_rows.assign(num_local * ranks, 0);
  for (size_t at = 0; at < t.call_rows.size(); ++at) {
    plan->source_rows[at % plan->source_rows.size()] += t.call_rows[at];
  }
  plan->group_sizes.assign(num_local, 0);
  plan->group_offsets.assign(num_local + 1, 0);
  for (size_t expert = 0; expert < num_local; ++expert) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      plan->group_sizes[expert] += plan->source_rows[expert * ranks + rank];
    }
    plan->group_offsets[expert + 1] = plan->group_offsets[expert] + plan->group_sizes[expert];
  }
  plan->receive_rows.assign(ranks, 0);
  plan->receive_rows[static_cast<size_t>(group.rank())] = t.shape.num_slots;
  plan->receive_slots = plan->receive_rows;
  plan->num_rounds = 1;
}

}  // namespace

// Brings the rows of all calls into their order, and puts on the tape what it keeps.
Status State::fill_slot_tape(const uint8_t* mask) {
  MoeTape::State& t = *tape;
  ARGOSY_RETURN_IF_ERROR(start_tape(MoeMode::kLatency, TapeShape(t.shape), mask));
  const Placement& placement = latency->placement();
  fill_plan(group, placement, t, &t.plan);
  t.slot_of.clear();
  if (t.shape.num_calls > 1) {
    order_rows(t.call_rows, placement.num_local(group.rank()), group.num_ranks(), &t.slot_of);
  }
  received.group_sizes = t.plan.group_sizes;
  received.group_offsets.assign(t.plan.group_offsets.begin(), t.plan.group_offsets.end() - 1);
  const int64_t slots = t.shape.num_slots;
  for (const auto& [buffer, kept] :
       {std::pair{&slot_rows, &t.rows}, std::pair{&slot_gate, &t.gate}, std::pair{&slot_up, &t.up},
        std::pair{&slot_h, &t.h}, std::pair{&slot_results, &t.results}}) {
    if (kept->keep == Keep::kRecompute || slots == 0) continue;
    move_rows(t.slot_of, kept->cols * size_of(kept->dtype), buffer->data());
    const ConstTensorView rows(buffer->data(), kept->dtype, {slots, kept->cols});
    ARGOSY_RETURN_IF_ERROR(keep_groups(rows, received, 0, &group.pool(), kept));
  }
  return {};
}

Status State::agree_in_latency_mode(const Status& local, const std::string& same) {
  const ConstTensorView no_rows(static_cast<const std::byte*>(nullptr), dtype, {0, shape.hidden});
  DispatchNote note;
  note.decline = local.ok();  // so that the call is over at once
  note.same = same;
  note.context = number;
  ARGOSY_ASSIGN_OR_RETURN(const uint64_t call,
                          latency->issue_dispatch(local, routing, no_rows, note));
  return latency->wait_dispatch(call, &latency_rows);
}

Status Backward::run_latency(const Status& local, bool* declined) {
  Status status = local;
  if (status.ok() && tape_.mode == MoeMode::kLatency) {
    status = check_plan(tape_.plan, layer_.group.id(), layer_.group.rank(),
                        layer_.group.num_ranks(), layer_.latency->placement().epoch);
  }
  if (!status.ok() || tape_.mode != MoeMode::kLatency) {
    status = layer_.agree_in_latency_mode(status, asked_for());
    *declined = status.ok();
    return status;
  }
  status = run_latency_mode();
  // Nothing was sent yet: the others hear of it in the first call.
  if (!status.ok() && !calls_.is_sent) return layer_.agree_in_latency_mode(status, asked_for());
  // Past the agreement a failure is this rank's alone, but for what was agreed on again.
  if (!status.ok() && calls_.is_accepted && !is_agreed_) {
    layer_.group.abort(status);
  }
  return status;
}

Status Backward::run_latency_mode() {
  const bool is_split = tape_.shape.num_calls > 1;
  const int64_t h = layer_.shape.hidden, f = layer_.shape.intermediate;
  const int64_t element = size_of(layer_.dtype);
  if (is_split) {
    const int64_t ids = tape_.routing.num_tokens * layer_.router.top_k;
    b_.returned.rows.assign(static_cast<size_t>(ids), nullptr);
    b_.returned.numbers.assign(static_cast<size_t>(ids), 0.0f);
  }
  ARGOSY_RETURN_IF_ERROR(restore());
  ARGOSY_RETURN_IF_ERROR(restore_slot_results());
  ARGOSY_RETURN_IF_ERROR(for_each_call(
      d_output_, tape_.routing.topk_weights.values.data(),
      [&](uint64_t call, int64_t first, int64_t base) -> Status {
        ARGOSY_RETURN_IF_ERROR(run_slots(base));
        ARGOSY_RETURN_IF_ERROR(layer_.latency->issue_combine(call));
        if (!is_split) return layer_.latency->wait_returned(call, &b_.returned);
        ARGOSY_RETURN_IF_ERROR(layer_.latency->wait_returned(call, &b_.part_returned));
        keep_returned(first);
        return {};
      }));
  if (is_split) {
    move_rows(tape_.slot_of, h * element, b_.d_rows.data());
    move_rows(tape_.slot_of, f * element, b_.d_gate.data());
    move_rows(tape_.slot_of, f * element, b_.d_up.data());
  }
  return finish();
}

// The calls of forward again, with `rows` [T, H] and `numbers` [T, K] or null in place of the hidden states. body(call, first
// token, first of its rows) runs between wait_dispatch and the end of the call, and ends it.
template <typename Body>
Status Backward::for_each_call(const ConstTensorView& rows, const float* numbers,
                               const Body& body) {
  LatencyExchange& exchange = *layer_.latency;
  const LatencyRows& slots = layer_.latency_rows;
  const Routing& routing = tape_.routing;
  const auto stale = [&](const std::string& what) {
    return base::error(StatusCode::kStalePlan, "the tape is of another call: {}", what);
  };
  int64_t base = 0;
  bool more = true;
  for (int64_t index = 0; more; ++index) {
    const int64_t step = exchange.options().max_tokens;
    const int64_t first = std::min(index * step, routing.num_tokens);
    const int64_t count = std::min(step, routing.num_tokens - first);
    DispatchNote note;
    note.more = first + count < routing.num_tokens;
    if (numbers != nullptr) note.numbers = numbers + first * routing.top_k;
    const std::string words = calls_.is_sent ? std::string() : asked_for();
    note.same = words;
    note.context = layer_.number;
    calls_.is_sent = true;
    ARGOSY_ASSIGN_OR_RETURN(
        const uint64_t call,
        exchange.issue_dispatch({}, layer_.routing_of_part(routing, first, count),
                                rows.rows(first, count), note));
    ARGOSY_RETURN_IF_ERROR(exchange.wait_dispatch(call, &layer_.latency_rows));
    calls_.is_accepted = true;
    if (slots.declined) return stale("that of another rank took throughput mode");
    calls_.rows.clear();
    count_rows(slots, layer_.group.num_ranks(), &calls_.rows);
    if (index >= tape_.shape.num_calls ||
        !std::equal(calls_.rows.begin(), calls_.rows.end(),
                    tape_.call_rows.begin() + index * static_cast<int64_t>(calls_.rows.size()))) {
      return stale(fmt::format("other rows came in part {} of {}", index, tape_.shape.num_calls));
    }
    ARGOSY_RETURN_IF_ERROR(body(call, first, base));
    base += num_rows_of(slots);
    more = slots.more;
    if (!more && index + 1 < tape_.shape.num_calls) {
      return stale(fmt::format("{} parts came, forward had {}", index + 1, tape_.shape.num_calls));
    }
  }
  return {};
}

// The hidden states once more, for rows that the tape did not keep.
Status Backward::dispatch_slots_again() {
  const int64_t row_bytes = layer_.shape.hidden * size_of(layer_.dtype);
  return for_each_call(hidden_, nullptr, [&](uint64_t call, int64_t, int64_t base) -> Status {
    const LatencyRows& slots = layer_.latency_rows;
    layer_.group.pool().parallel_for(num_rows_of(slots), [&](int64_t row, int) {
      std::memcpy(b_.rows.data() + slot_of(base + row) * row_bytes,
                  slots.rows[static_cast<size_t>(row)], static_cast<size_t>(row_bytes));
    });
    ARGOSY_RETURN_IF_ERROR(layer_.latency->issue_combine(call));
    return layer_.latency->wait_returned(call, &b_.part_returned);
  });
}

// Of all slots: those of a call lie apart. What the tape does not have bit by bit is made at once.
Status Backward::restore_slot_results() {
  const KeptMatrix& kept = tape_.results;
  if (kept.is_plain()) {
    results_ = kept.plain();
    return {};
  }
  const TensorView room = matrix(b_.results, kept.dtype, kept.rows, kept.cols);
  results_ = room;
  if (kept.keep == Keep::kFp8) {
    return decode_groups(kept, 0, {tape_.plan.group_offsets, tape_.plan.group_sizes},
                         &layer_.group.pool(), room);
  }
  return experts().down(layer_.gemm(), of_slots(h_), room);
}

int64_t Backward::slot_of(int64_t row) const {
  return tape_.slot_of.empty() ? row : tape_.slot_of[static_cast<size_t>(row)];
}

// Gradients of the rows of one call, the `base`-th and those after it as they come.
Status Backward::run_slots(int64_t base) {
  const LatencyRows& slots = layer_.latency_rows;
  const int64_t count = num_rows_of(slots);
  if (count == 0) return {};
  const DType dtype = layer_.dtype;
  const int64_t h = layer_.shape.hidden, f = layer_.shape.intermediate;
  ThreadPool& pool = layer_.group.pool();
  const TensorView d_rows = matrix(b_.d_rows, dtype, num_slots(), h);
  pool.parallel_for(count, [&](int64_t i, int) {
    const auto row = static_cast<size_t>(i);
    *slots.result_numbers[row] = weigh_row(slots.rows[row], slots.numbers[row],
                                           results_.row(slot_of(base + i)), d_rows.row(base + i));
  });
  ConstTensorView gate = gate_, up = up_;
  if (!tape_.slot_of.empty()) {
    // Those of this call, side by side.
    const int64_t bytes = f * size_of(DType::kF32);
    const auto gate_row = [&](int64_t row) { return gate_.row(slot_of(base + row)); };
    const auto up_row = [&](int64_t row) { return up_.row(slot_of(base + row)); };
    gather_rows(pool, count, bytes, gate_row, b_.part_gate.data());
    gather_rows(pool, count, bytes, up_row, b_.part_up.data());
    gate = matrix(b_.part_gate, DType::kF32, count, f);
    up = matrix(b_.part_up, DType::kF32, count, f);
  }
  take_groups(slots, &b_.received);
  const TensorView results = matrix(b_.slot_results, dtype, count, h);
  ARGOSY_RETURN_IF_ERROR(run_experts(base, count, gate, up, results, {}));
  if (out_.nonfinite == NonFiniteGradients::kError) {
    for (int64_t row = 0; row < count; ++row) {
      if (is_finite(results.row(row), *slots.result_numbers[static_cast<size_t>(row)])) continue;
      const int64_t slot = slot_of(base + row);
      nonfinite_slot_ = nonfinite_slot_ < 0 ? slot : std::min(slot, nonfinite_slot_);
    }
  }
  scatter_rows(pool, results, h * size_of(dtype), slots.results);
  return {};
}

// The rows that came home for the tokens from `first` on: their places are used again by later calls.
void Backward::keep_returned(int64_t first) {
  const int64_t row_bytes = layer_.shape.hidden * size_of(layer_.dtype);
  const ReturnedRows& part = b_.part_returned;
  const int64_t begin = first * layer_.router.top_k;
  layer_.group.pool().parallel_for(static_cast<int64_t>(part.rows.size()), [&](int64_t i, int) {
    const auto from = static_cast<size_t>(i);
    if (part.rows[from] == nullptr) return;
    std::byte* const to = b_.home.data() + (begin + i) * row_bytes;
    std::memcpy(to, part.rows[from], static_cast<size_t>(row_bytes));
    b_.returned.rows[static_cast<size_t>(begin + i)] = to;
    b_.returned.numbers[static_cast<size_t>(begin + i)] = part.numbers[from];
  });
}

}  // namespace argosy
