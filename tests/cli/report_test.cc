// The report page and the trace: well formed, whole, escaped, and equal to the table and the JSON of
// the same run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>

#include "cli/cli_process.h"
#include "tools/chart.h"
#include "tools/html.h"
#include "tools/report_page.h"
#include "tools/trace.h"

namespace argosy::testing {
namespace {

using nlohmann::json;
using tools::RunReport;
using Words = std::vector<std::string>;

// Empty when every tag is closed in order and text holds no stray markup; else what is wrong.
std::string unbalanced(const std::string& html) {
  static const std::set<std::string> kVoid = {"meta", "br"};
  static const std::regex kTag(R"re(<(/?)([a-z][a-z0-9]*)((?: [a-zA-Z0-9-]+="[^"<>]*")*)(/?)>)re");
  std::vector<std::string> open;
  size_t at = html.find('\n') + 1;  // past the doctype
  while ((at = html.find_first_of("<>", at)) != std::string::npos) {
    std::smatch tag;
    const auto begin = html.begin() + static_cast<std::ptrdiff_t>(at);
    if (!std::regex_search(begin, html.end(), tag, kTag, std::regex_constants::match_continuous)) {
      return "stray markup: " + html.substr(at, 60);
    }
    at += static_cast<size_t>(tag.length());
    const std::string name = tag[2];
    if (tag[1].length() > 0) {
      if (open.empty() || open.back() != name) return "closed out of order: " + html.substr(at, 60);
      open.pop_back();
    } else if (tag[4].length() == 0 && !kVoid.contains(name)) {
      open.push_back(name);
      // A style sheet is no markup.
      if (name == "style") at = html.find("</style>", at);
    }
  }
  return open.empty() ? "" : "not closed: " + open.back();
}

// Text and titles, entities kept, tags replaced by blanks.
std::string text_of(const std::string& html) {
  std::string text;
  bool in_tag = false;
  for (const char c : html.substr(html.find("</style>"))) {
    if (c == '<') in_tag = true;
    if (!in_tag) text += c;
    if (c == '>') {
      in_tag = false;
      text += ' ';
    }
  }
  return text;
}

// Every number and word of letters, as a set.
std::set<std::string> words_of(const std::string& text) {
  static const std::regex kWord(R"([A-Za-z0-9_.+:-]*[A-Za-z0-9])");
  std::set<std::string> words;
  for (std::sregex_iterator it(text.begin(), text.end(), kWord), end; it != end; ++it) {
    words.insert(it->str());
  }
  return words;
}

struct ReportRun {
  std::string table;
  json report;
  std::string page;
  json trace;
};

ReportRun run_report(const std::string& model, int layer, const Words& more, int exit_code = 0) {
  const std::string dir = fresh_dir("report");
  Words arguments =
      run_arguments(model, layer, "bf16",
                    {"--compare", captures(model, layer, "bf16"), "--report", dir + "/a.html",
                     "--trace", dir + "/a.trace", "--json", dir + "/a.json"});
  arguments.insert(arguments.end(), more.begin(), more.end());
  const CliResult result = run_cli(arguments);
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  return {result.out, json::parse(read_text(dir + "/a.json"), nullptr, false),
          read_text(dir + "/a.html"), json::parse(read_text(dir + "/a.trace"), nullptr, false)};
}

// A figure of the JSON as the page writes it: seconds as ms, rates as GB/s and GFLOP/s, shares as
// per cent, errors short, the rest as they are.
std::string as_shown(const std::string& path, const json& value) {
  if (value.is_string()) return tools::escaped(value.get<std::string>());
  if (!value.is_number_float()) return value.dump();
  const double number = value.get<double>();
  if (path.find("per_second") != std::string::npos) return fmt::format("{:.1f}", number / 1e9);
  if (path.find("reached") != std::string::npos) return fmt::format("{:.1f}", number * 100);
  if (path.find("seconds") != std::string::npos) return fmt::format("{:.3f}", number * 1e3);
  if (path.find("balancedness") != std::string::npos) return fmt::format("{:.3f}", number);
  return fmt::format("{:.3g}", number);
}

void expect_every_figure(const ReportRun& run) {
  const std::string text = text_of(run.page);
  const std::set<std::string> words = words_of(text);
  int figures = 0;
  const json flat = run.report.flatten();
  for (const auto& [path, value] : flat.items()) {
    if (value.is_boolean() || value.is_null() || value.is_array() || value.is_object()) continue;
    const std::string shown = as_shown(path, value);
    ++figures;
    if (value.is_string()) {
      EXPECT_NE(text.find(shown), std::string::npos) << path << " " << shown;
    } else {
      EXPECT_TRUE(words.contains(shown)) << path << " " << shown;
    }
  }
  EXPECT_GT(figures, 50);
  for (const std::string& word : words_of(run.table)) {
    if (word.find_first_of("0123456789") == std::string::npos) continue;
    EXPECT_TRUE(words.contains(word) || text.find(word) != std::string::npos) << word;
  }
}

void expect_loads_nothing(const std::string& page) {
  for (const char* const word :
       {"http", "src=", "href", "url(", "@import", "<script", "<link", "<iframe", "<img", "//"}) {
    EXPECT_EQ(page.find(word), std::string::npos) << word;
  }
}

// Spans of a rank touch, and per stage add up to what the rank reported.
void expect_trace_holds(const json& trace, int ranks, const json& report) {
  ASSERT_TRUE(trace.is_object());
  std::map<int, double> end_of;
  std::map<int, std::string> names;
  std::map<std::string, int64_t> bytes;
  std::map<std::string, std::map<int, double>> seconds;  // by stage and rank
  double first = INFINITY;
  for (const json& event : trace["traceEvents"]) {
    const int rank = event["pid"].get<int>();
    EXPECT_EQ(event["tid"], 0);
    if (event["ph"] == "M") {
      if (event["name"] == "process_name") names[rank] = event["args"]["name"];
      continue;
    }
    ASSERT_EQ(event["ph"], "X");
    const double begin = event["ts"].get<double>();
    const double length = event["dur"].get<double>();
    EXPECT_GE(length, -1e-6);
    first = std::min(first, begin);
    if (end_of.contains(rank)) {
      EXPECT_NEAR(begin, end_of[rank], 2e-3);
    }
    end_of[rank] = begin + length;
    seconds[event["name"]][rank] += length * 1e-6;
    seconds["total"][rank] += length * 1e-6;
    bytes[event["name"]] += event["args"]["bytes"].get<int64_t>();
    EXPECT_GE(event["args"]["rows"].get<int64_t>(), 0);
  }
  EXPECT_EQ(first, 0);
  const auto slowest = [&](const std::string& stage) {
    double most = 0;
    for (const auto& [rank, one] : seconds[stage]) most = std::max(most, one);
    return most;
  };
  if (report["repeat"] == 1) {  // of more, the report has medians
    for (const json& stage : report["stages"]) {
      EXPECT_NEAR(slowest(stage["name"]), stage["seconds"].get<double>(), 1e-6) << stage["name"];
    }
    EXPECT_NEAR(slowest("total"), report["total_seconds"].get<double>(), 1e-6);
  }
  ASSERT_EQ(names.size(), static_cast<size_t>(ranks));
  EXPECT_EQ(names[ranks - 1], fmt::format("rank {}", ranks - 1));
  EXPECT_EQ(end_of.size(), static_cast<size_t>(ranks));
  EXPECT_EQ(bytes["dispatch"], report["bytes"]["dispatch"].get<int64_t>());
  EXPECT_EQ(bytes["combine"], report["bytes"]["combine"].get<int64_t>());
  EXPECT_EQ(bytes["experts"], 0);
}

TEST(Report, PageAndTraceSayWhatTableAndJsonSay) {
  for (const auto& [model, layer] :
       {std::pair("deepseek_v3_tiny", 1), std::pair("qwen3_moe_tiny", 1)}) {
    for (const int ranks : {1, 4, 16}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", model, ranks));
      const ReportRun run = run_report(
          model, layer, {"--ranks", std::to_string(ranks), "--floors", "on", "--pin", "on"});
      EXPECT_EQ(unbalanced(run.page), "");
      expect_loads_nothing(run.page);
      expect_every_figure(run);
      expect_trace_holds(run.trace, ranks, run.report);
      EXPECT_NE(run.page.find("all checks held"), std::string::npos);
    }
  }
}

TEST(Report, AFailureIsNamedAndRoundsAreDrawnEach) {
  const ReportRun run = run_report(
      "deepseek_v3_tiny", 2,
      {"--ranks", "3", "--repeat", "2", "--receive-budget", "8192", "--tolerance", "1e-9"}, 1);
  EXPECT_EQ(unbalanced(run.page), "");
  expect_every_figure(run);
  expect_trace_holds(run.trace, 3, run.report);
  EXPECT_NE(run.page.find("a check FAILED"), std::string::npos);
  EXPECT_EQ(run.page.find("all checks held"), std::string::npos);
  for (const json& failure : run.report["failures"]) {
    EXPECT_NE(run.page.find(failure.get<std::string>()), std::string::npos) << failure;
  }
  const int64_t rounds = run.report["rounds"].get<int64_t>();
  EXPECT_GT(rounds, 3);
  EXPECT_NE(run.page.find(fmt::format("rank 2, combine, round {}:", rounds - 1)),
            std::string::npos);
}

TEST(Report, WithoutChecksThePageClaimsNone) {
  const std::string dir = fresh_dir("unchecked");
  const CliResult result = run_cli(run_arguments(
      "mixtral_tiny", 0, "f32", {"--check", "none", "--ranks", "2", "--report", dir + "/a.html"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string page = read_text(dir + "/a.html");
  EXPECT_NE(page.find("not checked"), std::string::npos);
  EXPECT_EQ(page.find("all checks held"), std::string::npos);
  EXPECT_EQ(unbalanced(page), "");
}

TEST(Report, APathFullOfMarkupIsText) {
  const std::string dir = fresh_dir("markup");
  const std::string model = dir + "/<script>alert(\"1\")&amp;'<b>\xff";
  std::filesystem::copy(testdata("models/mixtral_tiny"), model);
  const CliResult result = run_cli({"run", "--model", model, "--layer", "0", "--input",
                                    captures("mixtral_tiny", 0, "bf16") + ".moe_input", "--report",
                                    dir + "/a.html", "--trace", dir + "/a.trace"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string page = read_text(dir + "/a.html");
  EXPECT_EQ(unbalanced(page), "");
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;alert(&quot;1&quot;)&amp;amp;&#39;"), std::string::npos);
  EXPECT_EQ(page.find('\xff'), std::string::npos);
  EXPECT_FALSE(json::parse(read_text(dir + "/a.trace"), nullptr, false).is_discarded());
}

TEST(Report, TargetsAreRefusedBeforeAnyWork) {
  const std::string dir = fresh_dir("targets");
  const std::string same = dir + "/a";
  const CliResult twice =
      run_cli(run_arguments("mixtral_tiny", 0, "bf16", {"--report", same, "--trace", same}));
  EXPECT_EQ(twice.exit_code, 2);
  EXPECT_NE(twice.err.find("are the same file"), std::string::npos) << twice.err;
  for (const char* const option : {"--report", "--trace"}) {
    const CliResult nowhere =
        run_cli(run_arguments("mixtral_tiny", 0, "bf16", {option, dir + "/none/a"}));
    EXPECT_EQ(nowhere.exit_code, 2);
    EXPECT_NE(nowhere.err.find(option), std::string::npos) << nowhere.err;
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir));
}

TEST(Report, WhenOneFileCannotBeWrittenNoneIsLeft) {
  const std::string dir = fresh_dir("none_left");
  const CliResult result = run_cli(
      run_arguments("mixtral_tiny", 0, "bf16",
                    {"--check", "none", "--output", dir + "/a.safetensors", "--report",
                     dir + "/a.html", "--trace", "/proc/a.trace", "--json", dir + "/a.json"}));
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("/proc/a.trace"), std::string::npos) << result.err;
  EXPECT_TRUE(std::filesystem::is_empty(dir));
}

TEST(Escaped, LeavesNoMarkupNoControlsAndNoBrokenBytes) {
  EXPECT_EQ(tools::escaped("a<b>&\"'\t\xc3\xa9"), "a&lt;b&gt;&amp;&quot;&#39;\t\xc3\xa9");
  EXPECT_EQ(tools::escaped(std::string("\0\x1f\x7f", 3)), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(tools::escaped("\xff"), "\xEF\xBF\xBD");
  EXPECT_EQ(tools::escaped(""), "");
}

// --- pages of any size, without a run ---

// Made up, with stages of known length.
RunReport made_up(int ranks, int64_t experts, int64_t rounds) {
  RunReport report;
  report.model = "m";
  report.family = "f";
  report.experts = experts;
  report.top_k = 1;
  report.ranks = ranks;
  report.rows_per_expert.assign(static_cast<size_t>(experts), 0);
  for (size_t i = 0; i < report.rows_per_expert.size(); ++i) {
    report.rows_per_expert[i] = static_cast<int64_t>(i * 7919 % 100'000);
  }
  report.rows_per_rank.assign(static_cast<size_t>(ranks), 1'234'567);
  report.bytes.resize(static_cast<size_t>(ranks));
  report.rank_reports.resize(static_cast<size_t>(ranks));
  for (MoeReport& rank : report.rank_reports) {
    rank.row_bytes = 14336;
    rank.sent_rows.assign(static_cast<size_t>(ranks), 22'222);
    rank.sent_rows_dedup.assign(static_cast<size_t>(ranks), 11'111);
    double at = 1000;
    for (int64_t round = 0; round < rounds; ++round) {
      rank.spans.push_back({MoeStage::kExperts, static_cast<int32_t>(round), at, at + 0.25, 1, 0});
      at += 0.25;
    }
  }
  return report;
}

TEST(ReportPage, AnySizeIsWellFormed) {
  for (const int ranks : {1, 2, 5, 9, 13, 33, 64}) {
    for (const int64_t experts : {1, 3, 8, 60, 256, 1024}) {
      SCOPED_TRACE(fmt::format("{} ranks, {} experts", ranks, experts));
      const std::string page = tools::report_page(made_up(ranks, experts, 2));
      ASSERT_EQ(unbalanced(page), "");
      for (const char* const bad : {"nan", "inf", "width=\"-", "height=\"-"}) {
        EXPECT_EQ(page.find(bad, page.find("</style>")), std::string::npos) << bad;
      }
    }
  }
}

TEST(ReportPage, NothingLoadedIsDrawnToo) {
  RunReport report = made_up(3, 6, 0);
  report.rows_per_expert.assign(6, 0);
  report.rows_per_rank.assign(3, 0);
  for (MoeReport& rank : report.rank_reports) {
    rank.sent_rows.assign(3, 0);
    rank.sent_rows_dedup.assign(3, 0);
  }
  const std::string page = tools::report_page(report);
  EXPECT_EQ(unbalanced(page), "");
  EXPECT_EQ(page.find("nan", page.find("</style>")), std::string::npos);
}

TEST(ReportPage, ManyRoundsStayAPageThatOpens) {
  const std::string page = tools::report_page(made_up(64, 256, 772));
  EXPECT_LT(page.size(), size_t{8} << 20);
  EXPECT_EQ(page.find(", round "), std::string::npos);
}

// x of every text of the class, by line (y).
std::map<double, std::vector<std::pair<double, std::string>>> texts_of(const std::string& svg) {
  static const std::regex kText(
      R"re(<text class="[^"]*mid[^"]*" x="([0-9.]+)" y="([0-9.]+)">([^<]*)<)re");
  std::map<double, std::vector<std::pair<double, std::string>>> lines;
  for (std::sregex_iterator it(svg.begin(), svg.end(), kText), end; it != end; ++it) {
    lines[std::stod((*it)[2])].emplace_back(std::stod((*it)[1]), (*it)[3]);
  }
  return lines;
}

TEST(Chart, LabelsOfALineNeverTouch) {
  for (const int64_t count : {1, 2, 7, 16, 17, 40, 64, 100, 128, 384, 1000, 1024}) {
    const RunReport report = made_up(static_cast<int>(std::min<int64_t>(count, 64)), count, 3);
    tools::BarChart chart;
    chart.item = "expert";
    chart.values = report.rows_per_expert;
    chart.group = "rank";
    for (int64_t i = 0; i <= count; ++i) chart.group_begin.push_back(i);
    for (const std::string& svg : {tools::bar_chart(chart), tools::traffic_map(report.rank_reports),
                                   tools::time_lanes(report.rank_reports)}) {
      for (auto& [y, texts] : texts_of(svg)) {
        std::sort(texts.begin(), texts.end());
        for (size_t i = 1; i < texts.size(); ++i) {
          const double halves =
              3.0 * static_cast<double>(texts[i - 1].second.size() + texts[i].second.size());
          EXPECT_GT(texts[i].first - texts[i - 1].first, halves + 1)
              << count << " items: '" << texts[i - 1].second << "' and '" << texts[i].second << "'";
        }
      }
    }
  }
}

TEST(Trace, TimesAreMicrosecondsFromTheFirstBegin) {
  RunReport report = made_up(2, 4, 2);
  for (StageSpan& span : report.rank_reports[1].spans) {
    span.begin += 1e-6;
    span.end += 1e-6;
  }
  const json trace = json::parse(tools::trace_text(report), nullptr, false);
  std::vector<std::array<double, 3>> seen;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    EXPECT_EQ(event["name"], "experts");
    seen.push_back(
        {event["pid"].get<double>(), event["ts"].get<double>(), event["dur"].get<double>()});
  }
  const std::vector<std::array<double, 3>> want = {
      {0, 0, 250000}, {0, 250000, 250000}, {1, 1, 250000}, {1, 250001, 250000}};
  EXPECT_EQ(seen, want);
}

}  // namespace
}  // namespace argosy::testing
