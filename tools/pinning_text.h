// Where the threads of a run were bound, in words. Test: tests/cli/floors_test.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace argosy::tools {

// "threads pinned to cores 0-3", or that they were not and why. pinned_cpus: [R][threads], -1 for a
// thread that could not be bound; empty lists: nobody tried, as threads outnumber the usable cores.
std::string pinning_text(const std::vector<std::vector<int32_t>>& pinned_cpus, int threads_per_rank,
                         int num_cores);

}  // namespace argosy::tools
