// The layer backward, what every rank holds: the shared experts on their tokens' home rank, and the gradients of gate and
// shared experts over all ranks' tokens in global order. Contract 3.5, 4.3. Test: tests/moe/backward_test.cc.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "argosy/router_backward.h"
#include "moe/backward.h"
#include "numeric/elementary.h"
#include "platform/float_env.h"

namespace argosy {

// Valid tokens' rows side by side: masked ones are never read and take part in nothing.
Status Backward::take_valid_tokens() {
  SharedBackward& shared = b_.shared;
  const int64_t row_bytes = layer_.shape.hidden * size_of(layer_.dtype);
  shared.tokens.clear();
  for (int64_t token = 0; token < tape_.routing.num_tokens; ++token) {
    if (tape_.mask.empty() || tape_.mask[static_cast<size_t>(token)] != 0) {
      shared.tokens.push_back(token);
    }
  }
  shared.num_rows = static_cast<int64_t>(shared.tokens.size());
  for (int64_t at = 0; at < shared.num_rows; ++at) {
    const int64_t token = shared.tokens[static_cast<size_t>(at)];
    const auto bytes = static_cast<size_t>(row_bytes);
    std::memcpy(shared.hidden.data() + at * row_bytes, hidden_.row(token), bytes);
    std::memcpy(shared.d_output.data() + at * row_bytes, d_output_.row(token), bytes);
  }
  // How many rows every rank has.
  const std::vector<int64_t> ones(static_cast<size_t>(layer_.group.num_ranks()), 1);
  const std::byte* all = nullptr;
  ARGOSY_RETURN_IF_ERROR(layer_.row_gather->gather(
      ones, sizeof(int64_t), reinterpret_cast<const std::byte*>(&shared.num_rows), &b_.partial,
      &all));
  shared.rank_rows.resize(ones.size());
  std::memcpy(shared.rank_rows.data(), all, ones.size() * sizeof(int64_t));
  return {};
}

Status Backward::run_shared() {
  SharedBackward& b = b_.shared;
  const int64_t t = b.num_rows, h = layer_.shape.hidden, f = layer_.shape.shared_intermediate;
  if (f == 0) return {};
  const DType dtype = layer_.dtype;
  const int64_t element = size_of(dtype);
  if (t == 0) return {};
  const GemmOptions gemm = layer_.gemm();
  const std::array<int64_t, 1> offsets{0};
  const std::array<int64_t, 1> sizes{t};
  const auto all = [&](AlignedBuffer& buffer, DType type, int64_t cols) {
    return RaggedRows{matrix(buffer, type, t, cols), offsets, sizes};
  };
  const TensorView gate = matrix(b.gate, DType::kF32, t, f), up = matrix(b.up, DType::kF32, t, f);
  const TensorView rows = matrix(b.rows, dtype, t, h), d_rows = matrix(b.d_rows, dtype, t, h);
  const TensorView d_h = matrix(b.d_h, DType::kF32, t, f);
  const TensorView d_gate = matrix(b.d_gate, dtype, t, f), d_up = matrix(b.d_up, dtype, t, f);
  ARGOSY_RETURN_IF_ERROR(grouped_gemm_preactivation(gemm, all(b.hidden, dtype, h),
                                                    layer_.weights.shared_gate_up, gate, up,
                                                    matrix(b.h, dtype, t, f)));
  auto* const scale = reinterpret_cast<float*>(b.scale.data());
  auto* const d_scale = reinterpret_cast<float*>(b.d_scale.data());
  const TensorView scale_view = matrix(b.scale, DType::kF32, t, 1);
  if (layer_.shape.shared_gate) {
    ARGOSY_RETURN_IF_ERROR(
        grouped_gemm(gemm, all(b.h, dtype, f), layer_.weights.shared_down, rows));
    ARGOSY_RETURN_IF_ERROR(gate_logits(matrix(b.hidden, dtype, t, h),
                                       layer_.weights.shared_gate.view(), {}, &layer_.group.pool(),
                                       scale_view));
  }
  layer_.group.pool().parallel_for(t, [&](int64_t at, int) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    const std::byte* const d_out = b.d_output.data() + at * h * element;
    if (!layer_.shape.shared_gate) {
      std::memcpy(d_rows.row(at), d_out, static_cast<size_t>(h * element));
      return;
    }
    const float s = numeric::sigmoid_f32(scale[at]);
    scale_row(dtype, d_out, s, h, d_rows.row(at));
    const auto d_s = static_cast<float>(dot_rows(dtype, d_out, rows.row(at), h));
    d_scale[at] = d_s * (s * (1.0f - s));
  });
  ARGOSY_RETURN_IF_ERROR(
      grouped_dgrad(gemm, all(b.d_rows, dtype, h), layer_.weights.shared_down, d_h));
  ARGOSY_RETURN_IF_ERROR(
      activation_backward(gemm, {gate, up, offsets, sizes, {}}, d_h, {d_gate, d_up, {}, {}}));
  ARGOSY_RETURN_IF_ERROR(grouped_dgrad(gemm, all(b.d_gate, dtype, f), d_up,
                                       layer_.weights.shared_gate_up,
                                       matrix(b.d_hidden, DType::kF32, t, h)));
  if (!layer_.shape.shared_gate) return {};
  GateGradients gradients;
  gradients.d_hidden = matrix(b.d_hidden, DType::kF32, t, h);
  gradients.d_hidden_mode = GradientMode::kAdd;
  return gate_backward({}, layer_.weights.shared_gate.view(), matrix(b.d_scale, DType::kF32, t, 1),
                       &layer_.group.pool(), gradients);
}

