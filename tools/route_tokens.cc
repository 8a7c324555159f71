// See route_tokens.h. Test: tests/cli/route_test.cc.
#include "tools/route_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <utility>

#include "argosy/balance_loss.h"
#include "argosy/bfloat16.h"
#include "argosy/bias_update.h"
#include "argosy/capacity.h"
#include "argosy/plan.h"
#include "argosy/router_file.h"
#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

Status refused(std::string text) { return Status(StatusCode::kInvalidArgument, std::move(text)); }

// A tensor that must be finite, so that it is named and not the logits that it would spoil.
Result<Tensor> read_finite(const char* option, const std::string& file_and_tensor,
                           std::initializer_list<int64_t> shape) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor tensor, read_tensor_argument(file_and_tensor));
  const ConstTensorView view = std::as_const(tensor).view();
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor(option, view, shape));
  ARGOSY_RETURN_IF_ERROR(expect_finite(option, view));
  return tensor;
}

// Widening is exact.
Result<Tensor> as_f32(Tensor tensor) {
  const ConstTensorView from = std::as_const(tensor).view();
  if (from.dtype == DType::kF32) return tensor;
  const std::span<const int64_t> shape(from.shape.data(), static_cast<size_t>(from.num_dims));
  ARGOSY_ASSIGN_OR_RETURN(Tensor wide, Tensor::zeros(DType::kF32, shape));
  float* const to = wide.view().as<float>();
  for (int64_t i = 0; i < from.num_elements(); ++i) to[i] = from.as<BFloat16>()[i].to_float();
  return wide;
}

Result<Tensor> selection_bias_of(const RouteOptions& options, RouteRules& rules) {
  const RouterSpec& spec = rules.spec;
  const bool is_given = !options.selection_bias.empty();
  const bool is_wanted = spec.selection_bias == Choice::kYes;
  if (is_given && !is_wanted) {
    return refused(
        fmt::format("{} has no selection bias: leave --selection-bias out, or give "
                    "--use-selection-bias yes",
                    rules.source));
  }
  if (!is_wanted) return Tensor();
  if (!is_given) {
    if (!rules.tensors.selection_bias.empty()) return std::move(rules.tensors.selection_bias);
    return refused(
        fmt::format("{} needs a selection bias: give --selection-bias FILE:TENSOR, fp32 "
                    "[{}]",
                    rules.source, spec.num_experts));
  }
  ARGOSY_ASSIGN_OR_RETURN(
      Tensor bias, read_finite("--selection-bias", options.selection_bias, {spec.num_experts}));
  if (bias.view().dtype != DType::kF32) {
    return refused(
        fmt::format("--selection-bias is {}, expected F32", describe(std::as_const(bias).view())));
  }
  return bias;
}

Result<std::vector<uint8_t>> read_mask(const std::string& file_and_tensor, int64_t num_tokens) {
  if (file_and_tensor.empty()) return std::vector<uint8_t>();
  ARGOSY_ASSIGN_OR_RETURN(const Tensor tensor, read_tensor_argument(file_and_tensor));
  const ConstTensorView view = tensor.view();
  if (view.dtype != DType::kBool && view.dtype != DType::kU8) {
    return refused(fmt::format("--mask is {}, expected BOOL or U8", describe(view)));
  }
  ARGOSY_RETURN_IF_ERROR(expect_shape("--mask", view, {num_tokens}));
  const uint8_t* const values = view.as<uint8_t>();
  std::vector<uint8_t> mask(values, values + num_tokens);
  const auto odd = std::find_if(mask.begin(), mask.end(), [](uint8_t value) { return value > 1; });
  if (odd == mask.end()) return mask;
  return refused(
      fmt::format("--mask holds {} at token {}, expected 0 or 1", *odd, odd - mask.begin()));
}

