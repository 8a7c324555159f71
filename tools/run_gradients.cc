// See run_gradients.h.
#include "tools/run_gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "argosy/bfloat16.h"
#include "tools/tensor_values.h"

namespace argosy::tools {

Result<Tensor> converted(const char* option, Tensor tensor, DType dtype) {
  const ConstTensorView from = std::as_const(tensor).view();
  if (from.dtype == dtype) return tensor;
  const auto is_float = [](DType type) { return type == DType::kBF16 || type == DType::kF32; };
  if (!is_float(from.dtype) || !is_float(dtype) || from.num_dims != 2) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("{} is {}, it must be a matrix of fp32 or bf16", option, describe(from)));
  }
  ARGOSY_ASSIGN_OR_RETURN(Tensor made, Tensor::zeros(dtype, {from.dim(0), from.dim(1)}));
  for (int64_t i = 0; i < from.num_elements(); ++i) {
    if (dtype == DType::kBF16) {
      made.view().as<BFloat16>()[i] = BFloat16::from_float(from.as<float>()[i]);
    } else {
      made.view().as<float>()[i] = from.as<BFloat16>()[i].to_float();
    }
  }
  return made;
}

Result<std::vector<OwnedTensor>> gradient_tensors(const Checkpoint& checkpoint, int64_t layer,
                                                  const RanksResult& result) {
  const ModelConfig& config = checkpoint.config();
  const int64_t e = config.router.num_experts, h = config.hidden;
  const int64_t f = config.intermediate, fs = config.shared_intermediate;
  const RankGradients& g = result.gradients;
  const auto view = [](const std::vector<float>& values, std::initializer_list<int64_t> dims) {
    return values.empty() ? ConstTensorView() : ConstTensorView(values.data(), DType::kF32, dims);
  };
  LayerGradients gradients;
  gradients.gate = view(g.gate, {e, h});
  gradients.gate_bias = view(g.gate_bias, {e});
  gradients.expert_gate = view(g.expert_gate, {e, f, h});
  gradients.expert_up = view(g.expert_up, {e, f, h});
  gradients.expert_down = view(g.expert_down, {e, h, f});
  gradients.expert_gate_bias = view(g.expert_gate_bias, {e, f});
  gradients.expert_up_bias = view(g.expert_up_bias, {e, f});
  gradients.expert_down_bias = view(g.expert_down_bias, {e, h});
  gradients.shared_gate = view(g.shared_gate, {fs, h});
  gradients.shared_up = view(g.shared_up, {fs, h});
  gradients.shared_down = view(g.shared_down, {h, fs});
  gradients.shared_scale = view(g.shared_scale, {1, h});
  ARGOSY_ASSIGN_OR_RETURN(std::vector<OwnedTensor> tensors,
                          checkpoint.gradient_tensors(layer, gradients));
  const ConstTensorView d_hidden = result.d_hidden.view();
  ARGOSY_ASSIGN_OR_RETURN(Tensor copy,
                          Tensor::zeros(d_hidden.dtype, {d_hidden.dim(0), d_hidden.dim(1)}));
  std::ranges::copy(result.d_hidden.bytes(), copy.view().data);
  tensors.push_back({"d.hidden", std::move(copy)});
  std::ranges::sort(tensors, {}, &OwnedTensor::name);
  return tensors;
}

Result<std::vector<GradientError>> compare_gradients(const std::vector<OwnedTensor>& tensors,
                                                     const std::string& file) {
  ARGOSY_ASSIGN_OR_RETURN(const auto captured, SafetensorsFile::open(file));
  std::vector<GradientError> errors;
  for (const OwnedTensor& tensor : tensors) {
    ARGOSY_ASSIGN_OR_RETURN(const Tensor wanted, captured->read(tensor.name));
    const ConstTensorView have = tensor.tensor.view(), want = wanted.view();
    bool same = have.num_dims == want.num_dims;
    for (int d = 0; same && d < have.num_dims; ++d) same = have.dim(d) == want.dim(d);
    if (!same) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--compare-grads: {} is {} there, {} here", tensor.name,
                                describe(want), describe(have)));
    }
    if (!is_fp32_or_bf16(want.dtype)) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--compare-grads: {} is {} there, expected F32 or BF16",
                                tensor.name, describe(want)));
    }
    ARGOSY_RETURN_IF_ERROR(expect_finite("--compare-grads: " + tensor.name, want));
    const std::vector<double> seen = values_of(have, 0, have.num_elements());
    const std::vector<double> expected = values_of(want, 0, want.num_elements());
    GradientError error{tensor.name, {}};
    for (size_t i = 0; i < seen.size(); ++i) error.error.add(seen[i], expected[i]);
    errors.push_back(std::move(error));
  }
  return errors;
}

}  // namespace argosy::tools
