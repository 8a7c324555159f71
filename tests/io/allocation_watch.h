// The largest single allocation by operator new, so that a test can bound what an input makes the
// code ask for.
//
// Replaces operator new in the whole test binary. Guarded by safetensors_header_test.cc,
// AllocationWatch.
#pragma once

#include <cstddef>

namespace argosy::test {

void reset_largest_allocation();  // of this thread
size_t largest_allocation();      // bytes, of this thread since the last reset

}  // namespace argosy::test
