// The layer backward, routed experts: gradients of the output go where the tokens went, by the same plan and with the weights
// beside them; gradients of rows and weights come home. Contract 3.5. Test: tests/moe/backward_test.cc.
#include "moe/backward.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "argosy/bfloat16.h"
#include "argosy/router_backward.h"
#include "base/error.h"
#include "moe/tape_size.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

using base::invalid;

float value_at(DType dtype, const std::byte* row, int64_t i) {
  if (dtype == DType::kBF16) return reinterpret_cast<const BFloat16*>(row)[i].to_float();
  return reinterpret_cast<const float*>(row)[i];
}

Status check_output(const char* name, const TensorView& view, DType dtype,
                    std::initializer_list<int64_t> dims) {
  if (view.dtype == DType::kUnset) return {};
  const TensorView wanted(nullptr, dtype, dims);
  bool right = view.dtype == dtype && view.num_dims == wanted.num_dims;
  for (int d = 0; right && d < wanted.num_dims; ++d) right = view.dim(d) == wanted.dim(d);
  right = right && (view.num_elements() == 0 || view.is_dense());
  if (right && (view.data != nullptr || view.num_elements() == 0)) return {};
  return invalid("{} is {}{}, its gradient is {}, dense", name, describe(view),
                 right ? " without data" : "", describe(wanted));
}

}  // namespace

RaggedRows Backward::of_slots(const ConstTensorView& rows) const {
  return {rows, tape_.plan.group_offsets, tape_.plan.group_sizes};
}

Status Backward::check() const {
  const LayerShape& shape = layer_.shape;
  if (!tape_.is_filled || tape_.layer != layer_.id) {
    return base::error(StatusCode::kStalePlan, "the tape {}",
                       tape_.is_filled ? "was filled by another layer" : "is empty");
  }
  ARGOSY_RETURN_IF_ERROR(layer_.weights_status);
  if (tape_.weights_version != layer_.weights_version) {
    return base::error(StatusCode::kStalePlan,
                       "the weights were updated {} times since the tape was filled",
                       layer_.weights_version - tape_.weights_version);
  }
  const int64_t num_tokens = tape_.routing.num_tokens;
  const int64_t num_local =
      Placement{layer_.router.num_experts, layer_.group.num_ranks(), 0}.num_local(
          layer_.group.rank());
  const int64_t h = shape.hidden, f = shape.intermediate, fs = shape.shared_intermediate;
  const int64_t num_experts = layer_.router.num_experts;
  ARGOSY_RETURN_IF_ERROR(check_rows("hidden", hidden_, layer_.dtype, num_tokens, h, false));
  ARGOSY_RETURN_IF_ERROR(check_rows("d_output", d_output_, layer_.dtype, num_tokens, h, false));
  if (out_.d_hidden.dtype != DType::kUnset) {
    ARGOSY_RETURN_IF_ERROR(
        check_rows("d_hidden", out_.d_hidden, layer_.dtype, num_tokens, h, true));
  }
  if (d_logits_.dtype != DType::kUnset &&
      (d_logits_.dtype != DType::kF32 || d_logits_.num_dims != 2 ||
       d_logits_.dim(0) != num_tokens || d_logits_.dim(1) != num_experts ||
       !d_logits_.is_dense())) {
    return invalid("d_logits is {}, the layer takes dense F32 [{}, {}]", describe(d_logits_),
                   num_tokens, num_experts);
  }
  const struct {
    const char* name;
    const TensorView& view;
    std::initializer_list<int64_t> dims;
  } outputs[] = {{"d_gate", out_.d_gate, {num_experts, h}},
                 {"d_gate_bias", out_.d_gate_bias, {num_experts}},
                 {"d_expert_gate", out_.d_expert_gate, {num_local, f, h}},
                 {"d_expert_up", out_.d_expert_up, {num_local, f, h}},
                 {"d_expert_down", out_.d_expert_down, {num_local, h, f}},
                 {"d_expert_gate_bias", out_.d_expert_gate_bias, {num_local, f}},
                 {"d_expert_up_bias", out_.d_expert_up_bias, {num_local, f}},
                 {"d_expert_down_bias", out_.d_expert_down_bias, {num_local, h}},
                 {"d_shared_gate", out_.d_shared_gate, {fs, h}},
                 {"d_shared_up", out_.d_shared_up, {fs, h}},
                 {"d_shared_down", out_.d_shared_down, {h, fs}},
                 {"d_shared_scale", out_.d_shared_scale, {1, h}},
                 {"d_topk_weights", out_.d_topk_weights, {num_tokens, layer_.router.top_k}}};
  for (const auto& output : outputs) {
    ARGOSY_RETURN_IF_ERROR(check_output(output.name, output.view, DType::kF32, output.dims));
  }
  return {};
}

