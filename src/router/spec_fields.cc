// RouterSpec field by field, from text: what a router file and the command line share. Test:
// tests/router/spec_test.cc.
#include <fmt/ranges.h>

#include <charconv>
#include <cmath>

#include "argosy/router_file.h"
#include "base/error.h"
#include "router/spec_words.h"

namespace argosy {
namespace {

using Setter = Status (*)(std::string_view field, std::string_view value, RouterSpec* spec);

template <typename Number>
bool parse_all(std::string_view text, Number* value) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return problem == std::errc() && end == text.data() + text.size();
}

template <int64_t RouterSpec::*Field>
Status set_integer(std::string_view field, std::string_view value, RouterSpec* spec) {
  int64_t parsed = 0;
  if (!parse_all(value, &parsed)) {
    return base::invalid("{} is {}, expected a whole number", field, value);
  }
  spec->*Field = parsed;
  return {};
}

Status set_factor(std::string_view field, std::string_view value, RouterSpec* spec) {
  float parsed = 0;
  if (!parse_all(value, &parsed) || !std::isfinite(parsed)) {
    return base::invalid("{} is {}, expected a number that fits fp32", field, value);
  }
  spec->routed_scaling_factor = parsed;
  return {};
}

template <auto Field, auto& kWords>
Status set_word(std::string_view field, std::string_view value, RouterSpec* spec) {
  std::vector<std::string_view> allowed;
  for (const auto& one : kWords) {
    allowed.push_back(one.word);
    if (one.word != value) continue;
    spec->*Field = one.value;
    return {};
  }
  return base::invalid("{} is {}, expected one of {}", field, value, fmt::join(allowed, ", "));
}

template <Choice RouterSpec::*Field>
Status set_choice(std::string_view field, std::string_view value, RouterSpec* spec) {
  const std::string_view word = value == "true" ? "yes" : value == "false" ? "no" : value;
  return set_word<Field, router::kChoiceWords>(field, word, spec);
}

struct Field {
  std::string_view name;
  Setter set;
};

constexpr Field kFields[] = {
    {"num_experts", set_integer<&RouterSpec::num_experts>},
    {"top_k", set_integer<&RouterSpec::top_k>},
    {"score_function", set_word<&RouterSpec::score_function, router::kScoreFunctionWords>},
    {"selection_bias", set_choice<&RouterSpec::selection_bias>},
    {"num_groups", set_integer<&RouterSpec::num_groups>},
    {"keep_groups", set_integer<&RouterSpec::keep_groups>},
    {"group_score", set_word<&RouterSpec::group_score, router::kGroupScoreWords>},
    {"normalise", set_choice<&RouterSpec::normalise>},
    {"normalise_single", set_choice<&RouterSpec::normalise_single>},
    {"weight_norm", set_word<&RouterSpec::weight_norm, router::kWeightNormWords>},
    {"routed_scaling_factor", set_factor},
    {"on_nonfinite", set_word<&RouterSpec::on_nonfinite, router::kOnNonfiniteWords>},
};

}  // namespace

const std::vector<std::string>& router_field_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Field& field : kFields) list.emplace_back(field.name);
    return list;
  }();
  return names;
}

Status set_router_field(std::string_view field, std::string_view value, RouterSpec* spec) {
  for (const Field& one : kFields) {
    if (one.name == field) return one.set(field, value, spec);
  }
  return base::error(StatusCode::kNotFound, "no router field {}; there are: {}", field,
                     fmt::join(router_field_names(), ", "));
}

}  // namespace argosy
