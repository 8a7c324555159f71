// See check_arguments.h. Nothing is written and no row is read but scales, of rows that belong to a group.
#include "gemm/check_arguments.h"

#include <algorithm>

#include "base/error.h"
#include "gemm/row_codes.h"
#include "quant/scales.h"
#include "quant/view_checks.h"

namespace argosy::gemm {
namespace {

// No memory is so large; addresses are computed without a check from here on.
Status check_extent(const char* name, const ConstTensorView& view) {
  int64_t bytes = 0;
  const bool overflows = __builtin_mul_overflow(view.dim(0), view.stride(0), &bytes) ||
                         __builtin_mul_overflow(bytes, size_of(view.dtype), &bytes) ||
                         __builtin_mul_overflow(view.dim(1), size_of(view.dtype), &bytes);
  if (overflows) return base::invalid("{} is {}: more than 2^63 bytes", name, describe(view));
  return {};
}

}  // namespace

Status check_matrix(const char* name, const ConstTensorView& view, int64_t columns) {
  if (view.num_dims != 2) return base::invalid("{} is {}, not a matrix", name, describe(view));
  if (view.dtype != DType::kBF16 && view.dtype != DType::kF32) {
    return base::invalid("{} is {}, its dtype must be BF16 or F32", name, describe(view));
  }
  if (view.dim(0) < 0 || view.dim(1) != columns) {
    return base::invalid("{} is {}, expected {} columns", name, describe(view), columns);
  }
  if (view.dim(1) > 1 && view.stride(1) != 1) {
    return base::invalid("{} is {}, its columns must have stride 1", name, describe(view));
  }
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (address % static_cast<uintptr_t>(size_of(view.dtype)) != 0) {
    return base::invalid("{} starts at address {:#x}, which is not aligned to {} bytes", name,
                         address, size_of(view.dtype));
  }
  if (view.data == nullptr && view.dim(0) > 0) {
    return base::invalid("{} {} has no data", name, describe(view));
  }
  return check_extent(name, view);
}

namespace {

// First and last byte address + 1 that the view can touch. Precondition: not empty.
std::pair<uintptr_t, uintptr_t> byte_range(const ConstTensorView& view) {
  const auto base = reinterpret_cast<uintptr_t>(view.data);
  const auto last = reinterpret_cast<uintptr_t>(view.row(view.dim(0) - 1));
  const auto row_bytes = static_cast<uintptr_t>(view.dim(1) * size_of(view.dtype));
  return {std::min(base, last), std::max(base, last) + row_bytes};
}

}  // namespace

Status check_output_rows(const ConstTensorView& out) {
  if (out.dim(0) > 1 && out.stride(0) < out.dim(1) && -out.stride(0) < out.dim(1)) {
    return base::invalid("out has row stride {} and {} columns: its rows overlap", out.stride(0),
                         out.dim(1));
  }
  return {};
}

Status check_apart(const ConstTensorView& read, const ConstTensorView& out) {
  if (out.dim(0) == 0 || read.dim(0) == 0) return {};
  const auto [x_begin, x_end] = byte_range(read);
  const auto [out_begin, out_end] = byte_range(out);
  if (x_begin < out_end && out_begin < x_end) {
    return base::invalid("out [{:#x}, {:#x}) overlaps the rows [{:#x}, {:#x})", out_begin, out_end,
                         x_begin, x_end);
  }
  return {};
}

Status check_groups(std::span<const int64_t> offsets, std::span<const int64_t> sizes,
                    int64_t num_rows, int64_t num_groups) {
  const auto groups = static_cast<size_t>(num_groups);
  if (sizes.size() != groups || (offsets.size() != groups && offsets.size() != groups + 1)) {
    return base::invalid("{} sizes and {} offsets for {} groups (offsets: {} or {})", sizes.size(),
                         offsets.size(), groups, groups, groups + 1);
  }
  int64_t end = 0;
  for (size_t g = 0; g < groups; ++g) {
    const int64_t offset = offsets[g];
    const int64_t size = sizes[g];
    if (offset < 0 || size < 0 || offset > num_rows || size > num_rows - offset) {
      return base::invalid("group {} has offset {} and size {}, outside of the {} rows", g, offset,
                           size, num_rows);
    }
    if (offset < end) {
      return base::invalid("group {} starts at row {}, before the end {} of the groups before it",
                           g, offset, end);
    }
    end = offset + size;
  }
  if (offsets.size() > groups && offsets[groups] < end) {
    return base::invalid("the last offset is {}, before the end {} of the groups", offsets[groups],
                         end);
  }
  return {};
}

Status check_dot_order(const GemmOptions& options, DType rows) {
  if (rows == DType::kBF16 && options.dot_order != DotOrder::kAmx &&
      options.dot_order != DotOrder::kVdpbf16) {
    return base::invalid("dot_order is {}; bf16 rows need amx or vdpbf16",
                         name_of(options.dot_order));
  }
  return {};
}

Status check_weights(const GemmOptions& options, DType rows, const PackedWeights& w) {
  if (w.dtype() == DType::kUnset) return base::invalid("the weights were never created");
  if (w.num_groups() > 0 && w.panel(0, 0) == nullptr) {
    return base::invalid("the weights of {} groups have no data (moved from)", w.num_groups());
  }
  if (rows == DType::kBF16 && w.dtype() == DType::kF32) {
    return base::invalid("BF16 rows with F32 weights: fp32 weights need fp32 rows");
  }
  return check_dot_order(options, rows);
}

namespace {

Status check_formats(const ConstQuantisedView& rows, int64_t k) {
  if (rows.format == BlockFormat::kUnset) return base::invalid("quantised rows need a format");
  if (!are_rows_multiplied(rows.format)) {
    return base::error(
        StatusCode::kUnsupported,
        "rows in {} cannot be multiplied, only e4m3_1x128, e4m3_1x128_e8m0, mxfp8 and "
        "mxfp8_ceil",
        name_of(rows.format));
  }
  if (rows.rows < 0 || rows.cols != k) {
    return base::invalid("the rows are {} [{}, {}], the weights ask for {} columns",
                         name_of(rows.format), rows.rows, rows.cols, k);
  }
  return {};
}

// Any e8m0 code is a scale; of fp32, those of the groups' rows are looked at.
Status check_scales(const RaggedQuantisedRows& x) {
  const BlockFormatInfo info = info_of(x.rows.format);
  if (info.scale_dtype != DType::kF32) return {};
  for (size_t g = 0; g < x.sizes.size(); ++g) {
    for (int64_t row = x.offsets[g]; row < x.offsets[g] + x.sizes[g]; ++row) {
      for (int64_t block = 0; block < x.rows.scales.dim(1); ++block) {
        const float scale = quant::scale_at(info, x.rows.scales.row(row), block);
        if (quant::fault_of(scale) != quant::ScaleFault::kOutsideRule) continue;
        return base::error(StatusCode::kCorruptData,
                           "the scale of row {} block {} is {}: a scale is finite and not negative",
                           row, block, scale);
      }
    }
  }
  return {};
}

// Every row of a group has an address, aligned.
template <typename Rows, typename Byte>
Status check_addresses(const char* name, const Rows& x, Byte* const* rows, int64_t alignment) {
  for (size_t g = 0; g < x.sizes.size(); ++g) {
    for (int64_t row = x.offsets[g]; row < x.offsets[g] + x.sizes[g]; ++row) {
      const auto address = reinterpret_cast<uintptr_t>(rows[row]);
      if (address == 0) return base::invalid("{} {} of group {} has no data", name, row, g);
      if (address % static_cast<uintptr_t>(alignment) != 0) {
        return base::invalid("{} {} of group {} is at address {:#x}, not aligned to {} bytes", name,
                             row, g, address, alignment);
      }
    }
  }
  return {};
}

Status check_epilogue(const GemmOptions& options, const PackedWeights& w, const TensorView& out) {
  if (w.kind() == PackedWeights::Kind::kGateUp) {
    ARGOSY_RETURN_IF_ERROR(validate(options.activation));
  }
  return check_matrix("out", out, w.n());
}

}  // namespace

Status check_arguments(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                       const TensorView& out) {
  ARGOSY_RETURN_IF_ERROR(check_matrix("rows", x.rows, w.k()));
  ARGOSY_RETURN_IF_ERROR(check_weights(options, x.rows.dtype, w));
  ARGOSY_RETURN_IF_ERROR(check_epilogue(options, w, out));
  if (out.dtype != x.rows.dtype || out.dim(0) != x.rows.dim(0)) {
    return base::invalid("out is {}, the rows are {}: dtype and number of rows must be equal",
                         describe(out), describe(x.rows));
  }
  ARGOSY_RETURN_IF_ERROR(check_output_rows(out));
  ARGOSY_RETURN_IF_ERROR(check_apart(x.rows, out));
  return check_groups(x.offsets, x.sizes, x.rows.dim(0), w.num_groups());
}

Status check_arguments(const GemmOptions& options, const RaggedQuantisedRows& x,
                       const PackedWeights& w, const TensorView& out) {
  const ConstQuantisedView& rows = x.rows;
  ARGOSY_RETURN_IF_ERROR(check_formats(rows, w.k()));
  ARGOSY_RETURN_IF_ERROR(check_weights(options, DType::kBF16, w));
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(rows.format, rows.rows, rows.cols));
  ARGOSY_RETURN_IF_ERROR(quant::check_quantised_view(rows, layout));
  ARGOSY_RETURN_IF_ERROR(check_extent("codes", rows.codes));
  ARGOSY_RETURN_IF_ERROR(check_extent("scales", rows.scales));
  ARGOSY_RETURN_IF_ERROR(check_epilogue(options, w, out));
  if (out.dim(0) != rows.rows) {
    return base::invalid("out is {}, there are {} rows", describe(out), rows.rows);
  }
  ARGOSY_RETURN_IF_ERROR(check_output_rows(out));
  ARGOSY_RETURN_IF_ERROR(check_apart(rows.codes, out));
  ARGOSY_RETURN_IF_ERROR(check_apart(rows.scales, out));
  ARGOSY_RETURN_IF_ERROR(check_groups(x.offsets, x.sizes, rows.rows, w.num_groups()));
  return check_scales(x);
}

