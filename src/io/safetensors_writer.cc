// write_safetensors: header sorted by name; data by falling element size, then name, so that every
// tensor starts at a multiple of its element size although the format allows no gaps. A failed
// write leaves neither a target nor a temporary file behind. Test: tests/io/safetensors_test.cc.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "argosy/checkpoint.h"
#include "base/error.h"
#include "io/json.h"

namespace argosy {
namespace {

constexpr size_t kAlignment = 64;

Status io_error(const std::string& path, std::string_view action, int code) {
  return base::error(StatusCode::kIo, "{}: cannot {}: {}", path, action,
                     std::generic_category().message(code));
}

// A new file beside the target; removed again unless it was renamed.
class PartialFile {
 public:
  explicit PartialFile(std::string target) : target_(std::move(target)) {}
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }

  Status create() {
    constexpr int kMaxTries = 1000;
    for (int i = 0; i < kMaxTries && descriptor_ < 0; ++i) {
      const std::string path = fmt::format("{}.partial{}", target_, i);
      descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
      if (descriptor_ >= 0) path_ = path;
      if (descriptor_ < 0 && errno != EEXIST) return io_error(path, "create", errno);
    }
    if (descriptor_ < 0) return io_error(target_ + ".partial", "create", EEXIST);
    return {};
  }

  Status write(std::span<const std::byte> bytes) {
    constexpr size_t kMaxChunk = size_t{1} << 30;
    while (!bytes.empty()) {
      const ssize_t done = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxChunk));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) return io_error(path_, "write", errno);
      bytes = bytes.subspan(static_cast<size_t>(done));
    }
    return {};
  }

  Status rename_to_target() {
    const int closed = ::close(std::exchange(descriptor_, -1));
    if (closed != 0) return io_error(path_, "close", errno);
    if (std::rename(path_.c_str(), target_.c_str()) != 0)
      return io_error(target_, "rename to", errno);
    path_.clear();
    return {};
  }

 private:
  std::string target_;
  std::string path_;
  int descriptor_ = -1;
};

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
  PartialFile file(path);
  ARGOSY_RETURN_IF_ERROR(file.create());
  ARGOSY_RETURN_IF_ERROR(file.write(std::as_bytes(std::span(header))));
  for (const NamedTensor* tensor : order) {
    const auto bytes = static_cast<size_t>(num_bytes(*tensor));
    ARGOSY_RETURN_IF_ERROR(file.write({tensor->tensor.data, bytes}));
  }
  return file.rename_to_target();
}

}  // namespace argosy
