// Window memory of ranks that are processes: one memfd a rank, mapped by all; a handle is an offset in its
// rank's memfd. Test: tests/transport/shm_test.cc.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "platform/shared_memory.h"
#include "transport/shared/window_memory.h"

namespace argosy::transport::shm {

// Hands out ranges of [begin, end), 4 KiB aligned, lowest first; touching free ranges are joined.
class RangeAllocator {
 public:
  RangeAllocator(int64_t begin, int64_t end) { free_.emplace(begin, end - begin); }
  // -1 when no free range is large enough.
  int64_t take(int64_t bytes);
  void give_back(int64_t offset, int64_t bytes);
  int64_t largest() const;

 private:
  std::map<int64_t, int64_t> free_;  // offset -> bytes
};

class Heap final : public shared::WindowMemory {
 public:
  // Maps the memfds of all ranks; windows of the own rank go to [begin, heap_bytes). Errors: kOutOfMemory.
  static Result<std::unique_ptr<Heap>> map(std::vector<platform::Descriptor> memories, int rank,
                                           int64_t begin, int64_t heap_bytes);

  Result<uint64_t> create(int64_t bytes) override;
  std::byte* address(int rank, uint64_t handle) override {
    return mappings_[static_cast<size_t>(rank)].data() + handle;
  }
  void release(uint64_t handle, int64_t bytes) override;

 private:
  Heap(platform::Descriptor own, int64_t begin, int64_t heap_bytes)
      : own_(std::move(own)), heap_bytes_(heap_bytes), ranges_(begin, heap_bytes) {}

  platform::Descriptor own_;
  int64_t heap_bytes_;
  RangeAllocator ranges_;
  std::vector<platform::SharedMapping> mappings_;  // [R]
};

}  // namespace argosy::transport::shm