// compute(x, y, rows, out, accumulate) over all ranks' rows in global order (exact), or over this rank's, then added in rank
// order (reduced). x and y: [Tv] rows of so many bytes.
template <typename Compute>
Status Backward::replicated(const AlignedBuffer& x, int64_t x_bytes, const AlignedBuffer& y,
                            int64_t y_bytes, const TensorView& out, const Compute& compute) {
  const std::vector<int64_t>& rank_rows = b_.shared.rank_rows;
  if (out_.replicated == ReplicatedGradients::kExact) {
    int64_t total = 0;
    for (const int64_t rows : rank_rows) total += rows;
    const std::byte* all_x = nullptr;
    const std::byte* all_y = nullptr;
    ARGOSY_RETURN_IF_ERROR(
        layer_.row_gather->gather(rank_rows, x_bytes, x.data(), &b_.gathered_x, &all_x));
    ARGOSY_RETURN_IF_ERROR(
        layer_.row_gather->gather(rank_rows, y_bytes, y.data(), &b_.gathered_y, &all_y));
    return compute(all_x, all_y, total, out, out_.accumulate);
  }
  const int64_t bytes = out.num_elements() * size_of(DType::kF32);
  TensorView mine = out;
  mine.data = b_.partial.data();
  ARGOSY_RETURN_IF_ERROR(compute(x.data(), y.data(), b_.shared.num_rows, mine, false));
  const std::vector<int64_t> ones(rank_rows.size(), 1);
  const std::byte* all = nullptr;
  ARGOSY_RETURN_IF_ERROR(layer_.row_gather->gather(ones, bytes, mine.data, &b_.gathered_x, &all));
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const auto* const parts = reinterpret_cast<const float*>(all);
  auto* const sums = out.as<float>();
  for (int64_t i = 0; i < out.num_elements(); ++i) {
    float sum = 0.0f;
    for (size_t rank = 0; rank < ones.size(); ++rank) {
      sum += parts[static_cast<int64_t>(rank) * out.num_elements() + i];
    }
    sums[i] = out_.accumulate ? sums[i] + sum : sum;
  }
  return {};
}

