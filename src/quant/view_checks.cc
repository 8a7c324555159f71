// See view_checks.h.
#include "quant/view_checks.h"

#include "base/error.h"

namespace argosy::quant {
namespace {

Status check_matrix(const char* name, const ConstTensorView& view, DType dtype, int64_t rows,
                    int64_t cols) {
  if (view.num_dims != 2 || view.dim(0) != rows || view.dim(1) != cols || view.dtype != dtype) {
    return base::invalid("{} is {}, expected {} [{}, {}]", name, describe(view), name_of(dtype),
                         rows, cols);
  }
  if (rows == 0 || cols == 0) return {};
  if (view.data == nullptr) return base::invalid("{} {} has no data", name, describe(view));
  if (cols > 1 && view.stride(1) != 1) {
    return base::invalid("{} is {}, its columns need stride 1", name, describe(view));
  }
  return {};
}

}  // namespace

Status check_quantised_view(const ConstQuantisedView& view, const QuantisedLayout& layout) {
  const BlockFormatInfo info = info_of(layout.format);
  ARGOSY_RETURN_IF_ERROR(
      check_matrix("codes", view.codes, info.code_dtype, layout.codes[0], layout.codes[1]));
  ARGOSY_RETURN_IF_ERROR(
      check_matrix("scales", view.scales, info.scale_dtype, layout.scales[0], layout.scales[1]));
  if (!info.has_tensor_scale) return {};
  const ConstTensorView& tensor = view.tensor_scales;
  if (tensor.num_dims != 1 || tensor.dim(0) != layout.num_tensor_scales ||
      tensor.dtype != DType::kF32 || !tensor.is_dense()) {
    return base::invalid("tensor_scales is {}, expected dense F32 [{}]", describe(tensor),
                         layout.num_tensor_scales);
  }
  if (layout.num_tensor_scales > 0 && tensor.data == nullptr) {
    return base::invalid("tensor_scales {} has no data", describe(tensor));
  }
  return {};
}

Status check_values(const ConstTensorView& values, int64_t rows, int64_t cols) {
  if (values.dtype != DType::kBF16 && values.dtype != DType::kF32) {
    return base::invalid("values are {}, expected BF16 or F32", describe(values));
  }
  return check_matrix("values", values, values.dtype, rows, cols);
}

Status check_distinct_rows(const char* name, const ConstTensorView& view) {
  if (view.num_elements() == 0 || view.dim(0) == 1 || view.stride(0) >= view.dim(1)) return {};
  return base::invalid("{} is {}, its rows overlap", name, describe(view));
}

}  // namespace argosy::quant