Result<Tensor> logits_of_input(const RouteOptions& options, RouteRules& rules) {
  const RouterSpec& spec = rules.spec;
  ARGOSY_ASSIGN_OR_RETURN(const Tensor hidden, read_tensor_argument(options.input));
  ARGOSY_RETURN_IF_ERROR(expect_float_tensor("--input", hidden.view(), {-1, -1}));
  // Otherwise the row may be masked or replaced; the router names it if not.
  if (options.mask.empty() && spec.on_nonfinite == OnNonfinite::kError) {
    ARGOSY_RETURN_IF_ERROR(expect_finite("--input", hidden.view()));
  }
  const int64_t width = hidden.view().dim(1);
  if (width == 0) {
    return refused(fmt::format("--input is {}, expected a hidden size of at least 1",
                               describe(hidden.view())));
  }
  Tensor gate = std::move(rules.tensors.gate);
  if (!options.gate.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(gate, read_finite("--gate", options.gate, {spec.num_experts, width}));
  }
  ARGOSY_RETURN_IF_ERROR(
      expect_shape("the model's gate", std::as_const(gate).view(), {spec.num_experts, width}));
  Tensor gate_bias = std::move(rules.tensors.gate_bias);
  if (!options.gate_bias.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(gate_bias,
                            read_finite("--gate-bias", options.gate_bias, {spec.num_experts}));
  }
  ARGOSY_ASSIGN_OR_RETURN(Tensor logits,
                          Tensor::zeros(DType::kF32, {hidden.view().dim(0), spec.num_experts}));
  ARGOSY_RETURN_IF_ERROR(gate_logits(hidden.view(), std::as_const(gate).view(),
                                     std::as_const(gate_bias).view(), nullptr, logits.view()));
  return logits;
}

Result<Tensor> logits_of(const RouteOptions& options, RouteRules& rules) {
  if (options.logits.empty()) return logits_of_input(options, rules);
  ARGOSY_ASSIGN_OR_RETURN(Tensor logits, read_tensor_argument(options.logits));
  ARGOSY_RETURN_IF_ERROR(
      expect_float_tensor("--logits", std::as_const(logits).view(), {-1, rules.spec.num_experts}));
  return as_f32(std::move(logits));
}

// --- training ---

Result<std::vector<int32_t>> sequences_of(const RouteOptions& options, int64_t num_tokens) {
  int64_t sum = 0;
  std::vector<int32_t> sequence;
  for (size_t i = 0; i < options.sequence_lengths.size(); ++i) {
    const int64_t length = options.sequence_lengths[i];
    if (length > num_tokens - sum) {
      return refused(fmt::format("--sequence-lengths sum to more than the {} tokens at {}",
                                 num_tokens, length));
    }
    sum += length;
    sequence.insert(sequence.end(), static_cast<size_t>(length), static_cast<int32_t>(i));
  }
  if (sum == num_tokens) return sequence;
  return refused(fmt::format("--sequence-lengths sum to {}, there are {} tokens", sum, num_tokens));
}

Status add_losses(const RouteOptions& options, const RouterSpec& spec, const RouterInput& rows,
                  RouteResult* result) {
  if (options.z_loss.has_value()) {
    ARGOSY_ASSIGN_OR_RETURN(const ZLossSums sums, z_loss_sums(spec, rows, nullptr));
    result->z_loss = z_loss(*options.z_loss, sums);
  }
  if (!options.aux_loss.has_value()) return {};
  BalanceInput input;
  input.rows = rows;
  input.routing = &result->routing;
  input.counts_from = options.aux_counts == "plain" ? LossCounts::kPlainTopK : LossCounts::kRouted;
  std::vector<int32_t> sequence;
  if (options.aux_scope == "sequence") {
    ARGOSY_ASSIGN_OR_RETURN(sequence, sequences_of(options, result->routing.num_tokens));
    input.sequence = sequence.data();
    input.num_sequences = static_cast<int64_t>(options.sequence_lengths.size());
  }
  AuxLossSpec aux;
  aux.coeff = *options.aux_loss;
  aux.scale = options.aux_scale == "hf" ? LossScale::kHuggingFace : LossScale::kMegatron;
  BalanceSums sums;
  ARGOSY_RETURN_IF_ERROR(balance_sums(spec, input, nullptr, &sums));
  ARGOSY_ASSIGN_OR_RETURN(result->aux_loss, aux_loss(spec, aux, sums));
  return {};
}

