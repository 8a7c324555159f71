// Memory straight from the system: zero, page aligned, backed by pages only when touched.
//
// Windows reserve their worst case; what is never touched costs nothing. Test:
// tests/platform/memory_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "argosy/status.h"

namespace argosy::platform {

class MappedMemory {
 public:
  MappedMemory() = default;
  // `bytes` >= 0; a mapping of 0 bytes has an address too. Errors: kInvalidArgument (negative),
  // kOutOfMemory naming the bytes.
  static Result<MappedMemory> map(int64_t bytes);
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

constexpr int64_t kHugePage = int64_t{1} << 21;  // bytes

// Asks for huge pages behind [data, data + bytes), in which nothing has been touched yet: a large
// stream then waits for no page walk. Whether it gets them only changes speed.
void prefer_huge_pages(std::byte* data, int64_t bytes);

}  // namespace argosy::platform
