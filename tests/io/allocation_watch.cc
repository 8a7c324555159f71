// A file of its own: where the compiler saw these bodies, it would take new and free for a
// mismatched pair. See allocation_watch.h.
#include "io/allocation_watch.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {
thread_local size_t largest = 0;
}  // namespace

void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  largest = std::max(largest, bytes);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(size_t bytes) {
  void* memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace argosy::test {

void reset_largest_allocation() { largest = 0; }
size_t largest_allocation() { return largest; }

}  // namespace argosy::test
