// See backward_reference.h. Sums are functions that are not inlined: no compiler can move their
// arithmetic out of the floating-point environment of the call.
#include "gemm/backward_reference.h"

#include <cstring>

#include "argosy/number_formats.h"
#include "gemm/gradient_store.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "gemm/row_codes.h"
#include "numeric/activation.h"
#include "numeric/dot.h"
#include "platform/float_env.h"

namespace argosy::gemm {
namespace {

float element_at(const ConstTensorView& view, int64_t row, int64_t column) {
  return load_element(view.row(row) + column * size_of(view.dtype), view.dtype);
}

// One product by the order that dtype and options ask for.
template <typename X, typename W>
__attribute__((noinline)) float sum_of(const GemmOptions& options, DType rows, int64_t k,
                                       const X& x, const W& w) {
  const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
  __asm__ volatile("" : : : "memory");
  float sum = 0;
  if (rows == DType::kF32) {
    sum = numeric::dot_f32_of(k, x, w);
  } else if (options.dot_order == DotOrder::kAmx) {
    sum = numeric::dot_amx_of(k, x, w);
  } else {
    sum = numeric::dot_vdpbf16_of(k, x, w);
  }
  __asm__ volatile("" : "+x"(sum) : : "memory");
  return sum;
}

// numeric::add_scaled of two e8m0 scales.
__attribute__((noinline)) float added(float partial, float scale_x, float scale_w, float acc) {
  const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
  __asm__ volatile("" : "+x"(partial), "+x"(scale_x), "+x"(scale_w), "+x"(acc) : : "memory");
  float sum = numeric::add_scaled(partial, scale_x, scale_w, true, acc);
  __asm__ volatile("" : "+x"(sum) : : "memory");
  return sum;
}

float weight_at(const PackedWeights& w, size_t group, const PanelColumn& at, int64_t k) {
  const std::byte* panel = w.panel(static_cast<int64_t>(group), at.panel);
  return w.dtype() == DType::kF32 ? f32_at(panel, k, at.column)
                                  : bf16_at(panel, k, at.column).to_float();
}

template <typename Body>
void for_each_row(std::span<const int64_t> offsets, std::span<const int64_t> sizes, Body body) {
  for (size_t g = 0; g < sizes.size(); ++g) {
    for (int64_t row = offsets[g]; row < offsets[g] + sizes[g]; ++row) body(g, row);
  }
}

float activated(const Activation& activation, float gate, float up) {
  const numeric::ActivationConstants c{activation.limit, activation.alpha};
  switch (activation.kind) {
    case ActivationKind::kSwiGlu:
      return numeric::SwiGlu::join(c, numeric::SwiGlu::value(c, gate), up);
    case ActivationKind::kClampedSwiGlu:
      return numeric::ClampedSwiGlu::join(c, numeric::ClampedSwiGlu::value(c, gate), up);
    case ActivationKind::kGeGlu:
      return numeric::GeGlu::join(c, numeric::GeGlu::value(c, gate), up);
    case ActivationKind::kGeGluTanh:
      return numeric::GeGluTanh::join(c, numeric::GeGluTanh::value(c, gate), up);
    case ActivationKind::kRelu2Glu:
      return numeric::Relu2Glu::join(c, numeric::Relu2Glu::value(c, gate), up);
  }
  return 0;
}

}  // namespace

void reference_dgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView* d_up,
                     const PackedWeights& w, const TensorView& d_x) {
  // Of each operand: zeros fill its last block.
  const int64_t padded_n = (w.n() + kBlockK - 1) / kBlockK * kBlockK;
  for_each_row(d_y.offsets, d_y.sizes, [&](size_t g, int64_t row) {
    for (int64_t k = 0; k < w.k(); ++k) {
      const auto gradient = [&](int64_t i) {
        const int64_t n = i % padded_n;
        return n < w.n() ? element_at(i < padded_n ? d_y.rows : *d_up, row, n) : 0.0f;
      };
      const auto weight = [&](int64_t i) {
        const int64_t n = i % padded_n;
        if (n >= w.n()) return 0.0f;
        if (d_up == nullptr) return weight_at(w, g, plain_column(n), k);
        return weight_at(w, g, i < padded_n ? gate_column(n) : up_column(n), k);
      };
      const int64_t length = d_up == nullptr ? padded_n : 2 * padded_n;
      const float sum = sum_of(options, d_y.rows.dtype, length, gradient, weight);
      store_element(d_x.row(row) + k * size_of(d_x.dtype), d_x.dtype, sum);
    }
  });
}

