// Checks of option values before anything runs: each refusal names the value and what is allowed.
//
// Test: tests/cli/usage_test.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace argosy::tools {

// Digits only, the whole word, inside int64.
std::optional<int64_t> parse_whole_number(std::string_view word);
// A finite decimal number, the whole word.
std::optional<double> parse_number(std::string_view word);

// "4,,4" has three items, one of them empty.
std::vector<std::string_view> split_at_commas(std::string_view list);

CLI::Validator whole_number(int64_t lowest, int64_t highest);
// A list with commas; an item that is refused is named by its place.
CLI::Validator whole_numbers(int64_t lowest, int64_t highest);
CLI::Validator number(double lowest, double highest);
CLI::Validator level_name();
CLI::Validator dot_order_name();
CLI::Validator preset_name();
// "FILE:<part>", split at the last colon, both not empty.
CLI::Validator file_and(std::string_view part);
CLI::Validator one_of(std::vector<std::string> words);
// Any text but "".
CLI::Validator not_empty();
// A whole number, all or none.
CLI::Validator check_count();

}  // namespace argosy::tools
