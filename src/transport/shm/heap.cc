// See heap.h. Test: tests/transport/shm_test.cc.
#include "transport/shm/heap.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace argosy::transport::shm {
namespace {

constexpr int64_t kPageBytes = 4096;

int64_t whole_pages(int64_t bytes) {
  return std::max<int64_t>(1, bytes / kPageBytes + (bytes % kPageBytes != 0 ? 1 : 0)) * kPageBytes;
}

}  // namespace

int64_t RangeAllocator::take(int64_t bytes) {
  const auto at = std::find_if(free_.begin(), free_.end(),
                               [&](const auto& range) { return range.second >= bytes; });
  if (at == free_.end()) return -1;
  const auto [offset, size] = *at;
  free_.erase(at);
  if (size > bytes) free_.emplace(offset + bytes, size - bytes);
  return offset;
}

void RangeAllocator::give_back(int64_t offset, int64_t bytes) {
  auto at = free_.emplace(offset, bytes).first;
  if (const auto next = std::next(at); next != free_.end() && offset + bytes == next->first) {
    at->second += next->second;
    free_.erase(next);
  }
  if (at == free_.begin()) return;
  const auto before = std::prev(at);
  if (before->first + before->second == offset) {
    before->second += at->second;
    free_.erase(at);
  }
}

int64_t RangeAllocator::largest() const {
  int64_t most = 0;
  for (const auto& [offset, bytes] : free_) most = std::max(most, bytes);
  return most;
}

Result<std::unique_ptr<Heap>> Heap::map(std::vector<platform::Descriptor> memories, int rank,
                                        int64_t begin, int64_t heap_bytes) {
  std::vector<platform::SharedMapping> mappings;
  for (const platform::Descriptor& memory : memories) {
    ARGOSY_ASSIGN_OR_RETURN(platform::SharedMapping mapping,
                            platform::SharedMapping::map(memory, heap_bytes));
    mappings.push_back(std::move(mapping));
  }
  std::unique_ptr<Heap> heap(
      new Heap(std::move(memories[static_cast<size_t>(rank)]), begin, heap_bytes));
  heap->mappings_ = std::move(mappings);
  return heap;
}

Result<uint64_t> Heap::create(int64_t bytes) {
  if (bytes < 0) return base::invalid("cannot map {} bytes", bytes);
  // Pages come when they are touched, and a machine without any left ends the process then: what can
  // never fit is refused here.
  if (const int64_t available = platform::available_memory_bytes(); bytes > available) {
    return base::error(StatusCode::kOutOfMemory,
                       "a window of {} bytes; the machine has {} bytes of memory left", bytes,
                       available);
  }
  const int64_t offset = ranges_.largest() < bytes ? -1 : ranges_.take(whole_pages(bytes));
  if (offset < 0) {
    return base::error(
        StatusCode::kOutOfMemory,
        "a window of {} bytes; the largest free part of the shared heap of {} bytes has {}", bytes,
        heap_bytes_, ranges_.largest());
  }
  return static_cast<uint64_t>(offset);
}

void Heap::release(uint64_t handle, int64_t bytes) {
  const auto offset = static_cast<int64_t>(handle);
  platform::discard_shared_memory(own_, offset, whole_pages(bytes));
  ranges_.give_back(offset, whole_pages(bytes));
}

}  // namespace argosy::transport::shm