CapacitySpec capacity_spec(const RouteOptions& options) {
  CapacitySpec spec;
  spec.factor_num = options.capacity->first;
  spec.factor_den = options.capacity->second;
  spec.policy = options.policy == "weight" ? CapacityPolicy::kWeight : CapacityPolicy::kPosition;
  spec.scope = options.capacity_scope == "rank" ? CapacityScope::kRank : CapacityScope::kGroup;
  spec.choice_order = options.choice_order == "interleaved" ? ChoiceOrder::kInterleaved
                                                            : ChoiceOrder::kAllFirstChoicesFirst;
  spec.renormalise = options.renormalise_kept ? Choice::kYes : Choice::kNo;
  return spec;
}

template <typename T>
void append(const std::vector<T>& from, std::vector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

Routing joined(const Routing& like, const std::vector<Routing>& parts) {
  Routing whole = like;
  whole.topk_idx.clear();
  whole.topk_weights.values.clear();
  std::fill(whole.counts.begin(), whole.counts.end(), 0);
  for (const Routing& part : parts) {
    append(part.topk_idx, &whole.topk_idx);
    append(part.topk_weights.values, &whole.topk_weights.values);
    for (size_t e = 0; e < whole.counts.size(); ++e) whole.counts[e] += part.counts[e];
  }
  return whole;
}

Status apply_capacity_option(const RouteOptions& options, RouteResult* result) {
  result->kept = result->routing;
  if (!options.capacity.has_value()) return {};
  const Routing& all = result->routing;
  std::vector<Routing> parts;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const int64_t first = owned_begin(all.num_tokens, options.num_ranks, rank);
    parts.push_back(
        part_of(all, first, owned_begin(all.num_tokens, options.num_ranks, rank + 1) - first));
  }
  std::vector<const Routing*> ranks;
  for (const Routing& part : parts) ranks.push_back(&part);
  std::vector<Routing> kept;
  CapacityResult capacity;
  ARGOSY_RETURN_IF_ERROR(apply_capacity(capacity_spec(options), ranks, &kept, &capacity.capacity));
  result->kept = joined(all, kept);
  for (size_t e = 0; e < all.counts.size(); ++e) {
    capacity.dropped.push_back(all.counts[e] - result->kept.counts[e]);
    capacity.num_dropped += capacity.dropped.back();
  }
  for (int64_t token = 0; token < all.num_tokens; ++token) {
    const auto begin = static_cast<size_t>(token * all.top_k);
    const auto has_expert = [&](const Routing& routing) {
      return std::any_of(routing.topk_idx.begin() + static_cast<ptrdiff_t>(begin),
                         routing.topk_idx.begin() + static_cast<ptrdiff_t>(begin) + all.top_k,
                         [](int32_t expert) { return expert >= 0; });
    };
    if (has_expert(all) && !has_expert(result->kept)) ++capacity.num_lost_tokens;
  }
  result->capacity = std::move(capacity);
  return {};
}

Status step_bias(const RouteOptions& options, RouteResult* result) {
  if (!options.bias_update.has_value()) return {};
  if (result->selection_bias.empty()) {
    return refused("--bias-update needs a selection bias: the rules have none");
  }
  const ConstTensorView view = std::as_const(result->selection_bias).view();
  std::vector<float> bias(view.as<float>(), view.as<float>() + view.num_elements());
  const BiasUpdateSpec spec{static_cast<float>(*options.bias_update), options.bias_centred};
  ARGOSY_RETURN_IF_ERROR(update_selection_bias(spec, result->routing.counts, bias));
  result->selection_bias_next = std::move(bias);
  return {};
}

}  // namespace

