// ARGOSY_CHECK: programmer errors only, never user input. Prints the condition and a message, then
// aborts. Test: tests/base/status_test.cc (CheckDeathTest).
#pragma once

#include <fmt/format.h>

#include <string>

namespace argosy::base {
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const std::string& message);
}  // namespace argosy::base

#define ARGOSY_CHECK(condition, ...)                                                            \
  do {                                                                                          \
    if (!(condition)) [[unlikely]] {                                                            \
      ::argosy::base::check_failed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
    }                                                                                           \
  } while (false)
