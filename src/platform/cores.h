// How many cores this process may really use: the affinity mask cut by the cgroup's CPU quota.
//
// Declared core counts lie in containers, and a spin with more threads than cores costs a scheduler
// tick per wait. Test: tests/platform/cores_test.cc.
#pragma once

#include <optional>
#include <string_view>

namespace argosy::platform {

// At least 1. Reads the system each time: masks change.
int usable_cores();

// Whole cores of a cgroup v2 "cpu.max" text, "QUOTA PERIOD", at least 1. Empty for "max ..." and
// for anything that does not parse.
std::optional<int> parse_cpu_max(std::string_view text);

}  // namespace argosy::platform
