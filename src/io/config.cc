// read_model_config: the fields of a config.json through the table of families.h. Nothing is
// guessed: a field that changes the result is required, or has the default that docs/checkpoints.md
// states, and a value that this build would ignore is refused. Test: tests/io/config_test.cc.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "argosy/checkpoint.h"
#include "base/error.h"
#include "io/config_fields.h"
#include "io/families.h"
#include "io/file.h"
#include "io/json.h"
#include "io/quantisation_config.h"

namespace argosy {
namespace {

using io::ConfigFields;
using io::Family;
using Json = nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;
constexpr int64_t kMaxLayers =
    1 << 16;  // bounds is_moe_layer, the one list whose length a number sets
constexpr int64_t kMaxSharedExperts = 1 << 16;
constexpr int64_t kMaxSharedWidth = kMaxSharedExperts << 31;  // of the widest experts
// Each list begins with the name that most configs use.
constexpr std::string_view kExpertAliases[] = {"num_experts", "num_local_experts",
                                               "n_routed_experts"};
constexpr std::string_view kExpertAliasesOfDeepseek[] = {"n_routed_experts", "num_experts",
                                                         "num_local_experts"};
// Not "top_k": beside a config's other fields that is a parameter of sampling.
constexpr std::string_view kTopKAliases[] = {"num_experts_per_tok", "num_experts_per_token",
                                             "experts_per_token"};

Status refuse_other_word(const ConfigFields& fields, std::string_view field, std::string_view only,
                         StatusCode code) {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<std::string> word, fields.word(field));
  if (!word || *word == only) return {};
  return base::error(code, "{}: {} is {}, only \"{}\" is supported", fields.family(), field,
                     io::in_quotes(*word), only);
}

// Fields that would change the result and that this build cannot follow.
Status check_unsupported(const ConfigFields& fields, const Family& family, bool reads_router) {
  ARGOSY_ASSIGN_OR_RETURN(const Json* compression, fields.find("compression_config"));
  if (compression != nullptr) {
    return base::error(StatusCode::kUnsupported, "{}: compression_config cannot be followed",
                       family.name);
  }
  ARGOSY_RETURN_IF_ERROR(refuse_other_word(fields, "hidden_act", "silu", StatusCode::kUnsupported));
  if (reads_router) {
    ARGOSY_RETURN_IF_ERROR(
        refuse_other_word(fields, "scoring_func", family.score_word, StatusCode::kInvalidArgument));
  }
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<bool> mlp_bias, fields.boolean("mlp_bias"));
  if (family.biases && !mlp_bias.value_or(true)) {
    return fields.refused("mlp_bias", "false", "the experts of this family have biases");
  }
  if (!family.biases && mlp_bias.value_or(false)) {
    return base::error(StatusCode::kUnsupported,
                       "{}: mlp_bias is true; experts with biases cannot be "
                       "read yet",
                       family.name);
  }
  return {};
}

// A field of another family's rule: only the value that leaves the rule without effect.
Status refuse_other_integer(const ConfigFields& fields, std::string_view field, int64_t neutral) {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<int64_t> said, fields.integer(field, {}));
  if (!said || *said == neutral) return {};
  return fields.refused(field, fmt::format("{}", *said),
                        fmt::format("this family has no such rule: only {} is accepted", neutral));
}

// `field` says how often a layer has experts: every n-th.
Result<int64_t> layer_step(const ConfigFields& fields, std::string_view field) {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<int64_t> step, fields.integer(field, {.min = 1}));
  return step.value_or(1);
}

Status apply_mlp_only_layers(const ConfigFields& fields, std::vector<bool>* is_moe_layer) {
  constexpr std::string_view kField = "mlp_only_layers";
  ARGOSY_ASSIGN_OR_RETURN(const Json* list, fields.find(kField));
  if (list == nullptr) return {};
  const auto num_layers = is_moe_layer->size();
  const std::string wanted = fmt::format("wanted a list of layers from 0 to {}", num_layers - 1);
  if (!list->is_array()) return fields.refused(kField, "no list", wanted);
  for (const Json& entry : *list) {
    const bool fits = entry.is_number_unsigned() && entry.get<uint64_t>() < num_layers;
    if (!fits) {
      return fields.refused(kField,
                            entry.is_number() ? "a list with " + entry.dump()
                                              : "a list with "
                                                "something else than numbers",
                            wanted);
    }
    (*is_moe_layer)[entry.get<size_t>()] = false;
  }
  return {};
}