// One more dispatch of the hidden states, for rows that the tape did not keep.
Status Backward::dispatch_rows_again() {
  if (tape_.mode == MoeMode::kLatency) return dispatch_slots_again();
  const DispatchPlan& plan = tape_.plan;
  const int64_t row_bytes = layer_.shape.hidden * size_of(layer_.dtype);
  for (int64_t round = 0; round < plan.num_rounds; ++round) {
    ARGOSY_RETURN_IF_ERROR(layer_.exchange->issue_dispatch(plan, round, hidden_));
    ARGOSY_RETURN_IF_ERROR(layer_.exchange->wait_dispatch(plan, round, &b_.received));
    copy_groups(b_.received.rows, b_.received, row_bytes,
                b_.rows.data() + round * plan.round_rows * row_bytes);
    ARGOSY_RETURN_IF_ERROR(layer_.exchange->issue_combine(plan, round));
    ARGOSY_RETURN_IF_ERROR(layer_.exchange->wait_returned(plan, round, &b_.returned));
  }
  ARGOSY_RETURN_IF_ERROR(layer_.exchange->issue_reuse({}, plan));
  return layer_.exchange->wait_reuse();
}

Status Backward::reserve() {
  TapeShape shape = tape_.shape;
  shape.replicated = out_.replicated;
  return reserve_all(backward_needs(b_, tape_.policy, shape));
}

// Views of what forward had: as it is, decoded, or made again.
Status Backward::restore() {
  const TapePolicy& policy = tape_.policy;
  const GemmOptions gemm = layer_.gemm();
  const RowGroups groups{tape_.plan.group_offsets, tape_.plan.group_sizes};
  // Where the tensor will be; decoded there at once.
  Status decoded;
  const auto place = [&](const KeptMatrix& kept, AlignedBuffer& room) {
    if (kept.is_plain()) return kept.plain();
    const TensorView view = matrix(room, kept.dtype, kept.rows, kept.cols);
    if (kept.keep == Keep::kFp8 && decoded.ok()) {
      decoded = decode_groups(kept, 0, groups, &layer_.group.pool(), view);
    }
    return view;
  };
  const TensorView rows = place(tape_.rows, b_.rows), h = place(tape_.h, b_.h);
  const TensorView gate = place(tape_.gate, b_.gate), up = place(tape_.up, b_.up);
  ARGOSY_RETURN_IF_ERROR(decoded);
  rows_ = rows;
  gate_ = gate;
  up_ = up;
  h_ = h;
  if (policy.rows == Keep::kRecompute) ARGOSY_RETURN_IF_ERROR(dispatch_rows_again());
  bool needs_h = policy.h == Keep::kRecompute;
  if (policy.preactivation == Keep::kRecompute) {
    // With the weights inside, h comes after them.
    const bool in_one = needs_h && !layer_.weights_inside;
    ARGOSY_RETURN_IF_ERROR(
        experts().preactivation(gemm, of_slots(rows_), gate, up, in_one ? h : TensorView()));
    needs_h = needs_h && !in_one;
  }
  if (!needs_h) return {};
  return activation_forward(
      gemm, {gate_, up_, groups.offsets, groups.sizes, tape_.weights_from(0, num_slots())}, h);
}

