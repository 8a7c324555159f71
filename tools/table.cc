// See table.h. Test: tests/cli/table_test.cc.
#include "tools/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "tools/load_summary.h"

namespace argosy::tools {
namespace {

using Lines = std::vector<std::vector<std::string>>;

std::vector<std::string> load_line(std::string name, std::span<const int64_t> loads) {
  const LoadSummary summary = summarise(loads);
  return {std::move(name), std::to_string(summary.min), fmt::format("{:.1f}", summary.mean),
          std::to_string(summary.max), fmt::format("{:.3f}", summary.balancedness)};
}

std::vector<std::string> bytes_line(std::string name, const RankBytes& bytes) {
  return {std::move(name), std::to_string(bytes.dispatch), std::to_string(bytes.combine),
          std::to_string(bytes.saved_by_dedup), std::to_string(bytes.weights_read)};
}

std::string bytes_table(const std::vector<RankBytes>& ranks) {
  Lines lines = {{"bytes", "dispatch", "combine", "saved by dedup", "weights read"}};
  RankBytes total;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    lines.push_back(bytes_line(fmt::format("rank {}", rank), ranks[rank]));
    total.dispatch += ranks[rank].dispatch;
    total.combine += ranks[rank].combine;
    total.saved_by_dedup += ranks[rank].saved_by_dedup;
    total.weights_read += ranks[rank].weights_read;
  }
  if (ranks.size() > 1) lines.push_back(bytes_line("all ranks", total));
  return aligned(lines);
}

// By which machine the floors were taken.
std::string floors_line(const RunReport& report) {
  if (!report.floors_note.empty()) return "no floors: " + report.floors_note + "\n";
  if (!report.floors.has_value()) return "";
  const Rates& all = report.floors->rates.all_ranks;
  return fmt::format(
      "floors: {} thread{}, {} at {:.1f} GFLOP/s, memory read at {:.1f} GB/s and moved at {:.1f}\n",
      all.num_threads, all.num_threads == 1 ? "" : "s",
      report.dtype == "bf16" ? report.floors->rates.bf16_instruction
                             : report.floors->rates.f32_instruction,
      (report.dtype == "bf16" ? all.bf16_peak : all.f32_peak) / 1e9, all.memory_read / 1e9,
      all.memory_moved / 1e9);
}

std::string stages_table(const RunReport& report) {
  const std::string head = report.repeat > 1
                               ? fmt::format("ms (slowest rank, median of {})", report.repeat)
                               : std::string("ms (slowest rank)");
  const bool has_floors = report.floors.has_value();
  Lines lines = {{"stage", head}};
  if (has_floors) lines[0].insert(lines[0].end(), {"floor", "reached"});
  const auto add = [&](std::string name, double seconds, double floor) {
    lines.push_back({std::move(name), fmt::format("{:.3f}", seconds * 1e3)});
    const std::optional<double> share = reached(floor, seconds);
    if (!share.has_value()) return;
    lines.back().push_back(fmt::format("{:.3f}", floor * 1e3));
    lines.back().push_back(fmt::format("{:.1f} %", *share * 100));
  };
  for (const Stage& stage : report.stages) add(stage.name, stage.seconds, stage.floor_seconds);
  add("total", report.total_seconds, has_floors ? report.floors->total : 0);
  return aligned(lines) + floors_line(report);
}

std::string check_lines(const RunReport& report) {
  std::string text;
  if (report.check.has_value()) {
    const CheckResult& check = *report.check;
    text += fmt::format(
        "check    {} tokens against the fp64 reference: experts differ {}, ties {}\n"
        "         output off by {:.3g}, {:.3g} of the peak (allowed {:.3g})\n",
        check.tokens, check.experts_differ, check.ties, check.error.max_abs, check.error.relative(),
        report.tolerance);
  }
  if (report.compare.has_value()) {
    const CompareResult& compare = *report.compare;
    const std::string allowed = std::isfinite(report.weights_tolerance)
                                    ? fmt::format("allowed {:.3g}", report.weights_tolerance)
                                    : "not judged in bf16";
    text += fmt::format(
        "compare  {} tokens against the captures: experts equal {}, differ {}, ties {}\n"
        "         weights off by {:.3g} ({})\n"
        "         logits off by {:.3g}, output by {:.3g} of the peak (allowed {:.3g})\n",
        report.tokens, compare.experts_equal, compare.experts_differ, compare.ties,
        compare.weights_max_rel, allowed, compare.logits.relative(), compare.output.relative(),
        report.compare_tolerance);
  }
  return text;
}

}  // namespace