void reference_wgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView& x,
                     const WeightGradientOptions& gradient, const TensorView& out) {
  for (size_t g = 0; g < d_y.sizes.size(); ++g) {
    const int64_t first = d_y.offsets[g], size = d_y.sizes[g];
    if (size == 0 && gradient.accumulate) continue;
    const float alpha = gradient.alpha.empty() || size == 0 ? 1.0f : gradient.alpha[g];
    for (int64_t n = 0; n < out.dim(1); ++n) {
      for (int64_t k = 0; k < out.dim(2); ++k) {
        const float sum = sum_of(
            options, x.dtype, size, [&](int64_t r) { return element_at(d_y.rows, first + r, n); },
            [&](int64_t r) { return element_at(x, first + r, k); });
        std::byte* to =
            out.row(static_cast<int64_t>(g)) + (n * out.stride(1) + k) * size_of(out.dtype);
        store_gradient(to, out.dtype, sum, alpha, gradient.accumulate);
      }
    }
  }
}

void reference_wgrad(const GemmOptions& options, const RaggedQuantisedColumns& d_y,
                     const ConstQuantisedView& x, std::span<const int64_t> blocks,
                     const WeightGradientOptions& gradient, const TensorView& out) {
  for (size_t g = 0; g < d_y.sizes.size(); ++g) {
    const int64_t first = d_y.offsets[g], size = d_y.sizes[g];
    if (size == 0 && gradient.accumulate) continue;
    const float alpha = gradient.alpha.empty() || size == 0 ? 1.0f : gradient.alpha[g];
    const auto code = [&](const ConstQuantisedView& view, int64_t line, int64_t row) {
      const auto* const codes = reinterpret_cast<const uint8_t*>(view.codes.row(line));
      return decode_element(ElementFormat::kE4M3, codes[first + row]);
    };
    const auto scale = [&](const ConstQuantisedView& view, int64_t line, int64_t row) {
      return row_scale_of(view.scales.row(line)[blocks[g] + row / kBlockK]);
    };
    for (int64_t n = 0; n < out.dim(1); ++n) {
      for (int64_t k = 0; k < out.dim(2); ++k) {
        const auto partial = [&](int64_t row, int64_t count) {
          return sum_of(
              options, DType::kBF16, count,
              [&](int64_t r) { return code(d_y.columns, n, row + r); },
              [&](int64_t r) { return code(x, k, row + r); });
        };
        const auto add = [&](float block, int64_t row, float acc) {
          return added(block, scale(d_y.columns, n, row), scale(x, k, row), acc);
        };
        const float sum = numeric::dot_blocks_of(size, kBlockK, partial, add);
        std::byte* to =
            out.row(static_cast<int64_t>(g)) + (n * out.stride(1) + k) * size_of(out.dtype);
        store_gradient(to, out.dtype, sum, alpha, gradient.accumulate);
      }
    }
  }
}

void reference_preactivation(const GemmOptions& options, const RaggedRows& x,
                             const PackedWeights& w, const TensorView& gate, const TensorView& up,
                             const TensorView& h) {
  for_each_row(x.offsets, x.sizes, [&](size_t g, int64_t row) {
    for (int64_t n = 0; n < w.n(); ++n) {
      const auto product = [&](const PanelColumn& at) {
        const float sum = sum_of(
            options, x.rows.dtype, w.k(), [&](int64_t k) { return element_at(x.rows, row, k); },
            [&](int64_t k) { return weight_at(w, g, at, k); });
        const float* bias = w.bias_of_panel(static_cast<int64_t>(g), at.panel);
        return bias == nullptr ? sum : sum + bias[at.column];
      };
      const float gate_value = product(gate_column(n)), up_value = product(up_column(n));
      store_element(gate.row(row) + n * size_of(gate.dtype), gate.dtype, gate_value);
      store_element(up.row(row) + n * size_of(up.dtype), up.dtype, up_value);
      if (h.data == nullptr) continue;
      store_element(h.row(row) + n * size_of(h.dtype), h.dtype,
                    activated(options.activation, gate_value, up_value));
    }
  });
}

}  // namespace argosy::gemm
