// Names of levels, and what this process may use of its CPU. Test: tests/platform/cpu_test.cc.
#include "argosy/cpu.h"

#include <cpuid.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/env.h"
#include "base/error.h"
#include "platform/cpu_detect.h"
#include "platform/read_file.h"

namespace argosy {
namespace {

constexpr std::array<std::string_view, 6> kLevelNames = {"reference", "generic",     "avx2",
                                                         "avx512",    "avx512_bf16", "amx"};
constexpr std::array<std::string_view, 3> kDotOrderNames = {"auto", "amx", "vdpbf16"};

}  // namespace

std::string_view name_of(Level level) {
  const auto at = static_cast<size_t>(level);
  return at < kLevelNames.size() ? kLevelNames[at] : "(no level)";
}

Result<Level> parse_level(std::string_view name) {
  const auto at = std::find(kLevelNames.begin(), kLevelNames.end(), name);
  if (at != kLevelNames.end()) return static_cast<Level>(at - kLevelNames.begin());
  return base::invalid("unknown level \"{}\"; known: {}", name, fmt::join(kLevelNames, ", "));
}

std::string_view name_of(DotOrder order) { return kDotOrderNames[static_cast<size_t>(order)]; }

Result<DotOrder> parse_dot_order(std::string_view name) {
  const auto at = std::find(kDotOrderNames.begin(), kDotOrderNames.end(), name);
  if (at != kDotOrderNames.end()) return static_cast<DotOrder>(at - kDotOrderNames.begin());
  return base::invalid("unknown dot order \"{}\"; known: {}", name,
                       fmt::join(kDotOrderNames, ", "));
}

bool CpuInfo::has(Level level) const {
  return std::find(levels.begin(), levels.end(), level) != levels.end();
}

Result<const CpuInfo*> cpu_info() {
  static const Result<CpuInfo> info = platform::detect_cpu(base::env("ARGOSY_MAX_LEVEL"));
  if (!info.has_value()) return info.error();
  return &*info;
}

const std::vector<Level>& built_levels() {
  static const std::vector<Level> levels = {Level::kReference, Level::kGeneric,    Level::kAvx2,
                                            Level::kAvx512,    Level::kAvx512Bf16, Level::kAmx};
  return levels;
}

Result<Level> resolve_level(std::optional<Level> wanted) {
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* info, cpu_info());
  Level highest = Level::kReference;
  for (const Level level : built_levels()) {
    if (!info->has(level)) continue;
    if (wanted == level) return level;
    highest = level;
  }
  if (!wanted.has_value()) return highest;
  std::vector<std::string_view> usable;
  for (const Level level : built_levels()) {
    if (info->has(level)) usable.push_back(name_of(level));
  }
  return base::error(StatusCode::kUnsupported,
                     "level {} is not to be had: not {}; this build and CPU have: {}{}",
                     name_of(*wanted), info->has(*wanted) ? "in this build" : "on this CPU",
                     fmt::join(usable, ", "),
                     info->cap.empty() ? "" : fmt::format(" (ARGOSY_MAX_LEVEL is {})", info->cap));
}

namespace platform {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx,
                    &r.edx);  // leaves zeros if there is no leaf
  return r;
}

bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

// Register state the operating system saves. Precondition: CPUID says OSXSAVE.
uint64_t xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

bool may_use_amx() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) == 0;
}

std::string vendor_name() {
  const Registers r = cpuid(0);
  char text[13] = {};
  std::memcpy(text, &r.ebx, 4);
  std::memcpy(text + 4, &r.edx, 4);
  std::memcpy(text + 8, &r.ecx, 4);
  return text;
}

std::string model_name() {
  char text[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002u + i);
    std::memcpy(text + size_t{16} * i, &r, 16);
  }
  const std::string name = text;
  const size_t first = name.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  return name.substr(first, name.find_last_not_of(' ') - first + 1);
}

}  // namespace

