#include "student.h"

#include <algorithm>
#include <cmath>

#include "argosy/bfloat16.h"
#include "random.h"

using argosy::DType;
using argosy::MoeWeights;
using argosy::PackedWeights;
using argosy::Result;
using argosy::Status;
using argosy::Tensor;
using argosy::TensorView;

namespace {

// One matrix of the master weights, rounded to the layer's dtype.
Result<Tensor> rounded(const float* values, DType dtype, int64_t rows, int64_t columns) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor matrix, Tensor::zeros(dtype, {rows, columns}));
  for (int64_t i = 0; i < rows * columns; ++i) {
    if (dtype == DType::kBF16) {
      matrix.view().as<argosy::BFloat16>()[i] = argosy::BFloat16::from_float(values[i]);
    } else {
      matrix.view().as<float>()[i] = values[i];
    }
  }
  return matrix;
}

}  // namespace

Student::Parameter Student::make(int64_t count, int64_t fan_in, uint64_t seed) {
  std::mt19937_64 random(seed);
  const double deviation = 1 / std::sqrt(static_cast<double>(fan_in));
  Parameter parameter;
  for (int64_t i = 0; i < count; ++i) parameter.value.push_back(random_value(random, deviation));
  for (auto* const other : {&parameter.gradient, &parameter.first, &parameter.second}) {
    other->assign(parameter.value.size(), 0.0f);
  }
  return parameter;
}

void Student::append(Parameter* to, const Parameter& more) {
  const auto add = [](std::vector<float>* values, const std::vector<float>& end) {
    values->insert(values->end(), end.begin(), end.end());
  };
  add(&to->value, more.value);
  add(&to->gradient, more.gradient);
  add(&to->first, more.first);
  add(&to->second, more.second);
}

// An expert starts with the same values wherever it lies.
Student::Student(const StudentShape& shape, int rank, int num_ranks)
    : shape_(shape),
      placement_{shape.num_experts, num_ranks},
      rank_(rank),
      num_local_(placement_.num_local(rank)) {
  const int64_t h = shape.hidden, f = shape.intermediate;
  gate_ = make(shape.num_experts * h, h, 1);
  gate_.decays = false;
  for (int64_t local = 0; local < num_local_; ++local) {
    const auto seed = static_cast<uint64_t>(100 + 3 * (placement_.begin(rank) + local));
    append(&expert_gate_, make(f * h, h, seed));
    append(&expert_up_, make(f * h, h, seed + 1));
    append(&expert_down_, make(h * f, f, seed + 2));
  }
  selection_bias_.assign(static_cast<size_t>(shape.num_experts), 0.0f);
}

Result<MoeWeights> Student::make_weights() const {
  MoeWeights weights;
  weights.first_expert = placement_.begin(rank_);
  ARGOSY_ASSIGN_OR_RETURN(weights.gate,
                          Tensor::zeros(DType::kF32, {shape_.num_experts, shape_.hidden}));
  ARGOSY_ASSIGN_OR_RETURN(weights.selection_bias, Tensor::zeros(DType::kF32, {shape_.num_experts}));
  ARGOSY_ASSIGN_OR_RETURN(
      weights.gate_up, PackedWeights::create(PackedWeights::Kind::kGateUp, shape_.dtype, num_local_,
                                             shape_.intermediate, shape_.hidden));
  ARGOSY_ASSIGN_OR_RETURN(
      weights.down, PackedWeights::create(PackedWeights::Kind::kPlain, shape_.dtype, num_local_,
                                          shape_.hidden, shape_.intermediate));
  ARGOSY_RETURN_IF_ERROR(write(weights));
  return weights;
}

Status Student::write(MoeWeights& weights) const {
  std::copy(gate_.value.begin(), gate_.value.end(), weights.gate.view().as<float>());
  std::copy(selection_bias_.begin(), selection_bias_.end(),
            weights.selection_bias.view().as<float>());
  const int64_t h = shape_.hidden, f = shape_.intermediate;
  for (int64_t local = 0; local < num_local_; ++local) {
    const int64_t at = local * f * h;
    ARGOSY_ASSIGN_OR_RETURN(const Tensor gate,
                            rounded(expert_gate_.value.data() + at, shape_.dtype, f, h));
    ARGOSY_ASSIGN_OR_RETURN(const Tensor up,
                            rounded(expert_up_.value.data() + at, shape_.dtype, f, h));
    ARGOSY_ASSIGN_OR_RETURN(const Tensor down,
                            rounded(expert_down_.value.data() + at, shape_.dtype, h, f));
    ARGOSY_RETURN_IF_ERROR(weights.gate_up.set_group(local, gate.view(), up.view()));
    ARGOSY_RETURN_IF_ERROR(weights.down.set_group(local, down.view()));
  }
  return {};
}

argosy::MoeGradients Student::gradients() {
  const int64_t h = shape_.hidden, f = shape_.intermediate;
  argosy::MoeGradients out;
  out.d_gate = TensorView(gate_.gradient.data(), DType::kF32, {shape_.num_experts, h});
  out.d_expert_gate = TensorView(expert_gate_.gradient.data(), DType::kF32, {num_local_, f, h});
  out.d_expert_up = TensorView(expert_up_.gradient.data(), DType::kF32, {num_local_, f, h});
  out.d_expert_down = TensorView(expert_down_.gradient.data(), DType::kF32, {num_local_, h, f});
  return out;
}

void Student::step(const AdamW& adam) {
  power1_ *= adam.beta1;
  power2_ *= adam.beta2;
  for (Parameter* const parameter : {&gate_, &expert_gate_, &expert_up_, &expert_down_}) {
    const float decay = parameter->decays ? adam.learning_rate * adam.weight_decay : 0.0f;
    for (size_t i = 0; i < parameter->value.size(); ++i) {
      const float gradient = parameter->gradient[i];
      float& first = parameter->first[i];
      float& second = parameter->second[i];
      first = adam.beta1 * first + (1 - adam.beta1) * gradient;
      second = adam.beta2 * second + (1 - adam.beta2) * gradient * gradient;
      const float scale = std::sqrt(second / (1 - power2_)) + adam.epsilon;
      float& value = parameter->value[i];
      value -= decay * value + adam.learning_rate * (first / (1 - power1_)) / scale;
    }
  }
}
