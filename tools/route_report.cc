// See route_report.h. Test: tests/cli/route_test.cc.
#include "tools/route_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "tools/html.h"
#include "tools/load_page.h"
#include "tools/load_summary.h"
#include "tools/table.h"

namespace argosy::tools {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no infinity.
Json number_or_word(double value) {
  return std::isfinite(value) ? Json(value) : Json(std::isnan(value) ? "nan" : "inf");
}

template <typename T>
Json value_or_null(const std::optional<T>& value) {
  return value.has_value() ? Json(*value) : Json(nullptr);
}

// Field and text of every line of to_string().
std::vector<std::pair<std::string, std::string>> fields_of(const RouterSpec& spec) {
  std::vector<std::pair<std::string, std::string>> fields;
  std::string rest = to_string(spec);
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const size_t equals = rest.find(" = ");
    fields.emplace_back(rest.substr(0, equals), rest.substr(equals + 3, end - equals - 3));
    rest.erase(0, end + 1);
  }
  return fields;
}

Json spec_json(const RouterSpec& spec) {
  Json json = Json::object();
  for (const auto& [field, text] : fields_of(spec)) json[field] = text;
  json["num_experts"] = spec.num_experts;
  json["top_k"] = spec.top_k;
  json["num_groups"] = spec.num_groups;
  json["keep_groups"] = spec.keep_groups;
  json["routed_scaling_factor"] = spec.routed_scaling_factor;
  return json;
}

Json compare_json(const RouteCompare& compare) {
  Json first = nullptr;
  if (compare.first_difference.has_value()) {
    const RouteDifference& at = *compare.first_difference;
    first = {{"token", at.token},
             {"experts", at.experts},
             {"other_experts", at.other_experts},
             {"selection_gap", number_or_word(at.selection_gap)},
             {"lowest_taken", value_or_null(at.lowest_taken)},
             {"highest_refused", value_or_null(at.highest_refused)}};
  }
  return {{"experts_equal", compare.experts_equal},
          {"experts_differ", compare.experts_differ},
          {"ties", compare.ties},
          {"weights_max_rel", number_or_word(compare.weights_max_rel)},
          {"differ_max_gap", number_or_word(compare.differ_max_gap)},
          {"first_difference", first}};
}

std::string bars(std::string_view name, const std::vector<int64_t>& loads) {
  constexpr int kBarWidth = 40;
  const int64_t most = summarise(loads).max;
  const size_t index_width = std::to_string(loads.size() - 1).size();
  const size_t load_width = std::to_string(most).size();
  std::string text;
  for (size_t i = 0; i < loads.size(); ++i) {
    const std::string bar = load_bar(loads[i], most, kBarWidth);
    text += fmt::format("{} {:>{}}  {:>{}}{}{}\n", name, i, index_width, loads[i], load_width,
                        bar.empty() ? "" : "  ", bar);
  }
  return text;
}

// Name and text of everything but the load.
std::vector<std::pair<std::string, std::string>> findings(const RouteReport& report) {
  const RouteResult& result = *report.result;
  std::vector<std::pair<std::string, std::string>> lines;
  if (result.routing.num_valid_tokens != result.routing.num_tokens) {
    lines.emplace_back("valid tokens", std::to_string(result.routing.num_valid_tokens));
  }
  if (result.routing.num_nonfinite_rows > 0) {
    lines.emplace_back("rows not finite", std::to_string(result.routing.num_nonfinite_rows));
  }
  if (result.aux_loss.has_value()) {
    lines.emplace_back("auxiliary loss",
                       fmt::format("{:.9g} ({})", *result.aux_loss, report.options->aux_scope));
  }
  if (result.z_loss.has_value()) {
    lines.emplace_back("z-loss", fmt::format("{:.9g}", *result.z_loss));
  }
  if (result.capacity.has_value()) {
    const CapacityResult& capacity = *result.capacity;
    const bool same = std::adjacent_find(capacity.capacity.begin(), capacity.capacity.end(),
                                         std::not_equal_to<>()) == capacity.capacity.end();
    lines.emplace_back("capacity",
                       fmt::format("{}: {} dropped, {} tokens without an expert",
                                   same ? std::to_string(capacity.capacity.front())
                                        : fmt::format("{}", fmt::join(capacity.capacity, ", ")),
                                   capacity.num_dropped, capacity.num_lost_tokens));
  }
  if (!report.compare.has_value()) return lines;
  const RouteCompare& compare = *report.compare;
  lines.emplace_back("compare", fmt::format("experts equal {}, differ {}, ties {}; weights off by "
                                            "{:.3g}",
                                            compare.experts_equal, compare.experts_differ,
                                            compare.ties, compare.weights_max_rel));
  if (!compare.first_difference.has_value()) return lines;
  const RouteDifference& first = *compare.first_difference;
  std::string scores;
  if (first.lowest_taken.has_value() && first.highest_refused.has_value()) {
    scores = fmt::format("; lowest score taken {:.17g}, of the others {:.17g}", *first.lowest_taken,
                         *first.highest_refused);
  }
  lines.emplace_back("first difference", fmt::format("token {}: [{}] and [{}]; gap {:.3g}{}",
                                                     first.token, fmt::join(first.experts, ", "),
                                                     fmt::join(first.other_experts, ", "),
                                                     first.selection_gap, scores));
  return lines;
}