FamilyAndModel family_and_model(uint32_t eax) {
  const auto field = [eax](int first, unsigned mask) {
    return static_cast<int>(eax >> first & mask);
  };
  const int family = field(8, 0xF);
  const bool is_extended = family == 0xF || family == 0x6;
  return {family == 0xF ? family + field(20, 0xFF) : family,
          field(4, 0xF) + (is_extended ? field(16, 0xF) << 4 : 0)};
}

bool has_half_width_avx512(const CpuInfo& cpu) {
  return cpu.vendor == "AuthenticAMD" && cpu.family == 0x19;
}

CpuFeatures cpu_features() {
  constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xE6, kTileState = 0x60000;
  CpuFeatures features;
  const Registers leaf1 = cpuid(1);
  if (!bit(leaf1.ecx, 27)) return features;  // OSXSAVE
  const uint64_t state = xcr0();
  const auto saves = [state](uint64_t bits) { return (state & bits) == bits; };
  const Registers leaf7 = cpuid(7);
  const Registers leaf7_1 = cpuid(7, 1);
  features.avx2_fma =
      saves(kAvxState) && bit(leaf1.ecx, 28) && bit(leaf1.ecx, 12) && bit(leaf7.ebx, 5);
  features.avx512 = features.avx2_fma && saves(kAvx512State) && bit(leaf7.ebx, 16) &&
                    bit(leaf7.ebx, 17) && bit(leaf7.ebx, 30) && bit(leaf7.ebx, 31);
  features.avx512_bf16 = features.avx512 && bit(leaf7_1.eax, 5);
  features.avx512_vbmi = features.avx512 && bit(leaf7.ecx, 1);
  features.avx512_vbmi2 = features.avx512 && bit(leaf7.ecx, 6);
  features.gfni = features.avx2_fma && bit(leaf7.ecx, 8);
  // Some virtual machines show the feature bits but no tile palette.
  features.amx_bf16 = features.avx512_bf16 && saves(kTileState) && bit(leaf7.edx, 24) &&
                      bit(leaf7.edx, 22) && cpuid(0x1D).eax >= 1 && may_use_amx();
  return features;
}

UsableLevels usable_levels(const CpuFeatures& features, Level cap, bool (*self_test)(Level)) {
  const std::pair<Level, bool> offered[] = {
      {Level::kGeneric, true},           {Level::kAvx2, features.avx2_fma},
      {Level::kAvx512, features.avx512}, {Level::kAvx512Bf16, features.avx512_bf16},
      {Level::kAmx, features.amx_bf16},
  };
  UsableLevels usable;
  usable.levels.push_back(Level::kReference);
  for (const auto& [level, is_offered] : offered) {
    if (!is_offered || level > cap) break;
    if (!self_test(level)) {
      usable.failed.push_back(level);
      break;
    }
    usable.levels.push_back(level);
  }
  return usable;
}

Result<CpuInfo> detect_cpu(const std::optional<std::string>& cap) {
  Level max_level = Level::kAmx;
  if (cap.has_value()) {
    Result<Level> parsed = parse_level(*cap);
    if (!parsed.has_value()) {
      return base::invalid("ARGOSY_MAX_LEVEL: {}", parsed.error().message());
    }
    max_level = *parsed;
  }
  CpuInfo info;
  info.vendor = vendor_name();
  info.model_name = model_name();
  const auto [family, model] = family_and_model(cpuid(1).eax);
  info.family = family;
  info.model = model;
  info.num_cores = usable_cores();
  info.caches = caches_from_sys("/sys/devices/system/cpu/cpu0/cache");
  if (info.caches.empty()) info.caches = caches_from_cpuid();
  UsableLevels usable = usable_levels(cpu_features(), max_level, passes_self_test);
  info.levels = std::move(usable.levels);
  info.failed_self_test = std::move(usable.failed);
  info.cap = cap.value_or("");
  return info;
}

}  // namespace platform
}  // namespace argosy