// Results of a round's slots. Those that the tape does not have bit by bit come to where the gradients of the rows go next.
Status Backward::restore_results(int64_t base, int64_t end) {
  const KeptMatrix& kept = tape_.results;
  if (kept.is_plain()) {
    results_ = kept.plain().rows(base, end);
    return {};
  }
  const TensorView room = layer_.exchange->results().rows(0, end);
  results_ = room;
  const ReceivedRows& groups = b_.received;
  if (kept.keep == Keep::kFp8) {
    return decode_groups(kept, base, {groups.group_offsets, groups.group_sizes},
                         &layer_.group.pool(), room);
  }
  return experts().down(layer_.gemm(),
                        {h_.rows(base, end), groups.group_offsets, groups.group_sizes}, room);
}

// d_row = weight * gradient, and the gradient of the weight = gradient . result.
float Backward::weigh_row(const std::byte* d_out, float weight, const std::byte* result,
                          std::byte* d_row) const {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const int64_t h = layer_.shape.hidden;
  scale_row(layer_.dtype, d_out, weight, h, d_row);
  return static_cast<float>(dot_rows(layer_.dtype, d_out, result, h));
}

// The same for a round. Weights inside the activation: d_rows = gradient.
Status Backward::weigh_rows(int64_t base, int64_t end) {
  const ReceivedRows& received = b_.received;
  const DType dtype = layer_.dtype;
  const int64_t h = layer_.shape.hidden;
  const TensorView d_rows = matrix(b_.d_rows, dtype, num_slots(), h);
  if (layer_.weights_inside) {
    copy_groups(received.rows, received, h * size_of(dtype), d_rows.row(base));
    return {};
  }
  ARGOSY_RETURN_IF_ERROR(restore_results(base, end));
  float* const d_weights = layer_.exchange->result_numbers();
  for (size_t group = 0; group < received.group_sizes.size(); ++group) {
    const int64_t first = received.group_offsets[group];
    layer_.group.pool().parallel_for(received.group_sizes[group], [&](int64_t i, int) {
      const int64_t row = first + i;
      d_weights[row] = weigh_row(received.rows.row(row), received.numbers[row], results_.row(row),
                                 d_rows.row(base + row));
    });
  }
  return {};
}

// d_rows -> d_h -> d_gate, d_up -> gradients of the rows, for `count` slots from `base` on: the groups of b_.received, which
// `gate`, `up` and `results` begin with. d_weights: of weights inside the activation.
Status Backward::run_experts(int64_t base, int64_t count, const ConstTensorView& gate,
                             const ConstTensorView& up, const TensorView& results,
                             std::span<float> d_weights) {
  const ReceivedRows& received = b_.received;
  const DType dtype = layer_.dtype;
  const int64_t h = layer_.shape.hidden, f = layer_.shape.intermediate;
  const auto rows_of = [&](AlignedBuffer& buffer, DType type, int64_t cols) {
    return matrix(buffer, type, num_slots(), cols).rows(base, count);
  };
  const auto groups = [&](const ConstTensorView& rows) {
    return RaggedRows{rows, received.group_offsets, received.group_sizes};
  };
  const TensorView d_h = rows_of(b_.d_h, DType::kF32, f);
  const TensorView d_gate = rows_of(b_.d_gate, dtype, f);
  const TensorView d_up = rows_of(b_.d_up, dtype, f);
  ARGOSY_RETURN_IF_ERROR(
      experts().down_gradient(layer_.gemm(), groups(rows_of(b_.d_rows, dtype, h)), d_h));
  const ActivationRows act{gate.rows(0, count), up.rows(0, count), received.group_offsets,
                           received.group_sizes, tape_.weights_from(base, count)};
  ARGOSY_RETURN_IF_ERROR(
      activation_backward(layer_.gemm(), act, d_h, {d_gate, d_up, {}, d_weights}));
  return experts().gate_up_gradient(layer_.gemm(), groups(d_gate), d_up, results.rows(0, count));
}

