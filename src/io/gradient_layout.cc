// See gradient_layout.h.
#include "io/gradient_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace argosy::io {
namespace {

class Writer {
 public:
  Writer(const ModelConfig& config, const Family& family, const LayerLayout& layout,
         const LayerGradients& gradients)
      : config_(config), family_(family), layout_(layout), gradients_(gradients) {}

  Result<std::vector<OwnedTensor>> run() {
    const int64_t num_experts = config_.router.num_experts;
    const int64_t h = config_.hidden, fs = config_.shared_intermediate;
    const std::string router = std::string(family_.router_module);
    ARGOSY_RETURN_IF_ERROR(add(router + ".weight", gradients_.gate, {num_experts, h}));
    ARGOSY_RETURN_IF_ERROR(add(router + ".bias", gradients_.gate_bias, {num_experts}));
    ARGOSY_RETURN_IF_ERROR(layout_.experts == ExpertLayout::kSeparate ? add_separate()
                                                                      : add_fused());
    const std::string shared = fmt::format("{}.", family_.shared_module);
    const auto name_of = [&](std::string_view matrix) {
      return fmt::format("{}{}.weight", shared, matrix);
    };
    ARGOSY_RETURN_IF_ERROR(add(name_of(kProjections.gate), gradients_.shared_gate, {fs, h}));
    ARGOSY_RETURN_IF_ERROR(add(name_of(kProjections.up), gradients_.shared_up, {fs, h}));
    ARGOSY_RETURN_IF_ERROR(add(name_of(kProjections.down), gradients_.shared_down, {h, fs}));
    ARGOSY_RETURN_IF_ERROR(add("shared_expert_gate.weight", gradients_.shared_scale, {1, h}));
    return std::move(tensors_);
  }

 private:
  using Dims = std::initializer_list<int64_t>;

  static Status check(const std::string& name, const ConstTensorView& view, Dims dims) {
    const ConstTensorView wanted(static_cast<const float*>(nullptr), DType::kF32, dims);
    bool right = view.dtype == DType::kF32 && view.num_dims == wanted.num_dims && view.is_dense();
    for (int d = 0; right && d < wanted.num_dims; ++d) right = view.dim(d) == wanted.dim(d);
    if (right) return {};
    return base::invalid("the gradient of {} is {}, the layer has dense {}", name, describe(view),
                         describe(wanted));
  }

  Result<float*> make(const std::string& name, Dims dims) {
    ARGOSY_ASSIGN_OR_RETURN(Tensor tensor, Tensor::zeros(DType::kF32, dims));
    tensors_.push_back({fmt::format("d.{}{}", layout_.block, name), std::move(tensor)});
    return tensors_.back().tensor.view().as<float>();
  }

  Status add(const std::string& name, const ConstTensorView& view, Dims dims) {
    if (view.dtype == DType::kUnset) return {};
    ARGOSY_RETURN_IF_ERROR(check(name, view, dims));
    ARGOSY_ASSIGN_OR_RETURN(float* const to, make(name, dims));
    std::copy_n(view.as<float>(), view.num_elements(), to);
    return {};
  }

  Status add_separate() {
    const int64_t num_experts = config_.router.num_experts;
    const int64_t h = config_.hidden, f = config_.intermediate;
    const struct {
      std::string_view name;
      const ConstTensorView& view;
      int64_t rows, cols;
    } matrices[] = {{family_.expert.gate, gradients_.expert_gate, f, h},
                    {family_.expert.up, gradients_.expert_up, f, h},
                    {family_.expert.down, gradients_.expert_down, h, f}};
    for (const auto& matrix : matrices) {
      if (matrix.view.dtype == DType::kUnset) continue;
      ARGOSY_RETURN_IF_ERROR(
          check(std::string(matrix.name), matrix.view, {num_experts, matrix.rows, matrix.cols}));
      const int64_t size = matrix.rows * matrix.cols;
      for (int64_t expert = 0; expert < num_experts; ++expert) {
        ARGOSY_ASSIGN_OR_RETURN(float* const to,
                                make(fmt::format("experts.{}.{}.weight", expert, matrix.name),
                                     {matrix.rows, matrix.cols}));
        std::copy_n(matrix.view.as<float>() + expert * size, size, to);
      }
    }
    return {};
  }

