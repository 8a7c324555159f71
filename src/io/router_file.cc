// The router file: JSON types are checked here, values by set_router_field(). Test:
// tests/io/router_file_test.cc.
#include "argosy/router_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/file.h"
#include "io/json.h"

namespace argosy {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxRouterFileBytes = int64_t{1} << 20;
constexpr std::string_view kNumbers[] = {"num_experts", "top_k", "num_groups", "keep_groups",
                                         "routed_scaling_factor"};

// A value as it may stand in a message.
std::string shown(const Json& value) {
  if (value.is_string()) return io::in_quotes(value.get_ref<const std::string&>());
  if (value.is_structured()) return value.is_object() ? "an object" : "a list";
  return value.dump();
}

Status check_known(const Json& root) {
  const std::vector<std::string>& fields = router_field_names();
  for (const auto& [name, value] : root.items()) {
    if (name == "preset" || name == "family") continue;
    if (std::find(fields.begin(), fields.end(), name) != fields.end()) continue;
    return base::invalid(
        "router file: unknown field {} (its value is {}); there are: preset, "
        "family, {}",
        io::in_quotes(name), shown(value), fmt::join(fields, ", "));
  }
  return {};
}

// Empty when absent.
Result<std::string> word(const Json& root, const char* field) {
  const auto at = root.find(field);
  if (at == root.end()) return std::string();
  if (!at->is_string() || at->get_ref<const std::string&>().empty()) {
    return base::invalid("router file: {} is {}, expected a name in quotes", field, shown(*at));
  }
  return at->get<std::string>();
}

Status set_field(const std::string& name, const Json& value, RouterSpec* spec) {
  const bool is_number =
      std::find(std::begin(kNumbers), std::end(kNumbers), name) != std::end(kNumbers);
  // A text where a number belongs is another type, even one of digits.
  if (value.is_structured() || value.is_null() || (is_number && !value.is_number())) {
    return base::invalid("router file: {} is {}, expected {}", name, shown(value),
                         is_number ? "a number" : "a word or true or false");
  }
  const std::string text =
      value.is_string() ? io::printable(value.get_ref<const std::string&>()) : value.dump();
  const Status status = set_router_field(name, text, spec);
  return status.ok() ? status : Status(status.code(), "router file: " + status.message());
}

}  // namespace

Result<RouterFile> parse_router_file(std::string_view json_text) {
  ARGOSY_ASSIGN_OR_RETURN(const Json root, io::parse_json(json_text, "router file"));
  if (!root.is_object()) {
    return base::error(StatusCode::kCorruptData, "router file: no JSON object");
  }
  ARGOSY_RETURN_IF_ERROR(check_known(root));
  RouterFile file;
  ARGOSY_ASSIGN_OR_RETURN(file.family, word(root, "family"));
  ARGOSY_ASSIGN_OR_RETURN(const std::string preset, word(root, "preset"));
  if (!preset.empty()) {
    Result<RouterSpec> spec = router_preset(io::printable(preset), 0, 0);
    if (!spec) return Status(spec.error().code(), "router file: " + spec.error().message());
    file.spec = *spec;
  }
  for (const std::string& name : router_field_names()) {
    const auto at = root.find(name);
    if (at != root.end()) ARGOSY_RETURN_IF_ERROR(set_field(name, *at, &file.spec));
  }
  return file;
}

Result<RouterFile> read_router_file(const std::string& path) {
  ARGOSY_ASSIGN_OR_RETURN(const std::string text, io::read_text(path, kMaxRouterFileBytes));
  Result<RouterFile> file = parse_router_file(text);
  if (file) return file;
  return Status(file.error().code(), fmt::format("{}: {}", path, file.error().message()));
}

}  // namespace argosy
