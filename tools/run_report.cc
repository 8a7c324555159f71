// See run_report.h. Test: tests/cli/run_test.cc.
#include "tools/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "tools/load_summary.h"

namespace argosy::tools {
namespace {

using Json = nlohmann::ordered_json;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Json bytes_json(const std::vector<RankBytes>& ranks) {
  RankBytes total;
  Json per_rank = {{"dispatch", Json::array()},
                   {"combine", Json::array()},
                   {"saved_by_dedup", Json::array()},
                   {"weights_read", Json::array()}};
  for (const RankBytes& rank : ranks) {
    total.dispatch += rank.dispatch;
    total.combine += rank.combine;
    total.saved_by_dedup += rank.saved_by_dedup;
    total.weights_read += rank.weights_read;
    per_rank["dispatch"].push_back(rank.dispatch);
    per_rank["combine"].push_back(rank.combine);
    per_rank["saved_by_dedup"].push_back(rank.saved_by_dedup);
    per_rank["weights_read"].push_back(rank.weights_read);
  }
  return {{"dispatch", total.dispatch},
          {"combine", total.combine},
          {"saved_by_dedup", total.saved_by_dedup},
          {"weights_read", total.weights_read},
          {"per_rank", per_rank}};
}

// [from][to]: what every rank sends, its own rows on the diagonal.
Json traffic_json(const std::vector<MoeReport>& ranks) {
  Json rows = Json::array();
  Json expert_rows = Json::array();
  for (const MoeReport& rank : ranks) {
    rows.push_back(rank.sent_rows_dedup);
    expert_rows.push_back(rank.sent_rows);
  }
  return {{"row_bytes", ranks.empty() ? 0 : ranks[0].row_bytes},
          {"rows", rows},
          {"expert_rows", expert_rows}};
}

// JSON has no such numbers; null would read as "not measured".
Json number_json(double value) {
  if (std::isfinite(value)) return value;
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

Json reached_json(double floor_seconds, double seconds) {
  const std::optional<double> share = reached(floor_seconds, seconds);
  return share.has_value() ? Json(*share) : Json(nullptr);
}

Json rates_json(const Rates& rates) {
  return {{"threads", rates.num_threads},
          {"bf16_operations_per_second", rates.bf16_peak},
          {"f32_operations_per_second", rates.f32_peak},
          {"memory_read_bytes_per_second", rates.memory_read},
          {"memory_moved_bytes_per_second", rates.memory_moved},
          {"cache_read_bytes_per_second", rates.cache_read},
          {"cache_moved_bytes_per_second", rates.cache_moved}};
}

Json floors_json(const RunReport& report) {
  if (!report.floors.has_value()) return nullptr;
  const Floors& floors = *report.floors;
  Json per_rank = Json::object();
  for (const Stage& stage : report.stages) per_rank[stage.name + "_seconds"] = Json::array();
  for (const auto& rank : floors.ranks) {
    for (int stage = 0; stage < kNumMoeStages; ++stage) {
      const std::string name = name_of(static_cast<MoeStage>(stage));
      per_rank[name + "_seconds"].push_back(rank[static_cast<size_t>(stage)]);
    }
  }
  return {{"total_seconds", floors.total},
          {"reached", reached_json(floors.total, report.total_seconds)},
          {"per_rank", per_rank},
          {"bf16_instruction", floors.rates.bf16_instruction},
          {"f32_instruction", floors.rates.f32_instruction},
          {"last_cache_bytes", floors.rates.last_cache_bytes},
          {"memory_bytes", floors.rates.memory_bytes},
          {"one_rank", rates_json(floors.rates.one_rank)},
          {"all_ranks", rates_json(floors.rates.all_ranks)}};
}

Json check_json(const std::optional<CheckResult>& check) {
  if (!check.has_value()) return nullptr;
  return {{"max_abs", number_json(check->error.max_abs)},
          {"max_rel_to_peak", number_json(check->error.relative())},
          {"tokens", check->tokens},
          {"experts_differ", check->experts_differ},
          {"ties", check->ties}};
}

Json compare_json(const std::optional<CompareResult>& compare) {
  if (!compare.has_value()) return nullptr;
  return {{"experts_equal", compare->experts_equal},
          {"experts_differ", compare->experts_differ},
          {"ties", compare->ties},
          {"weights_max_rel", number_json(compare->weights_max_rel)},
          {"logits_max_rel_to_peak", number_json(compare->logits.relative())},
          {"output_max_rel_to_peak", number_json(compare->output.relative())}};
}

// [R] lists of {peer, waits, p50, p99, longest and all of them, in seconds}.
Json waits_json(const RunReport& report) {
  Json ranks = Json::array();
  for (const std::vector<PeerWait>& waits : report.waits) {
    Json list = Json::array();
    for (const PeerWait& wait : waits) {
      const auto seconds = [](int64_t ns) { return static_cast<double>(ns) * 1e-9; };
      list.push_back({{"peer", wait.peer},
                      {"waits", wait.num_waits},
                      {"p50_seconds", seconds(wait.p50_ns)},
                      {"p99_seconds", seconds(wait.p99_ns)},
                      {"max_seconds", seconds(wait.max_ns)},
                      {"total_seconds", seconds(wait.total_ns)}});
    }
    ranks.push_back(std::move(list));
  }
  return ranks;
}

Json gradients_json(const RunReport& report) {
  Json list = Json::array();
  for (const GradientError& gradient : report.gradients) {
    list.push_back({{"name", gradient.name},
                    {"max_abs", number_json(gradient.error.max_abs)},
                    {"max_rel_to_peak", number_json(gradient.error.relative())}});
  }
  return list;
}

Json straggler_json(const RunReport& report) {
  const std::optional<Straggler> straggler = straggler_of(report);
  return straggler.has_value() ? Json(straggler->rank) : Json(nullptr);
}

}  // namespace

double median_of(const std::vector<StageTimes>& repeats, double StageTimes::*stage) {
  std::vector<double> values;
  for (const StageTimes& times : repeats) values.push_back(times.*stage);
  return median(std::move(values));
}

std::vector<Stage> stages_of(const std::vector<StageTimes>& repeats) {
  constexpr std::array<std::pair<const char*, double StageTimes::*>, 6> kStages = {{
      {"route", &StageTimes::route},
      {"counts", &StageTimes::counts},
      {"dispatch", &StageTimes::dispatch},
      {"experts", &StageTimes::experts},
      {"shared", &StageTimes::shared},
      {"combine", &StageTimes::combine},
  }};
  std::vector<Stage> stages;
  for (const auto& [name, stage] : kStages) stages.push_back({name, median_of(repeats, stage)});
  return stages;
}

std::optional<double> reached(double floor_seconds, double seconds) {
  if (!(floor_seconds > 0) || !(seconds > 0)) return std::nullopt;
  return floor_seconds / seconds;
}

std::optional<Straggler> straggler_of(const RunReport& report) {
  std::vector<int64_t> totals(static_cast<size_t>(report.ranks), 0);
  for (const std::vector<PeerWait>& waits : report.waits) {
    for (const PeerWait& wait : waits) {
      if (wait.peer >= 0 && wait.peer < report.ranks) {
        totals[static_cast<size_t>(wait.peer)] += wait.total_ns;
      }
    }
  }
  const auto longest = std::max_element(totals.begin(), totals.end());
  if (longest == totals.end() || *longest == 0) return std::nullopt;
  return Straggler{longest - totals.begin(), *longest};
}

std::string mode_text(const RunReport& report) {
  std::string line = fmt::format("mode {}, payload {}", report.mode, report.payload);
  if (report.weights_inside) line += ", weights inside the activation";
  if (report.recipe != "bf16") line += fmt::format(", experts in {}", report.recipe);
  if (report.mode == "auto") {
    line +=
        fmt::format("; took {}: latency mode is faster up to {} token{} a rank", report.taken_mode,
                    report.latency_tokens, report.latency_tokens == 1 ? "" : "s");
  }
  if (const std::optional<Straggler> straggler = straggler_of(report); straggler.has_value()) {
    line += fmt::format("; waited longest for rank {}: {:.3g} ms in sum over ranks and runs",
                        straggler->rank, static_cast<double>(straggler->total_ns) * 1e-6);
  }
  return line;
}

int64_t nonfinite_logit_rows_of(const RunReport& report) {
  int64_t rows = 0;
  for (const MoeReport& moe : report.rank_reports) rows += moe.num_nonfinite_rows;
  return rows;
}

std::vector<std::string> failures_of(const RunReport& report) {
  std::vector<std::string> failures;
  // Written as "not within", so that a NaN fails.
  const auto within = [](double seen, double allowed) { return seen <= allowed; };
  if (report.check.has_value()) {
    const CheckResult& check = *report.check;
    if (check.experts_differ > 0) {
      failures.push_back(fmt::format(
          "{} of {} checked tokens have other experts than the fp64 reference, token {} first",
          check.experts_differ, check.tokens, check.first_differing_token));
    }
    if (!within(check.error.relative(), report.tolerance)) {
      failures.push_back(fmt::format(
          "output differs from the fp64 reference by {:.3g} of its peak, {:.3g} allowed",
          check.error.relative(), report.tolerance));
    }
  }
  if (report.compare.has_value()) {
    const CompareResult& compare = *report.compare;
    if (compare.experts_differ > 0) {
      failures.push_back(
          fmt::format("{} of {} tokens have other experts than the captures, token {} first",
                      compare.experts_differ, report.tokens, compare.first_differing_token));
    }
    if (!within(compare.weights_max_rel, report.weights_tolerance)) {
      failures.push_back(fmt::format("weights differ from the captures by {:.3g}, {:.3g} allowed",
                                     compare.weights_max_rel, report.weights_tolerance));
    }
    if (!within(compare.output.relative(), report.compare_tolerance)) {
      failures.push_back(
          fmt::format("output differs from the captures by {:.3g} of their peak, {:.3g} allowed",
                      compare.output.relative(), report.compare_tolerance));
    }
  }
  for (const GradientError& gradient : report.gradients) {
    if (within(gradient.error.relative(), report.tolerance)) continue;
    failures.push_back(fmt::format("{} differs by {:.3g} of its peak, {:.3g} allowed",
                                   gradient.name, gradient.error.relative(), report.tolerance));
  }
  return failures;
}

std::vector<std::string> warnings_of(const RunReport& report) {
  std::vector<std::string> warnings;
  if (!report.compare.has_value()) return warnings;
  const CompareResult& compare = *report.compare;
  if (report.tokens > 0 && compare.ties == report.tokens) {
    warnings.push_back(fmt::format(
        "all {} tokens are ties by the captured logits: nothing was compared", report.tokens));
  }
  if (!(compare.logits.relative() <= report.tolerance)) {
    warnings.push_back(
        fmt::format("captured router logits are off by {:.3g} of their peak: ties may be wrong",
                    compare.logits.relative()));
  }
  return warnings;
}

Json to_json(const RunReport& report) {
  Json stages = Json::array();
  for (const Stage& stage : report.stages) {
    const bool has_floor = stage.floor_seconds > 0;
    stages.push_back({{"name", stage.name},
                      {"seconds", stage.seconds},
                      {"floor_seconds", has_floor ? Json(stage.floor_seconds) : Json(nullptr)},
                      {"reached", reached_json(stage.floor_seconds, stage.seconds)}});
  }
  const std::vector<std::string> failures = failures_of(report);
  return {{"model", report.model},
          {"family", report.family},
          {"layer", report.layer},
          {"dtype", report.dtype},
          {"digest", report.digest},
          {"dot_order", report.dot_order},
          {"level", report.level},
          {"transport", report.transport},
          {"mode", report.mode},
          {"taken_mode", report.taken_mode},
          {"payload", report.payload},
          {"weights_inside", report.weights_inside},
          {"recipe", report.recipe},
          {"latency_tokens", report.latency_tokens},
          {"waits", waits_json(report)},
          {"straggler", straggler_json(report)},
          {"ranks", report.ranks},
          {"threads_per_rank", report.threads_per_rank},
          {"tokens", report.tokens},
          {"hidden", report.hidden},
          {"experts", report.experts},
          {"top_k", report.top_k},
          {"rows_per_expert", report.rows_per_expert},
          {"rows_per_rank", report.rows_per_rank},
          {"balancedness", summarise(report.rows_per_rank).balancedness},
          {"expert_balancedness", summarise(report.rows_per_expert).balancedness},
          {"bytes", bytes_json(report.bytes)},
          {"traffic", traffic_json(report.rank_reports)},
          {"repeat", report.repeat},
          {"rounds", report.rounds},
          {"stages", stages},
          {"total_seconds", report.total_seconds},
          {"floors", floors_json(report)},
          {"floors_note", report.floors_note},
          {"pinning", {{"text", report.pinning}, {"cpus", report.pinned_cpus}}},
          {"nonfinite_logit_rows", nonfinite_logit_rows_of(report)},
          {"nonfinite_output_rows", report.nonfinite_output.count},
          {"gradients", gradients_json(report)},
          {"tolerance", report.tolerance},
          {"compare_tolerance", report.compare_tolerance},
          {"error", check_json(report.check)},
          {"compare", compare_json(report.compare)},
          {"warnings", warnings_of(report)},
          {"failures", failures},
          {"passed", failures.empty()}};
}

}  // namespace argosy::tools
