// The MoE layer as contract 3.5 spells it, token by token with the dot-product twins: no ranks, no
// packing, no buffers. The oracle that the layer must equal bit for bit. Also makes small random
// layers and their packed weights.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "argosy/moe.h"
#include "numeric/dot.h"
#include "numeric/elementary.h"

namespace argosy::testing {

// Row-major values of one matrix, kept in fp32; bf16 ones hold values that bf16 represents.
struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values;
  const float* row(int64_t i) const { return values.data() + i * columns; }
};

struct NaiveExpert {
  Matrix gate, up, down;
  std::vector<float> gate_bias = {}, up_bias = {}, down_bias = {};  // all or none
};

struct NaiveLayer {
  RouterSpec router;
  DType dtype = DType::kBF16;  // of hidden states and weights
  DotOrder order = DotOrder::kVdpbf16;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  Activation activation;
  Matrix gate;
  std::vector<float> gate_bias;  // [E] or empty
  std::vector<float> selection_bias;
  std::vector<NaiveExpert> experts;
  std::vector<NaiveExpert> shared;  // none or one
  Matrix shared_gate;               // rows 0 or 1
  bool weights_inside = false;      // the activation
};

inline Matrix random_matrix(std::mt19937_64& random, int64_t rows, int64_t columns, float scale,
                            bool bf16) {
  std::normal_distribution<float> normal(0.0f, scale);
  Matrix matrix{rows, columns, std::vector<float>(static_cast<size_t>(rows * columns))};
  for (float& value : matrix.values) {
    value = normal(random);
    if (bf16) value = BFloat16::from_float(value).to_float();
  }
  return matrix;
}

inline NaiveExpert random_expert(std::mt19937_64& random, int64_t hidden, int64_t width,
                                 bool bf16) {
  return {random_matrix(random, width, hidden, 0.3f, bf16),
          random_matrix(random, width, hidden, 0.3f, bf16),
          random_matrix(random, hidden, width, 0.3f, bf16)};
}

// The values as a tensor of `dtype`.
inline Tensor to_tensor(const Matrix& matrix, DType dtype) {
  Tensor tensor = std::move(Tensor::zeros(dtype, {matrix.rows, matrix.columns})).value();
  for (size_t i = 0; i < matrix.values.size(); ++i) {
    if (dtype == DType::kBF16) {
      tensor.view().as<BFloat16>()[i] = BFloat16::from_float(matrix.values[i]);
    } else {
      tensor.view().as<float>()[i] = matrix.values[i];
    }
  }
  return tensor;
}

// fp32, or bf16 when the values are.
inline Tensor to_vector(const std::vector<float>& values, DType dtype) {
  Matrix row{1, static_cast<int64_t>(values.size()), values};
  const Tensor matrix = to_tensor(row, dtype);
  Tensor vector = std::move(Tensor::zeros(dtype, {row.columns})).value();
  std::memcpy(vector.view().data, matrix.view().data, static_cast<size_t>(matrix.num_bytes()));
  return vector;
}

inline Status pack_biases(const NaiveExpert& expert, int64_t group, DType dtype,
                          PackedWeights* gate_up, PackedWeights* down) {
  ARGOSY_RETURN_IF_ERROR(gate_up->set_bias(group, to_vector(expert.gate_bias, dtype).view(),
                                           to_vector(expert.up_bias, dtype).view()));
  return down->set_bias(group, to_vector(expert.down_bias, dtype).view());
}

inline Status pack_experts(const std::vector<NaiveExpert>& experts, int64_t first, int64_t count,
                           DType dtype, int64_t width, int64_t hidden, PackedWeights* gate_up,
                           PackedWeights* down) {
  ARGOSY_ASSIGN_OR_RETURN(
      *gate_up, PackedWeights::create(PackedWeights::Kind::kGateUp, dtype, count, width, hidden));
  ARGOSY_ASSIGN_OR_RETURN(
      *down, PackedWeights::create(PackedWeights::Kind::kPlain, dtype, count, hidden, width));
  const bool has_bias = !experts[0].down_bias.empty();
  if (has_bias) {
    ARGOSY_RETURN_IF_ERROR(gate_up->add_bias());
    ARGOSY_RETURN_IF_ERROR(down->add_bias());
  }
  for (int64_t i = 0; i < count; ++i) {
    const NaiveExpert& expert = experts[static_cast<size_t>(first + i)];
    ARGOSY_RETURN_IF_ERROR(gate_up->set_group(i, to_tensor(expert.gate, dtype).view(),
                                              to_tensor(expert.up, dtype).view()));
    ARGOSY_RETURN_IF_ERROR(down->set_group(i, to_tensor(expert.down, dtype).view()));
    if (has_bias) {
      ARGOSY_RETURN_IF_ERROR(pack_biases(expert, i, dtype, gate_up, down));
    }
  }
  return {};
}

