// What a layer can refuse before any rank is asked: shapes and dtypes of weights against the router
// spec, and the settings that all ranks must share. Test: tests/moe/.
#include "moe/layer_checks.h"

#include <fmt/format.h>

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

Status check_dtype(const char* name, DType weights, DType hidden) {
  if (weights == DType::kBF16 || (weights == DType::kF32 && hidden == DType::kF32)) return {};
  return invalid("{} is {}; {} hidden states need {} weights", name, name_of(weights),
                 name_of(hidden), hidden == DType::kF32 ? "BF16 or F32" : "BF16");
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

}  // namespace

Result<LayerShape> check_weights(const RouterSpec& router, const MoeWeights& weights,
                                 DType hidden_dtype, int64_t num_local_experts) {
  ARGOSY_RETURN_IF_ERROR(validate(router));
  if (hidden_dtype != DType::kBF16 && hidden_dtype != DType::kF32) {
    return invalid("hidden_dtype is {}, must be BF16 or F32", name_of(hidden_dtype));
  }
  ARGOSY_RETURN_IF_ERROR(check_gate(router, weights));
  LayerShape shape;
  shape.hidden = weights.gate.view().dim(1);
  shape.intermediate = weights.gate_up.n();
  ARGOSY_RETURN_IF_ERROR(check_packed("gate_up", weights.gate_up, PackedWeights::Kind::kGateUp,
                                      num_local_experts, shape.intermediate, shape.hidden));
  ARGOSY_RETURN_IF_ERROR(check_packed("down", weights.down, PackedWeights::Kind::kPlain,
                                      num_local_experts, shape.hidden, shape.intermediate));
  if (num_local_experts > 0) {
    ARGOSY_RETURN_IF_ERROR(check_dtype("gate_up", weights.gate_up.dtype(), hidden_dtype));
    ARGOSY_RETURN_IF_ERROR(check_dtype("down", weights.down.dtype(), hidden_dtype));
  }
  if (weights.shared_gate_up.num_groups() > 0 || weights.shared_down.num_groups() > 0) {
    shape.shared_intermediate = weights.shared_gate_up.n();
    ARGOSY_RETURN_IF_ERROR(check_packed("shared_gate_up", weights.shared_gate_up,
                                        PackedWeights::Kind::kGateUp, 1, shape.shared_intermediate,
                                        shape.hidden));
    ARGOSY_RETURN_IF_ERROR(check_packed("shared_down", weights.shared_down,
                                        PackedWeights::Kind::kPlain, 1, shape.hidden,
                                        shape.shared_intermediate));
    ARGOSY_RETURN_IF_ERROR(
        check_dtype("shared_gate_up", weights.shared_gate_up.dtype(), hidden_dtype));
    ARGOSY_RETURN_IF_ERROR(check_dtype("shared_down", weights.shared_down.dtype(), hidden_dtype));
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

std::vector<Setting> layer_settings(const RouterSpec& router, const MoeWeights& weights,
                                    const LayerShape& shape, DType hidden_dtype) {
  return {
      {"layer.check", "Ok"},
      {"layer.hidden_dtype", std::string(name_of(hidden_dtype))},
      {"layer.router", to_string(router)},
      {"layer.hidden", fmt::to_string(shape.hidden)},
      {"layer.intermediate", fmt::to_string(shape.intermediate)},
      {"layer.shared_intermediate", fmt::to_string(shape.shared_intermediate)},
      {"layer.gate digest", digest_or_none(weights.gate)},
      {"layer.gate_bias digest", digest_or_none(weights.gate_bias)},
      {"layer.selection_bias digest", digest_or_none(weights.selection_bias)},
      {"layer.shared_gate digest", digest_or_none(weights.shared_gate)},
  };
}

}  // namespace argosy
