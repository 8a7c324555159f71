// Test: tests/io/config_test.cc.
//
// JSON has no NaN or Inf, and a number beyond fp64 does not parse.
// JSON numbers keep their kind here: 4 is an integer, 4.0 is none.
#include "io/config_fields.h"

#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/json.h"

namespace argosy::io {
namespace {

using Json = nlohmann::json;

const Json* find_in(const Json* object, std::string_view field) {
  if (object == nullptr) return nullptr;
  const auto at = object->find(std::string(field));
  return at == object->end() || at->is_null() ? nullptr : &*at;
}

// A value as it may stand in a message.
std::string shown(const Json& value) {
  if (value.is_string()) return in_quotes(value.get_ref<const std::string&>());
  if (value.is_structured()) return value.is_object() ? "an object" : "a list";
  return value.dump();
}

template <typename T>
Result<T> require(const ConfigFields& fields, std::string_view field,
                  const Result<std::optional<T>>& value) {
  if (!value) return value.error();
  if (!value->has_value()) return fields.missing(field);
  return **value;
}

}  // namespace

Status ConfigFields::missing(std::string_view field) const {
  return base::invalid("{}: {} is missing", family_, field);
}

Status ConfigFields::refused(std::string_view field, std::string_view value,
                             std::string_view wanted) const {
  return base::invalid("{}: {} is {}, {}", family_, field, value, wanted);
}

Result<const Json*> ConfigFields::find(std::string_view field) const {
  const Json* outer = find_in(root_, field);
  const Json* inner = find_in(nested_, field);
  if (outer != nullptr && inner != nullptr && *outer != *inner) {
    return base::invalid("{}: {} is {} but text_config.{} is {}", family_, field, shown(*outer),
                         field, shown(*inner));
  }
  return inner != nullptr ? inner : outer;
}

Result<std::optional<int64_t>> ConfigFields::integer(std::string_view field,
                                                     IntegerRange range) const {
  ARGOSY_ASSIGN_OR_RETURN(const Json* value, find(field));
  if (value == nullptr) return std::optional<int64_t>();
  const bool fits = value->is_number_integer() && (!value->is_number_unsigned() ||
                                                   std::in_range<int64_t>(value->get<uint64_t>()));
  if (!fits || value->get<int64_t>() < range.min || value->get<int64_t>() > range.max) {
    return refused(field, shown(*value),
                   fmt::format("wanted an integer from {} to {}", range.min, range.max));
  }
  return std::optional(value->get<int64_t>());
}

Result<std::optional<double>> ConfigFields::number(std::string_view field) const {
  ARGOSY_ASSIGN_OR_RETURN(const Json* value, find(field));
  if (value == nullptr) return std::optional<double>();
  constexpr double kMax = std::numeric_limits<float>::max();
  if (!value->is_number() || std::abs(value->get<double>()) > kMax) {
    return refused(field, shown(*value), "wanted a number that fits fp32");
  }
  return std::optional(value->get<double>());
}

Result<std::optional<bool>> ConfigFields::boolean(std::string_view field) const {
  ARGOSY_ASSIGN_OR_RETURN(const Json* value, find(field));
  if (value == nullptr) return std::optional<bool>();
  if (!value->is_boolean()) return refused(field, shown(*value), "wanted true or false");
  return std::optional(value->get<bool>());
}

Result<std::optional<std::string>> ConfigFields::word(std::string_view field) const {
  ARGOSY_ASSIGN_OR_RETURN(const Json* value, find(field));
  if (value == nullptr) return std::optional<std::string>();
  if (!value->is_string()) return refused(field, shown(*value), "wanted a text");
  return std::optional(value->get<std::string>());
}

Result<std::optional<int64_t>> ConfigFields::integer_alias(std::span<const std::string_view> names,
                                                           IntegerRange range) const {
  std::optional<int64_t> found;
  std::string_view found_name;
  for (const std::string_view name : names) {
    ARGOSY_ASSIGN_OR_RETURN(const std::optional<int64_t> value, integer(name, range));
    if (!value) continue;
    if (found && *found != *value) {
      return base::invalid("{}: {} is {} but {} is {}; both name the same value", family_,
                           found_name, *found, name, *value);
    }
    found = value;
    found_name = name;
  }
  return found;
}

Result<int64_t> ConfigFields::required_integer(std::string_view field, IntegerRange range) const {
  return require(*this, field, integer(field, range));
}
Result<int64_t> ConfigFields::required_alias(std::span<const std::string_view> names,
                                             IntegerRange range) const {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<int64_t> value, integer_alias(names, range));
  if (value) return *value;
  if (names.size() == 1) return missing(names[0]);
  return missing(fmt::format("{} (or an alias: {})", names[0], fmt::join(names.subspan(1), ", ")));
}
Result<double> ConfigFields::required_number(std::string_view field) const {
  return require(*this, field, number(field));
}
Result<bool> ConfigFields::required_boolean(std::string_view field) const {
  return require(*this, field, boolean(field));
}

}  // namespace argosy::io
