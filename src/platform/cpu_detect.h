// The parts of CPU detection, separate so that tests can give their own input: a cap instead of the
// environment, a folder instead of /sys. Test: tests/platform/cpu_test.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/cpu.h"

namespace argosy::platform {

// What CPUID, XCR0 and the kernel's permission offer, before any self-test.
struct CpuFeatures {
  bool avx2_fma = false;
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_bf16 = false;  // VDPBF16PS
  bool amx_bf16 = false;     // tiles, TDPBF16PS, and the permission to use them
  // No level: kernels that gain by it ask for it beside their level.
  bool avx512_vbmi = false;   // permutations of bytes
  bool avx512_vbmi2 = false;  // compresses of bytes and words
  bool gfni = false;          // bytes times bit matrices
};
CpuFeatures cpu_features();

// Of EAX of CPUID leaf 1, with the extended fields where the vendors' manuals add them.
struct FamilyAndModel {
  int family = 0;
  int model = 0;
};
FamilyAndModel family_and_model(uint32_t eax);

// Zen 4: a register of 512 bits is worked on, loaded and stored in two halves.
bool has_half_width_avx512(const CpuInfo& cpu);

// Everything in CpuInfo, for a given value of ARGOSY_MAX_LEVEL. kInvalidArgument when it names no
// level.
Result<CpuInfo> detect_cpu(const std::optional<std::string>& cap);

// Levels out of what the CPU offers. `self_test` is called at most once per level; the first level
// that fails it ends the list, because higher levels use the instructions of lower ones.
struct UsableLevels {
  std::vector<Level> levels;
  std::vector<Level> failed;
};
UsableLevels usable_levels(const CpuFeatures& features, Level cap, bool (*self_test)(Level));

// True when the level's instructions give the bits of a scalar emulation. Precondition: the CPU has
// them.
bool passes_self_test(Level level);

// CPUs in this process's affinity mask; 1 when the system does not say.
int num_affinity_cpus();

// CPU time the control groups allow, in CPUs (1.5 = one and a half), the least over the group and
// its parents; nullopt without a limit. `cgroup_file`: text of /proc/self/cgroup; `root`: where the
// control groups are mounted.
std::optional<double> cgroup_cpu_limit(std::string_view cgroup_file, const std::string& root);

// Whole cores this process may keep busy: the affinity mask, cut by the control groups' quota (1.5 CPUs
// are one core: a second would be there half of the time). At least 1.
int usable_cores();

// Caches of one CPU from its /sys folder; empty when there is none.
std::vector<CacheInfo> caches_from_sys(const std::string& dir);

// Caches by CPUID leaf 4 (or AMD's 0x8000001D); empty when the CPU does not say.
std::vector<CacheInfo> caches_from_cpuid();

}  // namespace argosy::platform
