// Yardsticks: finite and positive, of the levels the CPU has, and honest about the work they do.
// Nothing here depends on how fast the machine is.
#include "argosy/measure.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <limits>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "argosy/pinning.h"
#include "platform/cpu_detect.h"
#include "platform/measure_loops.h"

namespace argosy {
namespace {

MeasureOptions tiny() {
  MeasureOptions options;
  options.num_threads = 2;
  options.num_samples = 2;
  options.peak_seconds = 1e-4;
  options.memory_bytes = 1 << 20;
  options.sample_bytes = 1 << 16;
  return options;
}

TEST(Measure, EveryRateIsFiniteAndPositive) {
  const Result<MachineRates> rates = measure_machine(tiny());
  ASSERT_TRUE(rates.has_value()) << rates.error().to_string();
  EXPECT_EQ(rates->num_threads, 2);
  EXPECT_EQ(rates->memory_bytes, 1 << 20);
  ASSERT_FALSE(rates->peaks.empty());
  ASSERT_LT(rates->best_bf16, rates->peaks.size());
  std::vector<double> all = {rates->one_thread.read,           rates->one_thread.copy,
                             rates->one_thread.streaming_copy, rates->all_threads.read,
                             rates->all_threads.copy,          rates->all_threads.streaming_copy};
  for (const MachineRates::Peak& peak : rates->peaks) {
    all.push_back(peak.one_thread);
    all.push_back(peak.all_threads);
    EXPECT_LE(peak.one_thread, rates->peaks[rates->best_bf16].one_thread);
  }
  for (const double rate : all) {
    EXPECT_TRUE(std::isfinite(rate));
    EXPECT_GT(rate, 0.0);
  }
}

TEST(Measure, LoopsAreThoseOfTheCpuUpToTheLevel) {
  const CpuInfo& cpu = **cpu_info();
  for (const Level highest : {Level::kReference, Level::kGeneric, Level::kAvx2, Level::kAvx512,
                              Level::kAvx512Bf16, Level::kAmx}) {
    const Result<std::vector<PeakLoop>> loops = peak_loops(highest);
    ASSERT_TRUE(loops.has_value());
    ASSERT_FALSE(loops->empty());
    size_t expected = 0;
    for (const Level level : cpu.levels) {
      expected += level > Level::kReference && level <= highest ? 1u : 0u;
    }
    EXPECT_EQ(loops->size(), std::max<size_t>(expected, 1));
    for (size_t i = 1; i < loops->size(); ++i) {
      EXPECT_LE((*loops)[i].level, highest);
      EXPECT_LT((*loops)[i - 1].level, (*loops)[i].level);
    }
  }
}

TEST(Measure, LevelsHaveOneLoopEach) {
  std::vector<Level> levels;
  for (const platform::RegisterLoop& loop : platform::register_loops()) {
    levels.push_back(loop.peak.level);
    EXPECT_GT(loop.operations_per_pass, 0.0);
  }
  EXPECT_EQ(levels, (std::vector<Level>{Level::kGeneric, Level::kAvx2, Level::kAvx512,
                                        Level::kAvx512Bf16, Level::kAmx}));
}

TEST(Measure, BadSizesAreRefusedByValue) {
  const PeakLoop loop = peak_loops(Level::kGeneric)->front();
  EXPECT_EQ(sample_peak(loop, 0, 1e-4).error().code(), StatusCode::kInvalidArgument);
  PeakLoop unknown = loop;
  unknown.instruction = "fdiv";
  const Status status = sample_peak(unknown, 1, 1e-4).error();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("fdiv"), std::string::npos);
  EXPECT_EQ(MemoryProbe::create(1, -1).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(MemoryProbe::create(4096, 1).error().code(), StatusCode::kInvalidArgument);
  MeasureOptions options = tiny();
  options.num_samples = 0;
  EXPECT_EQ(measure_machine(options).error().code(), StatusCode::kInvalidArgument);
}

TEST(Measure, ProbeOfAnySizeStaysInsideItsMemory) {
  for (const int threads : {1, 3}) {
    for (const int64_t bytes : {1, 8191, 8193, 100'000}) {
      const Result<std::unique_ptr<MemoryProbe>> probe = MemoryProbe::create(threads, bytes);
      ASSERT_TRUE(probe.has_value());
      // More than there is, less than a step, and what does not divide the part.
      for (const int64_t sample : {int64_t{1} << 30, int64_t{1}, int64_t{5000}, int64_t{5000}}) {
        EXPECT_GT(*(*probe)->sample_read(sample), 0.0);
        EXPECT_GT(*(*probe)->sample_copy(sample), 0.0);
        EXPECT_GT(*(*probe)->sample_streaming_copy(sample), 0.0);
        EXPECT_GT(*(*probe)->sample_read(sample, 1), 0.0);
        EXPECT_GT(*(*probe)->sample_copy(sample, 1), 0.0);
      }
      for (const int refused : {-1, threads + 1}) {
        EXPECT_EQ((*probe)->sample_read(1, refused).error().code(), StatusCode::kInvalidArgument);
        EXPECT_EQ((*probe)->sample_copy(1, refused).error().code(), StatusCode::kInvalidArgument);
      }
    }
  }
}

TEST(Measure, CopiesCopy) {
  constexpr int64_t kMost = 3 * platform::kMemoryStep + 17;
  std::mt19937_64 rng(20260817);
  std::vector<std::byte> from(kMost + 64), to(kMost + 64), want(kMost + 64);
  for (std::byte& value : from) value = static_cast<std::byte>(rng());
  for (int64_t bytes = 0; bytes <= kMost; ++bytes) {
    for (const int64_t offset : {0, 1}) {
      std::fill(to.begin(), to.end(), std::byte{0xA5});
      want = to;
      std::copy(from.begin(), from.begin() + bytes, want.begin() + offset);
      copy_by_plain_stores(to.data() + offset, from.data(), bytes);
      ASSERT_EQ(to, want) << bytes;
    }
  }
  alignas(64) static std::byte source[4 * platform::kMemoryStep];
  alignas(64) static std::byte target[4 * platform::kMemoryStep];
  for (std::byte& value : source) value = static_cast<std::byte>(rng());
  platform::memory_loops().streaming_copy(target, source, sizeof(source));
  EXPECT_EQ(std::memcmp(target, source, sizeof(source)), 0);
}

TEST(Pinning, BindsForTheScopeAndNests) {
  std::thread([] {
    const int before = platform::num_affinity_cpus();
    {
      const ScopedPin outer(0);
      EXPECT_EQ(platform::num_affinity_cpus(), 1);
      const int cpu = sched_getcpu();
      {
        const ScopedPin inner(before - 1);
        EXPECT_EQ(platform::num_affinity_cpus(), 1);
        EXPECT_EQ(sched_getcpu() == cpu, before == 1);
      }
      EXPECT_EQ(sched_getcpu(), cpu);
    }
    EXPECT_EQ(platform::num_affinity_cpus(), before);
  }).join();
}

TEST(Pinning, BindsEveryThreadOfAPool) {
  std::thread([] {
    const Result<std::unique_ptr<ThreadPool>> pool = ThreadPool::create(3);
    ASSERT_TRUE(pool.has_value());
    const std::vector<int> bound = pin_threads(**pool, 1);
    const std::vector<int>& usable = usable_cpus();
    ASSERT_FALSE(usable.empty());
    for (size_t thread = 0; thread < 3; ++thread) {
      EXPECT_EQ(bound[thread], usable[(1 + thread) % usable.size()]);
    }
    std::vector<int> cpus(3, -1), masks(3, -1);
    // Threads that get no task here keep -1.
    (*pool)->parallel_for(64, [&](int64_t, int thread) {
      cpus[static_cast<size_t>(thread)] = sched_getcpu();
      masks[static_cast<size_t>(thread)] = platform::num_affinity_cpus();
      sched_yield();
    });
    for (size_t thread = 0; thread < 3; ++thread) {
      EXPECT_TRUE(cpus[thread] == bound[thread] || cpus[thread] == -1) << thread;
    }
    for (const int mask : masks) EXPECT_TRUE(mask == 1 || mask == -1) << mask;
  }).join();
}

TEST(Measure, RefusesTimesAndSizesThatCannotBe) {
  const PeakLoop loop = peak_loops(Level::kGeneric).value().front();
  for (const double seconds : {-1.0, 61.0, 1e300, std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(sample_peak(loop, 1, seconds).error().code(), StatusCode::kInvalidArgument)
        << seconds;
  }
  const Status huge = MemoryProbe::create(1, int64_t{1} << 50).error();
  EXPECT_EQ(huge.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(huge.message().find("1125899906842624 bytes"), std::string::npos) << huge.message();
}

}  // namespace
}  // namespace argosy
