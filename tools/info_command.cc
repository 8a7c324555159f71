// argosy info: what this machine and this build can do. Test: tests/cli/output_test.cc.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "argosy/cpu.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/option_checks.h"
#include "tools/output_files.h"
#include "tools/table.h"

namespace argosy::tools {
namespace {

using Json = nlohmann::ordered_json;

struct Info {
  CpuInfo cpu;
  Level level = Level::kGeneric;  // what runs when nothing else is asked for
  DotOrder dot_order = DotOrder::kVdpbf16;
};

Result<Info> collect() {
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  ARGOSY_ASSIGN_OR_RETURN(const Level level, resolve_level(std::nullopt));
  return Info{*cpu, level, cpu->has(Level::kAmx) ? DotOrder::kAmx : DotOrder::kVdpbf16};
}

std::vector<std::string> names_of(const std::vector<Level>& levels) {
  std::vector<std::string> names;
  for (const Level level : levels) names.emplace_back(name_of(level));
  return names;
}

Json to_json(const Info& info) {
  Json caches = Json::array();
  for (const CacheInfo& cache : info.cpu.caches) {
    caches.push_back({{"level", cache.level}, {"type", cache.type}, {"bytes", cache.bytes}});
  }
  return {{"version", ARGOSY_VERSION},
          {"cpu", {{"vendor", info.cpu.vendor}, {"model", info.cpu.model_name}}},
          {"cores", info.cpu.num_cores},
          {"level", std::string(name_of(info.level))},
          {"levels",
           {{"detected", names_of(info.cpu.levels)},
            {"built", names_of(built_levels())},
            {"failed_self_test", names_of(info.cpu.failed_self_test)},
            {"cap", info.cpu.cap.empty() ? Json(nullptr) : Json(info.cpu.cap)}}},
          {"dot_order", std::string(name_of(info.dot_order))},
          {"caches", caches},
          {"transports", {"inproc"}}};
}

std::string joined(const std::vector<Level>& levels) {
  return levels.empty() ? "none" : fmt::format("{}", fmt::join(names_of(levels), ", "));
}

std::string to_text(const Info& info) {
  std::vector<std::pair<std::string, std::string>> lines = {
      {"version", ARGOSY_VERSION},
      {"cpu", fmt::format("{} ({})", info.cpu.model_name, info.cpu.vendor)},
      {"cores", fmt::format("{} usable", info.cpu.num_cores)},
      {"levels detected", joined(info.cpu.levels)},
      {"levels built", joined(built_levels())},
      {"level that runs", std::string(name_of(info.level))},
      {"failed self-test", joined(info.cpu.failed_self_test)},
      {"capped by", info.cpu.cap.empty() ? "nothing" : "ARGOSY_MAX_LEVEL=" + info.cpu.cap},
      {"dot_order auto", std::string(name_of(info.dot_order))}};
  for (const CacheInfo& cache : info.cpu.caches) {
    lines.emplace_back(fmt::format("cache L{} {}", cache.level, cache.type),
                       fmt::format("{} KiB", cache.bytes / 1024));
  }
  lines.emplace_back("transports", "inproc (ranks are threads of one process)");
  std::string text;
  for (const auto& [name, value] : lines) text += fmt::format("{:<22}{}\n", name, value);
  return text;
}

int info(const std::string& json_path) {
  const bool json_is_file = !json_path.empty() && json_path != "-";
  if (json_is_file) {
    if (const Status status = check_target("--json", json_path); !status.ok()) return fail(status);
  }
  const Result<Info> collected = collect();
  if (!collected.has_value()) return fail(collected.error());
  const std::string json = json_text(to_json(*collected));
  Status status = write_stdout(json_path == "-" ? json : to_text(*collected));
  OutputFiles files;
  if (status.ok() && json_is_file) status = files.add_text(json_path, json);
  if (status.ok()) status = files.commit();
  return status.ok() ? kExitOk : fail(status);
}

}  // namespace

void add_info_command(CLI::App& app, int* exit_code) {
  CLI::App* const command = app.add_subcommand(
      "info", "Show CPU levels, the dot_order that auto takes, cores, caches, transports");
  const auto json_path = std::make_shared<std::string>();
  command
      ->add_option("--json", *json_path, "Write JSON to this file; - is stdout, without the table")
      ->type_name("FILE|-")
      ->check(not_empty());
  command->footer(
      "Environment:\n"
      "  ARGOSY_MAX_LEVEL=NAME  highest CPU level to use, for example avx2\n\n"
      "Examples:\n"
      "  argosy info\n"
      "  argosy info --json - | jq .dot_order");
  command->callback([json_path, exit_code] { *exit_code = info(*json_path); });
}

}  // namespace argosy::tools