std::string aligned(const Lines& lines) {
  std::vector<size_t> widths;
  for (const auto& line : lines) {
    widths.resize(std::max(widths.size(), line.size()), 0);
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      text += i == 0 ? fmt::format("{:<{}}", line[i], widths[i])
                     : fmt::format("  {:>{}}", line[i], widths[i]);
    }
    while (!text.empty() && text.back() == ' ') text.pop_back();
    text += '\n';
  }
  return text;
}

std::string load_bar(int64_t load, int64_t most, int width) {
  if (load <= 0 || most <= 0) return "";
  const double share = static_cast<double>(load) / static_cast<double>(most);
  // Anything loaded shows.
  const auto length = std::max<int64_t>(1, std::llround(share * width));
  return std::string(static_cast<size_t>(length), '#');
}

std::string load_table(std::span<const int64_t> rows_per_expert,
                       std::span<const int64_t> rows_per_rank) {
  return aligned({{"rows", "min", "mean", "max", "balancedness"},
                  load_line("per expert", rows_per_expert),
                  load_line("per rank", rows_per_rank)});
}

std::string run_table(const RunReport& report) {
  std::string text = fmt::format(
      "{}, layer {} of {}\n"
      "{} tokens of {} {}, {} experts, top-{}\n"
      "{} rank{} x {} thread{}, transport {}, level {}, dot_order {}, {} round{}\n{}\n\n",
      report.family, report.layer, report.model, report.tokens, report.hidden, report.dtype,
      report.experts, report.top_k, report.ranks, report.ranks == 1 ? "" : "s",
      report.threads_per_rank, report.threads_per_rank == 1 ? "" : "s", report.transport,
      report.level, report.dot_order, report.rounds, report.rounds == 1 ? "" : "s", report.pinning);
  const bool is_usual = report.mode == "throughput" && report.recipe == "bf16" &&
                        (report.payload == "bf16" || report.payload == "fp32");
  if (!is_usual) text.insert(text.size() - 1, mode_text(report) + "\n");
  text += load_table(report.rows_per_expert, report.rows_per_rank) + "\n";
  text += bytes_table(report.bytes) + "\n";
  text += stages_table(report) + "\n";
  if (const int64_t rows = nonfinite_logit_rows_of(report); rows > 0) {
    text += fmt::format("{} tokens with NaN or Inf logits were routed as if all were 0\n\n", rows);
  }
  if (report.nonfinite_output.count > 0) {
    text += fmt::format("{} rows of the output hold NaN or Inf, token {} first\n\n",
                        report.nonfinite_output.count, report.nonfinite_output.first);
  }
  const std::string checks = check_lines(report);
  if (!checks.empty()) text += checks + "\n";
  if (!report.gradients.empty()) {
    Lines lines = {{"gradient", "error / peak"}};
    for (const GradientError& gradient : report.gradients) {
      lines.push_back({gradient.name, fmt::format("{:.3g}", gradient.error.relative())});
    }
    text += aligned(lines) + "\n";
  }
  for (const std::string& warning : warnings_of(report)) text += "warning: " + warning + "\n";
  text += fmt::format("digest {}:{}\n", report.dot_order, report.digest);
  if (report.check.has_value() || report.compare.has_value()) {
    text += failures_of(report).empty() ? "all checks held\n" : "a check FAILED\n";
  }
  return text;
}

}  // namespace argosy::tools
