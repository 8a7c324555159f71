// CPU detection: names, the cap, self-tests, and the parsers of /sys and control groups on made-up
// folders.
#include "argosy/cpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/env.h"
#include "platform/cpu_detect.h"
#include "platform/read_file.h"

namespace argosy {
namespace {

using platform::CpuFeatures;
using platform::detect_cpu;
using platform::usable_levels;
using ::testing::Test;

constexpr Level kLevels[] = {Level::kReference, Level::kGeneric,    Level::kAvx2,
                             Level::kAvx512,    Level::kAvx512Bf16, Level::kAmx};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Zen 4 alone: kernels of level avx512_bf16 and of combine are chosen by it.
TEST(CpuCore, HalfWidthIsOneFamilyOfOneVendor) {
  CpuInfo cpu;
  cpu.vendor = "AuthenticAMD";
  for (const int family : {0x17, 0x19, 0x1A}) {
    cpu.family = family;
    EXPECT_EQ(platform::has_half_width_avx512(cpu), family == 0x19) << family;
  }
  cpu.vendor = "GenuineIntel";
  cpu.family = 0x19;
  EXPECT_FALSE(platform::has_half_width_avx512(cpu));
}

// Genoa (Zen 4), Turin (Zen 5), Rome (Zen 2), Sapphire Rapids, a Pentium without extended fields.
TEST(CpuCore, FamilyAndModelOfKnownWords) {
  struct Known {
    uint32_t eax;
    int family, model;
  };
  for (const Known& known :
       {Known{0x00A10F11, 0x19, 0x11}, Known{0x00B00F21, 0x1A, 0x02}, Known{0x00830F10, 0x17, 0x31},
        Known{0x000806F8, 0x06, 0x8F}, Known{0x00000543, 0x05, 0x04}}) {
    const platform::FamilyAndModel got = platform::family_and_model(known.eax);
    EXPECT_EQ(got.family, known.family) << known.eax;
    EXPECT_EQ(got.model, known.model) << known.eax;
  }
}

// What Linux read from the same leaf.
TEST(CpuCore, FamilyAndModelAreTheSystems) {
  std::ifstream file("/proc/cpuinfo");
  int family = -1, model = -1;
  for (std::string line; std::getline(file, line) && (family < 0 || model < 0);) {
    const size_t colon = line.find(':');
    if (line.starts_with("cpu family")) family = std::stoi(line.substr(colon + 1));
    if (line.starts_with("model\t")) model = std::stoi(line.substr(colon + 1));
  }
  if (family < 0) GTEST_SKIP() << "no /proc/cpuinfo with a family";
  EXPECT_EQ(cpu_info().value()->family, family);
  EXPECT_EQ(cpu_info().value()->model, model);
}

TEST(CpuNames, RoundTrip) {
  std::set<std::string_view> names;
  for (const Level level : kLevels) {
    names.insert(name_of(level));
    ASSERT_TRUE(parse_level(name_of(level)).has_value());
    EXPECT_EQ(*parse_level(name_of(level)), level);
  }
  EXPECT_EQ(names.size(), 6u);
  for (const DotOrder order : {DotOrder::kAuto, DotOrder::kAmx, DotOrder::kVdpbf16}) {
    EXPECT_EQ(*parse_dot_order(name_of(order)), order);
  }
  EXPECT_EQ(name_of(Level::kAvx512Bf16), "avx512_bf16");
  EXPECT_EQ(name_of(DotOrder::kVdpbf16), "vdpbf16");
}

TEST(CpuNames, UnknownWordsAreNamed) {
  for (const char* word : {"", "AVX2", "avx3", "amx "}) {
    const Result<Level> level = parse_level(word);
    ASSERT_FALSE(level.has_value());
    EXPECT_EQ(level.error().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(level.error().message(), std::string("\"") + word + "\""));
    EXPECT_TRUE(contains(level.error().message(), "avx512_bf16, amx"));
    const Result<DotOrder> order = parse_dot_order(word);
    ASSERT_FALSE(order.has_value());
    EXPECT_TRUE(contains(order.error().message(), std::string("\"") + word + "\""));
  }
}

TEST(CpuCap, EveryCapCutsWhatLiesAbove) {
  const Result<CpuInfo> all = detect_cpu(std::nullopt);
  ASSERT_TRUE(all.has_value());
  EXPECT_EQ(all->cap, "");
  for (const Level cap : kLevels) {
    const Result<CpuInfo> info = detect_cpu(std::string(name_of(cap)));
    ASSERT_TRUE(info.has_value());
    EXPECT_EQ(info->cap, name_of(cap));
    for (const Level level : kLevels) {
      EXPECT_EQ(info->has(level), all->has(level) && level <= cap)
          << name_of(cap) << name_of(level);
    }
    EXPECT_TRUE(std::is_sorted(info->levels.begin(), info->levels.end()));
  }
}

TEST(CpuCap, AWrongWordIsAnErrorThatNamesIt) {
  const Result<CpuInfo> info = detect_cpu("avx1024");
  ASSERT_FALSE(info.has_value());
  EXPECT_EQ(info.error().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(contains(info.error().message(), "ARGOSY_MAX_LEVEL"));
  EXPECT_TRUE(contains(info.error().message(), "\"avx1024\""));
}

std::vector<Level> g_tested;
bool passes(Level level) {
  g_tested.push_back(level);
  return true;
}
bool fails_at_avx512(Level level) { return level != Level::kAvx512; }

TEST(UsableLevels, FollowFeaturesCapAndSelfTest) {
  using V = std::vector<Level>;
  const CpuFeatures all{true, true, true, true};
  EXPECT_EQ(usable_levels({}, Level::kAmx, passes).levels, (V{Level::kReference, Level::kGeneric}));
  EXPECT_EQ(usable_levels(all, Level::kAmx, passes).levels, V(kLevels, kLevels + 6));
  EXPECT_EQ(usable_levels(all, Level::kAvx512, passes).levels, V(kLevels, kLevels + 4));
  EXPECT_EQ(usable_levels(all, Level::kReference, passes).levels, V{Level::kReference});
  const CpuFeatures avx2{.avx2_fma = true};
  EXPECT_EQ(usable_levels(avx2, Level::kAmx, passes).levels, V(kLevels, kLevels + 3));

  const platform::UsableLevels broken = usable_levels(all, Level::kAmx, fails_at_avx512);
  EXPECT_EQ(broken.levels, V(kLevels, kLevels + 3)) << "higher levels use AVX-512 too";
  EXPECT_EQ(broken.failed, V{Level::kAvx512});
}

TEST(UsableLevels, NothingAboveTheCapOrOutsideTheCpuIsRun) {
  g_tested.clear();
  usable_levels({true, true, true, true}, Level::kAvx2, passes);
  usable_levels({true, false, false, false}, Level::kAmx, passes);
  for (const Level level : g_tested) EXPECT_LE(level, Level::kAvx2);
}

TEST(CpuSelfTest, EveryInstructionOfThisCpuPasses) {
  const CpuFeatures features = platform::cpu_features();
  int num_run = 0;
  const std::pair<Level, bool> offered[] = {{Level::kAvx2, features.avx2_fma},
                                            {Level::kAvx512, features.avx512},
                                            {Level::kAvx512Bf16, features.avx512_bf16},
                                            {Level::kAmx, features.amx_bf16}};
  for (const auto& [level, present] : offered) {
    if (!present) continue;
    EXPECT_TRUE(platform::passes_self_test(level)) << name_of(level);
    ++num_run;
  }
  RecordProperty("self_tests_run", num_run);
}

TEST(CpuInfo, DescribesThisMachine) {
  const Result<const CpuInfo*> info = cpu_info();
  ASSERT_TRUE(info.has_value()) << info.error().to_string();
  EXPECT_EQ(*info, *cpu_info()) << "detected once";
  EXPECT_EQ((*info)->vendor.size(), 12u);
  EXPECT_FALSE((*info)->model_name.empty());
  EXPECT_GE((*info)->num_cores, 1);
  EXPECT_LE((*info)->num_cores, platform::num_affinity_cpus());
  EXPECT_TRUE((*info)->failed_self_test.empty());
  EXPECT_EQ((*info)->levels.front(), Level::kReference);
}

TEST(ResolveLevel, TheHighestThatIsDetectedAndBuilt) {
  const CpuInfo& info = **cpu_info();
  Level highest = Level::kReference;
  for (const Level level : built_levels()) {
    if (info.has(level)) highest = level;
  }
  ASSERT_TRUE(resolve_level(std::nullopt).has_value());
  EXPECT_EQ(*resolve_level(std::nullopt), highest);
  EXPECT_EQ(*resolve_level(Level::kReference), Level::kReference);
}

TEST(ResolveLevel, TheErrorListsWhatIsToBeHad) {
  for (const Level level : kLevels) {
    const Result<Level> got = resolve_level(level);
    const auto& built = built_levels();
    const bool is_built = std::find(built.begin(), built.end(), level) != built.end();
    const bool detected = (*cpu_info())->has(level);
    ASSERT_EQ(got.has_value(), is_built && detected) << name_of(level);
    if (got.has_value()) continue;
    EXPECT_EQ(got.error().code(), StatusCode::kUnsupported);
    EXPECT_TRUE(
        contains(got.error().message(), std::string("level ") + std::string(name_of(level))));
    EXPECT_TRUE(
        contains(got.error().message(), detected ? "not in this build" : "not on this CPU"));
    EXPECT_TRUE(contains(got.error().message(), "have: reference"));
  }
}

TEST(Env, UnsetAndEmptyAreNothing) {
  EXPECT_EQ(base::env("ARGOSY_TEST_NEVER_SET"), std::nullopt);
  ASSERT_EQ(setenv("ARGOSY_TEST_SET", "", 1), 0);
  EXPECT_EQ(base::env("ARGOSY_TEST_SET"), std::nullopt);
  ASSERT_EQ(setenv("ARGOSY_TEST_SET", "avx2", 1), 0);
  EXPECT_EQ(base::env("ARGOSY_TEST_SET"), "avx2");
  unsetenv("ARGOSY_TEST_SET");
}

// A folder of small files, removed at the end.
class FakeFiles : public Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "argosy_cpu_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string root_;
};

using Cgroups = FakeFiles;

TEST_F(Cgroups, V2TakesTheLeastOfTheGroupAndItsParents) {
  write("cpu.max", "max 100000\n");
  write("a/cpu.max", "300000 100000\n");
  write("a/b/cpu.max", "150000 100000\n");
  write("a/c/cpu.max", "max 100000\n");
  EXPECT_EQ(platform::cgroup_cpu_limit("0::/a/b\n", root_), 1.5);
  EXPECT_EQ(platform::cgroup_cpu_limit("0::/a/c\n", root_), 3.0);
  EXPECT_EQ(platform::cgroup_cpu_limit("0::/a/none", root_), 3.0);
  EXPECT_EQ(platform::cgroup_cpu_limit("0::/\n", root_), std::nullopt);
}

TEST_F(Cgroups, V1ReadsTheCpuControllerOnly) {
  write("cpu/cpu.cfs_quota_us", "-1\n");
  write("cpu/cpu.cfs_period_us", "100000\n");
  write("cpu/box/cpu.cfs_quota_us", "200000\n");
  write("cpu/box/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(platform::cgroup_cpu_limit("5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n", root_), 4.0);
  EXPECT_EQ(platform::cgroup_cpu_limit("4:cpuacct,cpu:/\n", root_), std::nullopt);
  EXPECT_EQ(platform::cgroup_cpu_limit("4:cpuset:/box\n", root_), std::nullopt);
}

TEST_F(Cgroups, NonsenseIsNoLimit) {
  for (const char* text :
       {"", "x", "100000", "0 100000", "-5 100000", "100000 0", "99999999999999999999 1"}) {
    write("cpu.max", text);
    EXPECT_EQ(platform::cgroup_cpu_limit("0::/\n", root_), std::nullopt) << text;
  }
  for (const char* file : {"", "\n\n", ":", "::", "0::", "0::no/slash", "nothing at all"}) {
    EXPECT_EQ(platform::cgroup_cpu_limit(file, root_), std::nullopt) << file;
  }
}

using Caches = FakeFiles;

TEST_F(Caches, FromSys) {
  write("index0/level", "1\n");
  write("index0/type", "Data\n");
  write("index0/size", "48K\n");
  write("index3/level", "3\n");
  write("index3/type", "Unified\n");
  write("index3/size", "32M\n");
  write("index4/level", "x\n");
  write("index4/size", "1K\n");
  const std::vector<CacheInfo> caches = platform::caches_from_sys(root_);
  ASSERT_EQ(caches.size(), 2u);
  EXPECT_EQ(caches[0].level, 1);
  EXPECT_EQ(caches[0].type, "data");
  EXPECT_EQ(caches[0].bytes, 48 * 1024);
  EXPECT_EQ(caches[1].type, "unified");
  EXPECT_EQ(caches[1].bytes, 32 * 1024 * 1024);
  EXPECT_TRUE(platform::caches_from_sys(root_ + "/none").empty());
}

TEST_F(Caches, CpuidAgreesWithSys) {
  const auto sys = platform::caches_from_sys("/sys/devices/system/cpu/cpu0/cache");
  const auto cpuid = platform::caches_from_cpuid();
  if (sys.empty() || cpuid.empty()) GTEST_SKIP() << "one source only";
  ASSERT_EQ(sys.size(), cpuid.size());
  for (size_t i = 0; i < sys.size(); ++i) {
    EXPECT_EQ(sys[i].level, cpuid[i].level);
    EXPECT_EQ(sys[i].type, cpuid[i].type);
    EXPECT_EQ(sys[i].bytes, cpuid[i].bytes);
  }
}

TEST_F(Caches, ReadingIsBounded) {
  write("big", std::string(200000, '7'));
  EXPECT_EQ(platform::read_small_file(root_ + "/big").size(), 65536u);
  EXPECT_EQ(platform::read_small_file(root_ + "/none"), "");
}

}  // namespace
}  // namespace argosy
