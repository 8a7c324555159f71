// Aligned memory, in huge pages where it is large: streams over it wait for no page walk.
// Test: tests/base/tensor_test.cc, tests/platform/memory_test.cc.
#include <cstdlib>
#include <limits>

#include "argosy/tensor.h"
#include "base/error.h"
#include "platform/memory.h"

namespace argosy {

Result<AlignedBuffer> AlignedBuffer::allocate(int64_t bytes) {
  AlignedBuffer buffer;
  ARGOSY_RETURN_IF_ERROR(buffer.reserve(bytes));
  return buffer;
}

Status AlignedBuffer::reserve(int64_t bytes) {
  if (bytes < 0) return base::invalid("cannot allocate {} bytes", bytes);
  if (bytes <= size_bytes_) return {};
  // The old block goes first: its contents are lost anyway, and the peak stays at the new size.
  data_.reset();
  size_bytes_ = 0;
  if (bytes > std::numeric_limits<int64_t>::max() - 64) {
    return base::error(StatusCode::kOutOfMemory, "cannot allocate {} bytes", bytes);
  }
  const int64_t rounded = (bytes + 63) / 64 * 64;
  // Large ones begin on a huge page, so that all but the end can be in some. Not aligned_alloc: its size must be a multiple
  // of the alignment, which glibc alone does not ask for.
  const size_t alignment = rounded < platform::kHugePage ? 64 : platform::kHugePage;
  void* data = nullptr;
  if (posix_memalign(&data, alignment, static_cast<size_t>(rounded)) != 0) {
    return base::error(StatusCode::kOutOfMemory, "cannot allocate {} bytes", bytes);
  }
  data_.reset(static_cast<std::byte*>(data));
  size_bytes_ = rounded;
  platform::prefer_huge_pages(data_.get(), rounded);
  return {};
}

}  // namespace argosy
