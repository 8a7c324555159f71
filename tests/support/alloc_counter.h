// Counts the heap allocations of a test binary: link alloc_counter.cc into it.
//
// Every thread counts, and every way into the heap (operator new, malloc, aligned_alloc, ...).
// Under a sanitizer, which owns the heap, nothing is counted: ask is_counting_allocations() first.
// Test: tests/platform/alloc_counter_test.cc.
#pragma once

#include <cstdint>

namespace argosy::testing {

bool is_counting_allocations();

// Allocations since the program started.
int64_t num_allocations();

// Bytes that posix_memalign gave since the program started: all of AlignedBuffer, and nothing else of Argosy.
int64_t num_aligned_bytes();

}  // namespace argosy::testing
