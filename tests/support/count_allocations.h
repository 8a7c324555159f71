// Counts calls of operator new in a test binary that links count_allocations.cc.
#pragma once

#include <cstdint>

namespace argosy::testing {

// Since the start of the process, over all threads.
int64_t num_allocations();

}  // namespace argosy::testing
