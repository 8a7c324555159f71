// SafetensorsFile: header once, then tensors by position. The descriptor is the only shared state
// besides one counter, so any number of threads may read. Test: tests/io/safetensors_test.cc.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <utility>

#include "argosy/checkpoint.h"
#include "base/error.h"
#include "io/file.h"
#include "io/json.h"
#include "io/safetensors_header.h"

namespace argosy {

static_assert(std::endian::native == std::endian::little, "safetensors is little endian");

struct SafetensorsFile::State {
  io::ReadOnlyFile file;
  std::deque<TensorInfo> tensors;
  std::atomic<int64_t> bytes_read{0};
};

namespace {

constexpr int64_t kLengthBytes = 8;

// How alike two names are: bytes in common at the front and at the back.
size_t likeness(std::string_view a, std::string_view b) {
  const size_t length = std::min(a.size(), b.size());
  size_t front = 0;
  while (front < length && a[front] == b[front]) ++front;
  size_t back = 0;
  while (back < length - front && a[a.size() - 1 - back] == b[b.size() - 1 - back]) ++back;
  return front + back;
}

std::string near_names(const std::deque<TensorInfo>& tensors, std::string_view name) {
  std::vector<std::pair<size_t, const TensorInfo*>> ranked;
  ranked.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors)
    ranked.emplace_back(likeness(tensor.name, name), &tensor);
  const size_t count = std::min<size_t>(ranked.size(), 3);
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(count),
                    ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> shown;
  for (size_t i = 0; i < count; ++i) shown.push_back(io::in_quotes(ranked[i].second->name));
  return fmt::format("{}", fmt::join(shown, ", "));
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
SafetensorsFile::~SafetensorsFile() = default;

Result<std::shared_ptr<SafetensorsFile>> SafetensorsFile::open(const std::string& path) {
  ARGOSY_ASSIGN_OR_RETURN(io::ReadOnlyFile file, io::ReadOnlyFile::open(path));
  const int64_t after_length = file.size_bytes() - kLengthBytes;
  if (after_length < 0) {
    return base::error(StatusCode::kCorruptData,
                       "{}: {} bytes long, a safetensors file has 8 or more", path,
                       file.size_bytes());
  }
  std::array<std::byte, kLengthBytes> length_bytes;
  ARGOSY_RETURN_IF_ERROR(file.read(0, length_bytes));
  const auto length = std::bit_cast<uint64_t>(length_bytes);
  const auto limit = static_cast<uint64_t>(std::min(after_length, io::kMaxHeaderBytes));
  if (length > limit) {
    return base::error(StatusCode::kCorruptData,
                       "{}: header of {} bytes; the file has {} after the length, the limit is {}",
                       path, length, after_length, io::kMaxHeaderBytes);
  }
  std::string json(length, '\0');
  ARGOSY_RETURN_IF_ERROR(file.read(kLengthBytes, std::as_writable_bytes(std::span(json))));
  const auto header_bytes = static_cast<int64_t>(length);
  Result<std::deque<TensorInfo>> tensors =
      io::parse_safetensors_header(json, kLengthBytes + header_bytes, after_length - header_bytes);
  if (!tensors) {
    return Status(tensors.error().code(), fmt::format("{}: {}", path, tensors.error().message()));
  }
  std::unique_ptr<State> state(new State{std::move(file), std::move(*tensors)});
  return std::shared_ptr<SafetensorsFile>(new SafetensorsFile(std::move(state)));
}

const std::string& SafetensorsFile::path() const { return state_->file.path(); }
const std::deque<TensorInfo>& SafetensorsFile::tensors() const { return state_->tensors; }
int64_t SafetensorsFile::bytes_read() const { return state_->bytes_read.load(); }

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const std::deque<TensorInfo>& all = state_->tensors;
  const auto at = std::lower_bound(
      all.begin(), all.end(), name,
      [](const TensorInfo& info, std::string_view want) { return info.name < want; });
  return at != all.end() && at->name == name ? &*at : nullptr;
}

Result<Tensor> SafetensorsFile::read(std::string_view name) const {
  const TensorInfo* info = find(name);
  return read_elements(name, 0, info == nullptr ? std::span<const int64_t>() : info->shape);
}

Result<Tensor> SafetensorsFile::read_rows(std::string_view name, int64_t first,
                                          int64_t count) const {
  const TensorInfo* info = find(name);
  if (info == nullptr) return read_elements(name, 0, {});
  const int64_t num_rows = info->shape.empty() ? 0 : info->shape[0];
  if (info->shape.empty() || first < 0 || count < 0 || first > num_rows - count) {
    return base::invalid("{}: rows [{}, {} + {}) of tensor {} of shape [{}]", path(), first, first,
                         count, io::in_quotes(name), fmt::join(info->shape, ", "));
  }
  std::vector<int64_t> shape = info->shape;
  shape[0] = count;
  int64_t row_elements = 1;
  for (size_t i = 1; i < shape.size(); ++i) row_elements *= shape[i];
  return read_elements(name, first * row_elements, shape);
}

Result<const TensorInfo*> SafetensorsFile::expect(std::string_view name) const {
  const TensorInfo* info = find(name);
  if (info != nullptr) return info;
  return base::error(StatusCode::kNotFound, "{}: no tensor {} among {}; near: {}", path(),
                     io::in_quotes(name), tensors().size(), near_names(tensors(), name));
}

Result<Tensor> SafetensorsFile::read_elements(std::string_view name, int64_t first_element,
                                              std::span<const int64_t> shape) const {
  ARGOSY_ASSIGN_OR_RETURN(const TensorInfo* const info, expect(name));
  if (shape.size() > kMaxTensorDims) {
    return base::error(StatusCode::kUnsupported, "{}: tensor {} has {} dimensions, the limit is {}",
                       path(), io::in_quotes(name), shape.size(), kMaxTensorDims);
  }
  const int64_t element_bytes = size_of(info->dtype);
  ARGOSY_ASSIGN_OR_RETURN(const int64_t bytes, checked_num_bytes(shape, element_bytes));
  const int64_t tensor_bytes = info->end - info->begin;
  if (first_element < 0 || bytes > tensor_bytes ||
      first_element > (tensor_bytes - bytes) / element_bytes) {
    return base::invalid("{}: [{}] elements from {} on of tensor {}, which has {}", path(),
                         fmt::join(shape, ", "), first_element, io::in_quotes(name),
                         tensor_bytes / element_bytes);
  }
  ARGOSY_ASSIGN_OR_RETURN(Tensor tensor, Tensor::zeros(info->dtype, shape));
  const std::span<std::byte> out(tensor.view().data, static_cast<size_t>(bytes));
  ARGOSY_RETURN_IF_ERROR(read_into(name, first_element, out));
  return tensor;
}

Status SafetensorsFile::read_into(std::string_view name, int64_t first_element,
                                  std::span<std::byte> out) const {
  ARGOSY_ASSIGN_OR_RETURN(const TensorInfo* const info, expect(name));
  const int64_t element_bytes = size_of(info->dtype);
  const int64_t tensor_bytes = info->end - info->begin;
  const bool fits = std::in_range<int64_t>(out.size()) &&
                    static_cast<int64_t>(out.size()) % element_bytes == 0 &&
                    static_cast<int64_t>(out.size()) <= tensor_bytes;
  const auto bytes = static_cast<int64_t>(out.size());
  if (!fits || first_element < 0 || first_element > (tensor_bytes - bytes) / element_bytes) {
    return base::invalid(
        "{}: {} bytes from element {} on of tensor {}, which has {} elements of {}", path(),
        out.size(), first_element, io::in_quotes(name), tensor_bytes / element_bytes,
        name_of(info->dtype));
  }
  ARGOSY_RETURN_IF_ERROR(state_->file.read(info->begin + first_element * element_bytes, out));
  state_->bytes_read += bytes;
  return {};
}

Result<Tensor> read_tensor_argument(std::string_view file_and_tensor) {
  const size_t colon = file_and_tensor.rfind(':');
  const bool splits =
      colon != std::string_view::npos && colon > 0 && colon + 1 < file_and_tensor.size();
  if (!splits) {
    return base::invalid("{} is not of the form FILE:TENSOR", io::in_quotes(file_and_tensor));
  }
  ARGOSY_ASSIGN_OR_RETURN(const std::shared_ptr<SafetensorsFile> file,
                          SafetensorsFile::open(std::string(file_and_tensor.substr(0, colon))));
  return file->read(file_and_tensor.substr(colon + 1));
}

}  // namespace argosy
