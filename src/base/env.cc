// The one file of the library that calls getenv. Test: tests/platform/cpu_test.cc.
#include "base/env.h"

#include <cstdlib>

// Of POSIX; declared here because <unistd.h> belongs to src/platform.
extern char** environ;

namespace argosy::base {

std::optional<std::string> env(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::vector<std::string> environment() {
  std::vector<std::string> all;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    all.emplace_back(*variable);
  }
  return all;
}

}  // namespace argosy::base