inline Result<MoeWeights> weights_for_rank(const NaiveLayer& layer, int rank, int num_ranks) {
  MoeWeights weights;
  weights.gate = to_tensor(layer.gate, layer.dtype);
  weights.activation = layer.activation;
  if (!layer.gate_bias.empty()) weights.gate_bias = to_vector(layer.gate_bias, layer.dtype);
  if (!layer.selection_bias.empty()) {
    const auto experts = static_cast<int64_t>(layer.selection_bias.size());
    ARGOSY_ASSIGN_OR_RETURN(weights.selection_bias, Tensor::zeros(DType::kF32, {experts}));
    std::memcpy(weights.selection_bias.view().data, layer.selection_bias.data(),
                layer.selection_bias.size() * sizeof(float));
  }
  const Placement placement{layer.router.num_experts, num_ranks, 0};
  weights.first_expert = placement.begin(rank);
  ARGOSY_RETURN_IF_ERROR(pack_experts(layer.experts, placement.begin(rank),
                                      placement.num_local(rank), layer.dtype, layer.intermediate,
                                      layer.hidden, &weights.gate_up, &weights.down));
  if (!layer.shared.empty()) {
    ARGOSY_RETURN_IF_ERROR(pack_experts(layer.shared, 0, 1, layer.dtype, layer.shared[0].gate.rows,
                                        layer.hidden, &weights.shared_gate_up,
                                        &weights.shared_down));
  }
  if (layer.shared_gate.rows > 0) weights.shared_gate = to_tensor(layer.shared_gate, layer.dtype);
  return weights;
}

inline NaiveLayer random_layer(uint64_t seed, DType dtype, DotOrder order, int64_t num_experts,
                               int64_t top_k, int64_t hidden, int64_t intermediate,
                               bool with_shared, bool with_shared_gate) {
  std::mt19937_64 random(seed);
  const bool bf16 = dtype == DType::kBF16;
  NaiveLayer layer;
  layer.router = std::move(router_preset("deepseek_v3", num_experts, top_k)).value();
  layer.router.routed_scaling_factor = 2.5f;
  layer.dtype = dtype;
  layer.order = order;
  layer.hidden = hidden;
  layer.intermediate = intermediate;
  layer.gate = random_matrix(random, num_experts, hidden, 0.5f, bf16);
  layer.selection_bias = random_matrix(random, 1, num_experts, 0.2f, false).values;
  for (int64_t i = 0; i < num_experts; ++i) {
    layer.experts.push_back(random_expert(random, hidden, intermediate, bf16));
  }
  if (with_shared) layer.shared.push_back(random_expert(random, hidden, intermediate + 5, bf16));
  if (with_shared_gate) layer.shared_gate = random_matrix(random, 1, hidden, 0.5f, bf16);
  return layer;
}

// As gpt-oss: softmax over the chosen, biases everywhere, a clamped activation whose limit random values pass.
inline NaiveLayer random_gpt_oss_layer(uint64_t seed, DType dtype, DotOrder order,
                                       int64_t num_experts, int64_t top_k, int64_t hidden,
                                       int64_t intermediate) {
  NaiveLayer layer = random_layer(seed, dtype, order, num_experts, top_k, hidden, intermediate,
                                  /*with_shared=*/false, /*with_shared_gate=*/false);
  std::mt19937_64 random(seed + 1);
  const bool bf16 = dtype == DType::kBF16;
  layer.router = std::move(router_preset("gpt_oss", num_experts, top_k)).value();
  layer.selection_bias.clear();
  layer.gate_bias = random_matrix(random, 1, num_experts, 0.5f, bf16).values;
  layer.activation = {ActivationKind::kClampedSwiGlu, 1.5f, 1.702f};
  for (NaiveExpert& expert : layer.experts) {
    expert.gate_bias = random_matrix(random, 1, intermediate, 0.5f, bf16).values;
    expert.up_bias = random_matrix(random, 1, intermediate, 0.5f, bf16).values;
    expert.down_bias = random_matrix(random, 1, hidden, 0.5f, bf16).values;
  }
  return layer;
}

// x . row, by the layer's dtype and order.
inline float naive_dot(const NaiveLayer& layer, const float* x, const float* w, int64_t k) {
  const auto size = static_cast<size_t>(k);
  if (layer.dtype == DType::kF32) return numeric::dot_f32(std::span(x, size), std::span(w, size));
  std::vector<BFloat16> x16(size);
  std::vector<BFloat16> w16(size);
  for (size_t i = 0; i < size; ++i) {
    x16[i] = BFloat16::from_float(x[i]);
    w16[i] = BFloat16::from_float(w[i]);
  }
  return layer.order == DotOrder::kAmx ? numeric::dot_amx(x16, w16)
                                       : numeric::dot_vdpbf16(x16, w16);
}

inline float naive_round(const NaiveLayer& layer, float value) {
  return layer.dtype == DType::kBF16 ? BFloat16::from_float(value).to_float() : value;
}

