// See heap_watch.h. A block counts with what the allocator holds for it; with glibc that includes the
// rounding, with a sanitizer it is the size asked for.
#include "fuzz/heap_watch.h"

#include <malloc.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ARGOSY_SANITIZER_HEAP 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ARGOSY_SANITIZER_HEAP 1
#endif

namespace {

constinit thread_local bool watching = false;
constinit thread_local size_t largest = 0;
constinit thread_local int64_t live = 0;
constinit thread_local int64_t peak = 0;

void took(size_t bytes) {
  if (!watching) return;
  largest = std::max(largest, bytes);
  live += static_cast<int64_t>(bytes);
  peak = std::max(peak, live);
}

void gave_back(size_t bytes) {
  if (watching) live -= static_cast<int64_t>(bytes);
}

}  // namespace

#ifdef ARGOSY_SANITIZER_HEAP

extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));
extern "C" size_t __sanitizer_get_allocated_size(const volatile void* memory);

namespace {

void on_malloc(const volatile void* /*memory*/, size_t bytes) { took(bytes); }
void on_free(const volatile void* memory) {
  if (watching && memory != nullptr) gave_back(__sanitizer_get_allocated_size(memory));
}
[[maybe_unused]] const int kInstalled =
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);

}  // namespace

#else

extern "C" {

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* memory);

void* malloc(size_t bytes) {
  void* memory = __libc_malloc(bytes);
  if (watching && memory != nullptr) took(malloc_usable_size(memory));
  return memory;
}

void* calloc(size_t count, size_t bytes) {
  void* memory = __libc_calloc(count, bytes);
  if (watching && memory != nullptr) took(malloc_usable_size(memory));
  return memory;
}

void* realloc(void* old, size_t bytes) {
  if (watching && old != nullptr) gave_back(malloc_usable_size(old));
  void* memory = __libc_realloc(old, bytes);
  if (watching && memory != nullptr) took(malloc_usable_size(memory));
  return memory;
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  void* memory = __libc_memalign(alignment, bytes);
  if (watching && memory != nullptr) took(malloc_usable_size(memory));
  return memory;
}

int posix_memalign(void** out, size_t alignment, size_t bytes) {
  *out = aligned_alloc(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}

void free(void* memory) {
  if (watching && memory != nullptr) gave_back(malloc_usable_size(memory));
  __libc_free(memory);
}

}  // extern "C"

#endif

namespace argosy::testing {

void start_heap_watch() {
  largest = 0;
  live = 0;
  peak = 0;
  watching = true;
}

HeapUse stop_heap_watch() {
  watching = false;
  return {largest, static_cast<size_t>(peak)};
}

}  // namespace argosy::testing
