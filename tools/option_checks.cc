// See option_checks.h. Test: tests/cli/usage_test.cc.
#include "tools/option_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "argosy/cpu.h"
#include "argosy/router.h"

namespace argosy::tools {
namespace {

template <typename Number>
std::optional<Number> parse_all(std::string_view word) {
  Number value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return value;
}

template <typename T>
std::string message_of(const Result<T>& result) {
  return result.has_value() ? std::string() : result.error().message();
}

// Empty when the word is a whole number in the range.
std::string refusal_of(std::string_view word, int64_t lowest, int64_t highest) {
  const std::optional<int64_t> value = parse_all<int64_t>(word);
  if (value.has_value() && *value >= lowest && *value <= highest) return {};
  if (highest == std::numeric_limits<int64_t>::max()) {
    return fmt::format("'{}' is not a whole number of at least {}", word, lowest);
  }
  return fmt::format("'{}' is not a whole number from {} to {}", word, lowest, highest);
}

}  // namespace

std::optional<int64_t> parse_whole_number(std::string_view word) {
  return parse_all<int64_t>(word);
}

std::optional<double> parse_number(std::string_view word) {
  const std::optional<double> value = parse_all<double>(word);
  return value.has_value() && std::isfinite(*value) ? value : std::nullopt;
}

std::vector<std::string_view> split_at_commas(std::string_view list) {
  std::vector<std::string_view> items;
  for (size_t comma = list.find(','); comma != std::string_view::npos; comma = list.find(',')) {
    items.push_back(list.substr(0, comma));
    list.remove_prefix(comma + 1);
  }
  items.push_back(list);
  return items;
}

CLI::Validator whole_number(int64_t lowest, int64_t highest) {
  return CLI::Validator(
      [lowest, highest](std::string& word) { return refusal_of(word, lowest, highest); }, "");
}

CLI::Validator whole_numbers(int64_t lowest, int64_t highest) {
  return CLI::Validator(
      [lowest, highest](std::string& list) {
        const std::vector<std::string_view> items = split_at_commas(list);
        for (size_t i = 0; i < items.size(); ++i) {
          const std::string refusal = refusal_of(items[i], lowest, highest);
          if (!refusal.empty()) return fmt::format("item {} of '{}': {}", i + 1, list, refusal);
        }
        return std::string();
      },
      "");
}

CLI::Validator number(double lowest, double highest) {
  return CLI::Validator(
      [lowest, highest](std::string& word) {
        const std::optional<double> value = parse_number(word);
        if (value.has_value() && *value >= lowest && *value <= highest) return std::string();
        return fmt::format("'{}' is not a number from {} to {}", word, lowest, highest);
      },
      "");
}

CLI::Validator level_name() {
  return CLI::Validator([](std::string& word) { return message_of(parse_level(word)); }, "");
}

CLI::Validator dot_order_name() {
  return CLI::Validator([](std::string& word) { return message_of(parse_dot_order(word)); }, "");
}

CLI::Validator preset_name() {
  return CLI::Validator(
      [](std::string& word) {
        const std::vector<std::string>& names = router_preset_names();
        if (std::find(names.begin(), names.end(), word) != names.end()) return std::string();
        return fmt::format("'{}' is no preset; there are {}", word, fmt::join(names, ", "));
      },
      "");
}

CLI::Validator file_and(std::string_view part) {
  return CLI::Validator(
      [part = std::string(part)](std::string& word) {
        const size_t colon = word.rfind(':');
        if (colon != std::string::npos && colon > 0 && colon + 1 < word.size()) {
          return std::string();
        }
        return fmt::format("'{}' is not FILE:{}", word, part);
      },
      "");
}

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words = std::move(words)](std::string& word) {
        if (std::find(words.begin(), words.end(), word) != words.end()) return std::string();
        return fmt::format("'{}' is none of {}", word, fmt::join(words, ", "));
      },
      "");
}

CLI::Validator not_empty() {
  return CLI::Validator(
      [](std::string& word) { return std::string(word.empty() ? "'' names nothing" : ""); }, "");
}

CLI::Validator check_count() {
  return CLI::Validator(
      [](std::string& word) {
        const std::optional<int64_t> value = parse_whole_number(word);
        if (word == "all" || word == "none" || (value.has_value() && *value >= 0)) {
          return std::string();
        }
        return fmt::format("'{}' is not a number of tokens, all or none", word);
      },
      "");
}

}  // namespace argosy::tools