  bool is_transposed() const { return family_.fused_layout == FusedLayout::kInterleavedTransposed; }

  Status add_fused() {
    const int64_t e = config_.router.num_experts, h = config_.hidden, f = config_.intermediate;
    if (gradients_.expert_gate.dtype != DType::kUnset &&
        gradients_.expert_up.dtype != DType::kUnset) {
      ARGOSY_RETURN_IF_ERROR(check("gate", gradients_.expert_gate, {e, f, h}));
      ARGOSY_RETURN_IF_ERROR(check("up", gradients_.expert_up, {e, f, h}));
      ARGOSY_ASSIGN_OR_RETURN(float* const to, is_transposed()
                                                   ? make("experts.gate_up_proj", {e, h, 2 * f})
                                                   : make("experts.gate_up_proj", {e, 2 * f, h}));
      put_pair(gradients_.expert_gate, gradients_.expert_up, h, to);
    }
    if (gradients_.expert_down.dtype != DType::kUnset) {
      ARGOSY_RETURN_IF_ERROR(check("down", gradients_.expert_down, {e, h, f}));
      ARGOSY_ASSIGN_OR_RETURN(float* const to, is_transposed()
                                                   ? make("experts.down_proj", {e, f, h})
                                                   : make("experts.down_proj", {e, h, f}));
      const float* const from = gradients_.expert_down.as<float>();
      for (int64_t i = 0; i < e * h * f; ++i) {
        const int64_t expert = i / (h * f), row = i / f % h, col = i % f;
        to[is_transposed() ? (expert * f + col) * h + row : i] = from[i];
      }
    }
    if (gradients_.expert_gate_bias.dtype != DType::kUnset &&
        gradients_.expert_up_bias.dtype != DType::kUnset) {
      ARGOSY_RETURN_IF_ERROR(check("gate bias", gradients_.expert_gate_bias, {e, f}));
      ARGOSY_RETURN_IF_ERROR(check("up bias", gradients_.expert_up_bias, {e, f}));
      ARGOSY_ASSIGN_OR_RETURN(float* const to, make("experts.gate_up_proj_bias", {e, 2 * f}));
      put_pair(gradients_.expert_gate_bias, gradients_.expert_up_bias, 1, to);
    }
    return add("experts.down_proj_bias", gradients_.expert_down_bias, {e, h});
  }

  // [E, F, width] twice to [E, 2F, width] with gate first, or to [E, width, 2F] with gate and up in turn.
  void put_pair(const ConstTensorView& gate, const ConstTensorView& up, int64_t width,
                float* to) const {
    const int64_t e = config_.router.num_experts, f = config_.intermediate;
    for (int64_t expert = 0; expert < e; ++expert) {
      for (int64_t row = 0; row < f; ++row) {
        for (int64_t col = 0; col < width; ++col) {
          const int64_t from = (expert * f + row) * width + col;
          const int64_t first = is_transposed() ? (expert * width + col) * 2 * f + 2 * row
                                                : (expert * 2 * f + row) * width + col;
          to[first] = gate.as<float>()[from];
          to[first + (is_transposed() ? 1 : f * width)] = up.as<float>()[from];
        }
      }
    }
  }

  const ModelConfig& config_;
  const Family& family_;
  const LayerLayout& layout_;
  const LayerGradients& gradients_;
  std::vector<OwnedTensor> tensors_;
};

}  // namespace

Result<std::vector<OwnedTensor>> gradient_tensors(const ModelConfig& config, const Family& family,
                                                  const LayerLayout& layout,
                                                  const LayerGradients& gradients) {
  return Writer(config, family, layout, gradients).run();
}

}  // namespace argosy::io
