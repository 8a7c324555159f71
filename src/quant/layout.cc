// Shapes of codes and scales, and the tensor that owns them. Test: tests/quant/layout_test.cc.
#include <algorithm>

#include "argosy/quantise.h"
#include "base/error.h"
#include "quant/segments.h"

namespace argosy {

int64_t QuantisedLayout::code_bytes() const {
  return codes[0] * codes[1] * size_of(info_of(format).code_dtype);
}

int64_t QuantisedLayout::scale_bytes() const {
  return scales[0] * scales[1] * size_of(info_of(format).scale_dtype) +
         num_tensor_scales * size_of(DType::kF32);
}

int64_t max_group_blocks(int64_t total, int64_t num_groups, int64_t block) {
  // Every group that has rows may end in a partial block; a group needs a row to have one.
  const int64_t groups = std::min(num_groups, total);
  return groups + (total - groups) / block;
}

Result<QuantisedLayout> quantised_layout(BlockFormat format, int64_t rows, int64_t cols,
                                         const RowGroups& groups, GroupAxis axis) {
  const BlockFormatInfo info = info_of(format);
  if (info.block_cols == 0) return base::invalid("a layout needs a block format, not unset");
  // The widest of what is stored: fp32 scales, of blocks that may be one element each.
  const int64_t dims[] = {rows, cols};
  ARGOSY_ASSIGN_OR_RETURN([[maybe_unused]] const int64_t bytes, checked_num_bytes(dims, 8));
  const int64_t side = axis == GroupAxis::kRows ? rows : cols;
  if (quant::is_grouped(groups)) ARGOSY_RETURN_IF_ERROR(quant::check_groups(groups, side));
  const int64_t block = axis == GroupAxis::kRows ? info.block_rows : info.block_cols;
  const bool grouped = quant::is_grouped(groups);
  if (grouped && axis == GroupAxis::kCols && info.element == ElementFormat::kE2M1) {
    ARGOSY_RETURN_IF_ERROR(quant::check_even_offsets(groups));
  }
  QuantisedLayout layout;
  layout.format = format;
  layout.rows = rows;
  layout.cols = cols;
  layout.codes = {rows, info.element == ElementFormat::kE2M1 ? quant::ceil_div(cols, 2) : cols};
  layout.scales = {quant::ceil_div(rows, info.block_rows), quant::ceil_div(cols, info.block_cols)};
  if (info.has_tensor_scale) {
    layout.num_tensor_scales = grouped ? static_cast<int64_t>(groups.sizes.size()) : 1;
  }
  if (grouped && block > 1) {
    layout.first_block.push_back(0);
    for (const int64_t size : groups.sizes) {
      layout.first_block.push_back(layout.first_block.back() + quant::ceil_div(size, block));
    }
    layout.scales[axis == GroupAxis::kRows ? 0 : 1] = layout.first_block.back();
  }
  return layout;
}

Result<QuantisedTensor> QuantisedTensor::create(const QuantisedLayout& layout) {
  const BlockFormatInfo info = info_of(layout.format);
  if (info.block_cols == 0) return base::invalid("a tensor needs a block format, not unset");
  QuantisedTensor made;
  made.format_ = layout.format;
  made.rows_ = layout.rows;
  made.cols_ = layout.cols;
  ARGOSY_ASSIGN_OR_RETURN(made.codes_, Tensor::zeros(info.code_dtype, layout.codes));
  ARGOSY_ASSIGN_OR_RETURN(made.scales_, Tensor::zeros(info.scale_dtype, layout.scales));
  if (info.has_tensor_scale) {
    ARGOSY_ASSIGN_OR_RETURN(made.tensor_scales_,
                            Tensor::zeros(DType::kF32, {layout.num_tensor_scales}));
  }
  return made;
}

QuantisedView QuantisedTensor::view() {
  QuantisedView view;
  view.format = format_;
  view.rows = rows_;
  view.cols = cols_;
  view.codes = codes_.view();
  view.scales = scales_.view();
  view.tensor_scales = tensor_scales_.view();
  return view;
}

ConstQuantisedView QuantisedTensor::view() const {
  ConstQuantisedView view;
  view.format = format_;
  view.rows = rows_;
  view.cols = cols_;
  view.codes = codes_.view();
  view.scales = scales_.view();
  view.tensor_scales = tensor_scales_.view();
  return view;
}

}  // namespace argosy
