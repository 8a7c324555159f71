// See weight_gradient.h.
#include "gemm/weight_gradient.h"

#include <algorithm>

#include "base/error.h"
#include "gemm/backward_driver.h"
#include "gemm/check_arguments.h"
#include "platform/copy.h"

namespace argosy::gemm {
Status check_gradient(std::span<const int64_t> offsets, std::span<const int64_t> sizes,
                      int64_t num_rows, const WeightGradientOptions& gradient,
                      const TensorView& out, int num_dims) {
  if (out.num_dims != num_dims || out.dim(0) < 0 || out.dim(1) < 0) {
    return base::invalid("out is {}, expected {} dims [groups, ..]", describe(out), num_dims);
  }
  if (out.dtype != DType::kBF16 && out.dtype != DType::kF32) {
    return base::invalid("out is {}, its dtype must be BF16 or F32", describe(out));
  }
  ARGOSY_RETURN_IF_ERROR(check_groups(offsets, sizes, num_rows, out.dim(0)));
  if (!gradient.alpha.empty() && std::ssize(gradient.alpha) != out.dim(0)) {
    return base::invalid("alpha has {} values for {} groups", gradient.alpha.size(), out.dim(0));
  }
  return {};
}

Status check_gradient_matrices(int64_t n, int64_t k, std::span<const ConstTensorView> read,
                               const TensorView& out) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(out.dim(0), out.stride(0), &bytes) ||
      __builtin_mul_overflow(bytes, size_of(out.dtype), &bytes)) {
    return base::invalid("out is {}: more than 2^63 bytes", describe(out));
  }
  for (int64_t g = 0; g < out.dim(0); ++g) {
    TensorView matrix = out;
    matrix.num_dims = 2;
    matrix.data = out.data == nullptr ? nullptr : out.row(g);
    for (size_t i = 0; i < 2; ++i) {
      matrix.shape[i] = out.shape[i + 1];
      matrix.strides[i] = out.strides[i + 1];
    }
    ARGOSY_RETURN_IF_ERROR(check_matrix("out", matrix, k));
    ARGOSY_RETURN_IF_ERROR(check_output_rows(matrix));
    for (const ConstTensorView& one : read) ARGOSY_RETURN_IF_ERROR(check_apart(one, matrix));
  }
  if (out.dim(1) != n) {
    return base::invalid("out is {}, the operands ask for [{}, {}, {}]", describe(out), out.dim(0),
                         n, k);
  }
  const int64_t apart = out.stride(1) * out.dim(1);
  if (out.dim(0) > 1 && out.dim(1) > 0 && out.stride(0) < apart && -out.stride(0) < apart) {
    return base::invalid("out is {}: its matrices overlap", describe(out));
  }
  return {};
}

GradientOutput::GradientOutput(Level level, const WeightGradientOptions& gradient,
                               std::span<const int64_t> sizes, const TensorView& out)
    : gradient_(gradient),
      sizes_(sizes),
      out_(out),
      streams_(!gradient.accumulate && is_streamed(level, out)),
      store_(streams_ ? gradient_stores_for(level).stream_f32
                      : gradient_stores_for(level)
                            .of[out.dtype == DType::kF32 ? 1 : 0][gradient.accumulate ? 1 : 0]) {}

void GradientOutput::fetch(const Tile& tile, int64_t panel, const Part& rows) const {
  if (streams_) return;
  fetch_rows(first(tile, panel), row_stride_bytes(), rows, out_.dtype == DType::kF32 ? 2 : 1);
}

float GradientOutput::alpha_of(int64_t group) const {
  const auto at = static_cast<size_t>(group);
  // Masking selects: a group without rows has no alpha.
  return !gradient_.alpha.empty() && sizes_[at] > 0 ? gradient_.alpha[at] : 1.0f;
}

void GradientOutput::finish_tile() const {
  if (streams_) platform::finish_streaming();
}

void GradientOutput::store(const Tile& tile, int64_t panel, const float* products) const {
  store_({.sums = products,
          .num_rows = tile.rows.count,
          .num_columns = std::min(kPanelColumns, out_.dim(2) - panel * kPanelColumns),
          .out = first(tile, panel),
          .row_stride_bytes = row_stride_bytes(),
          .alpha = alpha_of(tile.group)});
}

std::byte* GradientOutput::first(const Tile& tile, int64_t panel) const {
  return out_.row(tile.group) +
         (tile.rows.first * out_.stride(1) + panel * kPanelColumns) * size_of(out_.dtype);
}

ProductRows product_rows(std::span<const int64_t> sizes, int64_t n, bool accumulate) {
  thread_local std::vector<int64_t> rows;
  rows.assign(sizes.size(), n);
  int64_t max_size = 0;
  for (size_t g = 0; g < rows.size(); ++g) {
    max_size = std::max(max_size, sizes[g]);
    if (sizes[g] == 0 && accumulate) rows[g] = 0;
  }
  return {rows, max_size};
}

}  // namespace argosy::gemm