Result<RouteRules> effective_rules(const RouteOptions& options) {
  RouteRules rules;
  std::optional<RouterFile> file;
  if (!options.router.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(file, read_router_file(options.router));
    rules.spec = file->spec;
    rules.source = options.router;
  }
  if (!options.preset.empty()) {
    ARGOSY_ASSIGN_OR_RETURN(rules.spec, router_preset(options.preset, 0, 0));
    rules.source = options.preset;
  }
  if (!options.model.empty()) {
    CheckpointOptions how;
    how.router = file;
    // A bias given by hand stands in for the checkpoint's, which may have none.
    const bool has_bias = !options.selection_bias.empty();
    if (how.router.has_value() && has_bias) how.router->spec.selection_bias = Choice::kNo;
    ARGOSY_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(options.model, how));
    ARGOSY_ASSIGN_OR_RETURN(rules.tensors, checkpoint.read_shared(options.layer));
    rules.spec = checkpoint.config().router;
    if (file.has_value()) rules.spec.selection_bias = file->spec.selection_bias;
    if (!file) rules.source = checkpoint.config().family;
  }
  for (const auto& [field, value] : options.fields) {
    ARGOSY_RETURN_IF_ERROR(set_router_field(field, value, &rules.spec));
  }
  ARGOSY_RETURN_IF_ERROR(validate(rules.spec));
  return rules;
}

Routing part_of(const Routing& routing, int64_t first, int64_t count) {
  Routing part;
  part.num_tokens = count;
  part.num_experts = routing.num_experts;
  part.top_k = routing.top_k;
  const auto begin = first * routing.top_k;
  const auto end = begin + count * routing.top_k;
  part.topk_idx.assign(routing.topk_idx.begin() + begin, routing.topk_idx.begin() + end);
  part.topk_weights = routing.topk_weights;
  part.topk_weights.values.assign(routing.topk_weights.values.begin() + begin,
                                  routing.topk_weights.values.begin() + end);
  part.counts.assign(static_cast<size_t>(routing.num_experts), 0);
  for (const int32_t expert : part.topk_idx) {
    if (expert >= 0) ++part.counts[static_cast<size_t>(expert)];
  }
  // A valid token of a router's output has all its experts.
  for (int64_t token = 0; token < count; ++token) {
    if (part.topk_idx[static_cast<size_t>(token * routing.top_k)] >= 0) ++part.num_valid_tokens;
  }
  return part;
}

Result<RouteResult> route_tokens(const RouteOptions& options, RouteRules& rules) {
  RouteResult result;
  ARGOSY_ASSIGN_OR_RETURN(result.selection_bias, selection_bias_of(options, rules));
  ARGOSY_ASSIGN_OR_RETURN(result.logits, logits_of(options, rules));
  const int64_t num_tokens = result.logits.view().dim(0);
  ARGOSY_ASSIGN_OR_RETURN(result.mask, read_mask(options.mask, num_tokens));
  RouterInput input;
  input.logits = result.logits.view();
  input.selection_bias = std::as_const(result.selection_bias).view();
  input.mask = result.mask.empty() ? nullptr : result.mask.data();
  ARGOSY_RETURN_IF_ERROR(route(rules.spec, input, nullptr, &result.routing));
  ARGOSY_RETURN_IF_ERROR(add_losses(options, rules.spec, input, &result));
  ARGOSY_RETURN_IF_ERROR(step_bias(options, &result));
  ARGOSY_RETURN_IF_ERROR(apply_capacity_option(options, &result));
  const Placement placement{rules.spec.num_experts, options.num_ranks, 0};
  const std::vector<int64_t>& counts = result.kept.counts;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    result.rows_per_rank.push_back(std::accumulate(counts.begin() + placement.begin(rank),
                                                   counts.begin() + placement.begin(rank + 1),
                                                   int64_t{0}));
  }
  return result;
}

}  // namespace argosy::tools
