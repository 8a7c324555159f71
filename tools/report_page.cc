// See report_page.h. Test: tests/cli/report_test.cc.
#include "tools/report_page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "argosy/plan.h"
#include "tools/chart.h"
#include "tools/html.h"
#include "tools/load_page.h"
#include "tools/load_summary.h"

namespace argosy::tools {
namespace {

// In the order in which a call goes through them.
constexpr MoeStage kStagesInTime[] = {MoeStage::kRoute,    MoeStage::kCounts,  MoeStage::kShared,
                                      MoeStage::kDispatch, MoeStage::kExperts, MoeStage::kCombine};

std::string ms(double seconds) { return fmt::format("{:.3f}", seconds * 1e3); }

// --- head ---

std::string verdict(const RunReport& report) {
  const std::vector<std::string> failures = failures_of(report);
  if (!report.check.has_value() && !report.compare.has_value()) {
    return "<div class=\"verdict\">not checked</div>\n";
  }
  if (failures.empty()) return "<div class=\"verdict pass\">all checks held</div>\n";
  std::string html = "<div class=\"verdict fail\">a check FAILED</div>\n<ul class=\"failures\">\n";
  for (const std::string& failure : failures) html += "<li>" + escaped(failure) + "</li>\n";
  return html + "</ul>\n";
}

std::string head(const RunReport& report) {
  std::string html =
      fmt::format("<h1>{}, layer {}, {}</h1>\n<code>{}</code><br>\n", escaped(report.family),
                  report.layer, plural(report.ranks, "rank"), escaped(report.model));
  html += verdict(report);
  html += "<dl class=\"facts\">\n";
  html += fact("tokens", fmt::format("{} of {} {}", report.tokens, report.hidden, report.dtype));
  html += fact("experts", fmt::format("{}, top-{}", report.experts, report.top_k));
  html += fact("ranks",
               fmt::format("{} x {}", report.ranks, plural(report.threads_per_rank, "thread")));
  html += wide_fact("threads", report.pinning);
  html += fact("transport", report.transport);
  html += fact("level", report.level);
  html += fact("dot_order", report.dot_order);
  html += fact("receive rounds", std::to_string(report.rounds));
  html += fact("runs", std::to_string(report.repeat));
  html += fact("time of a run", ms(report.total_seconds) + " ms");
  html += fact("rank balancedness",
               fmt::format("{:.3f}", summarise(report.rows_per_rank).balancedness));
  html += fact("expert balancedness",
               fmt::format("{:.3f}", summarise(report.rows_per_expert).balancedness));
  html += wide_fact("digest of the output", report.dot_order + ":" + report.digest);
  return html + "</dl>\n";
}

using Lines = HtmlLines;

// --- traffic ---

std::vector<std::string> bytes_line(std::string name, const RankBytes& bytes) {
  return {std::move(name), std::to_string(bytes.dispatch), std::to_string(bytes.combine),
          std::to_string(bytes.saved_by_dedup), std::to_string(bytes.weights_read)};
}

// In two columns where there are many ranks.
std::string bytes_tables(const std::vector<RankBytes>& ranks, const RankBytes& total) {
  constexpr size_t kMostLines = 17;
  const Lines head = {{"bytes", "dispatch", "combine", "saved by dedup", "weights read"}};
  const size_t half = ranks.size() <= kMostLines ? ranks.size() : ranks.size() / 2 + 1;
  std::string html;
  Lines lines = head;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    lines.push_back(bytes_line(fmt::format("rank {}", rank), ranks[rank]));
    if (rank + 1 != half || rank + 1 == ranks.size()) continue;
    html += table(lines, false);
    lines = head;
  }
  const bool has_sum = ranks.size() > 1;
  if (has_sum) lines.push_back(bytes_line("all ranks", total));
  return "<div class=\"beside\">\n" + html + table(lines, has_sum) + "</div>\n";
}

std::string traffic_text(const RunReport& report, const RankBytes& total) {
  const int64_t row_bytes = report.rank_reports[0].row_bytes;
  if (report.ranks == 1) {
    return fmt::format("Rows of {} bytes. With one rank, none leaves it.", row_bytes);
  }
  const double saved = total.combine == 0 ? 0
                                          : 100.0 * static_cast<double>(total.saved_by_dedup) /
                                                static_cast<double>(total.combine);
  return fmt::format(
      "Rows that dispatch sends, {} bytes each. A token goes once to a rank{}, however many of its "
      "experts are there: that saves {} of {} bytes, {:.1f} %. Rows on the diagonal stay.",
      row_bytes, report.rounds > 1 ? " and round" : "", total.saved_by_dedup, total.combine, saved);
}

std::string traffic(const RunReport& report) {
  RankBytes total;
  for (const RankBytes& bytes : report.bytes) {
    total.dispatch += bytes.dispatch;
    total.combine += bytes.combine;
    total.saved_by_dedup += bytes.saved_by_dedup;
    total.weights_read += bytes.weights_read;
  }
  return section("Traffic from rank to rank", traffic_text(report, total),
                 scrolling(traffic_map(report.rank_reports))) +
         section("Bytes per rank",
                 "Of rows that change rank, each counted where its token is at home; and of the "
                 "checkpoint.",
                 scrolling(bytes_tables(report.bytes, total)));
}

// --- time ---

std::string time_line(const RunReport& report) {
  std::string key = "<div class=\"key\">";
  for (const MoeStage stage : kStagesInTime) {
    key += fmt::format("<span><i class=\"{0}\"></i>{0}</span>", name_of(stage));
  }
  key += "</div>\n";
  int64_t dropped = 0;
  for (const MoeReport& rank : report.rank_reports) dropped += rank.dropped_spans;
  std::string text = report.repeat > 1 ? "The last run, from the moment the first rank began."
                                       : "From the moment the first rank began.";
  text += " counts, dispatch and combine include waiting for other ranks.";
  if (dropped > 0) {
    text += fmt::format(" {} spans past round {} are not drawn.", dropped,
                        MoeReport::kMaxTimedRounds - 1);
  }
  return section("Time line", text, key + scrolling(time_lanes(report.rank_reports)));
}

Stage find_stage(const RunReport& report, MoeStage stage) {
  for (const Stage& one : report.stages) {
    if (one.name == name_of(stage)) return one;
  }
  return {};
}

// The cells of a floor and of its share of the time; none when nothing was measured.
std::string floor_cells(const RunReport& report, double floor, double seconds) {
  if (!report.floors.has_value()) return "";
  const std::optional<double> share = reached(floor, seconds);
  if (!share.has_value()) return "<td></td><td></td>";
  return fmt::format("<td>{}</td><td>{:.1f} %</td>", ms(floor), *share * 100);
}

std::string stage_line(const RunReport& report, MoeStage stage, double longest) {
  const Stage one = find_stage(report, stage);
  const double seconds = one.seconds;
  double fastest = INFINITY;
  double slowest = 0;
  for (const MoeReport& rank : report.rank_reports) {
    fastest = std::min(fastest, seconds_of(rank.seconds, stage));
    slowest = std::max(slowest, seconds_of(rank.seconds, stage));
  }
  return fmt::format(
      "<tr><td>{0}</td><td>{1}</td>{2}<td class=\"share\"><span class=\"{0}\" "
      "style=\"width:{3:.1f}%\"></span></td><td>{4}</td><td>{5}</td></tr>\n",
      name_of(stage), ms(seconds), floor_cells(report, one.floor_seconds, seconds),
      longest > 0 ? 100 * seconds / longest : 0, ms(fastest), ms(slowest));
}

std::string stages(const RunReport& report) {
  double longest = 0;
  for (const Stage& stage : report.stages) longest = std::max(longest, stage.seconds);
  std::string html = fmt::format(
      "<table>\n<tr><th>stage</th><th>ms, slowest rank{}</th>{}<th></th>"
      "<th>last run, fastest rank</th><th>last run, slowest rank</th></tr>\n",
      report.repeat > 1 ? fmt::format(", median of {}", report.repeat) : "",
      report.floors.has_value() ? "<th>floor</th><th>reached</th>" : "");
  for (const MoeStage stage : kStagesInTime) html += stage_line(report, stage, longest);
  double fastest = INFINITY;
  double slowest = 0;
  for (const MoeReport& rank : report.rank_reports) {
    fastest = std::min(fastest, rank.seconds.total);
    slowest = std::max(slowest, rank.seconds.total);
  }
  html += fmt::format(
      "<tr "
      "class=\"sum\"><td>total</td><td>{}</td>{}<td></td><td>{}</td><td>{}</td></tr>\n</table>\n",
      ms(report.total_seconds),
      floor_cells(report, report.floors.has_value() ? report.floors->total : 0,
                  report.total_seconds),
      ms(fastest), ms(slowest));
  return section("Stages",
                 "The slowest rank of every stage; the stages of several ranks overlap, "
                 "so they need not add up to the total.",
                 scrolling(html));
}

// --- floors ---

std::string giga(double per_second) { return fmt::format("{:.1f}", per_second / 1e9); }

std::string rates_table(const FloorRates& rates) {
  const auto line = [&](std::string name, double Rates::*rate) {
    return std::vector<std::string>{std::move(name), giga(rates.one_rank.*rate),
                                    giga(rates.all_ranks.*rate)};
  };
  return table(
      {{"measured after the run", "one rank", "all ranks"},
       {"threads", std::to_string(rates.one_rank.num_threads),
        std::to_string(rates.all_ranks.num_threads)},
       line(escaped(rates.bf16_instruction) + ", products of bf16, GFLOP/s", &Rates::bf16_peak),
       line(escaped(rates.f32_instruction) + ", products of fp32, GFLOP/s", &Rates::f32_peak),
       line("memory, read, GB/s", &Rates::memory_read),
       line("memory, read and written, GB/s", &Rates::memory_moved),
       line("last cache, read, GB/s", &Rates::cache_read),
       line("last cache, read and written, GB/s", &Rates::cache_moved)},
      false);
}

std::string rank_floors_table(const RunReport& report) {
  Lines lines = {{"ms, at least"}};
  for (const MoeStage stage : kStagesInTime) lines[0].emplace_back(name_of(stage));
  for (size_t rank = 0; rank < report.floors->ranks.size(); ++rank) {
    lines.push_back({fmt::format("rank {}", rank)});
    for (const MoeStage stage : kStagesInTime) {
      lines.back().push_back(ms(report.floors->ranks[rank][static_cast<size_t>(stage)]));
    }
  }
  return table(lines, false);
}

std::string floors(const RunReport& report) {
  if (!report.floors.has_value()) {
    return report.floors_note.empty() ? "" : section("Floors", escaped(report.floors_note), "");
  }
  const FloorRates& rates = report.floors->rates;
  const std::string text = fmt::format(
      "The least time that arithmetic and memory allow for a stage's work. The floor of a stage is "
      "the largest of any rank's, each as if alone on the machine; the total's also counts what "
      "all "
      "ranks have to do together. Peaks are of registers only; the memory's rates were taken over "
      "{} bytes, and a "
      "stage of which no rank touches more than the last cache, {} bytes, has the cache's.",
      rates.memory_bytes, rates.last_cache_bytes);
  return section("Floors", text,
                 "<div class=\"beside\">\n" + scrolling(rates_table(rates)) +
                     scrolling(rank_floors_table(report)) + "</div>\n");
}

// --- waits ---

std::string waits(const RunReport& report) {
  Lines lines = {{"", "for", "waits", "p50", "p99", "longest", "in sum"}};
  const auto time = [](int64_t ns) { return ms(static_cast<double>(ns) * 1e-9); };
  for (size_t rank = 0; rank < report.waits.size(); ++rank) {
    for (const PeerWait& wait : report.waits[rank]) {
      lines.push_back({fmt::format("rank {}", rank), fmt::format("rank {}", wait.peer),
                       std::to_string(wait.num_waits), time(wait.p50_ns), time(wait.p99_ns),
                       time(wait.max_ns), time(wait.total_ns)});
    }
  }
  const std::string text =
      mode_text(report) +
      fmt::format(
          "; taken: {}, most tokens of a rank for latency mode by auto: {}. A wait runs "
          "until the peer's flag was seen, ms, over all runs.",
          report.taken_mode, report.latency_tokens);
  return section("Mode and waits", text, lines.size() == 1 ? "" : scrolling(table(lines, false)));
}

std::string short_number(double value) { return fmt::format("{:.3g}", value); }

// --- gradients ---

std::string gradients(const RunReport& report) {
  if (report.gradients.empty()) return "";
  Lines lines = {{"", "largest error", "largest error / peak"}};
  for (const GradientError& gradient : report.gradients) {
    lines.push_back({gradient.name, short_number(gradient.error.max_abs),
                     short_number(gradient.error.relative())});
  }
  return section("Gradients", "Against the file of --compare-grads.",
                 scrolling(table(lines, false)));
}

// --- pinning ---

std::string cores(const RunReport& report) {
  Lines lines = {{"", "cores, thread by thread"}};
  for (size_t rank = 0; rank < report.pinned_cpus.size(); ++rank) {
    if (report.pinned_cpus[rank].empty()) continue;
    lines.push_back({fmt::format("rank {}", rank),
                     fmt::format("{}", fmt::join(report.pinned_cpus[rank], ", "))});
  }
  if (lines.size() == 1) return "";
  return section("Cores", "Each thread stays on its own.", scrolling(table(lines, false)));
}

// --- checks ---

struct CheckLine {
  std::string what;
  std::string seen;
  std::string allowed;
  std::optional<bool> held;  // unset: only told
};

std::string check_table(const std::vector<CheckLine>& lines) {
  std::string html =
      "<table>\n<tr><th>against</th><th>seen</th><th>allowed</th><th class=\"text\"></th></tr>\n";
  for (const CheckLine& line : lines) {
    const char* const tone = !line.held.has_value() ? "text" : *line.held ? "pass" : "fail";
    const char* const word = !line.held.has_value() ? "" : *line.held ? "held" : "FAILED";
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"{}\">{}</td></tr>\n",
                        line.what, line.seen, line.allowed, tone, word);
  }
  return html + "</table>\n";
}

