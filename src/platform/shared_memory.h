// Memory without a name that several processes map: a memfd, found by its descriptor alone, gone with its
// last user, not limited by the size of /dev/shm. Test: tests/platform/shared_memory_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "argosy/status.h"
#include "platform/descriptor.h"

namespace argosy::platform {

// A memfd of `bytes`, sparse: pages exist once touched. Errors: kUnsupported when the system has no
// memfd_create (what to do is said); kOutOfMemory naming the bytes and the limit that forbids them.
Result<Descriptor> create_shared_memory(const char* label, int64_t bytes);

// Gives back the pages of a range of the memfd; it reads as zero afterwards.
void discard_shared_memory(const Descriptor& memory, int64_t offset, int64_t bytes);

// One mapping of a whole memfd; huge pages where the system allows them.
class SharedMapping {
 public:
  SharedMapping() = default;
  // Errors: kOutOfMemory naming the bytes and, when it is set, the limit of the address space.
  static Result<SharedMapping> map(const Descriptor& memory, int64_t bytes);
  ~SharedMapping();
  SharedMapping(SharedMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  SharedMapping& operator=(SharedMapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Bytes the system could still back, by its own estimate; a large number when it does not say.
int64_t available_memory_bytes();

}  // namespace argosy::platform
