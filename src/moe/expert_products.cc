// See expert_products.h.
#include "moe/expert_products.h"

#include <cstring>

namespace argosy {
namespace {

// Codes, then scales, dense: what the layout asks for.
int64_t bytes_of(const QuantisedLayout& layout) {
  return layout.code_bytes() + layout.scale_bytes();
}

QuantisedView view_in(AlignedBuffer* room, const QuantisedLayout& layout) {
  const BlockFormatInfo info = info_of(layout.format);
  QuantisedView view;
  view.format = layout.format;
  view.rows = layout.rows;
  view.cols = layout.cols;
  view.codes = TensorView(room->data(), info.code_dtype, {layout.codes[0], layout.codes[1]});
  view.scales = TensorView(room->data() + layout.code_bytes(), info.scale_dtype,
                           {layout.scales[0], layout.scales[1]});
  return view;
}

// Columns [first, first + count) of a view, first a multiple of the block.
QuantisedView columns_of(const QuantisedView& view, int64_t first, int64_t count) {
  const int64_t block = info_of(view.format).block_cols;
  QuantisedView part = view;
  part.cols = count;
  part.codes.data += first;
  part.codes.shape[1] = count;
  part.scales.data += first / block;
  part.scales.shape[1] = (count + block - 1) / block;
  return part;
}

QuantiseOptions quantise_options(const GemmOptions& gemm) {
  QuantiseOptions options;
  options.level = gemm.level;
  options.pool = gemm.pool;
  return options;
}

}  // namespace

Status QuantisedExperts::take(const GemmOptions& gemm, const MoeWeights& weights) {
  if (format == BlockFormat::kUnset) return {};
  const QuantiseOptions options = quantise_options(gemm);
  ARGOSY_RETURN_IF_ERROR(quantise_weights(options, weights.gate_up, format, &gate_up));
  return quantise_weights(options, weights.down, format, &down);
}

Result<RaggedQuantisedRows> ExpertProducts::codes_of(const GemmOptions& gemm,
                                                     const RaggedRows& rows) const {
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(quantised_.format, rows.rows.dim(0), rows.rows.dim(1)));
  ARGOSY_RETURN_IF_ERROR(codes_->reserve(bytes_of(layout)));
  const QuantisedView view = view_in(codes_, layout);
  ARGOSY_RETURN_IF_ERROR(
      quantise(quantise_options(gemm), rows.rows, view, {rows.offsets, rows.sizes}));
  return RaggedQuantisedRows{view, rows.offsets, rows.sizes};
}

Status ExpertProducts::product(const GemmOptions& gemm, const RaggedRows& rows,
                               const PackedWeights& plain, const PackedWeights& codes,
                               const TensorView& out) const {
  if (!is_quantised()) return grouped_gemm(gemm, rows, plain, out);
  ARGOSY_ASSIGN_OR_RETURN(const RaggedQuantisedRows quantised, codes_of(gemm, rows));
  return grouped_gemm(gemm, quantised, codes, out);
}

Status ExpertProducts::gate_up(const GemmOptions& gemm, const RaggedRows& rows,
                               const TensorView& h) const {
  return product(gemm, rows, weights_.gate_up, quantised_.gate_up.along_k, h);
}

Status ExpertProducts::preactivation(const GemmOptions& gemm, const RaggedRows& rows,
                                     const TensorView& gate, const TensorView& up,
                                     const TensorView& h) const {
  if (!is_quantised()) {
    return grouped_gemm_preactivation(gemm, rows, weights_.gate_up, gate, up, h);
  }
  ARGOSY_ASSIGN_OR_RETURN(const RaggedQuantisedRows codes, codes_of(gemm, rows));
  return grouped_gemm_preactivation(gemm, codes, quantised_.gate_up.along_k, gate, up, h);
}

Status ExpertProducts::down(const GemmOptions& gemm, const RaggedRows& h,
                            const TensorView& results) const {
  return product(gemm, h, weights_.down, quantised_.down.along_k, results);
}

