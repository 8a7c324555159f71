// The only place that reads environment variables. Test: tests/platform/cpu_test.cc.
#pragma once

#include <optional>
#include <string>

namespace argosy::base {

// The variable's value, or nullopt when it is not set or empty.
std::optional<std::string> env(const char* name);

}  // namespace argosy::base