// The layer rules of other families must say what this one does.
Status check_layer_fields(const ConfigFields& fields, const Family& family) {
  if (family.layer_rule != io::LayerRule::kAfterFirstDense) {
    ARGOSY_RETURN_IF_ERROR(refuse_other_integer(fields, "first_k_dense_replace", 0));
    ARGOSY_RETURN_IF_ERROR(refuse_other_integer(fields, "moe_layer_freq", 1));
  }
  if (family.layer_rule == io::LayerRule::kSparseStep) return {};
  ARGOSY_RETURN_IF_ERROR(refuse_other_integer(fields, "decoder_sparse_step", 1));
  ARGOSY_ASSIGN_OR_RETURN(const Json* list, fields.find("mlp_only_layers"));
  if (list == nullptr || (list->is_array() && list->empty())) return {};
  return fields.refused("mlp_only_layers", list->is_array() ? "a list with entries" : "no list",
                        "this family has no such rule: only an empty list is accepted");
}

Status read_layers(const ConfigFields& fields, const Family& family, ModelConfig* config) {
  ARGOSY_RETURN_IF_ERROR(check_layer_fields(fields, family));
  std::vector<bool>& is_moe_layer = config->is_moe_layer;
  switch (family.layer_rule) {
    case io::LayerRule::kAll:
      is_moe_layer.assign(is_moe_layer.size(), true);
      return {};
    case io::LayerRule::kAfterFirstDense: {
      ARGOSY_ASSIGN_OR_RETURN(const int64_t first,
                              fields.required_integer("first_k_dense_replace", {}));
      ARGOSY_ASSIGN_OR_RETURN(const int64_t step, layer_step(fields, "moe_layer_freq"));
      for (int64_t i = 0; i < config->num_layers; ++i) {
        is_moe_layer[static_cast<size_t>(i)] = i >= first && i % step == 0;
      }
      return {};
    }
    case io::LayerRule::kSparseStep: {
      ARGOSY_ASSIGN_OR_RETURN(const int64_t step, layer_step(fields, "decoder_sparse_step"));
      for (int64_t i = 0; i < config->num_layers; ++i) {
        is_moe_layer[static_cast<size_t>(i)] = (i + 1) % step == 0;
      }
      return apply_mlp_only_layers(fields, &is_moe_layer);
    }
  }
  return base::error(StatusCode::kInternal, "{}: no layer rule", family.name);
}

// What a router file says in place of the config.
Status apply_router_file(const ConfigFields& fields, const RouterFile& file, ModelConfig* config) {
  const int64_t num_experts = config->router.num_experts;
  config->router = file.spec;
  RouterSpec& router = config->router;
  if (router.num_experts == 0) router.num_experts = num_experts;
  if (router.num_experts != num_experts) {
    return base::invalid("{}: num_experts is {} in the config but {} in the router file",
                         fields.family(), num_experts, router.num_experts);
  }
  if (router.top_k == 0) {
    ARGOSY_ASSIGN_OR_RETURN(router.top_k,
                            fields.required_integer("num_experts_per_tok", {.min = 1}));
  }
  if (const Status valid = validate(router); !valid.ok()) {
    return Status(valid.code(), fmt::format("router file: {}", valid.message()));
  }
  return {};
}

// Whether deepseek_v2 limits the choice by groups.
Result<bool> limited_by_topk_method(const ConfigFields& fields) {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<std::string> method, fields.word("topk_method"));
  // "gready" is how the first published configs spell it.
  if (!method || *method == "greedy" || *method == "gready") return false;
  if (*method == "group_limited_greedy") return true;
  return fields.refused("topk_method", io::in_quotes(*method),
                        "wanted \"greedy\", \"gready\" or \"group_limited_greedy\"");
}

Status check_no_groups(const ConfigFields& fields) {
  ARGOSY_RETURN_IF_ERROR(refuse_other_integer(fields, "n_group", 1));
  ARGOSY_RETURN_IF_ERROR(refuse_other_integer(fields, "topk_group", 1));
  ARGOSY_ASSIGN_OR_RETURN(const bool limited, limited_by_topk_method(fields));
  if (!limited) return {};
  return fields.refused("topk_method", "\"group_limited_greedy\"", "this family has no groups");
}

Status read_groups(const ConfigFields& fields, const Family& family, RouterSpec* router) {
  if (family.group_rule == io::GroupRule::kNone) return check_no_groups(fields);
  bool limited = family.group_rule == io::GroupRule::kAlways;
  if (family.group_rule == io::GroupRule::kTopkMethod) {
    ARGOSY_ASSIGN_OR_RETURN(limited, limited_by_topk_method(fields));
  }
  if (!limited) return {};
  router->group_score = family.group_score;
  ARGOSY_ASSIGN_OR_RETURN(router->num_groups, fields.required_integer("n_group", {.min = 1}));
  ARGOSY_ASSIGN_OR_RETURN(router->keep_groups, fields.required_integer("topk_group", {.min = 1}));
  return {};
}

