// The only place that reads environment variables. Test: tests/platform/cpu_test.cc.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace argosy::base {

// The variable's value, or nullopt when it is not set or empty.
std::optional<std::string> env(const char* name);

// All variables, "NAME=value" each.
std::vector<std::string> environment();

}  // namespace argosy::base