Status Backward::run_round(int64_t round) {
  const DispatchPlan& plan = tape_.plan;
  Exchange& exchange = *layer_.exchange;
  ARGOSY_RETURN_IF_ERROR(exchange.issue_dispatch(
      plan, round, d_output_,
      layer_.weights_inside ? nullptr : tape_.routing.topk_weights.values.data()));
  ReceivedRows& received = b_.received;
  ARGOSY_RETURN_IF_ERROR(exchange.wait_dispatch(plan, round, &received));
  const int64_t base = round * plan.round_rows;
  const int64_t end = end_of_groups(&received);
  if (end > 0) {
    ARGOSY_RETURN_IF_ERROR(weigh_rows(base, end));
    std::span<float> d_weights;
    if (layer_.weights_inside) d_weights = {exchange.result_numbers(), static_cast<size_t>(end)};
    ARGOSY_RETURN_IF_ERROR(run_experts(base, end, gate_.rows(base, end), up_.rows(base, end),
                                       exchange.results(), d_weights));
  }
  if (out_.nonfinite == NonFiniteGradients::kError) find_nonfinite(round);
  ARGOSY_RETURN_IF_ERROR(exchange.issue_combine(plan, round));
  return exchange.wait_returned(plan, round, &b_.returned);
}

bool Backward::is_finite(const std::byte* row, float number) const {
  bool all = std::isfinite(number);
  for (int64_t i = 0; i < layer_.shape.hidden && all; ++i) {
    all = std::isfinite(value_at(layer_.dtype, row, i));
  }
  return all;
}

// Rows are in order of experts, so the first one met is the first of this rank.
void Backward::find_nonfinite(int64_t round) {
  const ReceivedRows& received = b_.received;
  const TensorView rows = layer_.exchange->results();
  const float* const numbers = layer_.exchange->result_numbers();
  for (size_t group = 0; group < received.group_sizes.size() && nonfinite_slot_ < 0; ++group) {
    const int64_t begin = received.group_offsets[group];
    for (int64_t row = begin; row < begin + received.group_sizes[group]; ++row) {
      if (is_finite(rows.row(row), numbers[row])) continue;
      nonfinite_slot_ = round * tape_.plan.round_rows + row;
      return;
    }
  }
}

Status Backward::nonfinite() const {
  if (nonfinite_slot_ < 0) return {};
  const DispatchPlan& plan = tape_.plan;
  const auto num_ranks = static_cast<size_t>(plan.num_ranks);
  size_t group = 0;
  while (nonfinite_slot_ >= plan.group_offsets[group] + plan.group_sizes[group]) ++group;
  const int64_t in_group = nonfinite_slot_ - plan.group_offsets[group];
  int64_t of_source = in_group;
  size_t source = 0;
  while (of_source >= plan.source_rows[group * num_ranks + source]) {
    of_source -= plan.source_rows[group * num_ranks + source++];
  }
  const Placement placement{layer_.router.num_experts, plan.num_ranks, 0};
  return base::error(StatusCode::kNonFinite,
                     "the gradient of expert {}'s row {} of {} (row {} of those from rank "
                     "{}) is not finite",
                     placement.begin(plan.rank) + static_cast<int64_t>(group), in_group,
                     plan.group_sizes[group], of_source, source);
}

