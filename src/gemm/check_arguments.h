// What grouped_gemm refuses, and the rows that all of its kinds become. Test: tests/gemm/arguments_test.cc,
// quantised_rows_test.cc.
#pragma once

#include "argosy/gemm.h"

namespace argosy::gemm {

// Rows of any kind. `values` are bf16 or fp32 without scales (format kUnset), else codes; or the rows lie at `rows_at`.
struct GroupedRows {
  ConstTensorView values = {};
  ConstTensorView scales = {};
  BlockFormat format = BlockFormat::kUnset;
  std::span<const int64_t> offsets = {};
  std::span<const int64_t> sizes = {};
  std::span<const std::byte* const> rows_at = {};
  PayloadLayout payload = {};  // of those

  bool is_scattered() const { return payload.hidden > 0; }
  bool has_scales() const { return format != BlockFormat::kUnset; }
  // Of the numbers that are multiplied: codes become bf16.
  DType dtype() const {
    if (is_scattered()) return payload.dtype;
    return has_scales() ? DType::kBF16 : values.dtype;
  }
};

// Rows, weights, output and groups, in this order; `options` without its level.
Status check_arguments(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                       const TensorView& out);
Status check_arguments(const GemmOptions& options, const RaggedQuantisedRows& x,
                       const PackedWeights& w, const TensorView& out);
Status check_arguments(const GemmOptions& options, const ScatteredRows& x, const PackedWeights& w,
                       const TensorView& out);
Status check_arguments(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                       std::span<std::byte* const> out);

// Of quantised rows; h is wanted where it has data.
Status check_quantised_preactivation(const GemmOptions& options, const RaggedQuantisedRows& x,
                                     const PackedWeights& w, const TensorView& gate,
                                     const TensorView& up, const TensorView& h);

// Parts of the above, for other calls on rows and packed weights.

// bf16 or fp32 [*, columns], unit stride in the columns, aligned, in memory that there can be.
Status check_matrix(const char* name, const ConstTensorView& view, int64_t columns);
// The rows of `out` do not overlap each other.
Status check_output_rows(const ConstTensorView& out);
// The bytes of `out` do not overlap those read.
Status check_apart(const ConstTensorView& read, const ConstTensorView& out);
// The weights exist, and go with rows of this dtype.
Status check_weights(const GemmOptions& options, DType rows, const PackedWeights& w);
// bf16 rows need an order.
Status check_dot_order(const GemmOptions& options, DType rows);
Status check_groups(std::span<const int64_t> offsets, std::span<const int64_t> sizes,
                    int64_t num_rows, int64_t num_groups);

}  // namespace argosy::gemm
