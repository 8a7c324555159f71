// What a layer can refuse before any rank is asked: shapes and dtypes of weights against the router
// spec, and the settings that all ranks must share. Test: tests/moe/.
#include "moe/layer_checks.h"

#include <fmt/format.h>

#include <sstream>

#include "base/error.h"

namespace argosy {
namespace {

using base::invalid;

Status check_packed(const char* name, const PackedWeights& packed, PackedWeights::Kind kind,
                    int64_t groups, int64_t n, int64_t k) {
  if (packed.kind() == kind && packed.num_groups() == groups && packed.n() == n && packed.k() == k)
    return {};
  return invalid("{} holds {} groups of [{}, {}], the layer needs {} of [{}, {}]{}", name,
                 packed.num_groups(), packed.n(), packed.k(), groups, n, k,
                 packed.kind() == kind ? "" : " and the other kind of packing");
}

Status check_dtype(const char* name, const PackedWeights& packed, DType hidden) {
  if (packed.format() != BlockFormat::kUnset) return {};
  const DType weights = packed.dtype();
  if (weights == DType::kBF16 || (weights == DType::kF32 && hidden == DType::kF32)) return {};
  return invalid("{} is {}; {} hidden states need {} or quantised weights", name, name_of(weights),
                 name_of(hidden), hidden == DType::kF32 ? "BF16, F32" : "BF16");
}

Status check_vector(const char* name, const Tensor& tensor, bool only_f32, int64_t want) {
  const ConstTensorView view = tensor.view();
  const bool dtype = view.dtype == DType::kF32 || (!only_f32 && view.dtype == DType::kBF16);
  if (dtype && view.num_dims == 1 && view.dim(0) == want) return {};
  return invalid("{} is {}, the layer needs {} [{}]", name, describe(view),
                 only_f32 ? "F32" : "F32 or BF16", want);
}

Status check_gate(const RouterSpec& router, const MoeWeights& weights) {
  const ConstTensorView gate = weights.gate.view();
  if ((gate.dtype != DType::kBF16 && gate.dtype != DType::kF32) || gate.num_dims != 2 ||
      gate.dim(0) != router.num_experts || gate.dim(1) < 1) {
    return invalid("gate is {}, the layer needs BF16 or F32 [{}, hidden]", describe(gate),
                   router.num_experts);
  }
  if (!weights.gate_bias.empty()) {
    ARGOSY_RETURN_IF_ERROR(check_vector("gate_bias", weights.gate_bias, false, router.num_experts));
  }
  const bool wants_bias = router.selection_bias == Choice::kYes;
  if (wants_bias == weights.selection_bias.empty()) {
    return invalid("selection_bias is {}, the router spec says {}",
                   weights.selection_bias.empty() ? "missing" : "given", wants_bias ? "yes" : "no");
  }
  return wants_bias
             ? check_vector("selection_bias", weights.selection_bias, true, router.num_experts)
             : Status();
}

// Digests of what every rank holds whole: a rank with another gate would route differently.
std::string digest_or_none(const Tensor& tensor) {
  return tensor.empty() ? "none" : digest_of(tensor.bytes());
}

// Which expert products have a bias.
std::string biases_of(const MoeWeights& weights) {
  const std::string gate_up = weights.gate_up.has_bias() ? "gate_up" : "";
  const std::string down = weights.down.has_bias() ? "down" : "";
  if (gate_up.empty() && down.empty()) return "none";
  return gate_up + (gate_up.empty() || down.empty() ? "" : " ") + down;
}

}  // namespace

Result<LayerShape> check_weights(const RouterSpec& router, const MoeWeights& weights,
                                 DType hidden_dtype, const Placement& placement, int rank) {
  ARGOSY_RETURN_IF_ERROR(validate(router));
  const int64_t num_local_experts = placement.num_local(rank);
  if (num_local_experts > 0 && weights.first_expert != placement.begin(rank)) {
    return invalid("the weights hold experts from {} on, rank {} of {} owns those from {} on",
                   weights.first_expert, rank, placement.num_ranks, placement.begin(rank));
  }
  if (hidden_dtype != DType::kBF16 && hidden_dtype != DType::kF32) {
    return invalid("hidden_dtype is {}, must be BF16 or F32", name_of(hidden_dtype));
  }
  ARGOSY_RETURN_IF_ERROR(check_gate(router, weights));
  ARGOSY_RETURN_IF_ERROR(validate(weights.activation));
  LayerShape shape;
  shape.hidden = weights.gate.view().dim(1);
  shape.intermediate = weights.gate_up.n();
  ARGOSY_RETURN_IF_ERROR(check_packed("gate_up", weights.gate_up, PackedWeights::Kind::kGateUp,
                                      num_local_experts, shape.intermediate, shape.hidden));
  ARGOSY_RETURN_IF_ERROR(check_packed("down", weights.down, PackedWeights::Kind::kPlain,
                                      num_local_experts, shape.hidden, shape.intermediate));
  if (num_local_experts > 0) {
    ARGOSY_RETURN_IF_ERROR(check_dtype("gate_up", weights.gate_up, hidden_dtype));
    ARGOSY_RETURN_IF_ERROR(check_dtype("down", weights.down, hidden_dtype));
  }
  if (weights.shared_gate_up.num_groups() > 0 || weights.shared_down.num_groups() > 0) {
    shape.shared_intermediate = weights.shared_gate_up.n();
    ARGOSY_RETURN_IF_ERROR(check_packed("shared_gate_up", weights.shared_gate_up,
                                        PackedWeights::Kind::kGateUp, 1, shape.shared_intermediate,
                                        shape.hidden));
    ARGOSY_RETURN_IF_ERROR(check_packed("shared_down", weights.shared_down,
                                        PackedWeights::Kind::kPlain, 1, shape.hidden,
                                        shape.shared_intermediate));
    ARGOSY_RETURN_IF_ERROR(check_dtype("shared_gate_up", weights.shared_gate_up, hidden_dtype));
    ARGOSY_RETURN_IF_ERROR(check_dtype("shared_down", weights.shared_down, hidden_dtype));
  }
  shape.shared_gate = !weights.shared_gate.empty();
  if (shape.shared_gate) {
    const ConstTensorView view = weights.shared_gate.view();
    if (shape.shared_intermediate == 0 || view.num_dims != 2 || view.dim(0) != 1 ||
        view.dim(1) != shape.hidden) {
      return invalid(
          "shared_gate is {} with shared experts of width {}, the layer needs [1, {}] beside them",
          describe(view), shape.shared_intermediate, shape.hidden);
    }
  }
  return shape;
}

Status check_training(const MoeWeights& weights, const MoeOptions& options) {
  const BlockFormat format = options.training_format;
  if (!options.training && format == BlockFormat::kUnset) return {};
  if (!options.training) {
    return invalid("training_format is {}, but the layer is not made with training",
                   name_of(format));
  }
  const auto unsupported = [](const char* what) {
    return base::error(StatusCode::kUnsupported, "training {} is not there yet", what);
  };
  if (options.payload != BlockFormat::kUnset) return unsupported("with a quantised payload");
  for (const PackedWeights* const packed :
       {&weights.gate_up, &weights.down, &weights.shared_gate_up, &weights.shared_down}) {
    if (packed->format() != BlockFormat::kUnset) return unsupported("of quantised weights");
  }
  if (format == BlockFormat::kUnset) return {};
  if (format != BlockFormat::kMxfp8 && format != BlockFormat::kMxfp8Ceil) {
    return base::error(StatusCode::kUnsupported, "training in {}, only in mxfp8 and mxfp8_ceil",
                       name_of(format));
  }
  if (options.hidden_dtype != DType::kBF16) {
    return invalid("training in {} with rows of {}, it takes BF16", name_of(format),
                   name_of(options.hidden_dtype));
  }
  return {};
}

Status check_weights_inside(const MoeWeights& weights, const MoeOptions& options) {
  const auto unsupported = [](const char* what) {
    return base::error(StatusCode::kUnsupported,
                       "weights inside the activation {} are not there yet", what);
  };
  if (options.mode != MoeMode::kThroughput) return unsupported("in latency mode");
  if (options.payload != BlockFormat::kUnset) return unsupported("with a quantised payload");
  if (options.training_format != BlockFormat::kUnset) return unsupported("with a training_format");
  if (weights.gate_up.format() != BlockFormat::kUnset) {
    return unsupported("with quantised weights");
  }
  return {};
}

Status check_capacity(const MoeOptions& options) {
  ARGOSY_RETURN_IF_ERROR(validate(*options.capacity));
  if (options.mode == MoeMode::kThroughput) return {};
  return base::error(StatusCode::kUnsupported, "capacity in mode {}; throughput mode alone has it",
                     name_of(options.mode));
}

ExchangeOptions exchange_options(const RouterSpec& router, const LayerShape& shape,
                                 const MoeOptions& options) {
  ExchangeOptions wanted;
  wanted.dtype = options.hidden_dtype;
  wanted.hidden = shape.hidden;
  wanted.num_experts = router.num_experts;
  wanted.top_k = router.top_k;
  wanted.receive_budget_bytes = options.receive_budget_bytes;
  wanted.max_receive_rows = options.max_receive_rows;
  wanted.group_alignment = options.group_alignment;
  wanted.payload = options.payload;
  wanted.training = options.training;
  wanted.numbers = options.weights_inside;
  return wanted;
}

LatencyOptions latency_options(const RouterSpec& router, const LayerShape& shape,
                               const MoeOptions& options) {
  LatencyOptions wanted;
  wanted.dtype = options.hidden_dtype;
  wanted.hidden = shape.hidden;
  wanted.num_experts = router.num_experts;
  wanted.top_k = router.top_k;
  wanted.max_tokens = options.max_tokens;
  wanted.payload = options.payload;
  wanted.return_path = options.return_path;
  wanted.training = options.training;
  return wanted;
}

namespace {

template <typename Theirs, typename Ours>
Status differs(const char* field, const Theirs& theirs, const Ours& ours) {
  return invalid("the given exchange has {} {}, the layer needs {}", field, theirs, ours);
}

std::string payload_text(BlockFormat format) {
  return format == BlockFormat::kUnset ? "as it is" : std::string(name_of(format));
}

// What the options of both kinds of exchange have.
template <typename Options, typename Given>
Status check_common(const Group& group, const Options& wanted, const Given& given) {
  const Options& have = given.options();
  if (given.group_id() != group.id()) return differs("group id", given.group_id(), group.id());
  if (have.dtype != wanted.dtype) {
    return differs("dtype", name_of(have.dtype), name_of(wanted.dtype));
  }
  if (have.hidden != wanted.hidden) return differs("hidden", have.hidden, wanted.hidden);
  if (have.num_experts != wanted.num_experts) {
    return differs("num_experts", have.num_experts, wanted.num_experts);
  }
  if (have.top_k != wanted.top_k) return differs("top_k", have.top_k, wanted.top_k);
  if (have.payload != wanted.payload) {
    return differs("payload", payload_text(have.payload), payload_text(wanted.payload));
  }
  return {};
}

}  // namespace

Status check_exchange(const Group& group, const ExchangeOptions& wanted, const Exchange& given) {
  ARGOSY_RETURN_IF_ERROR(check_common(group, wanted, given));
  const ExchangeOptions& have = given.options();
  if (have.receive_budget_bytes != wanted.receive_budget_bytes) {
    return differs("receive_budget_bytes", have.receive_budget_bytes, wanted.receive_budget_bytes);
  }
  if (have.max_receive_rows != wanted.max_receive_rows) {
    return differs("max_receive_rows", have.max_receive_rows, wanted.max_receive_rows);
  }
  if (have.group_alignment != wanted.group_alignment) {
    return differs("group_alignment", have.group_alignment, wanted.group_alignment);
  }
  if (have.training != wanted.training) return differs("training", have.training, wanted.training);
  if (have.numbers != wanted.numbers) return differs("numbers", have.numbers, wanted.numbers);
  return {};
}

Status check_exchange(const Group& group, const LatencyOptions& wanted,
                      const LatencyExchange& given) {
  ARGOSY_RETURN_IF_ERROR(check_common(group, wanted, given));
  const LatencyOptions& have = given.options();
  if (have.max_tokens != wanted.max_tokens) {
    return differs("max_tokens", have.max_tokens, wanted.max_tokens);
  }
  if (have.return_path != wanted.return_path) {
    return differs("return_path", static_cast<int>(have.return_path),
                   static_cast<int>(wanted.return_path));
  }
  if (have.training != wanted.training) return differs("training", have.training, wanted.training);
  return {};
}

Status check_rows(const char* name, const ConstTensorView& view, DType dtype, int64_t num_tokens,
                  int64_t hidden, bool is_written) {
  const bool right = view.dtype == dtype && view.num_dims == 2 && view.dim(0) == num_tokens &&
                     num_tokens >= 0 && view.dim(1) == hidden;
  const bool has_unit_stride = right && (num_tokens == 0 || hidden == 1 || view.stride(1) == 1);
  if (!has_unit_stride) {
    return invalid("{} is {}, the layer takes {} [{}, {}] with unit stride in hidden", name,
                   describe(view), name_of(dtype), num_tokens, hidden);
  }
  if (num_tokens > 0 && view.data == nullptr) {
    return invalid("{} {} has no data", name, describe(view));
  }
  if (is_written && num_tokens > 1 && view.stride(0) < hidden) {
    return invalid("{} is {}: rows of {} elements overlap", name, describe(view), hidden);
  }
  return {};
}

namespace {

std::string capacity_text(const std::optional<CapacitySpec>& capacity) {
  if (!capacity.has_value()) return "none";
  return fmt::format("{}/{} policy {} scope {} choices {} renormalise {}", capacity->factor_num,
                     capacity->factor_den, static_cast<int>(capacity->policy),
                     static_cast<int>(capacity->scope), static_cast<int>(capacity->choice_order),
                     static_cast<int>(capacity->renormalise));
}

}  // namespace

std::vector<Setting> layer_settings(const RouterSpec& router, const MoeWeights& weights,
                                    const LayerShape& shape, const MoeOptions& options) {
  std::vector<Setting> settings = {
      {"layer.check", "Ok"},
      {"layer.hidden_dtype", std::string(name_of(options.hidden_dtype))},
      {"layer.mode", name_of(options.mode)},
      {"layer.exchange", options.exchange != nullptr ? "given" : "own"},
      {"layer.latency", options.latency != nullptr ? "given" : "own"},
      {"layer.training", options.training ? "yes" : "no"},
      {"layer.weights_inside", options.weights_inside ? "yes" : "no"},
      {"layer.training_format", payload_text(options.training_format)},
      {"layer.payload", payload_text(options.payload)},
      {"layer.capacity", capacity_text(options.capacity)},
      {"layer.max_tokens", fmt::to_string(options.max_tokens)},
      {"layer.chunk", options.chunk ? "yes" : "no"},
      {"layer.hidden", fmt::to_string(shape.hidden)},
      {"layer.intermediate", fmt::to_string(shape.intermediate)},
      {"layer.shared_intermediate", fmt::to_string(shape.shared_intermediate)},
      {"layer.activation", to_string(weights.activation)},
      {"layer.expert_biases", biases_of(weights)},
      {"layer.gate digest", digest_or_none(weights.gate)},
      {"layer.gate_bias digest", digest_or_none(weights.gate_bias)},
      {"layer.selection_bias digest", digest_or_none(weights.selection_bias)},
      {"layer.shared_gate digest", digest_or_none(weights.shared_gate)},
  };
  // One setting per line "field = value", so that an error names the field.
  std::istringstream lines(to_string(router));
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find(" = ");
    if (equals == std::string::npos) continue;
    settings.push_back({"layer.router." + line.substr(0, equals), line.substr(equals + 3)});
  }
  return settings;
}

}  // namespace argosy
