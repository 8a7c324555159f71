// The one file of the library that calls getenv. Test: tests/platform/cpu_test.cc.
#include "base/env.h"

#include <cstdlib>

namespace argosy::base {

std::optional<std::string> env(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

}  // namespace argosy::base
