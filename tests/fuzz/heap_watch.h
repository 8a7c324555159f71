// What one piece of code asks of the heap: its largest single request and the most it holds at once.
//
// Sees every way into the heap: under a sanitizer through its hooks, else by standing before glibc's
// functions. Counts the calling thread only. Guarded by replay_test.cc, HeapWatch.
#pragma once

#include <cstddef>

namespace argosy::testing {

struct HeapUse {
  size_t largest = 0;  // bytes of the largest request
  size_t peak = 0;     // most bytes alive at once, above those at the start
};

// Between the two calls the calling thread is watched. They do not nest.
void start_heap_watch();
HeapUse stop_heap_watch();

}  // namespace argosy::testing