std::string head_line(const RouteReport& report) {
  const RouterSpec& spec = report.rules->spec;
  return fmt::format("{}, {} tokens, {} experts, top-{}, {}", report.rules->source,
                     report.result->routing.num_tokens, spec.num_experts, spec.top_k,
                     plural(report.options->num_ranks, "rank"));
}

}  // namespace

Json route_json(const RouteReport& report) {
  const RouteResult& result = *report.result;
  const RouterSpec& spec = report.rules->spec;
  Json json = {{"rules", report.rules->source},
               {"experts", spec.num_experts},
               {"top_k", spec.top_k},
               {"ranks", report.options->num_ranks},
               {"tokens", result.routing.num_tokens},
               {"valid_tokens", result.routing.num_valid_tokens},
               {"nonfinite_rows", result.routing.num_nonfinite_rows},
               {"spec", spec_json(spec)},
               {"rows_per_expert", result.kept.counts},
               {"rows_per_rank", result.rows_per_rank},
               {"balancedness", summarise(result.rows_per_rank).balancedness},
               {"expert_balancedness", summarise(result.kept.counts).balancedness}};
  if (!report.options->preset.empty()) json["preset"] = report.options->preset;
  Json losses = Json::object();
  if (result.aux_loss.has_value()) {
    losses["aux"] = number_or_word(*result.aux_loss);
    losses["aux_scope"] = report.options->aux_scope;
  }
  if (result.z_loss.has_value()) losses["z"] = number_or_word(*result.z_loss);
  json["losses"] = losses;
  if (result.capacity.has_value()) {
    json["capacity"] = {{"capacity", result.capacity->capacity},
                        {"policy", report.options->policy},
                        {"scope", report.options->capacity_scope},
                        {"dropped", result.capacity->num_dropped},
                        {"dropped_per_expert", result.capacity->dropped},
                        {"tokens_without_expert", result.capacity->num_lost_tokens}};
  }
  if (report.compare.has_value()) json["compare"] = compare_json(*report.compare);
  return json;
}

std::string route_text(const RouteReport& report) {
  const RouteResult& result = *report.result;
  std::string text = head_line(report) + "\n\n";
  text += bars("expert", result.kept.counts) + "\n";
  text += bars("rank", result.rows_per_rank) + "\n";
  text += load_table(result.kept.counts, result.rows_per_rank);
  const auto lines = findings(report);
  if (!lines.empty()) text += "\n";
  for (const auto& [name, value] : lines) text += fmt::format("{}: {}\n", name, value);
  return text;
}

std::string route_page(const RouteReport& report) {
  std::string head = fmt::format("<h1>{}</h1>\n<dl class=\"facts\">\n", escaped(head_line(report)));
  for (const auto& [name, value] : findings(report)) head += wide_fact(name, value);
  for (const auto& [field, text] : fields_of(report.rules->spec)) head += fact(field, text);
  head += "</dl>\n";
  return page("argosy route: " + escaped(report.rules->source), head,
              load_sections(report.result->kept.counts, report.result->rows_per_rank));
}

Json replay_json(const ReplayReport& report) {
  Json layers = Json::array();
  for (const TraceLayerLoad& layer : report.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"steps", layer.num_steps},
                      {"tokens", layer.num_tokens},
                      {"rows_per_expert", layer.counts},
                      {"rows_per_rank", layer.rank_loads},
                      {"balancedness", summarise(layer.rank_loads).balancedness},
                      {"expert_balancedness", summarise(layer.counts).balancedness},
                      {"mean_expert_peak", layer.expert_peak},
                      {"mean_rank_peak", layer.rank_peak}});
  }
  return {{"trace", report.path},
          {"records", report.trace.records.size()},
          {"top_k", report.trace.top_k},
          {"ranks", report.num_ranks},
          {"has_weights", !report.trace.topk_weights.empty()},
          {"layers", layers}};
}

std::string replay_text(const ReplayReport& report) {
  std::string text =
      fmt::format("{}, {}, top-{}, {}\n", report.path,
                  plural(static_cast<int64_t>(report.trace.records.size()), "record"),
                  report.trace.top_k, plural(report.num_ranks, "rank"));
  for (const TraceLayerLoad& layer : report.layers) {
    text += fmt::format(
        "\nlayer {}: {} tokens in {}; in a step the fullest expert has {:.2f} times the mean, the "
        "fullest rank {:.2f}\n",
        layer.layer, layer.num_tokens, plural(layer.num_steps, "step"), layer.expert_peak,
        layer.rank_peak);
    text += load_table(layer.counts, layer.rank_loads);
  }
  return text;
}

std::string replay_page(const ReplayReport& report) {
  std::string head =
      fmt::format("<h1>Router trace, {}</h1>\n<code>{}</code>\n<dl class=\"facts\">\n{}{}</dl>\n",
                  plural(report.num_ranks, "rank"), escaped(report.path),
                  fact("records", std::to_string(report.trace.records.size())),
                  fact("top_k", std::to_string(report.trace.top_k)));
  std::string sections;
  for (const TraceLayerLoad& layer : report.layers) {
    sections +=
        load_sections(layer.counts, layer.rank_loads, fmt::format(", layer {}", layer.layer));
  }
  return page("argosy route: a router trace", head, sections);
}

}  // namespace argosy::tools
