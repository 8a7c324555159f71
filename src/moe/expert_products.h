// The products of this rank's experts, forward and backward, in the layer's number format: operands
// as they are, or quantised on their way into each product.
//
// Quantised (MXFP8): every product's operands have their scales along its own contraction, so each
// tensor that two products take is quantised twice, from the same bf16 values; rows, their gradients
// and h stay bf16 everywhere else. Bits do not depend on rounds: a row's scales are its own, and
// weight gradients take a group's rows over all rounds. Test: tests/moe/quantised_training_test.cc.
#pragma once

#include <span>

#include "argosy/gemm_backward.h"
#include "argosy/moe.h"
#include "argosy/quantised_weights.h"

namespace argosy {

// The experts' weights in both directions.
struct QuantisedExperts {
  BlockFormat format = BlockFormat::kUnset;  // kUnset: there are none
  QuantisedWeights gate_up, down;

  // When the layer is made, and each time its weights change. Allocates: the first time.
  Status take(const GemmOptions& gemm, const MoeWeights& weights);
};

// Refers to what it is made of.
class ExpertProducts {
 public:
  // `codes`: room for an operand of a product. `more_codes`: for the other one of weight gradients, else null. Both are
  // grown where they are too small (tape_size.cc).
  ExpertProducts(const MoeWeights& weights, const QuantisedExperts& quantised, AlignedBuffer* codes,
                 AlignedBuffer* more_codes)
      : weights_(weights), quantised_(quantised), codes_(codes), more_codes_(more_codes) {}

  // h = activation(rows . gate, rows . up) and what entered it, fp32; h may be empty.
  Status gate_up(const GemmOptions& gemm, const RaggedRows& rows, const TensorView& h) const;
  Status preactivation(const GemmOptions& gemm, const RaggedRows& rows, const TensorView& gate,
                       const TensorView& up, const TensorView& h) const;
  Status down(const GemmOptions& gemm, const RaggedRows& h, const TensorView& results) const;

  // d_h = d_rows . down; d_x = d_gate . gate + d_up . up as one product.
  Status down_gradient(const GemmOptions& gemm, const RaggedRows& d_rows,
                       const TensorView& d_h) const;
  Status gate_up_gradient(const GemmOptions& gemm, const RaggedRows& d_gate,
                          const ConstTensorView& d_up, const TensorView& d_x) const;

  // out[g] = d_y[g]^T x[g]. Those that share an x lie next to each other: it is quantised once.
  struct WeightGradient {
    TensorView out;  // without dtype: not wanted
    ConstTensorView d_y, x;
  };
  Status weight_gradients(const GemmOptions& gemm, std::span<const int64_t> offsets,
                          std::span<const int64_t> sizes, const WeightGradientOptions& how,
                          std::span<const WeightGradient> gradients) const;

 private:
  bool is_quantised() const { return quantised_.format != BlockFormat::kUnset; }
  // Forward: by the weights as they are, or rows and weights as codes.
  Status product(const GemmOptions& gemm, const RaggedRows& rows, const PackedWeights& plain,
                 const PackedWeights& codes, const TensorView& out) const;
  // Rows in *codes_, valid until the next call.
  Result<RaggedQuantisedRows> codes_of(const GemmOptions& gemm, const RaggedRows& rows) const;
  Result<ConstQuantisedView> transposed(const GemmOptions& gemm, const ConstTensorView& rows,
                                        const RowGroups& groups, AlignedBuffer* room) const;

  const MoeWeights& weights_;
  const QuantisedExperts& quantised_;
  AlignedBuffer* codes_;
  AlignedBuffer* more_codes_;
};

}  // namespace argosy
