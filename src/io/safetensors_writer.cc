// write_safetensors: header sorted by name; data by falling element size, then name, so that every
// tensor starts at a multiple of its element size although the format allows no gaps. A failed
// write leaves neither a target nor a temporary file behind. Test: tests/io/safetensors_test.cc.
#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>

#include "argosy/checkpoint.h"
#include "base/error.h"
#include "io/json.h"
#include "io/partial_file.h"

namespace argosy {
namespace {

constexpr size_t kAlignment = 64;

Status check(const NamedTensor& tensor) {
  const ConstTensorView& view = tensor.tensor;
  if (tensor.name.empty() || tensor.name == "__metadata__") {
    return base::invalid("{} cannot be a tensor's name", io::in_quotes(tensor.name));
  }
  if (view.dtype == DType::kUnset) {
    return base::invalid("tensor {} has no dtype", io::in_quotes(tensor.name));
  }
  if (!view.is_dense()) {
    return base::invalid("tensor {} is not dense: {}", io::in_quotes(tensor.name), describe(view));
  }
  return {};
}

int64_t num_bytes(const NamedTensor& tensor) {
  return tensor.tensor.num_elements() * size_of(tensor.tensor.dtype);
}

// The length word and the JSON, padded so that the data starts aligned. `order` is the order of the
// data.
Result<std::string> make_header(const std::vector<const NamedTensor*>& order) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t offset = 0;
  for (const NamedTensor* tensor : order) {
    const ConstTensorView& view = tensor->tensor;
    const std::vector<int64_t> shape(view.shape.begin(), view.shape.begin() + view.num_dims);
    const int64_t end = offset + num_bytes(*tensor);
    header[tensor->name] = {
        {"dtype", name_of(view.dtype)}, {"shape", shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string json;
  try {
    json = header.dump();
  } catch (const nlohmann::json::exception&) {
    return base::invalid("a tensor's name is no UTF-8 text");
  }
  const size_t unpadded = sizeof(uint64_t) + json.size();
  json.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  const auto length = std::bit_cast<std::array<char, 8>>(static_cast<uint64_t>(json.size()));
  return std::string(length.data(), length.size()) + json;
}

}  // namespace

Status write_safetensors(const std::string& path, std::span<const NamedTensor> tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& tensor : tensors) {
    ARGOSY_RETURN_IF_ERROR(check(tensor));
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(),
            [](const NamedTensor* a, const NamedTensor* b) { return a->name < b->name; });
  const auto twice = std::adjacent_find(
      order.begin(), order.end(),
      [](const NamedTensor* a, const NamedTensor* b) { return a->name == b->name; });
  if (twice != order.end())
    return base::invalid("two tensors are named {}", io::in_quotes((*twice)->name));
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_of(a->tensor.dtype) > size_of(b->tensor.dtype);
  });
  ARGOSY_ASSIGN_OR_RETURN(const std::string header, make_header(order));
  io::PartialFile file(path);
  ARGOSY_RETURN_IF_ERROR(file.create());
  ARGOSY_RETURN_IF_ERROR(file.write(std::as_bytes(std::span(header))));
  for (const NamedTensor* tensor : order) {
    const auto bytes = static_cast<size_t>(num_bytes(*tensor));
    ARGOSY_RETURN_IF_ERROR(file.write({tensor->tensor.data, bytes}));
  }
  return file.rename_to_target();
}

}  // namespace argosy