Status read_normalise(const ConfigFields& fields, const Family& family, RouterSpec* router) {
  constexpr std::string_view kField = "norm_topk_prob";
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<bool> said, fields.boolean(kField));
  const bool over_chosen = family.norm_rule == io::NormRule::kOverChosen;
  bool normalise = family.norm_rule == io::NormRule::kAlways;
  if (family.norm_rule == io::NormRule::kField) {
    ARGOSY_ASSIGN_OR_RETURN(normalise, fields.required_boolean(kField));
  } else if (said && *said != (normalise || over_chosen)) {
    return fields.refused(kField, *said ? "true" : "false",
                          *said ? "public implementations of this family disagree on it"
                                : "the weights of this family always sum to 1");
  }
  router->normalise = normalise ? Choice::kYes : Choice::kNo;
  router->normalise_single = router->normalise;
  return {};
}

Status read_scaling_factor(const ConfigFields& fields, const Family& family, RouterSpec* router) {
  constexpr std::string_view kField = "routed_scaling_factor";
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<double> said, fields.number(kField));
  if (family.scaling_factor) {
    ARGOSY_ASSIGN_OR_RETURN(const double factor, fields.required_number(kField));
    router->routed_scaling_factor = static_cast<float>(factor);
  } else if (said && *said != 1.0) {
    return fields.refused(kField, fmt::format("{}", *said), "this family has none");
  }
  return {};
}

Status read_router(const ConfigFields& fields, const Family& family, ModelConfig* config) {
  RouterSpec& router = config->router;
  ARGOSY_ASSIGN_OR_RETURN(router.top_k, fields.required_alias(kTopKAliases, {.min = 1}));
  router.score_function = family.score_function;
  router.selection_bias = family.selection_bias ? Choice::kYes : Choice::kNo;
  ARGOSY_RETURN_IF_ERROR(read_groups(fields, family, &router));
  ARGOSY_RETURN_IF_ERROR(read_normalise(fields, family, &router));
  ARGOSY_RETURN_IF_ERROR(read_scaling_factor(fields, family, &router));
  if (const Status valid = validate(router); !valid.ok()) {
    return Status(valid.code(), fmt::format("{}: {}", family.name, valid.message()));
  }
  return {};
}

Status two_widths(const ConfigFields& fields, int64_t num_shared, int64_t width, int64_t wanted) {
  return base::invalid(
      "{}: n_shared_experts is {} but shared_expert_intermediate_size is {}, wanted {}",
      fields.family(), num_shared, width, wanted);
}

Status read_shared_width(const ConfigFields& fields, const Family& family, ModelConfig* config) {
  constexpr std::string_view kCount = "n_shared_experts";
  constexpr std::string_view kWidth = "shared_expert_intermediate_size";
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<int64_t> count,
                          fields.integer(kCount, {.max = kMaxSharedExperts}));
  const bool is_one = family.shared_rule != io::SharedRule::kCount;
  ARGOSY_ASSIGN_OR_RETURN(
      const std::optional<int64_t> width,
      fields.integer(kWidth,
                     is_one ? io::IntegerRange{} : io::IntegerRange{.max = kMaxSharedWidth}));
  switch (family.shared_rule) {
    case io::SharedRule::kNone:
      ARGOSY_RETURN_IF_ERROR(refuse_other_integer(fields, kCount, 0));
      return refuse_other_integer(fields, kWidth, 0);
    case io::SharedRule::kCount: {
      const int64_t total = count.value_or(0) * config->intermediate;
      if (width && *width != total) {
        return two_widths(fields, count.value_or(0), *width, total);
      }
      config->shared_intermediate = total;
      return {};
    }
    case io::SharedRule::kWidth:
      if (!width) return fields.missing(kWidth);
      if (count && *count != (*width > 0 ? 1 : 0)) {
        return two_widths(fields, *count, *width, *count == 0 ? 0 : *width);
      }
      config->shared_intermediate = *width;
      config->shared_gate = *width > 0;
      return {};
  }
  return base::error(StatusCode::kInternal, "{}: no rule of shared experts", family.name);
}

// A positive number that fp32 holds; `otherwise` when absent.
Result<float> read_positive(const ConfigFields& fields, std::string_view field, float otherwise) {
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<double> said, fields.number(field));
  const float value = said ? static_cast<float>(*said) : otherwise;
  if (value > 0.0f) return value;
  return fields.refused(field, fmt::format("{}", *said), "wanted a positive number");
}

Status read_activation(const ConfigFields& fields, const Family& family, Activation* activation) {
  constexpr std::string_view kFields[] = {"swiglu_limit", "swiglu_alpha"};
  activation->kind = family.activation;
  if (family.activation == ActivationKind::kClampedSwiGlu) {
    ARGOSY_ASSIGN_OR_RETURN(activation->limit,
                            read_positive(fields, kFields[0], activation->limit));
    ARGOSY_ASSIGN_OR_RETURN(activation->alpha,
                            read_positive(fields, kFields[1], activation->alpha));
    return validate(*activation);
  }
  for (const std::string_view field : kFields) {
    ARGOSY_ASSIGN_OR_RETURN(const std::optional<double> said, fields.number(field));
    if (!said) continue;
    return base::error(StatusCode::kUnsupported,
                       "{}: {} is {}; the activation of this family is not clamped", family.name,
                       field, *said);
  }
  return {};
}

