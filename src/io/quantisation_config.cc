// See quantisation_config.h. A field that is not in the list below could change what the codes mean, so
// it is refused, not passed over. Test: tests/io/quantisation_config_test.cc.
#include "io/quantisation_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/json.h"

namespace argosy {
namespace {

// At most as many steps as the product of the lengths, whatever the pattern.
bool glob_matches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

// Whether `pattern` stands in `module` as whole components: its own, those around it, or the last of one.
bool names_module(std::string_view pattern, std::string_view module) {
  if (pattern.find('*') != std::string_view::npos) {
    return glob_matches(fmt::format("*.{}.*", pattern), fmt::format(".{}.", module));
  }
  for (size_t at = module.find(pattern); at != std::string_view::npos;
       at = module.find(pattern, at + 1)) {
    const size_t end = at + pattern.size();
    if ((at == 0 || module[at - 1] == '.') && (end == module.size() || module[end] == '.')) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool CheckpointQuantisation::converts(std::string_view module) const {
  return std::none_of(modules_to_not_convert.begin(), modules_to_not_convert.end(),
                      [&](const std::string& pattern) { return names_module(pattern, module); });
}

namespace io {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kField = "quantization_config";

struct Method {
  std::string_view name;
  std::string_view fmt;  // the only value of "fmt"
};
constexpr std::array<Method, 3> kMethods = {
    {{"fp8", "e4m3"}, {"mxfp8", "e4m3"}, {"mxfp4", "e2m1"}}};

constexpr std::array<std::string_view, 8> kKnownFields = {"quant_method",
                                                          "fmt",
                                                          "weight_block_size",
                                                          "activation_scheme",
                                                          "modules_to_not_convert",
                                                          "ignored_layers",
                                                          "scale_fmt",
                                                          "dequantize"};

Status check_known(const ConfigFields& fields, const Json& object) {
  for (const auto& [name, value] : object.items()) {
    const bool known =
        std::find(kKnownFields.begin(), kKnownFields.end(), name) != kKnownFields.end();
    if (known || value.is_null()) continue;
    return base::error(StatusCode::kUnsupported, "{}: {} cannot be followed; known fields: {}",
                       fields.family(), in_quotes(name), fmt::join(kKnownFields, ", "));
  }
  return {};
}

Result<const Method*> read_method(const ConfigFields& fields) {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<std::string> word, fields.word("quant_method"));
  if (!word) return fields.missing("quant_method");
  std::vector<std::string_view> names;
  for (const Method& method : kMethods) {
    if (method.name == *word) return &method;
    names.push_back(method.name);
  }
  return base::error(StatusCode::kUnsupported, "{}: quant_method is {}; supported: {}",
                     fields.family(), in_quotes(*word), fmt::join(names, ", "));
}

Status only_word(const ConfigFields& fields, std::string_view field,
                 std::initializer_list<std::string_view> allowed) {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<std::string> word, fields.word(field));
  if (!word || std::find(allowed.begin(), allowed.end(), *word) != allowed.end()) return {};
  return base::error(StatusCode::kUnsupported, "{}: {} is {}; supported: {}", fields.family(),
                     field, in_quotes(*word), fmt::join(allowed, ", "));
}

// [rows, cols], or none.
Result<std::optional<std::array<int64_t, 2>>> read_block_size(const ConfigFields& fields) {
  constexpr std::string_view kName = "weight_block_size";
  ARGOSY_ASSIGN_OR_RETURN(const Json* list, fields.find(kName));
  std::array<int64_t, 2> block{};
  if (list == nullptr) return std::optional<std::array<int64_t, 2>>();
  const std::string_view wanted = "wanted a list of two numbers from 1 to 65536";
  if (!list->is_array() || list->size() != 2) {
    return fields.refused(
        kName,
        list->is_array() ? fmt::format("a list of {}", list->size()) : std::string("no list"),
        wanted);
  }
  for (size_t i = 0; i < 2; ++i) {
    const Json& side = (*list)[i];
    const bool fits = side.is_number_unsigned() && side.get<uint64_t>() - 1 < 65536;
    if (!fits) return fields.refused(kName, "a list with another entry", wanted);
    block[i] = side.get<int64_t>();
  }
  return std::optional(block);
}

Result<BlockFormat> format_of(const ConfigFields& fields, const Method& method) {
  ARGOSY_ASSIGN_OR_RETURN(const auto block, read_block_size(fields));
  const bool is_fp8 = method.name == "fp8";
  if (!block.has_value()) {
    if (!is_fp8) return method.name == "mxfp4" ? BlockFormat::kMxfp4 : BlockFormat::kMxfp8;
    return base::error(StatusCode::kUnsupported,
                       "{}: weight_block_size is missing; one scale per tensor cannot be read",
                       fields.family());
  }
  const auto is = [&](int64_t rows, int64_t cols) {
    return (*block)[0] == rows && (*block)[1] == cols;
  };
  if (is_fp8 && is(128, 128)) return BlockFormat::kE4M3Block128;
  if (is_fp8 && is(1, 128)) return BlockFormat::kE4M3Row128;
  if (!is_fp8 && is(1, 32))
    return method.name == "mxfp4" ? BlockFormat::kMxfp4 : BlockFormat::kMxfp8;
  return base::error(StatusCode::kUnsupported, "{}: weight_block_size is [{}, {}]; {} has {}",
                     fields.family(), (*block)[0], (*block)[1], method.name,
                     is_fp8 ? "[128, 128] or [1, 128]" : "[1, 32]");
}

Status add_modules(const ConfigFields& fields, std::string_view field,
                   std::vector<std::string>* modules) {
  ARGOSY_ASSIGN_OR_RETURN(const Json* list, fields.find(field));
  if (list == nullptr) return {};
  if (!list->is_array()) return fields.refused(field, "no list", "wanted a list of module names");
  for (const Json& entry : *list) {
    if (!entry.is_string() || entry.get_ref<const std::string&>().empty()) {
      return fields.refused(field, "a list with something else than names",
                            "wanted a list of module names");
    }
    const auto& name = entry.get_ref<const std::string&>();
    if (name.starts_with("re:")) {
      return base::error(StatusCode::kUnsupported,
                         "{}: {} has the regular expression {}; only * is understood",
                         fields.family(), field, in_quotes(name));
    }
    modules->push_back(name);
  }
  return {};
}

}  // namespace

Result<std::optional<CheckpointQuantisation>> read_quantisation(const ConfigFields& outer) {
  ARGOSY_ASSIGN_OR_RETURN(const Json* object, outer.find(kField));
  if (object == nullptr) return std::optional<CheckpointQuantisation>();
  if (!object->is_object()) return base::invalid("{}: {} is no object", outer.family(), kField);
  const ConfigFields fields(fmt::format("{}: {}", outer.family(), kField), object, nullptr);
  ARGOSY_ASSIGN_OR_RETURN(const Method* const method, read_method(fields));
  ARGOSY_RETURN_IF_ERROR(check_known(fields, *object));
  ARGOSY_RETURN_IF_ERROR(only_word(fields, "fmt", {method->fmt}));
  // "dynamic": activations may be quantised while running; nothing of that is in the file.
  ARGOSY_RETURN_IF_ERROR(only_word(fields, "activation_scheme", {"dynamic"}));
  // "ue8m0": the scales are powers of two, whatever their dtype.
  ARGOSY_RETURN_IF_ERROR(only_word(fields, "scale_fmt", {"ue8m0", "float"}));
  ARGOSY_RETURN_IF_ERROR(fields.boolean("dequantize").error());
  CheckpointQuantisation quantisation;
  ARGOSY_ASSIGN_OR_RETURN(quantisation.format, format_of(fields, *method));
  for (const std::string_view field : {"modules_to_not_convert", "ignored_layers"}) {
    ARGOSY_RETURN_IF_ERROR(add_modules(fields, field, &quantisation.modules_to_not_convert));
  }
  return std::optional(std::move(quantisation));
}

}  // namespace io
}  // namespace argosy
