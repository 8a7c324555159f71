// What this CPU can do, which level of kernels runs, and the order of the bf16 dot product.
//
// Levels differ in speed only: for one DotOrder every level gives the same bits (contract 4.2).
// ARGOSY_MAX_LEVEL caps what is detected, so that one machine can test all lower levels; a capped machine
// behaves in everything as if it lacked what lies above the cap. Test: tests/platform/cpu_test.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/status.h"

namespace argosy {

// Rising order of preference. kReference is the naive twin, for tests and checks.
enum class Level { kReference, kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// "reference", "generic", "avx2", "avx512", "avx512_bf16", "amx".
std::string_view name_of(Level level);
Result<Level> parse_level(std::string_view name);

// The order of a bf16 dot product (contract 4.2); kAuto is resolved when a group is created.
enum class DotOrder { kAuto, kAmx, kVdpbf16 };

// "auto", "amx", "vdpbf16".
std::string_view name_of(DotOrder order);
Result<DotOrder> parse_dot_order(std::string_view name);

struct CacheInfo {
  int level = 0;
  std::string type;  // "data", "instruction", "unified"
  int64_t bytes = 0;
};

struct CpuInfo {
  std::string vendor;
  std::string model_name;
  // As CPUID leaf 1 gives them, extensions added: AMD's Zen 4 is family 25, Zen 5 family 26.
  int family = 0;
  int model = 0;
  int num_cores = 1;  // that this process may use (affinity mask and cgroup quota)
  std::vector<CacheInfo> caches;
  // Levels whose instructions the CPU and the operating system offer, that passed a self-test against an
  // emulation, and that do not lie above the cap. Rising. kReference is always there, kGeneric unless the
  // cap is "reference". A level needs all lower ones: the first that fails ends the list.
  std::vector<Level> levels;
  // Levels whose self-test gave other bits than the emulation: never used. Normally empty.
  std::vector<Level> failed_self_test;
  std::string cap;  // value of ARGOSY_MAX_LEVEL that was applied, or empty

  bool has(Level level) const;
};

// Detected once per process; thread-safe. An ARGOSY_MAX_LEVEL that is no level's name is an error that
// names the word.
Result<const CpuInfo*> cpu_info();

// The kernels this build has, rising.
const std::vector<Level>& built_levels();

// The level to run: the highest that is both detected and built, or `wanted`. Errors: kUnsupported when
// `wanted` is not to be had; the message lists the levels that are.
Result<Level> resolve_level(std::optional<Level> wanted);

}  // namespace argosy
