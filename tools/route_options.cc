// See route_options.h. Test: tests/cli/route_test.cc.
#include "tools/route_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "argosy/router_file.h"
#include "tools/option_checks.h"

namespace argosy::tools {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

Status refused(std::string text) { return Status(StatusCode::kInvalidArgument, std::move(text)); }

// The word a field of RouterSpec takes, by the library's own rule.
CLI::Validator field_value(std::string field) {
  return CLI::Validator(
      [field = std::move(field)](std::string& word) {
        RouterSpec spec;
        const Status status = set_router_field(field, word, &spec);
        return status.ok() ? std::string() : status.message();
      },
      "");
}

struct FieldOption {
  const char* option;
  const char* field;
  const char* type;
  const char* help;
};

constexpr FieldOption kFieldOptions[] = {
    {"--experts", "num_experts", "E", "Number of experts"},
    {"--top-k", "top_k", "K", "Experts chosen per token"},
    {"--score-function", "score_function", "NAME",
     "softmax, softmax_top_k, sigmoid or sqrt_softplus"},
    {"--use-selection-bias", "selection_bias", "yes|no", "Whether a bias is added for selection"},
    {"--groups", "num_groups", "G", "Groups that the experts fall into; 1: no group limit"},
    {"--keep-groups", "keep_groups", "N", "Groups that a token may choose from"},
    {"--group-score", "group_score", "NAME", "max, sum_of_best_two or sum_of_best_k_per_group"},
    {"--normalise", "normalise", "yes|no", "Divide the weights of a token by their sum"},
    {"--normalise-single", "normalise_single", "yes|no",
     "The same when top-k is 1 and scores are sigmoid or sqrt_softplus"},
    {"--weight-norm", "weight_norm", "NAME", "exact, or reference: denominator + 1e-20"},
    {"--routed-scaling-factor", "routed_scaling_factor", "X", "Factor of all weights"},
    {"--on-nonfinite", "on_nonfinite", "error|uniform",
     "NaN or Inf among a token's logits: an error, or route it as if all were 0"},
};

CLI::Option* add_tensor(CLI::App& command, const char* name, std::string& target,
                        const char* help) {
  return command.add_option(name, target, help)
      ->type_name("FILE:TENSOR")
      ->check(file_and("TENSOR"));
}

void add_token_options(CLI::App& command, RouteOptions& options) {
  add_tensor(command, "--logits", options.logits, "Logits [tokens, experts], fp32 or bf16");
  add_tensor(command, "--input", options.input,
             "Hidden states [tokens, hidden], fp32 or bf16, in place of logits");
  add_tensor(command, "--gate", options.gate,
             "Router weights [experts, hidden] (default: the model's)");
  add_tensor(command, "--gate-bias", options.gate_bias,
             "Router bias [experts] (default: the model's, or none)");
  add_tensor(command, "--selection-bias", options.selection_bias,
             "Bias [experts], fp32, added to scores for selection; for rules that have one, as "
             "deepseek_v3 (default: the model's)");
  add_tensor(command, "--mask", options.mask,
             "Valid tokens [tokens], bool or uint8; rows of others are never read (default: all)");
  command
      .add_option("--replay", options.replay,
                  "Read choices from a router trace (.npz, .jsonl) in place of routing")
      ->type_name("FILE")
      ->check(not_empty());
}

void add_rule_options(CLI::App& command, RouteOptions& options) {
  command.add_option("--preset", options.preset, "Routing rules: mixtral, deepseek_v3, ...")
      ->type_name("NAME")
      ->check(preset_name());
  command
      .add_option("--router", options.router,
                  "Routing rules from a JSON file (docs/routing.md); with --model in place of its "
                  "own")
      ->type_name("FILE")
      ->check(not_empty());
  command
      .add_option("--model", options.model,
                  "Routing rules, gate and biases of a checkpoint in Hugging Face format")
      ->type_name("DIR")
      ->check(not_empty());
  command.add_option("--layer", options.layer, "Layer of the model, counted from 0")
      ->type_name("N")
      ->check(whole_number(0, kMost));
  for (const FieldOption& one : kFieldOptions) {
    const std::string field = one.field;
    CLI::Option* const option = command.add_option_function<std::string>(
        one.option,
        [&options, field](const std::string& word) { options.fields.emplace_back(field, word); },
        one.help);
    option->type_name(one.type);
    const bool is_size = field.starts_with("num_") || field == "top_k" || field == "keep_groups";
    option->check(is_size ? whole_number(1, kMost) : field_value(field));
  }
  command
      .add_option("--ranks", options.num_ranks,
                  "Ranks that share experts and tokens, 1 to 1024 (default: 1)")
      ->type_name("R")
      ->check(whole_number(1, 1024));
  command.add_flag("--print-spec", options.print_spec,
                   "Print the effective rules, one field a line, and stop");
}

void add_loss_options(CLI::App& command, RouteOptions& options) {
  constexpr double kLarge = 1e30;
  command.add_option("--aux-loss", options.aux_loss, "Coefficient of the auxiliary loss")
      ->type_name("COEFF")
      ->check(number(-kLarge, kLarge));
  command
      .add_option("--aux-scope", options.aux_scope,
                  "micro-batch, sequence, or global (one call is one batch: as micro-batch) "
                  "(default: micro-batch)")
      ->type_name("SCOPE")
      ->check(one_of({"micro-batch", "sequence", "global"}));
  command.add_option("--aux-scale", options.aux_scale, "megatron or hf (default: megatron)")
      ->type_name("SCALE")
      ->check(one_of({"megatron", "hf"}));
  command
      .add_option("--aux-counts", options.aux_counts,
                  "Choices counted: routed, or plain: top-k of the scores without bias and groups "
                  "(default: routed)")
      ->type_name("COUNTS")
      ->check(one_of({"routed", "plain"}));
  command
      .add_option_function<std::string>(
          "--sequence-lengths",
          [&options](const std::string& list) {
            for (const std::string_view word : split_at_commas(list)) {
              options.sequence_lengths.push_back(parse_whole_number(word).value_or(0));
            }
          },
          "Tokens of each sequence, in order, with commas; for --aux-scope sequence")
      ->type_name("N,N,...")
      ->check(whole_numbers(0, std::numeric_limits<int64_t>::max()));
  command.add_option("--z-loss", options.z_loss, "Coefficient of the z-loss")
      ->type_name("COEFF")
      ->check(number(-kLarge, kLarge));
  command
      .add_option("--bias-update", options.bias_update,
                  "Step the selection bias by this rate; --output gets selection_bias_next")
      ->type_name("RATE")
      ->check(number(0, kLarge));
  command.add_flag("--bias-centred", options.bias_centred, "Take the mean of all steps off each");
}

CLI::Validator capacity_factor() {
  return CLI::Validator(
      [](std::string& word) {
        const size_t slash = word.find('/');
        const auto num = parse_whole_number(std::string_view(word).substr(0, slash));
        const auto den = slash == std::string::npos
                             ? std::optional<int64_t>(1)
                             : parse_whole_number(std::string_view(word).substr(slash + 1));
        const bool fits = num && den && *num >= 1 && *num <= kMost && *den >= 1 && *den <= kMost;
        return fits ? std::string()
                    : fmt::format("'{}' is no factor: num/den or num, each from 1 to {}", word,
                                  kMost);
      },
      "");
}

void add_capacity_options(CLI::App& command, RouteOptions& options) {
  command
      .add_option_function<std::string>(
          "--capacity",
          [&options](const std::string& word) {
            const size_t slash = word.find('/');
            const std::string_view den =
                slash == std::string::npos ? "1" : std::string_view(word).substr(slash + 1);
            options.capacity = {*parse_whole_number(std::string_view(word).substr(0, slash)),
                                *parse_whole_number(den)};
          },
          "Drop what is above this factor of an even load (default: drop nothing)")
      ->type_name("num/den")
      ->check(capacity_factor());
  command.add_option("--policy", options.policy, "Who stays: position or weight")
      ->type_name("POLICY")
      ->check(one_of({"position", "weight"}));
  command
      .add_option("--capacity-scope", options.capacity_scope,
                  "Whose tokens compete: group or rank (default: group)")
      ->type_name("SCOPE")
      ->check(one_of({"group", "rank"}));
  command
      .add_option("--choice-order", options.choice_order,
                  "interleaved, or first-choices-first (default: interleaved)")
      ->type_name("ORDER")
      ->check(one_of({"interleaved", "first-choices-first"}));
  command.add_flag("--renormalise-kept", options.renormalise_kept,
                   "Kept weights of a token take over the sum of its dropped ones");
}

void add_result_options(CLI::App& command, RouteOptions& options) {
  const auto add_file = [&](const char* name, std::string& target, const char* help) {
    command.add_option(name, target, help)->type_name("FILE")->check(not_empty());
  };
  command
      .add_option("--compare", options.compare,
                  "Hold the routing against PREFIX.topk_idx and PREFIX.topk_weights")
      ->type_name("FILE:PREFIX")
      ->check(file_and("PREFIX"));
  add_file("--output", options.output,
           "Write topk_idx, topk_weights and counts to this safetensors file");
  add_file("--record", options.record, "Write a router trace, .npz or .jsonl");
  command
      .add_option("--json", options.json, "Write JSON to this file; - is stdout, without the table")
      ->type_name("FILE|-")
      ->check(not_empty());
  add_file("--report", options.report, "Write a page (HTML, one file) with the load");
}

struct Pair {
  const char* option;
  const char* other;
};

constexpr Pair kExclusive[] = {
    {"--logits", "--input"}, {"--logits", "--gate"},   {"--logits", "--gate-bias"},
    {"--preset", "--model"}, {"--preset", "--router"},
};

constexpr Pair kNeeded[] = {
    {"--gate", "--input"},
    {"--gate-bias", "--input"},
    {"--layer", "--model"},
    {"--model", "--layer"},
    {"--preset", "--experts"},
    {"--preset", "--top-k"},
    {"--aux-scope", "--aux-loss"},
    {"--aux-scale", "--aux-loss"},
    {"--aux-counts", "--aux-loss"},
    {"--sequence-lengths", "--aux-loss"},
    {"--bias-update", "--output"},
    {"--bias-centred", "--bias-update"},
    {"--capacity", "--policy"},
    {"--policy", "--capacity"},
    {"--capacity-scope", "--capacity"},
    {"--choice-order", "--capacity"},
    {"--renormalise-kept", "--capacity"},
};

// All that a replay can use: a trace has neither logits nor rules.
constexpr const char* kWithReplay[] = {"--replay", "--ranks", "--experts", "--json", "--report"};

Status check_replay(const RouteOptions& options) {
  for (const std::string& option : options.given) {
    if (std::find(std::begin(kWithReplay), std::end(kWithReplay), option) ==
        std::end(kWithReplay)) {
      return refused(fmt::format("--replay and {} do not go together", option));
    }
  }
  return {};
}

Status check_tokens_and_rules(const RouteOptions& options) {
  if (!options.has("--preset") && !options.has("--model") && !options.has("--router")) {
    return refused("no rules: give --preset, --model or --router");
  }
  if (options.print_spec) return {};
  if (!options.has("--logits") && !options.has("--input")) {
    return refused("no tokens: give --logits, --input or --replay");
  }
  if (options.has("--input") && !options.has("--gate") && !options.has("--model")) {
    return refused("--input needs --gate (or --model)");
  }
  const bool is_sequence = options.aux_scope == "sequence";
  if (is_sequence != options.has("--sequence-lengths")) {
    return refused(is_sequence
                       ? "--aux-scope sequence needs --sequence-lengths"
                       : fmt::format("--sequence-lengths needs --aux-scope sequence, not {}",
                                     options.aux_scope));
  }
  return {};
}

}  // namespace

void add_route_options(CLI::App& command, RouteOptions& options) {
  add_token_options(command, options);
  add_rule_options(command, options);
  add_loss_options(command, options);
  add_capacity_options(command, options);
  add_result_options(command, options);
}

void note_given(const CLI::App& command, RouteOptions& options) {
  for (const CLI::Option* const option : command.get_options()) {
    if (option->count() > 0) options.given.insert(option->get_name());
  }
}

Status check_combination(const RouteOptions& options) {
  if (options.has("--replay")) return check_replay(options);
  for (const Pair& pair : kExclusive) {
    if (options.has(pair.option) && options.has(pair.other)) {
      return refused(fmt::format("{} and {} do not go together", pair.option, pair.other));
    }
  }
  for (const Pair& pair : kNeeded) {
    if (options.has(pair.option) && !options.has(pair.other)) {
      return refused(fmt::format("{} needs {}", pair.option, pair.other));
    }
  }
  return check_tokens_and_rules(options);
}

}  // namespace argosy::tools
