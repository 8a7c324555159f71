// See tape_size.h and argosy/moe_backward.h.
#include "moe/tape_size.h"

#include <algorithm>

#include "moe/backward.h"

namespace argosy {
namespace {

constexpr auto kF32 = static_cast<int64_t>(sizeof(float));

// 1 for what is not kept bit by bit: it needs room of the layer's, in forward for a round.
int64_t again(Keep keep) { return keep == Keep::kRecompute || keep == Keep::kFp8 ? 1 : 0; }

// Codes and scales of [rows, cols], MXFP8; 0 where the layer does not quantise.
int64_t code_bytes(const TapeShape& shape, int64_t rows, int64_t cols) {
  if (shape.training_format == BlockFormat::kUnset) return 0;
  return rows * (cols + (cols + 31) / 32);
}

// The most rows of one product of forward: of a round, in latency mode of a call.
int64_t most_rows(const TapeShape& shape) {
  return shape.num_calls > 0 ? shape.call_slots : std::min(shape.num_slots, shape.round_rows);
}

int64_t forward_code_bytes(const TapeShape& shape) {
  return code_bytes(shape, most_rows(shape), std::max(shape.hidden, shape.intermediate));
}

// Of all slots the other way, whatever the groups' sizes.
int64_t transposed_code_bytes(const TapeShape& shape) {
  if (shape.training_format == BlockFormat::kUnset) return 0;
  const int64_t num_local = (shape.num_experts + shape.num_ranks - 1) / shape.num_ranks;
  return std::max(shape.hidden, shape.intermediate) *
         (shape.num_slots + max_group_blocks(shape.num_slots, num_local, 32));
}

int64_t backward_code_bytes(const TapePolicy& policy, const TapeShape& shape) {
  const int64_t joined = gradient_columns(PackedWeights::Kind::kGateUp, shape.intermediate).total;
  const int64_t again = policy.preactivation == Keep::kRecompute
                            ? code_bytes(shape, shape.num_slots, shape.hidden)
                            : 0;
  return std::max({code_bytes(shape, most_rows(shape), std::max(shape.hidden, joined)), again,
                   transposed_code_bytes(shape)});
}

template <size_t kCount>
int64_t needed_bytes(const std::array<BufferNeed, kCount>& needs) {
  int64_t sum = 0;
  for (const BufferNeed& need : needs) sum += whole_lines(need.bytes);
  return sum;
}

}  // namespace

std::array<BufferNeed, 13> forward_needs(ForwardBuffers& b, const TapePolicy& policy,
                                         const TapeShape& shape) {
  const int64_t t = shape.num_tokens, f = shape.intermediate, fs = shape.shared_intermediate;
  const int64_t element = size_of(shape.dtype);
  // In latency mode all rows pass through `slots`, also those of the calls before.
  const bool latency = shape.num_calls > 0;
  const int64_t rows = latency ? 0 : most_rows(shape);
  const int64_t slots = latency ? shape.num_slots : 0;
  const int64_t slot_pre = policy.preactivation == Keep::kRecompute ? 0 : slots * f * kF32;
  // Gate and up are rounded to FP8 after a round; made again, they stay inside the product, unless the weights come between.
  const bool pass = policy.preactivation == Keep::kFp8 ||
                    (policy.preactivation == Keep::kRecompute && shape.weights_inside);
  const int64_t pre = pass ? rows * f * kF32 : 0;
  return {{{&b.logits, t * shape.num_experts * kF32},
           {&b.inner, again(policy.h) * rows * f * element},
           {&b.pre_gate, pre},
           {&b.pre_up, pre},
           {&b.codes, forward_code_bytes(shape)},
           {&b.shared_inner, t * fs * element},
           {&b.shared_rows, fs > 0 ? t * shape.hidden * element : 0},
           {&b.shared_scale, fs > 0 ? t * kF32 : 0},
           {&b.slot_rows, slots * shape.hidden * element},
           {&b.slot_gate, slot_pre},
           {&b.slot_up, slot_pre},
           {&b.slot_h, slots * f * element},
           {&b.slot_results, slots * shape.hidden * element}}};
}

std::array<BufferNeed, 34> backward_needs(BackwardBuffers& b, const TapePolicy& policy,
                                          const TapeShape& shape) {
  const int64_t t = shape.num_tokens, s = shape.num_slots, h = shape.hidden;
  const int64_t f = shape.intermediate, fs = shape.shared_intermediate, e = shape.num_experts;
  const int64_t element = size_of(shape.dtype), ranks = shape.num_ranks;
  const int64_t pre = again(policy.preactivation) * s * f * kF32;
  const int64_t shared = fs > 0 ? 1 : 0;
  const int64_t latency = shape.num_calls > 0 ? 1 : 0, several = shape.num_calls > 1 ? 1 : 0;
  const int64_t part = several * shape.call_slots * f * kF32;
  SharedBackward& sh = b.shared;
  // Of all ranks' rows: exact. Of all ranks' sums: reduced.
  int64_t all_x = 0, all_y = 0;
  int64_t partial = ranks > 1 ? ranks * static_cast<int64_t>(sizeof(int64_t)) : 0;
  if (shape.replicated == ReplicatedGradients::kReduced) {
    const int64_t sum_bytes = std::max(e, fs) * h * kF32;
    partial = std::max(partial, sum_bytes);
    all_x = ranks > 1 ? ranks * sum_bytes : 0;
  } else if (ranks > 1) {
    all_x = shape.global_tokens * std::max(h, fs) * element;
    all_y = shape.global_tokens * std::max({e * kF32, shared * h * element, fs * element});
  }
  return {{{&b.rows, again(policy.rows) * s * h * element},
           {&b.gate, pre},
           {&b.up, pre},
           {&b.h, again(policy.h) * s * f * element},
           {&b.d_rows, s * h * element},
           {&b.d_h, s * f * kF32},
           {&b.d_gate, s * f * element},
           {&b.d_up, s * f * element},
           {&b.d_logits, t * e * kF32},
           {&b.d_hidden_gate, t * h * kF32},
           {&b.gathered_x, all_x},
           {&b.gathered_y, all_y},
           {&b.partial, partial},
           {&b.codes, backward_code_bytes(policy, shape)},
           {&b.more_codes, transposed_code_bytes(shape)},
           {&sh.hidden, t * h * element},
           {&sh.d_output, t * h * element},
           {&sh.d_logits, t * e * kF32},
           {&sh.gate, t * fs * kF32},
           {&sh.up, t * fs * kF32},
           {&sh.d_h, t * fs * kF32},
           {&sh.h, t * fs * element},
           {&sh.d_gate, t * fs * element},
           {&sh.d_up, t * fs * element},
           {&sh.rows, shared * t * h * element},
           {&sh.d_rows, shared * t * h * element},
           {&sh.d_hidden, shared * t * h * kF32},
           {&sh.scale, shared * t * kF32},
           {&sh.d_scale, shared * t * kF32},
           {&b.results, latency * again(policy.results) * s * h * element},
           {&b.slot_results, latency * shape.call_slots * h * element},
           {&b.part_gate, part},
           {&b.part_up, part},
           {&b.home, several * t * shape.top_k * h * element}}};
}

TapeSize size_tape(const TapePolicy& policy, const TapeShape& shape) {
  TapeSize size;
  const auto add = [&](Keep keep, DType dtype, int64_t cols) {
    const int64_t bytes = whole_lines(kept_bytes(keep, dtype, shape.num_slots, cols));
    (keep == Keep::kOffload ? size.offload_bytes : size.tape_bytes) += bytes;
  };
  size.tape_bytes = whole_lines(shape.num_tokens * shape.num_experts * kF32);
  add(policy.rows, shape.dtype, shape.hidden);
  add(policy.preactivation, DType::kF32, shape.intermediate);
  add(policy.preactivation, DType::kF32, shape.intermediate);
  add(policy.h, shape.dtype, shape.intermediate);
  if (shape.weights_inside) {
    size.tape_bytes += whole_lines(shape.num_slots * kF32);
  } else {
    add(policy.results, shape.dtype, shape.hidden);
  }
  ForwardBuffers forward;
  BackwardBuffers backward;
  size.forward_bytes = needed_bytes(forward_needs(forward, policy, shape));
  size.backward_bytes = needed_bytes(backward_needs(backward, policy, shape));
  if (shape.num_rounds > 1) {
    size.exchange_bytes =
        whole_lines(shape.num_tokens * shape.top_k * shape.hidden * size_of(shape.dtype));
  }
  return size;
}

TapeShape MoeLayer::State::tape_shape() const {
  TapeShape made;
  made.dtype = dtype;
  made.hidden = shape.hidden;
  made.intermediate = shape.intermediate;
  made.num_experts = router.num_experts;
  made.top_k = router.top_k;
  made.shared_intermediate = shape.shared_intermediate;
  made.num_ranks = group.num_ranks();
  made.weights_inside = weights_inside;
  made.training_format = quantised.format;
  if (exchange != nullptr) made.round_rows = exchange->size().round_rows;
  return made;
}

TapeShape MoeLayer::tape_shape() const { return state_->tape_shape(); }

MoeMemory MoeLayer::memory() const {
  State& state = *state_;
  MoeMemory held;
  held.forward_bytes = held_bytes(forward_needs(state, {}, {}));
  if (state.backward != nullptr) {
    held.backward_bytes = held_bytes(backward_needs(*state.backward, {}, {}));
  }
  if (state.exchange != nullptr) held.exchange_bytes = state.exchange->scratch_bytes();
  return held;
}

}  // namespace argosy
