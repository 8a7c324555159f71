// JSON of some 1 MB that makes a reader ask for as much memory as JSON can.
//
// Made anew by every run, since a corpus should not hold megabytes. Used by the large() of all targets
// that read JSON.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace argosy::testing {

inline constexpr size_t kLargeBytes = size_t{1} << 20;

// `text` over and over, at least kLargeBytes; `between` stands between two.
std::string repeated(std::string_view text, std::string_view between = {});

// The number-th of 100,000 and more different texts of one letter each, none that JSON escapes.
std::string one_letter(size_t number);

// `{"<letter>":<value>,...}`, `count` members.
std::string one_letter_members(size_t count, std::string_view value);

// By what they do: one giant token of each kind, the most values a byte, nesting, keys, white space.
std::map<std::string, std::string> large_json();

}  // namespace argosy::testing