// The width of a routed expert. Where dense layers have a width of their own, intermediate_size is theirs.
Result<int64_t> read_width(const ConfigFields& fields, const Family& family) {
  constexpr std::string_view kNames[] = {"intermediate_size", "moe_intermediate_size"};
  if (family.width_field == kNames[0]) return fields.required_alias(kNames, {.min = 1});
  return fields.required_integer(family.width_field, {.min = 1});
}

Result<ModelConfig> read_fields(const ConfigFields& fields, const Family& family,
                                const RouterFile* router) {
  ModelConfig config;
  config.family = std::string(family.name);
  ARGOSY_RETURN_IF_ERROR(check_unsupported(fields, family, router == nullptr));
  ARGOSY_ASSIGN_OR_RETURN(config.quantisation, io::read_quantisation(fields));
  ARGOSY_ASSIGN_OR_RETURN(
      config.num_layers,
      fields.required_integer("num_hidden_layers", {.min = 1, .max = kMaxLayers}));
  ARGOSY_ASSIGN_OR_RETURN(config.hidden, fields.required_integer("hidden_size", {.min = 1}));
  config.is_moe_layer.resize(static_cast<size_t>(config.num_layers));
  const bool is_deepseek = family.name.starts_with("deepseek");
  ARGOSY_ASSIGN_OR_RETURN(
      config.router.num_experts,
      fields.required_alias(is_deepseek ? kExpertAliasesOfDeepseek : kExpertAliases, {}));
  if (config.router.num_experts == 0) return config;  // a dense model: no layer routes
  config.gate_bias = config.expert_bias = family.biases;
  ARGOSY_ASSIGN_OR_RETURN(config.intermediate, read_width(fields, family));
  ARGOSY_RETURN_IF_ERROR(read_activation(fields, family, &config.activation));
  ARGOSY_RETURN_IF_ERROR(read_shared_width(fields, family, &config));
  ARGOSY_RETURN_IF_ERROR(read_layers(fields, family, &config));
  ARGOSY_RETURN_IF_ERROR(router == nullptr ? read_router(fields, family, &config)
                                           : apply_router_file(fields, *router, &config));
  return config;
}

Status unknown_family(const std::string& name) {
  std::vector<std::string_view> known;
  for (const Family& family : io::kFamilies) known.push_back(family.name);
  return base::error(StatusCode::kUnsupported, "model_type {} is unknown; supported: {}",
                     io::in_quotes(name), fmt::join(known, ", "));
}

}  // namespace

std::vector<int64_t> ModelConfig::moe_layers() const {
  std::vector<int64_t> layers;
  for (size_t i = 0; i < is_moe_layer.size(); ++i) {
    if (is_moe_layer[i]) layers.push_back(static_cast<int64_t>(i));
  }
  return layers;
}

Result<ModelConfig> parse_model_config(std::string_view json_text, const RouterFile* router) {
  ARGOSY_ASSIGN_OR_RETURN(const Json root, io::parse_json(json_text, "config"));
  if (!root.is_object()) return base::error(StatusCode::kCorruptData, "config: no JSON object");
  const auto text_config = root.find("text_config");
  const bool is_nested = text_config != root.end() && !text_config->is_null();
  if (is_nested && !text_config->is_object()) {
    return base::invalid("config: text_config is no object");
  }
  const Json* nested = is_nested ? &*text_config : nullptr;
  // The outer model_type of a nested config names the wrapper, not the language model.
  const bool inner_type = is_nested && nested->contains("model_type");
  const ConfigFields type_fields("config", inner_type ? nested : &root, nullptr);
  ARGOSY_ASSIGN_OR_RETURN(const std::optional<std::string> type, type_fields.word("model_type"));
  if (!type) return type_fields.missing("model_type");
  const bool is_named = router != nullptr && !router->family.empty();
  const std::string& name = is_named ? router->family : *type;
  const Family* family = io::find_family(name);
  if (family == nullptr) return unknown_family(name);
  return read_fields(ConfigFields(name, &root, nested), *family, router);
}

Result<ModelConfig> read_model_config(const std::string& dir, const RouterFile* router) {
  const std::string path = dir + "/config.json";
  ARGOSY_ASSIGN_OR_RETURN(const std::string text, io::read_text(path, kMaxConfigBytes));
  Result<ModelConfig> config = parse_model_config(text, router);
  if (config) return config;
  return Status(config.error().code(), fmt::format("{}: {}", path, config.error().message()));
}

}  // namespace argosy
