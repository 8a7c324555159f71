// See html.h. Test: tests/cli/report_test.cc.
#include "tools/html.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tools/report_style.h"

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

std::string plural(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string section(std::string_view title, const std::string& text, const std::string& body) {
  return fmt::format("<section>\n<h2>{}</h2>\n{}{}</section>\n", title,
                     text.empty() ? "" : "<p>" + text + "</p>\n", body);
}

std::string scrolling(const std::string& body) {
  return "<div class=\"scroll\">\n" + body + "</div>\n";
}

std::string fact(std::string_view name, const std::string& value) {
  return fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", name, escaped(value));
}

std::string wide_fact(std::string_view name, const std::string& value) {
  return fmt::format("<div class=\"wide\"><dt>{}</dt><dd><code>{}</code></dd></div>\n", name,
                     escaped(value));
}

std::string table(const HtmlLines& lines, bool last_is_sum) {
  std::string html = "<table>\n";
  for (size_t i = 0; i < lines.size(); ++i) {
    html += last_is_sum && i + 1 == lines.size() ? "<tr class=\"sum\">" : "<tr>";
    const char* const cell = i == 0 ? "th" : "td";
    for (const std::string& text : lines[i]) html += fmt::format("<{0}>{1}</{0}>", cell, text);
    html += "</tr>\n";
  }
  return html + "</table>\n";
}

std::string page(const std::string& title, const std::string& head, const std::string& sections) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<header>\n{}</header>\n<main>\n"
      "{}</main>\n<footer>argosy " ARGOSY_VERSION "</footer>\n</body>\n</html>\n",
      title, kReportStyle, head, sections);
}

}  // namespace argosy::tools
