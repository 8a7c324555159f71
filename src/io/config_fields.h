// Typed, bounded access to the fields of one config.json. Every error names family, field and
// value.
//
// A null counts as absent. When the language model is nested under "text_config", a field that
// stands at both levels must have one value. Test: tests/io/config_test.cc.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "argosy/status.h"

namespace argosy::io {

struct IntegerRange {
  int64_t min = 0;
  int64_t max = int64_t{1} << 31;
};

class ConfigFields {
 public:
  // `nested` may be null; both must outlive this object.
  ConfigFields(std::string family, const nlohmann::json* root, const nlohmann::json* nested)
      : family_(std::move(family)), root_(root), nested_(nested) {}

  const std::string& family() const { return family_; }

  // The value, or null when absent.
  Result<const nlohmann::json*> find(std::string_view field) const;

  Result<std::optional<int64_t>> integer(std::string_view field, IntegerRange range) const;
  Result<std::optional<double>> number(std::string_view field) const;
  Result<std::optional<bool>> boolean(std::string_view field) const;
  Result<std::optional<std::string>> word(std::string_view field) const;
  // The one value of several spellings of a field; kInvalidArgument names two that differ.
  Result<std::optional<int64_t>> integer_alias(std::span<const std::string_view> names,
                                               IntegerRange range) const;

  Result<int64_t> required_integer(std::string_view field, IntegerRange range) const;
  // The error for none of them lists all.
  Result<int64_t> required_alias(std::span<const std::string_view> names, IntegerRange range) const;
  Result<double> required_number(std::string_view field) const;
  Result<bool> required_boolean(std::string_view field) const;

  Status missing(std::string_view field) const;
  // kInvalidArgument: "<family>: <field> is <value>, <wanted>".
  Status refused(std::string_view field, std::string_view value, std::string_view wanted) const;

 private:
  std::string family_;
  const nlohmann::json* root_;
  const nlohmann::json* nested_;
};

}  // namespace argosy::io
