// See expected_tensor.h. Test: tests/io/checkpoint_test.cc.
#include "io/expected_tensor.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "io/json.h"

namespace argosy::io {

using Entry = TensorDirectory::Entry;

Result<const Entry*> expect_tensor(const TensorDirectory& tensors, const std::string& name,
                                   std::span<const int64_t> shape, std::span<const DType> dtypes) {
  const Entry* entry = tensors.find(name);
  if (entry == nullptr) {
    return base::error(StatusCode::kNotFound, "no tensor {} in the checkpoint", in_quotes(name));
  }
  const TensorInfo& info = *entry->info;
  if (std::find(dtypes.begin(), dtypes.end(), info.dtype) == dtypes.end()) {
    std::vector<std::string_view> names;
    for (const DType dtype : dtypes) names.push_back(name_of(dtype));
    return base::invalid("tensor {} is {}, expected {}", in_quotes(name), name_of(info.dtype),
                         fmt::join(names, " or "));
  }
  if (!std::equal(info.shape.begin(), info.shape.end(), shape.begin(), shape.end())) {
    return base::invalid("tensor {} has shape [{}], config.json asks for [{}]", in_quotes(name),
                         fmt::join(info.shape, ", "), fmt::join(shape, ", "));
  }
  return entry;
}

Result<const Entry*> expect_float(const TensorDirectory& tensors, const std::string& name,
                                  std::span<const int64_t> shape) {
  constexpr DType kFloats[] = {DType::kBF16, DType::kF32};
  const Entry* entry = tensors.find(name);
  if (entry != nullptr && entry->info->dtype == DType::kF16) {
    return base::error(StatusCode::kUnsupported, "tensor {} is F16; BF16 and F32 can be read",
                       in_quotes(name));
  }
  return expect_tensor(tensors, name, shape, kFloats);
}

Status two_dtypes(const Entry& a, const Entry& b) {
  return base::invalid("tensor {} is {} but {} is {}", in_quotes(a.name()), name_of(a.info->dtype),
                       in_quotes(b.name()), name_of(b.info->dtype));
}

}  // namespace argosy::io
