// mmap behind memory.h. Test: tests/platform/memory_test.cc.
#include "platform/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "base/error.h"

namespace argosy::platform {
namespace {

// munmap must be given what mmap was: a mapping of 0 bytes is refused by the system.
size_t mapped_bytes(int64_t bytes) { return static_cast<size_t>(std::max<int64_t>(bytes, 1)); }

}  // namespace

Result<MappedMemory> MappedMemory::map(int64_t bytes) {
  if (bytes < 0) return base::invalid("cannot map {} bytes", bytes);
  void* address = mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    return base::error(StatusCode::kOutOfMemory, "cannot map {} bytes", bytes);
  }
  MappedMemory memory;
  memory.data_ = static_cast<std::byte*>(address);
  memory.size_bytes_ = bytes;
  prefer_huge_pages(memory.data_, bytes);
  return memory;
}

MappedMemory::~MappedMemory() {
  if (data_ != nullptr) munmap(data_, mapped_bytes(size_bytes_));
}

void prefer_huge_pages(std::byte* data, int64_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (end < begin + static_cast<uintptr_t>(kHugePage)) return;
  madvise(data + (begin - reinterpret_cast<uintptr_t>(data)), end - begin, MADV_HUGEPAGE);
}

}  // namespace argosy::platform