Status check_quantised_preactivation(const GemmOptions& options, const RaggedQuantisedRows& x,
                                     const PackedWeights& w, const TensorView& gate,
                                     const TensorView& up, const TensorView& h) {
  if (w.kind() != PackedWeights::Kind::kGateUp) {
    return base::invalid("pre-activations are those of gate_up weights, these are plain");
  }
  ARGOSY_RETURN_IF_ERROR(check_arguments(options, x, w, gate));
  ARGOSY_RETURN_IF_ERROR(check_arguments(options, x, w, up));
  if (gate.dtype != up.dtype) {
    return base::invalid("gate is {}, up is {}: the dtypes must be equal", describe(gate),
                         describe(up));
  }
  ARGOSY_RETURN_IF_ERROR(check_apart(gate, up));
  if (h.data == nullptr) return {};
  ARGOSY_RETURN_IF_ERROR(check_arguments(options, x, w, h));
  ARGOSY_RETURN_IF_ERROR(check_apart(gate, h));
  return check_apart(up, h);
}

Status check_arguments(const GemmOptions& options, const ScatteredRows& x, const PackedWeights& w,
                       const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const PayloadLayout payload,
                          payload_layout(x.payload.dtype, x.payload.format, x.payload.hidden));
  if (payload.hidden != w.k()) {
    return base::invalid("the rows have {} columns, the weights ask for {}", payload.hidden, w.k());
  }
  ARGOSY_RETURN_IF_ERROR(check_weights(options, payload.dtype, w));
  ARGOSY_RETURN_IF_ERROR(check_epilogue(options, w, out));
  const auto num_rows = static_cast<int64_t>(x.rows.size());
  if (out.dtype != payload.dtype || out.dim(0) != num_rows) {
    return base::invalid("out is {}, there are {} {} rows", describe(out), num_rows,
                         name_of(payload.dtype));
  }
  ARGOSY_RETURN_IF_ERROR(check_output_rows(out));
  ARGOSY_RETURN_IF_ERROR(check_groups(x.offsets, x.sizes, num_rows, w.num_groups()));
  const int64_t alignment = payload.is_quantised() ? 4 : size_of(payload.dtype);
  return check_addresses("row", x, x.rows.data(), alignment);
}

Status check_arguments(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                       std::span<std::byte* const> out) {
  ARGOSY_RETURN_IF_ERROR(check_matrix("rows", x.rows, w.k()));
  ARGOSY_RETURN_IF_ERROR(check_weights(options, x.rows.dtype, w));
  if (w.kind() == PackedWeights::Kind::kGateUp) {
    ARGOSY_RETURN_IF_ERROR(validate(options.activation));
  }
  if (static_cast<int64_t>(out.size()) != x.rows.dim(0)) {
    return base::invalid("there are {} output rows for {} rows", out.size(), x.rows.dim(0));
  }
  ARGOSY_RETURN_IF_ERROR(check_groups(x.offsets, x.sizes, x.rows.dim(0), w.num_groups()));
  return check_addresses("output row", x, out.data(), size_of(x.rows.dtype));
}

}  // namespace argosy::gemm
