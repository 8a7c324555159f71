// Dtype table, and shape arithmetic that cannot overflow.
// Test: tests/base/tensor_test.cc.
#include "argosy/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"

namespace argosy {
namespace {

struct DTypeRow {
  DType dtype;
  int64_t bytes;
  std::string_view name;
};

constexpr DTypeRow kDTypes[] = {
    {DType::kF64, 8, "F64"},      {DType::kF32, 4, "F32"},      {DType::kF16, 2, "F16"},
    {DType::kBF16, 2, "BF16"},    {DType::kE4M3, 1, "F8_E4M3"}, {DType::kE5M2, 1, "F8_E5M2"},
    {DType::kE8M0, 1, "F8_E8M0"}, {DType::kI64, 8, "I64"},      {DType::kI32, 4, "I32"},
    {DType::kI16, 2, "I16"},      {DType::kI8, 1, "I8"},        {DType::kU64, 8, "U64"},
    {DType::kU32, 4, "U32"},      {DType::kU16, 2, "U16"},      {DType::kU8, 1, "U8"},
    {DType::kBool, 1, "BOOL"},
};

}  // namespace

int64_t size_of(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.bytes;
  }
  return 0;
}

std::string_view name_of(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "unset";
}

Result<DType> parse_dtype(std::string_view name) {
  std::vector<std::string_view> known;
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
    known.push_back(row.name);
  }
  return base::error(StatusCode::kNotFound, "unknown dtype \"{}\"; known: {}", name,
                     fmt::join(known, ", "));
}

std::string describe(const ConstTensorView& view) {
  if (view.num_dims < 0 || view.num_dims > kMaxTensorDims) {
    return fmt::format("a view of {} dimensions, 0 to {} are possible", view.num_dims,
                       kMaxTensorDims);
  }
  const auto dims = static_cast<size_t>(view.num_dims);
  const std::span<const int64_t> shape(view.shape.data(), dims);
  std::string text = fmt::format("{} [{}]", name_of(view.dtype), fmt::join(shape, ", "));
  if (!view.is_dense()) {
    const std::span<const int64_t> strides(view.strides.data(), dims);
    text += fmt::format(" strides [{}]", fmt::join(strides, ", "));
  }
  return text;
}

Result<int64_t> checked_num_bytes(std::span<const int64_t> dims, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  bool has_zero = false;
  for (const int64_t dim : dims) {
    if (dim < 0) return base::invalid("shape [{}] has a negative dimension", fmt::join(dims, ", "));
    has_zero = has_zero || dim == 0;
  }
  for (const int64_t dim : dims) {
    if (dim != 0 && __builtin_mul_overflow(bytes, dim, &bytes)) {
      return base::invalid("shape [{}] of {}-byte elements needs more than 2^63 bytes",
                           fmt::join(dims, ", "), element_bytes);
    }
  }
  return has_zero ? 0 : bytes;
}

Result<Tensor> Tensor::zeros(DType dtype, std::span<const int64_t> dims) {
  if (dims.size() > kMaxTensorDims) {
    return base::invalid("shape [{}] has {} dimensions, the limit is {}", fmt::join(dims, ", "),
                         dims.size(), kMaxTensorDims);
  }
  if (size_of(dtype) == 0) return base::invalid("tensor without a dtype");
  ARGOSY_ASSIGN_OR_RETURN(const int64_t bytes, checked_num_bytes(dims, size_of(dtype)));
  Tensor tensor;
  ARGOSY_RETURN_IF_ERROR(tensor.buffer_.reserve(bytes));
  if (bytes > 0) std::memset(tensor.buffer_.data(), 0, static_cast<size_t>(bytes));
  tensor.view_ = TensorView(tensor.buffer_.data(), dtype, dims);
  return tensor;
}

}  // namespace argosy