void add_reference_lines(const RunReport& report, std::vector<CheckLine>* lines) {
  const CheckResult& check = *report.check;
  const double error = check.error.relative();
  const std::string name = "fp64 reference: ";
  lines->push_back({name + "tokens", std::to_string(check.tokens), "", {}});
  lines->push_back({name + "tokens whose experts differ", std::to_string(check.experts_differ), "0",
                    check.experts_differ == 0});
  lines->push_back({name + "tokens with ties", std::to_string(check.ties), "", {}});
  lines->push_back({name + "largest error", short_number(check.error.max_abs), "", {}});
  lines->push_back({name + "largest error / peak", short_number(error),
                    short_number(report.tolerance), error <= report.tolerance});
}

void add_capture_lines(const RunReport& report, std::vector<CheckLine>* lines) {
  const CompareResult& compare = *report.compare;
  const double error = compare.output.relative();
  const bool judged = std::isfinite(report.weights_tolerance);
  const std::string name = "captures: ";
  lines->push_back(
      {name + "tokens whose experts are equal", std::to_string(compare.experts_equal), "", {}});
  lines->push_back({name + "tokens whose experts differ", std::to_string(compare.experts_differ),
                    "0", compare.experts_differ == 0});
  lines->push_back({name + "tokens with ties", std::to_string(compare.ties), "", {}});
  const double logits = compare.logits.relative();
  lines->push_back(
      {name + "largest error of a logit / peak", short_number(logits), "not judged", {}});
  CheckLine weights = {name + "largest relative error of a weight",
                       short_number(compare.weights_max_rel),
                       "not judged in bf16",
                       {}};
  if (judged) {
    weights.allowed = short_number(report.weights_tolerance);
    weights.held = compare.weights_max_rel <= report.weights_tolerance;
  }
  lines->push_back(weights);
  lines->push_back({name + "largest error / peak", short_number(error),
                    short_number(report.compare_tolerance), error <= report.compare_tolerance});
}

std::string checks(const RunReport& report) {
  std::vector<CheckLine> lines;
  if (report.check.has_value()) add_reference_lines(report, &lines);
  if (report.compare.has_value()) add_capture_lines(report, &lines);
  if (lines.empty()) return section("Checks", "None were asked for.", "");
  return section("Checks",
                 "Errors of the output are given as a part of the largest magnitude expected "
                 "(peak). Ties are choices that rounding decides; they are allowed.",
                 scrolling(check_table(lines)));
}

}  // namespace

std::string report_page(const RunReport& report) {
  const std::string title = fmt::format("argosy: {}, layer {}, {}", escaped(report.family),
                                        report.layer, plural(report.ranks, "rank"));
  return page(title, head(report),
              checks(report) + load_sections(report.rows_per_expert, report.rows_per_rank) +
                  traffic(report) + time_line(report) + stages(report) + floors(report) +
                  gradients(report) + waits(report) + cores(report));
}

}  // namespace argosy::tools