Status ExpertProducts::down_gradient(const GemmOptions& gemm, const RaggedRows& d_rows,
                                     const TensorView& d_h) const {
  if (!is_quantised()) return grouped_dgrad(gemm, d_rows, weights_.down, d_h);
  ARGOSY_ASSIGN_OR_RETURN(const RaggedQuantisedRows codes, codes_of(gemm, d_rows));
  return grouped_gemm(gemm, codes, quantised_.down.along_n, d_h);
}

Status ExpertProducts::gate_up_gradient(const GemmOptions& gemm, const RaggedRows& d_gate,
                                        const ConstTensorView& d_up, const TensorView& d_x) const {
  if (!is_quantised()) return grouped_dgrad(gemm, d_gate, d_up, weights_.gate_up, d_x);
  const int64_t f = d_gate.rows.dim(1);
  const GradientColumns columns = gradient_columns(PackedWeights::Kind::kGateUp, f);
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(quantised_.format, d_gate.rows.dim(0), columns.total));
  ARGOSY_RETURN_IF_ERROR(codes_->reserve(bytes_of(layout)));
  const QuantisedView joined = view_in(codes_, layout);
  const RowGroups groups{d_gate.offsets, d_gate.sizes};
  const QuantiseOptions options = quantise_options(gemm);
  ARGOSY_RETURN_IF_ERROR(quantise(options, d_gate.rows, columns_of(joined, 0, f), groups));
  ARGOSY_RETURN_IF_ERROR(quantise(options, d_up, columns_of(joined, columns.up, f), groups));
  // Zeros fill each operand's last block.
  const auto rest = static_cast<size_t>(columns.up - f);
  for (int64_t row = 0; rest > 0 && row < joined.rows; ++row) {
    std::byte* const codes = joined.codes.row(row);
    std::memset(codes + f, 0, rest);
    std::memset(codes + columns.up + f, 0, rest);
  }
  return grouped_gemm(gemm, RaggedQuantisedRows{joined, d_gate.offsets, d_gate.sizes},
                      quantised_.gate_up.along_n, d_x);
}

Result<ConstQuantisedView> ExpertProducts::transposed(const GemmOptions& gemm,
                                                      const ConstTensorView& rows,
                                                      const RowGroups& groups,
                                                      AlignedBuffer* room) const {
  ARGOSY_ASSIGN_OR_RETURN(
      const QuantisedLayout layout,
      quantised_layout(quantised_.format, rows.dim(1), rows.dim(0), groups, GroupAxis::kCols));
  ARGOSY_RETURN_IF_ERROR(room->reserve(bytes_of(layout)));
  const QuantisedView view = view_in(room, layout);
  ARGOSY_RETURN_IF_ERROR(transpose_quantise(quantise_options(gemm), rows, view, groups));
  return ConstQuantisedView(view);
}

Status ExpertProducts::weight_gradients(const GemmOptions& gemm, std::span<const int64_t> offsets,
                                        std::span<const int64_t> sizes,
                                        const WeightGradientOptions& how,
                                        std::span<const WeightGradient> gradients) const {
  const std::byte* in_codes = nullptr;  // whose transposed codes there are
  ConstQuantisedView x;
  for (const WeightGradient& one : gradients) {
    if (one.out.dtype == DType::kUnset || one.out.dim(0) == 0) continue;
    if (!is_quantised()) {
      ARGOSY_RETURN_IF_ERROR(grouped_wgrad(gemm, {one.d_y, offsets, sizes}, one.x, how, one.out));
      continue;
    }
    const RowGroups groups{offsets, sizes};
    if (in_codes == nullptr || in_codes != one.x.data) {
      ARGOSY_ASSIGN_OR_RETURN(x, transposed(gemm, one.x, groups, codes_));
      in_codes = one.x.data;
    }
    ARGOSY_ASSIGN_OR_RETURN(const ConstQuantisedView d_y,
                            transposed(gemm, one.d_y, groups, more_codes_));
    ARGOSY_RETURN_IF_ERROR(grouped_wgrad(gemm, {d_y, offsets, sizes}, x, how, one.out));
  }
  return {};
}

}  // namespace argosy
