// Replaces the global operator new. A file of its own: a compiler that sees the bodies beside their
// callers takes malloc and free for a mismatched pair.
#include "support/count_allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int64_t> g_num_allocations = 0;
}

void* operator new(size_t bytes) {
  g_num_allocations.fetch_add(1, std::memory_order_relaxed);
  void* pointer = std::malloc(bytes == 0 ? 1 : bytes);
  if (pointer == nullptr) std::abort();
  return pointer;
}
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, size_t) noexcept { std::free(pointer); }

namespace argosy::testing {

int64_t num_allocations() { return g_num_allocations.load(std::memory_order_relaxed); }

}  // namespace argosy::testing
