// See html.h. Test: tests/cli/report_test.cc.
#include "tools/html.h"

#include <nlohmann/json.hpp>

namespace argosy::tools {
namespace {

// The JSON writer knows how to replace what is no UTF-8.
std::string valid_utf8(std::string_view text) {
  using nlohmann::json;
  const std::string quoted = json(text).dump(-1, ' ', false, json::error_handler_t::replace);
  return json::parse(quoted, nullptr, false).get<std::string>();
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : valid_utf8(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default: {
        const bool is_control = (c >= 0 && c < ' ' && c != '\n' && c != '\t') || c == '\x7f';
        result += is_control ? std::string("\xEF\xBF\xBD") : std::string(1, c);
      }
    }
  }
  return result;
}

}  // namespace argosy::tools
