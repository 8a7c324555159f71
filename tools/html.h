// Text from outside as part of a page, and the parts that pages are made of. Test:
// tests/cli/report_test.cc.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace argosy::tools {

// Fit for HTML text and quoted attributes: markup characters as entities; bytes that are no UTF-8,
// and control characters, as U+FFFD.
std::string escaped(std::string_view text);

// "1 rank", "2 ranks".
std::string plural(int64_t count, std::string_view noun);

// What follows is HTML; `value` of a fact is text.
std::string section(std::string_view title, const std::string& text, const std::string& body);
std::string scrolling(const std::string& body);
std::string fact(std::string_view name, const std::string& value);
std::string wide_fact(std::string_view name, const std::string& value);

// Cells are HTML. The first line is the head.
using HtmlLines = std::vector<std::vector<std::string>>;
std::string table(const HtmlLines& lines, bool last_is_sum);

// A whole page that loads nothing.
std::string page(const std::string& title, const std::string& head, const std::string& sections);

}  // namespace argosy::tools
