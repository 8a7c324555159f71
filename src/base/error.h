// Short builders of Status with a formatted message.
// Test: tests/base/status_test.cc.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "argosy/status.h"

namespace argosy::base {

template <typename... Args>
Status error(StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Status(code, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
Status invalid(fmt::format_string<Args...> format, Args&&... args) {
  return Status(StatusCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace argosy::base