inline float naive_activation(const Activation& activation, float gate, float up, float weight) {
  if (activation.kind == ActivationKind::kSwiGlu) return (weight * numeric::silu_f32(gate)) * up;
  const float limit = activation.limit;
  const float g = gate > limit ? limit : gate;
  const float a = weight * (g * numeric::sigmoid_f32(activation.alpha * g));
  return std::fma(a, up > limit ? limit : (up < -limit ? -limit : up), a);
}

// `weight` inside the activation.
inline std::vector<float> naive_expert(const NaiveLayer& layer, const NaiveExpert& expert,
                                       const float* x, float weight = 1.0f) {
  const int64_t width = expert.gate.rows;
  std::vector<float> inner(static_cast<size_t>(width));
  const auto add = [](float product, const std::vector<float>& bias, int64_t i) {
    return bias.empty() ? product : product + bias[static_cast<size_t>(i)];
  };
  for (int64_t i = 0; i < width; ++i) {
    const float gate =
        add(naive_dot(layer, x, expert.gate.row(i), layer.hidden), expert.gate_bias, i);
    const float up = add(naive_dot(layer, x, expert.up.row(i), layer.hidden), expert.up_bias, i);
    inner[static_cast<size_t>(i)] =
        naive_round(layer, naive_activation(layer.activation, gate, up, weight));
  }
  std::vector<float> row(static_cast<size_t>(layer.hidden));
  for (int64_t i = 0; i < layer.hidden; ++i) {
    row[static_cast<size_t>(i)] = naive_round(
        layer, add(naive_dot(layer, inner.data(), expert.down.row(i), width), expert.down_bias, i));
  }
  return row;
}

// One token's output given its experts and weights.
inline std::vector<float> naive_token(const NaiveLayer& layer, const float* x,
                                      const int32_t* experts, const float* weights) {
  const auto hidden = static_cast<size_t>(layer.hidden);
  std::vector<float> acc(hidden, 0.0f);
  if (!layer.shared.empty()) {
    acc = naive_expert(layer, layer.shared[0], x);
    if (layer.shared_gate.rows > 0) {
      const float scale = numeric::sigmoid_f32(
          numeric::dot_f32(std::span(x, hidden), std::span(layer.shared_gate.row(0), hidden)));
      for (float& value : acc) value *= scale;
    }
  }
  for (int64_t k = 0; k < layer.router.top_k; ++k) {
    if (experts[k] < 0) continue;
    const std::vector<float> row =
        naive_expert(layer, layer.experts[static_cast<size_t>(experts[k])], x,
                     layer.weights_inside ? weights[k] : 1.0f);
    for (size_t i = 0; i < hidden; ++i) {
      acc[i] = layer.weights_inside ? acc[i] + row[i] : std::fma(weights[k], row[i], acc[i]);
    }
  }
  for (float& value : acc) value = naive_round(layer, value);
  return acc;
}

// The whole layer on [T, hidden]; logits by the twin, routing by route(), which has oracles of its
// own.
inline Matrix naive_forward(const NaiveLayer& layer, const Matrix& hidden, const uint8_t* mask) {
  const int64_t num_experts = layer.router.num_experts;
  const auto width = static_cast<size_t>(layer.hidden);
  Matrix logits{hidden.rows, num_experts,
                std::vector<float>(static_cast<size_t>(hidden.rows * num_experts))};
  for (int64_t token = 0; token < hidden.rows; ++token) {
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      logits.values[static_cast<size_t>(token * num_experts + expert)] = numeric::dot_f32(
          std::span(hidden.row(token), width), std::span(layer.gate.row(expert), width));
      if (!layer.gate_bias.empty()) {
        logits.values[static_cast<size_t>(token * num_experts + expert)] +=
            layer.gate_bias[static_cast<size_t>(expert)];
      }
    }
  }
  RouterInput input;
  input.logits = ConstTensorView(logits.values.data(), DType::kF32, {hidden.rows, num_experts});
  if (!layer.selection_bias.empty()) {
    input.selection_bias = ConstTensorView(layer.selection_bias.data(), DType::kF32, {num_experts});
  }
  input.mask = mask;
  Routing routing;
  const Status status = route(layer.router, input, nullptr, &routing);
  Matrix output{hidden.rows, layer.hidden, {}};
  if (!status.ok()) return output;
  output.values.assign(static_cast<size_t>(hidden.rows * layer.hidden), 0.0f);
  for (int64_t token = 0; token < hidden.rows; ++token) {
    if (mask != nullptr && mask[token] == 0) continue;
    const std::vector<float> row =
        naive_token(layer, hidden.row(token), routing.topk_idx.data() + token * layer.router.top_k,
                    routing.topk_weights.values.data() + token * layer.router.top_k);
    std::copy(row.begin(), row.end(), output.values.begin() + token * layer.hidden);
  }
  return output;
}

}  // namespace argosy::testing
