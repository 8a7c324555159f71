// Puts counting functions before those of glibc, which stay reachable by their internal names.
#include "support/alloc_counter.h"

#include <atomic>
#include <cerrno>
#include <cstddef>

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ARGOSY_COUNTS_ALLOCATIONS 1
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#undef ARGOSY_COUNTS_ALLOCATIONS
#define ARGOSY_COUNTS_ALLOCATIONS 0
#endif
#endif
#else
#define ARGOSY_COUNTS_ALLOCATIONS 0
#endif

namespace {

constinit std::atomic<int64_t> total{0};
constinit std::atomic<int64_t> aligned_bytes{0};

}  // namespace

namespace argosy::testing {

bool is_counting_allocations() { return ARGOSY_COUNTS_ALLOCATIONS == 1; }

// Relaxed: tests read it when the threads they count are at rest.
int64_t num_allocations() { return total.load(std::memory_order_relaxed); }

int64_t num_aligned_bytes() { return aligned_bytes.load(std::memory_order_relaxed); }

}  // namespace argosy::testing

#if ARGOSY_COUNTS_ALLOCATIONS == 1

extern "C" {

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

// Relaxed in all of them: a plain counter. free() needs no counterpart: the memory is glibc's.
void* malloc(size_t bytes) {
  total.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}

void* calloc(size_t count, size_t bytes) {
  total.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, bytes);
}

void* realloc(void* old, size_t bytes) {
  total.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(old, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  total.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, bytes);
}

int posix_memalign(void** out, size_t alignment, size_t bytes) {
  total.fetch_add(1, std::memory_order_relaxed);
  aligned_bytes.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  *out = __libc_memalign(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}

}  // extern "C"

#endif
