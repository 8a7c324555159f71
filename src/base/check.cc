// The one place of the library that prints: a broken invariant ends the process with its reason.
// Test: tests/base/status_test.cc (CheckDeathTest).
#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace argosy::base {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s:%d: check failed: %s: %s\n", file, line, condition, message.c_str());
  std::abort();
}

}  // namespace argosy::base