// All rows have moved by now. Those that came home stay valid: who owns them writes there again only after this rank's next
// call has begun.
Status Backward::agree_on_finite() {
  if (out_.nonfinite == NonFiniteGradients::kPass) return {};
  Status status;
  if (tape_.mode == MoeMode::kLatency) {
    status = layer_.agree_in_latency_mode(nonfinite(), {});
  } else {
    ARGOSY_RETURN_IF_ERROR(layer_.exchange->issue_reuse(nonfinite(), tape_.plan));
    status = layer_.exchange->wait_reuse();
  }
  is_agreed_ = status.code() == StatusCode::kNonFinite;
  return status;
}

std::string Backward::asked_for() const {
  std::string words = fmt::format(
      "backward of call {} of layer {}, {}, non-finite {}, for", tape_.call, layer_.number,
      out_.replicated == ReplicatedGradients::kExact ? "exact" : "reduced",
      out_.nonfinite == NonFiniteGradients::kPass ? "pass" : "error");
  const std::pair<const char*, const TensorView&> shared[] = {
      {" d_gate", out_.d_gate},
      {" d_gate_bias", out_.d_gate_bias},
      {" d_shared_gate", out_.d_shared_gate},
      {" d_shared_up", out_.d_shared_up},
      {" d_shared_down", out_.d_shared_down},
      {" d_shared_scale", out_.d_shared_scale}};
  for (const auto& [name, view] : shared) {
    if (view.dtype != DType::kUnset) words += name;
  }
  return words;
}

Status Backward::expert_weight_gradients() {
  const GemmOptions gemm = layer_.gemm();
  const WeightGradientOptions how{.accumulate = out_.accumulate};
  const int64_t s = num_slots(), h = layer_.shape.hidden, f = layer_.shape.intermediate;
  const RaggedRows d_rows = of_slots(matrix(b_.d_rows, layer_.dtype, s, h));
  const RaggedRows d_gate = of_slots(matrix(b_.d_gate, layer_.dtype, s, f));
  const RaggedRows d_up = of_slots(matrix(b_.d_up, layer_.dtype, s, f));
  const ExpertProducts::WeightGradient products[] = {{out_.d_expert_down, d_rows.rows, h_},
                                                     {out_.d_expert_gate, d_gate.rows, rows_},
                                                     {out_.d_expert_up, d_up.rows, rows_}};
  ARGOSY_RETURN_IF_ERROR(
      experts().weight_gradients(gemm, d_rows.offsets, d_rows.sizes, how, products));
  const struct {
    const TensorView& out;
    const RaggedRows& d_y;
  } biases[] = {{out_.d_expert_down_bias, d_rows},
                {out_.d_expert_gate_bias, d_gate},
                {out_.d_expert_up_bias, d_up}};
  for (const auto& bias : biases) {
    if (bias.out.dtype == DType::kUnset || bias.out.dim(0) == 0) continue;
    ARGOSY_RETURN_IF_ERROR(grouped_bias_gradient(gemm, bias.d_y, how, bias.out));
  }
  return {};
}

