// argosy info: what this machine and this build can do. Test: tests/cli/output_test.cc.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/measure.h"
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
  std::optional<MachineRates> rates;  // with --measure
};

Result<Info> collect(bool measure) {
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  ARGOSY_ASSIGN_OR_RETURN(const Level level, resolve_level(std::nullopt));
  Info info{*cpu, level, cpu->has(Level::kAmx) ? DotOrder::kAmx : DotOrder::kVdpbf16, {}};
  if (measure) {
    ARGOSY_ASSIGN_OR_RETURN(info.rates, measure_machine());
  }
  return info;
}

std::vector<std::string> names_of(const std::vector<Level>& levels) {
  std::vector<std::string> names;
  for (const Level level : levels) names.emplace_back(name_of(level));
  return names;
}

Json to_json(const MachineRates::Memory& memory) {
  return {{"read_bytes_per_second", memory.read},
          {"copy_bytes_per_second", memory.copy},
          {"streaming_copy_bytes_per_second", memory.streaming_copy}};
}

Json to_json(const MachineRates& rates) {
  Json peaks = Json::array();
  for (const MachineRates::Peak& peak : rates.peaks) {
    peaks.push_back({{"level", std::string(name_of(peak.loop.level))},
                     {"instruction", std::string(peak.loop.instruction)},
                     {"operands", std::string(name_of(peak.loop.operands))},
                     {"one_thread_operations_per_second", peak.one_thread},
                     {"all_threads_operations_per_second", peak.all_threads}});
  }
  return {{"threads", rates.num_threads},
          {"peaks", peaks},
          {"bf16_peak", std::string(name_of(rates.peaks[rates.best_bf16].loop.level))},
          {"memory_bytes", rates.memory_bytes},
          {"one_thread", to_json(rates.one_thread)},
          {"all_threads", to_json(rates.all_threads)}};
}

Json to_json(const Info& info) {
  Json caches = Json::array();
  for (const CacheInfo& cache : info.cpu.caches) {
    caches.push_back({{"level", cache.level}, {"type", cache.type}, {"bytes", cache.bytes}});
  }
  Json json = {{"version", ARGOSY_VERSION},
               {"cpu",
                {{"vendor", info.cpu.vendor},
                 {"model", info.cpu.model_name},
                 {"family", info.cpu.family},
                 {"model_number", info.cpu.model}}},
               {"cores", info.cpu.num_cores},
               {"level", std::string(name_of(info.level))},
               {"levels",
                {{"detected", names_of(info.cpu.levels)},
                 {"built", names_of(built_levels())},
                 {"failed_self_test", names_of(info.cpu.failed_self_test)},
                 {"cap", info.cpu.cap.empty() ? Json(nullptr) : Json(info.cpu.cap)}}},
               {"dot_order", std::string(name_of(info.dot_order))},
               {"caches", caches},
               {"transports", {"inproc", "shm"}}};
  if (info.rates.has_value()) json["measured"] = to_json(*info.rates);
  return json;
}

std::string joined(const std::vector<Level>& levels) {
  return levels.empty() ? "none" : fmt::format("{}", fmt::join(names_of(levels), ", "));
}

std::string to_text(const MachineRates& rates) {
  const std::string all = fmt::format("{} threads", rates.num_threads);
  std::vector<std::vector<std::string>> peaks = {{"peak, GFLOP/s", "operands", "1 thread", all}};
  for (size_t i = 0; i < rates.peaks.size(); ++i) {
    const MachineRates::Peak& peak = rates.peaks[i];
    peaks.push_back({fmt::format("{} ({}){}", name_of(peak.loop.level), peak.loop.instruction,
                                 i == rates.best_bf16 ? ", best for bf16" : ""),
                     std::string(name_of(peak.loop.operands)),
                     fmt::format("{:.1f}", peak.one_thread / 1e9),
                     fmt::format("{:.1f}", peak.all_threads / 1e9)});
  }
  const auto line = [](const char* name, double one, double every) {
    return std::vector<std::string>{name, fmt::format("{:.1f}", one / 1e9),
                                    fmt::format("{:.1f}", every / 1e9)};
  };
  return aligned(peaks) + "\n" +
         aligned({{"memory, GB/s", "1 thread", all},
                  line("read", rates.one_thread.read, rates.all_threads.read),
                  line("copy", rates.one_thread.copy, rates.all_threads.copy),
                  line("streaming copy", rates.one_thread.streaming_copy,
                       rates.all_threads.streaming_copy)}) +
         fmt::format("over {} MiB of random data; a copied byte counts once\n",
                     rates.memory_bytes >> 20);
}

std::string to_text(const Info& info) {
  std::vector<std::pair<std::string, std::string>> lines = {
      {"version", ARGOSY_VERSION},
      {"cpu", fmt::format("{} ({} family {} model {})", info.cpu.model_name, info.cpu.vendor,
                          info.cpu.family, info.cpu.model)},
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
  lines.emplace_back("transports",
                     "inproc (ranks are threads of one process), shm (processes of one host)");
  std::string text;
  for (const auto& [name, value] : lines) text += fmt::format("{:<22}{}\n", name, value);
  if (info.rates.has_value()) text += "\n" + to_text(*info.rates);
  return text;
}

int info(bool measure, const std::string& json_path) {
  const bool json_is_file = !json_path.empty() && json_path != "-";
  if (json_is_file) {
    if (const Status status = check_target("--json", json_path); !status.ok()) return fail(status);
  }
  const Result<Info> collected = collect(measure);
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
  const auto measure = std::make_shared<bool>(false);
  command->add_flag("--measure", *measure,
                    "Measure peaks of the instructions and rates of the memory (some seconds)");
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
      "  argosy info --json - | jq .dot_order\n"
      "  argosy info --measure");
  command->callback([measure, json_path, exit_code] { *exit_code = info(*measure, *json_path); });
}

}  // namespace argosy::tools
