// Text from outside as part of a page. Test: tests/cli/report_test.cc.
#pragma once

#include <string>
#include <string_view>

namespace argosy::tools {

// Fit for HTML text and quoted attributes: markup characters as entities; bytes that are no UTF-8,
// and control characters, as U+FFFD.
std::string escaped(std::string_view text);

}  // namespace argosy::tools
