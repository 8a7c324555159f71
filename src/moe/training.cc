// Both ends of a training step: the forward that fills a tape, and the entry of backward. Test: tests/moe/backward_test.cc.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/error.h"
#include "moe/backward.h"
#include "moe/tape_size.h"
#include "platform/clock.h"

namespace argosy {

using State = MoeLayer::State;

int64_t end_of_groups(ReceivedRows* received) {
  int64_t end = 0;
  for (size_t group = 0; group < received->group_sizes.size(); ++group) {
    if (received->group_sizes[group] > 0) {
      end = std::max(end, received->group_offsets[group] + received->group_sizes[group]);
    }
  }
  // Groups that are empty in this round may start past `end`.
  for (int64_t& offset : received->group_offsets) offset = std::min(offset, end);
  return end;
}

void copy_groups(const ConstTensorView& rows, const ReceivedRows& received, int64_t row_bytes,
                 std::byte* to) {
  for (size_t group = 0; group < received.group_sizes.size(); ++group) {
    if (received.group_sizes[group] == 0) continue;
    const int64_t first = received.group_offsets[group];
    std::memcpy(to + first * row_bytes, rows.row(first),
                static_cast<size_t>(received.group_sizes[group] * row_bytes));
  }
}

// All of it but the rows, and the room for these.
Status State::start_tape(MoeMode taken, const TapeShape& of_call, const uint8_t* mask) {
  MoeTape::State& t = *tape;
  t.is_filled = false;
  t.layer = id;
  // Of the exchanges' calls, which every rank counts alike, also after one that ranks made for different ends.
  t.call = 0;
  if (exchange != nullptr) t.call += static_cast<uint64_t>(exchange->stats().num_calls);
  if (latency != nullptr) t.call += static_cast<uint64_t>(latency->stats().num_calls);
  t.mode = taken;
  t.shape = of_call;
  t.shape.num_tokens = routing.num_tokens;
  t.routing = routing;
  t.weights_version = weights_version;
  t.is_dropped = is_dropped;
  if (is_dropped) t.assigned = assigned;
  t.mask.assign(mask, mask == nullptr ? mask : mask + routing.num_tokens);
  ARGOSY_RETURN_IF_ERROR(t.reserve());
  ARGOSY_RETURN_IF_ERROR(reserve_all(forward_needs(*this, t.policy, t.shape)));
  const int64_t bytes = routing.num_tokens * router.num_experts * size_of(DType::kF32);
  if (t.has_gate && bytes > 0) {
    std::memcpy(t.logits.data(), logits.data(), static_cast<size_t>(bytes));
  }
  return {};
}

Status State::prepare_tape(const uint8_t* mask) {
  TapeShape of_call = tape_shape();
  of_call.global_tokens =
      std::accumulate(counts.num_tokens.begin(), counts.num_tokens.end(), int64_t{0});
  of_call.num_slots = dispatch_plan.receive_slots[static_cast<size_t>(group.rank())];
  of_call.num_rounds = dispatch_plan.num_rounds;
  tape->plan = dispatch_plan;
  tape->slot_of.clear();
  return start_tape(MoeMode::kThroughput, of_call, mask);
}

// How many rows come is known only after the counts, and so is whether a tape can hold them: all ranks hear of it before a
// row moves.
Status State::agree_on_tape(const uint8_t* mask) {
  const Status prepared = prepare_tape(mask);
  ARGOSY_RETURN_IF_ERROR(
      exchange->issue_reuse(prepared, dispatch_plan, "a tape with " + to_string(tape->policy)));
  return exchange->wait_reuse();
}

// rows -> gate, up, h -> results of one round, each kept as the tape's policy says; the bits of run_experts.
Status State::run_experts_kept(const ConstTensorView& rows, int64_t round) {
  MoeTape::State& t = *tape;
  const int64_t end = end_of_groups(&received);
  if (end == 0) return {};
  const int64_t base = round * dispatch_plan.round_rows;
  ThreadPool* const pool = &group.pool();
  ARGOSY_RETURN_IF_ERROR(keep_groups(rows.rows(0, end), received, base, pool, &t.rows));
  if (weights_inside) {
    const ConstTensorView row_weights(received.numbers, DType::kF32, {end, 1});
    copy_groups(row_weights, received, sizeof(float),
                t.weights.data() + base * size_of(DType::kF32));
  }
  // Straight to its place where it is kept as it is.
  const auto room = [&](const KeptMatrix& kept, AlignedBuffer& passing) {
    return kept.is_plain() ? kept.plain().rows(base, end)
                           : TensorView(passing.data(), kept.dtype, {end, kept.cols});
  };
  const TensorView h = room(t.h, inner);
  const RaggedRows x{rows.rows(0, end), received.group_offsets, received.group_sizes};
  if (t.policy.preactivation == Keep::kRecompute && !weights_inside) {
    ARGOSY_RETURN_IF_ERROR(experts().gate_up(gemm(), x, h));
  } else {
    const TensorView gates = room(t.gate, pre_gate), ups = room(t.up, pre_up);
    ARGOSY_RETURN_IF_ERROR(weights_inside ? run_inside(x, gates, ups, h)
                                          : experts().preactivation(gemm(), x, gates, ups, h));
    if (t.policy.preactivation == Keep::kFp8) {
      ARGOSY_RETURN_IF_ERROR(keep_groups(gates, received, base, pool, &t.gate));
      ARGOSY_RETURN_IF_ERROR(keep_groups(ups, received, base, pool, &t.up));
    }
  }
  if (t.policy.h == Keep::kFp8) {
    ARGOSY_RETURN_IF_ERROR(keep_groups(h, received, base, pool, &t.h));
  }
  const TensorView results = exchange->results().rows(0, end);
  ARGOSY_RETURN_IF_ERROR(
      experts().down(gemm(), {h, received.group_offsets, received.group_sizes}, results));
  return keep_groups(results, received, base, pool, &t.results);
}

Status MoeLayer::forward_train(const ConstTensorView& hidden, const uint8_t* mask,
                               const TensorView& output, MoeTape* tape, MoeReport* report) {
  State& state = *state_;
  state.timeline.start();
  Status local = state.check_call(hidden, output);
  if (local.ok() && tape == nullptr) local = base::invalid("forward_train without a tape");
  if (local.ok() && state.backward == nullptr) {
    local = base::error(StatusCode::kUnsupported,
                        "forward_train, but the layer was not made with training");
  }
  if (local.ok()) local = state.run_router(hidden, mask);
  if (state.capacity != nullptr) ARGOSY_RETURN_IF_ERROR(state.drop_choices(local));
  if (local.ok()) {
    state.tape = &tape->state();
    state.tape->has_gate = true;
  }
  Status status = state.run(local, hidden, mask, output, report);
  if (status.ok() && state.tape != nullptr) state.tape->is_filled = true;
  state.tape = nullptr;
  return status;
}

Status MoeLayer::backward(const MoeTape& tape, const ConstTensorView& hidden,
                          const ConstTensorView& d_output, const ConstTensorView& d_logits,
                          const MoeGradients& gradients) {
  State& state = *state_;
  if (state.backward == nullptr) {
    return base::error(StatusCode::kUnsupported,
                       "backward, but the layer was not made with training");
  }
  Backward call(state, tape.state(), hidden, d_output, d_logits, gradients);
  Status local = call.check();
  if (local.ok()) local = call.reserve();
  if (state.latency != nullptr) {
    bool declined = false;
    local = call.run_latency(local, &declined);
    if (!declined) return local;
  }
  ARGOSY_RETURN_IF_ERROR(state.exchange->issue_reuse(local, tape.state().plan, call.asked_for()));
  ARGOSY_RETURN_IF_ERROR(state.exchange->wait_reuse());
  Status status = call.run();
  // Past the agreement a failure is this rank's alone, but for what was agreed on again.
  if (!status.ok() && !call.is_agreed()) state.group.abort(status);
  return status;
}

}  // namespace argosy
