// How many CPUs and which caches: the affinity mask, control groups v1 and v2, /sys, CPUID. All of
// it is outside text: what does not parse is ignored, never an error. Test:
// tests/platform/cpu_test.cc.
#include <cpuid.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <memory>

#include "platform/cpu_detect.h"
#include "platform/read_file.h"

namespace argosy::platform {
namespace {

std::optional<int64_t> parse_int(std::string_view text) {
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// Cuts the part before `separator` off the front of `text`; all of it when there is none.
std::string_view take_until(std::string_view& text, char separator) {
  const size_t at = text.find(separator);
  const std::string_view head = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view() : text.substr(at + 1);
  return head;
}

std::optional<double> ratio(std::optional<int64_t> quota, std::optional<int64_t> period) {
  if (!quota.has_value() || !period.has_value() || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::optional<double> limit_v2(const std::string& dir) {
  const std::string text = read_small_file(dir + "/cpu.max");  // "150000 100000" or "max 100000"
  std::string_view rest = text;
  const std::optional<int64_t> quota = parse_int(take_until(rest, ' '));
  return ratio(quota, parse_int(rest));
}

std::optional<double> limit_v1(const std::string& dir) {
  return ratio(parse_int(read_small_file(dir + "/cpu.cfs_quota_us")),
               parse_int(read_small_file(dir + "/cpu.cfs_period_us")));
}

std::optional<double> least(std::optional<double> a, std::optional<double> b) {
  if (!a.has_value()) return b;
  return b.has_value() ? std::min(*a, *b) : a;
}

// The limit of `path` below `mount` and of all its parents: a parent's limit holds for its
// children.
std::optional<double> least_up(const std::string& mount, std::string path,
                               std::optional<double> (*limit_of)(const std::string&)) {
  std::optional<double> limit = limit_of(mount);
  while (!path.empty() && path != "/") {
    limit = least(limit, limit_of(mount + path));
    path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
  return limit;
}

bool lists_cpu(std::string_view controllers) {
  while (!controllers.empty()) {
    if (take_until(controllers, ',') == "cpu") return true;
  }
  return false;
}

}  // namespace

int num_affinity_cpus() {
  // The kernel refuses a mask smaller than its own, whose size it does not tell: grow until it
  // fits.
  for (int max_cpus = 1024; max_cpus <= 1 << 20; max_cpus *= 4) {
    const size_t bytes = CPU_ALLOC_SIZE(max_cpus);
    struct Free {
      void operator()(cpu_set_t* set) const { CPU_FREE(set); }
    };
    const std::unique_ptr<cpu_set_t, Free> set(CPU_ALLOC(max_cpus));
    if (set == nullptr) return 1;
    if (sched_getaffinity(0, bytes, set.get()) == 0)
      return std::max(1, CPU_COUNT_S(bytes, set.get()));
  }
  return 1;
}

std::optional<double> cgroup_cpu_limit(std::string_view cgroup_file, const std::string& root) {
  std::optional<double> limit;
  while (!cgroup_file.empty()) {
    std::string_view path = take_until(cgroup_file, '\n');  // "hierarchy:controllers:path"
    const std::string_view hierarchy = take_until(path, ':');
    const std::string_view controllers = take_until(path, ':');
    if (hierarchy == "0" && controllers.empty()) {
      limit = least(limit, least_up(root, std::string(path), limit_v2));
    } else if (lists_cpu(controllers)) {
      limit = least(limit, least_up(root + "/cpu", std::string(path), limit_v1));
    }
  }
  return limit;
}

int usable_cores() {
  const int cpus = num_affinity_cpus();
  const std::optional<double> limit =
      cgroup_cpu_limit(read_small_file("/proc/self/cgroup"), "/sys/fs/cgroup");
  if (!limit.has_value() || *limit >= cpus) return cpus;
  return std::max(1, static_cast<int>(*limit));
}

std::vector<CacheInfo> caches_from_sys(const std::string& dir) {
  std::vector<CacheInfo> caches;
  for (int index = 0; index < 16; ++index) {
    const std::string entry = dir + "/index" + std::to_string(index);
    const std::string size_text = read_small_file(entry + "/size");  // "48K", "32M", "512"
    const std::string type_text = read_small_file(entry + "/type");
    const std::optional<int64_t> level = parse_int(read_small_file(entry + "/level"));
    const std::optional<int64_t> size = parse_int(size_text);
    if (!level.has_value() || !size.has_value() || *size < 0 || *size > 1 << 30) continue;
    CacheInfo cache;
    cache.level = static_cast<int>(*level);
    const size_t unit = size_text.find_first_of("KMG");
    const int shift = unit == std::string::npos ? 0
                      : size_text[unit] == 'K'  ? 10
                      : size_text[unit] == 'M'  ? 20
                                                : 30;
    cache.bytes = *size << shift;
    cache.type = type_text.substr(0, type_text.find('\n'));
    for (char& letter : cache.type) {
      if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
    }
    caches.push_back(std::move(cache));
  }
  return caches;
}

std::vector<CacheInfo> caches_from_cpuid() {
  constexpr const char* kTypes[] = {"", "data", "instruction", "unified"};
  for (const unsigned leaf : {4u, 0x8000001Du}) {
    std::vector<CacheInfo> caches;
    for (unsigned index = 0; index < 16; ++index) {
      unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
      if (__get_cpuid_count(leaf, index, &eax, &ebx, &ecx, &edx) == 0) break;
      const unsigned type = eax & 31u;
      if (type == 0 || type > 3) break;
      const int64_t ways = (ebx >> 22) + 1;
      const int64_t partitions = (ebx >> 12 & 0x3FFu) + 1;
      const int64_t line = (ebx & 0xFFFu) + 1;
      CacheInfo cache;
      cache.level = static_cast<int>(eax >> 5 & 7u);
      cache.type = kTypes[type];
      cache.bytes = ways * partitions * line * (int64_t{ecx} + 1);
      caches.push_back(std::move(cache));
    }
    if (!caches.empty()) return caches;
  }
  return {};
}

}  // namespace argosy::platform
