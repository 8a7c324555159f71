// See tensor_values.h. Test: tests/cli/compare_test.cc.
#include "tools/tensor_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "argosy/bfloat16.h"

namespace argosy::tools {

std::vector<double> values_of(const ConstTensorView& tensor, int64_t first, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = first + i;
    values[static_cast<size_t>(i)] = tensor.dtype == DType::kBF16
                                         ? static_cast<double>(tensor.as<BFloat16>()[at].to_float())
                                         : static_cast<double>(tensor.as<float>()[at]);
  }
  return values;
}

std::vector<double> values_of(const ConstTensorView& tensor) {
  return values_of(tensor, 0, tensor.num_elements());
}

Status expect_shape(std::string_view name, const ConstTensorView& tensor,
                    std::initializer_list<int64_t> shape) {
  bool fits = tensor.num_dims == static_cast<int>(shape.size());
  std::string wanted;
  int dim = 0;
  for (const int64_t size : shape) {
    wanted += fmt::format("{}{}", dim > 0 ? ", " : "", size < 0 ? "any" : std::to_string(size));
    fits = fits && (size < 0 || tensor.dim(dim) == size);
    ++dim;
  }
  if (fits) return Status();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} is {}, expected shape [{}]", name, describe(tensor), wanted));
}

Status expect_float_tensor(std::string_view name, const ConstTensorView& tensor,
                           std::initializer_list<int64_t> shape) {
  if (!is_fp32_or_bf16(tensor.dtype)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} is {}, expected F32 or BF16", name, describe(tensor)));
  }
  return expect_shape(name, tensor, shape);
}

Status expect_finite(std::string_view name, const ConstTensorView& tensor) {
  constexpr int64_t kChunk = 4096;
  const int64_t count = tensor.num_elements();
  for (int64_t first = 0; first < count; first += kChunk) {
    const std::vector<double> values = values_of(tensor, first, std::min(kChunk, count - first));
    const auto bad =
        std::find_if(values.begin(), values.end(), [](double v) { return !std::isfinite(v); });
    if (bad == values.end()) continue;
    std::vector<int64_t> index(static_cast<size_t>(tensor.num_dims));
    int64_t rest = first + (bad - values.begin());
    for (int dim = tensor.num_dims - 1; dim >= 0; --dim) {
      index[static_cast<size_t>(dim)] = rest % tensor.dim(dim);
      rest /= tensor.dim(dim);
    }
    return Status(StatusCode::kNonFinite,
                  fmt::format("{} holds {} at [{}]", name, *bad, fmt::join(index, ", ")));
  }
  return Status();
}

}  // namespace argosy::tools