// d_gate[o, h] = chain over tokens of d_logits[t, o] * hidden[t, h]; d_bias: hidden = 1.
Status Backward::gate_gradient(const AlignedBuffer& d_logits, int64_t num_outputs,
                               const TensorView& d_gate, const TensorView& d_bias) {
  const int64_t h = layer_.shape.hidden;
  const DType dtype = layer_.dtype;
  const auto compute = [&](bool is_bias) {
    return [&, is_bias](const std::byte* x, const std::byte* y, int64_t rows, const TensorView& out,
                        bool accumulate) {
      GateGradients gradients;
      (is_bias ? gradients.d_gate_bias : gradients.d_gate) = out;
      gradients.d_gate_mode = accumulate ? GateGradientMode::kAdd : GateGradientMode::kWrite;
      return gate_backward(ConstTensorView(x, dtype, {rows, h}), {},
                           ConstTensorView(y, DType::kF32, {rows, num_outputs}),
                           &layer_.group.pool(), gradients);
    };
  };
  const int64_t x_bytes = h * size_of(dtype);
  const int64_t y_bytes = num_outputs * size_of(DType::kF32);
  if (d_gate.dtype != DType::kUnset) {
    ARGOSY_RETURN_IF_ERROR(
        replicated(b_.shared.hidden, x_bytes, d_logits, y_bytes, d_gate, compute(false)));
  }
  if (d_bias.dtype == DType::kUnset) return {};
  return replicated(b_.shared.hidden, x_bytes, d_logits, y_bytes, d_bias, compute(true));
}

// out[n, k] = sum over tokens of d_y[t, n] x[t, k], one group.
Status Backward::product_gradient(const AlignedBuffer& d_y, int64_t n, const AlignedBuffer& x,
                                  int64_t k, const TensorView& out) {
  if (out.dtype == DType::kUnset) return {};
  const DType dtype = layer_.dtype;
  const auto compute = [&](const std::byte* all_x, const std::byte* all_y, int64_t rows,
                           const TensorView& to, bool accumulate) {
    const std::array<int64_t, 1> offsets{0};
    const std::array<int64_t, 1> sizes{rows};
    const WeightGradientOptions how{.accumulate = accumulate};
    return grouped_wgrad(layer_.gemm(), {ConstTensorView(all_y, dtype, {rows, n}), offsets, sizes},
                         ConstTensorView(all_x, dtype, {rows, k}), how,
                         TensorView(to.data, DType::kF32, {1, n, k}));
  };
  return replicated(x, k * size_of(dtype), d_y, n * size_of(dtype), out, compute);
}

Status Backward::replicated_gradients() {
  SharedBackward& b = b_.shared;
  const int64_t h = layer_.shape.hidden, f = layer_.shape.shared_intermediate;
  const int64_t num_experts = layer_.router.num_experts;
  if (tape_.has_gate || d_logits_.dtype != DType::kUnset) {
    const auto* const from = reinterpret_cast<const float*>(b_.d_logits.data());
    auto* const to = reinterpret_cast<float*>(b.d_logits.data());
    for (int64_t at = 0; at < b.num_rows; ++at) {
      std::copy_n(from + b.tokens[static_cast<size_t>(at)] * num_experts, num_experts,
                  to + at * num_experts);
    }
    ARGOSY_RETURN_IF_ERROR(gate_gradient(b.d_logits, num_experts, out_.d_gate, out_.d_gate_bias));
  }
  if (f == 0) return {};
  ARGOSY_RETURN_IF_ERROR(product_gradient(b.d_rows, h, b.h, f, out_.d_shared_down));
  ARGOSY_RETURN_IF_ERROR(product_gradient(b.d_gate, f, b.hidden, h, out_.d_shared_gate));
  ARGOSY_RETURN_IF_ERROR(product_gradient(b.d_up, f, b.hidden, h, out_.d_shared_up));
  if (!layer_.shape.shared_gate) return {};
  return gate_gradient(b.d_scale, 1, out_.d_shared_scale, {});
}

}  // namespace argosy
