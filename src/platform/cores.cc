// Counts usable cores from sched_getaffinity and the cgroup files. Test:
// tests/platform/cores_test.cc.
#include "platform/cores.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace argosy::platform {
namespace {

std::optional<int64_t> parse_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<int> whole_cores(int64_t quota, int64_t period) {
  if (quota <= 0 || period <= 0) return std::nullopt;
  return static_cast<int>(std::clamp<int64_t>(quota / period, 1, 1 << 20));
}

std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int affinity_cores() {
  // 8,192 bits: the mask of the largest kernels; sched_getaffinity refuses a mask that is too
  // small.
  std::array<cpu_set_t, 8> masks{};
  if (sched_getaffinity(0, sizeof(masks), masks.data()) != 0) return 1;
  return std::max(1, CPU_COUNT_S(sizeof(masks), masks.data()));
}

// The quota may stand at any ancestor of the process's own cgroup.
std::optional<int> cgroup_v2_cores() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  std::string group = "/";
  while (std::getline(file, line)) {
    if (line.starts_with("0::/")) group = line.substr(3);
  }
  std::optional<int> cores;
  const std::filesystem::path root = "/sys/fs/cgroup";
  for (std::filesystem::path at = group; !at.empty(); at = at.parent_path()) {
    const std::optional<int> here =
        parse_cpu_max(first_line(root / at.relative_path() / "cpu.max"));
    if (here) cores = std::min(cores.value_or(*here), *here);
    if (at == at.parent_path()) break;
  }
  return cores;
}

std::optional<int> cgroup_v1_cores() {
  const std::filesystem::path root = "/sys/fs/cgroup/cpu";
  const std::optional<int64_t> quota = parse_number(first_line(root / "cpu.cfs_quota_us"));
  const std::optional<int64_t> period = parse_number(first_line(root / "cpu.cfs_period_us"));
  if (!quota || !period) return std::nullopt;
  return whole_cores(*quota, *period);
}

}  // namespace

std::optional<int> parse_cpu_max(std::string_view text) {
  const size_t space = text.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  std::string_view period_text = text.substr(space + 1);
  while (!period_text.empty() && period_text.back() == '\n') period_text.remove_suffix(1);
  const std::optional<int64_t> quota = parse_number(text.substr(0, space));
  const std::optional<int64_t> period = parse_number(period_text);
  if (!quota || !period) return std::nullopt;
  return whole_cores(*quota, *period);
}

int usable_cores() {
  int cores = affinity_cores();
  if (const std::optional<int> quota = cgroup_v2_cores()) cores = std::min(cores, *quota);
  if (const std::optional<int> quota = cgroup_v1_cores()) cores = std::min(cores, *quota);
  return cores;
}

}  // namespace argosy::platform