// d_topk_weights -> d_logits [T, E] -> the hidden states' part. A routing from outside has none.
Status Backward::router_gradients() {
  const int64_t num_tokens = tape_.routing.num_tokens;
  const int64_t num_experts = layer_.router.num_experts;
  const ConstTensorView d_weights(b_.returned.numbers.data(), DType::kF32,
                                  {num_tokens, layer_.router.top_k});
  if (out_.d_topk_weights.dtype != DType::kUnset && num_tokens > 0) {
    std::memcpy(out_.d_topk_weights.data, d_weights.data,
                static_cast<size_t>(d_weights.num_elements()) * sizeof(float));
  }
  const TensorView d_logits = matrix(b_.d_logits, DType::kF32, num_tokens, num_experts);
  if (tape_.has_gate) {
    const ConstTensorView logits(tape_.logits.data(), DType::kF32, {num_tokens, num_experts});
    ConstTensorView d_assigned = d_weights;
    if (tape_.is_dropped) {
      // The router made the weights before the drop.
      b_.d_assigned.resize(static_cast<size_t>(d_weights.num_elements()));
      const TensorView out(b_.d_assigned.data(), DType::kF32, {num_tokens, layer_.router.top_k});
      ARGOSY_RETURN_IF_ERROR(capacity_backward(layer_.capacity->spec(), tape_.assigned,
                                               tape_.routing, d_weights, out));
      d_assigned = out;
    }
    ARGOSY_RETURN_IF_ERROR(route_backward(
        layer_.router, {logits, layer_.weights.selection_bias.view(), tape_.mask_or_null()},
        tape_.is_dropped ? tape_.assigned : tape_.routing, d_assigned, GradientMode::kWrite,
        &layer_.group.pool(), d_logits));
  } else if (num_tokens > 0) {
    std::memset(d_logits.data, 0, static_cast<size_t>(d_logits.num_elements()) * sizeof(float));
  }
  if (d_logits_.dtype != DType::kUnset) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    for (int64_t token = 0; token < num_tokens; ++token) {
      if (!tape_.mask.empty() && tape_.mask[static_cast<size_t>(token)] == 0) continue;
      auto* const to = reinterpret_cast<float*>(d_logits.row(token));
      const auto* const more = reinterpret_cast<const float*>(d_logits_.row(token));
      for (int64_t e = 0; e < num_experts; ++e) to[e] += more[e];
    }
  }
  const int64_t h = layer_.shape.hidden;
  GateGradients gradients;
  gradients.d_hidden = matrix(b_.d_hidden_gate, DType::kF32, num_tokens, h);
  return gate_backward({}, layer_.weights.gate.view(), d_logits, &layer_.group.pool(), gradients);
}

// d_hidden = round(shared + sum over k ascending + gate part), in fp32, in this order.
void Backward::sum_hidden() const {
  if (out_.d_hidden.dtype == DType::kUnset) return;
  const int64_t h = layer_.shape.hidden;
  const int64_t top_k = layer_.router.top_k;
  const bool has_shared = layer_.shape.shared_intermediate > 0;
  const auto num_valid = static_cast<int64_t>(b_.shared.tokens.size());
  for (int64_t token = 0; token < tape_.routing.num_tokens; ++token) {
    if (!tape_.mask.empty() && tape_.mask[static_cast<size_t>(token)] == 0) {
      std::memset(out_.d_hidden.row(token), 0, static_cast<size_t>(h * size_of(layer_.dtype)));
    }
  }
  const GradientRowKernels& kernels = gradient_rows(layer_.dtype);
  layer_.group.pool().parallel_for(num_valid, [&](int64_t at, int) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    const int64_t token = b_.shared.tokens[static_cast<size_t>(at)];
    const auto* const shared = reinterpret_cast<const float*>(b_.shared.d_hidden.data()) + at * h;
    kernels.sum({.shared = has_shared ? shared : nullptr,
                 .last = reinterpret_cast<const float*>(b_.d_hidden_gate.data()) + token * h,
                 .rows = b_.returned.rows.data() + token * top_k,
                 .num_rows = top_k,
                 .n = h,
                 .out = out_.d_hidden.row(token)});
  });
}

Status Backward::run() {
  ARGOSY_RETURN_IF_ERROR(restore());
  for (int64_t round = 0; round < tape_.plan.num_rounds; ++round) {
    ARGOSY_RETURN_IF_ERROR(run_round(round));
  }
  return finish();
}

// All rows are home, and what the experts' weights need lies by slots.
Status Backward::finish() {
  ARGOSY_RETURN_IF_ERROR(agree_on_finite());
  ARGOSY_RETURN_IF_ERROR(expert_weight_gradients());
  ARGOSY_RETURN_IF_ERROR(take_valid_tokens());
  ARGOSY_RETURN_IF_ERROR(router_gradients());
  ARGOSY_RETURN_IF_ERROR(run_shared());
  sum_hidden();
  return replicated_gradients();
}

}  // namespace argosy
