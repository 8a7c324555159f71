// Samples of peaks and memory rates. Test: tests/platform/measure_test.cc.
#include "argosy/measure.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <system_error>
#include <thread>
#include <utility>

#include "argosy/pinning.h"
#include "base/error.h"
#include "platform/clock.h"
#include "platform/cpu_detect.h"
#include "platform/measure_loops.h"
#include "platform/memory.h"
#include "platform/shared_memory.h"

namespace argosy {
namespace {

constexpr int kMaxThreads = 1024;

Status check_threads(int num_threads) {
  if (num_threads >= 1 && num_threads <= kMaxThreads) return {};
  return base::invalid("a measurement by {} threads; it can have 1 to {}", num_threads,
                       kMaxThreads);
}

// Runs body(thread) on `num_threads` pinned threads that start together, the caller as thread 0.
// Returns the seconds from the first start to the last end.
template <typename Body>
Result<double> timed_on_threads(int num_threads, const Body& body) {
  std::vector<double> begin(static_cast<size_t>(num_threads));
  std::vector<double> end(static_cast<size_t>(num_threads));
  const auto timed = [&](int thread) {
    begin[static_cast<size_t>(thread)] = platform::now_seconds();
    body(thread);
    end[static_cast<size_t>(thread)] = platform::now_seconds();
  };
  const ScopedPin pin(0);
  if (num_threads == 1) {
    timed(0);
    return end[0] - begin[0];
  }
  std::latch all_started(1);
  bool go = true;  // written before the latch opens, read after
  std::atomic<int> num_ready{0};
  const auto start_together = [&](int thread) {
    // Relaxed: only the time of the start depends on it.
    num_ready.fetch_add(1, std::memory_order_relaxed);
    while (num_ready.load(std::memory_order_relaxed) < num_threads) std::this_thread::yield();
    timed(thread);
  };
  std::vector<std::thread> threads;
  std::string refusal;
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      threads.emplace_back([&, thread] {
        const ScopedPin own_pin(thread);
        all_started.wait();
        if (go) start_together(thread);
      });
    }
  } catch (const std::system_error& error) {
    go = false;
    refusal = error.what();
  }
  all_started.count_down();
  if (go) start_together(0);
  for (std::thread& thread : threads) thread.join();
  if (!go) {
    return base::error(StatusCode::kOutOfMemory, "the system refused one of {} threads: {}",
                       num_threads, refusal);
  }
  return *std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end());
}

const platform::RegisterLoop* find_loop(const PeakLoop& peak) {
  for (const platform::RegisterLoop& loop : platform::register_loops()) {
    if (loop.peak.instruction == peak.instruction) return &loop;
  }
  return nullptr;
}

int64_t last_cache_bytes(const CpuInfo& cpu) {
  int64_t largest = 0;
  for (const CacheInfo& cache : cpu.caches) largest = std::max(largest, cache.bytes);
  return largest;
}

void fill_with_random(std::byte* data, int64_t bytes, uint64_t seed) {
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  auto* words = reinterpret_cast<uint64_t*>(data);
  for (int64_t i = 0; i < bytes / 8; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    words[i] = state;
  }
}

double median(std::vector<double> samples) {
  const auto middle = samples.begin() + static_cast<ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

// A longer sample is a slip of units.
constexpr double kMostPeakSeconds = 60;

}  // namespace

Result<std::vector<PeakLoop>> peak_loops(Level highest) {
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  std::vector<PeakLoop> loops;
  for (const platform::RegisterLoop& loop : platform::register_loops()) {
    // Any x86-64 CPU has the lowest.
    const bool usable = cpu->has(loop.peak.level) && loop.peak.level <= highest;
    if (usable || loops.empty()) loops.push_back(loop.peak);
  }
  return loops;
}

Result<double> sample_peak(const PeakLoop& loop, int num_threads, double seconds) {
  ARGOSY_RETURN_IF_ERROR(check_threads(num_threads));
  if (!(seconds >= 0 && seconds <= kMostPeakSeconds)) {
    return base::invalid("a peak sampled for {} seconds; 0 to {} are possible", seconds,
                         kMostPeakSeconds);
  }
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<PeakLoop> usable, peak_loops(loop.level));
  const bool is_usable = std::any_of(usable.begin(), usable.end(), [&](const PeakLoop& other) {
    return other.instruction == loop.instruction;
  });
  const platform::RegisterLoop* const found = find_loop(loop);
  if (found == nullptr || !is_usable) {
    return base::invalid("no loop of {} on this CPU", loop.instruction);
  }
  // How many passes fill the time: a short run tells, and wakes the unit up.
  constexpr int64_t kTrialPasses = 2000;
  const double trial_begin = platform::now_seconds();
  found->run(kTrialPasses);
  const double trial = std::max(platform::now_seconds() - trial_begin, 1e-9);
  const double wanted = static_cast<double>(kTrialPasses) * seconds / trial;
  const auto passes = static_cast<int64_t>(std::clamp(wanted, 1000.0, 1e10));
  ARGOSY_ASSIGN_OR_RETURN(const double elapsed,
                          timed_on_threads(num_threads, [&](int) { found->run(passes); }));
  return static_cast<double>(num_threads) * static_cast<double>(passes) *
         found->operations_per_pass / std::max(elapsed, 1e-9);
}

struct MemoryProbe::State {
  int num_threads = 1;
  int64_t bytes_per_thread = 0;  // a multiple of two steps
  int64_t next_at = 0;           // where the next pass begins, in every part; of any kind
  std::vector<platform::MappedMemory> parts;

  // The next stretch of `size` per thread: its begin, after which the position is moved on.
  int64_t take(int64_t size) {
    if (next_at + size > bytes_per_thread) next_at = 0;
    return std::exchange(next_at, next_at + size);
  }

  // Bytes of one of `threads` threads that move `bytes` together.
  static int64_t stretch(int64_t bytes, int threads, int64_t room) {
    const int64_t step = platform::kMemoryStep;
    return std::clamp(bytes / threads / step * step, step, room);
  }

  Result<int> threads_of(int asked) const {
    if (asked >= 0 && asked <= num_threads) return asked == 0 ? num_threads : asked;
    return base::invalid("a sample by {} threads of a probe of {}", asked, num_threads);
  }

  using Copy = void (*)(std::byte* to, const std::byte* from, int64_t bytes);
  Result<double> copy(Copy loop, int64_t bytes, int asked_threads) {
    ARGOSY_ASSIGN_OR_RETURN(const int threads, threads_of(asked_threads));
    const int64_t size = stretch(bytes, threads, bytes_per_thread / 2);
    const int64_t from = take(2 * size);
    ARGOSY_ASSIGN_OR_RETURN(const double elapsed, timed_on_threads(threads, [&](int thread) {
                              std::byte* const part = parts[static_cast<size_t>(thread)].data();
                              loop(part + from + size, part + from, size);
                            }));
    return static_cast<double>(size * threads) / std::max(elapsed, 1e-9);
  }
};

MemoryProbe::MemoryProbe(std::unique_ptr<State> state) : state_(std::move(state)) {}
MemoryProbe::~MemoryProbe() = default;

int64_t MemoryProbe::num_bytes() const { return state_->bytes_per_thread * state_->num_threads; }

Result<std::unique_ptr<MemoryProbe>> MemoryProbe::create(int num_threads, int64_t bytes) {
  ARGOSY_RETURN_IF_ERROR(check_threads(num_threads));
  if (bytes < 0) return base::invalid("a memory probe of {} bytes", bytes);
  // It is touched whole at once: what the machine has not would end the process.
  if (const int64_t available = platform::available_memory_bytes(); bytes > available) {
    return base::error(StatusCode::kOutOfMemory,
                       "a memory probe of {} bytes; the machine has {} bytes of memory left", bytes,
                       available);
  }
  if (bytes == 0) {
    ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
    bytes = std::max<int64_t>(8 * last_cache_bytes(*cpu), int64_t{512} << 20);
  }
  auto state = std::make_unique<State>();
  state->num_threads = num_threads;
  // Halves begin on pages.
  constexpr int64_t kUnit = int64_t{2} * 4096;
  state->bytes_per_thread = std::max(kUnit, bytes / num_threads / kUnit * kUnit);
  for (int thread = 0; thread < num_threads; ++thread) {
    ARGOSY_ASSIGN_OR_RETURN(platform::MappedMemory part,
                            platform::MappedMemory::map(state->bytes_per_thread));
    // A hint; without it passes are some per cent slower.
    madvise(part.data(), static_cast<size_t>(part.size_bytes()), MADV_HUGEPAGE);
    state->parts.push_back(std::move(part));
  }
  ARGOSY_ASSIGN_OR_RETURN(
      [[maybe_unused]] const double elapsed, timed_on_threads(num_threads, [&](int thread) {
        platform::MappedMemory& part = state->parts[static_cast<size_t>(thread)];
        fill_with_random(part.data(), part.size_bytes(), static_cast<uint64_t>(thread) + 1);
      }));
  return std::unique_ptr<MemoryProbe>(new MemoryProbe(std::move(state)));
}

Result<double> MemoryProbe::sample_read(int64_t bytes, int num_threads) {
  ARGOSY_ASSIGN_OR_RETURN(const int threads, state_->threads_of(num_threads));
  const int64_t size = State::stretch(bytes, threads, state_->bytes_per_thread);
  const int64_t from = state_->take(size);
  ARGOSY_ASSIGN_OR_RETURN(const double elapsed, timed_on_threads(threads, [&](int thread) {
                            platform::memory_loops().read(
                                state_->parts[static_cast<size_t>(thread)].data() + from, size);
                          }));
  return static_cast<double>(size * threads) / std::max(elapsed, 1e-9);
}

Result<double> MemoryProbe::sample_copy(int64_t bytes, int num_threads) {
  return state_->copy(platform::memory_loops().copy, bytes, num_threads);
}

Result<double> MemoryProbe::sample_streaming_copy(int64_t bytes, int num_threads) {
  return state_->copy(platform::memory_loops().streaming_copy, bytes, num_threads);
}

void copy_by_plain_stores(std::byte* to, const std::byte* from, int64_t bytes) {
  const int64_t whole = bytes / platform::kMemoryStep * platform::kMemoryStep;
  platform::memory_loops().copy(to, from, whole);
  std::copy(from + whole, from + bytes, to + whole);
}

namespace {

Result<MachineRates::Memory> measure_memory(int num_threads, const MeasureOptions& options,
                                            int64_t* memory_bytes) {
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<MemoryProbe> probe,
                          MemoryProbe::create(num_threads, options.memory_bytes));
  *memory_bytes = probe->num_bytes();
  std::vector<double> read, copy, streaming;
  for (int i = 0; i < options.num_samples; ++i) {
    ARGOSY_ASSIGN_OR_RETURN(const double read_rate, probe->sample_read(options.sample_bytes));
    ARGOSY_ASSIGN_OR_RETURN(const double copy_rate, probe->sample_copy(options.sample_bytes));
    ARGOSY_ASSIGN_OR_RETURN(const double streaming_rate,
                            probe->sample_streaming_copy(options.sample_bytes));
    read.push_back(read_rate);
    copy.push_back(copy_rate);
    streaming.push_back(streaming_rate);
  }
  return MachineRates::Memory{median(read), median(copy), median(streaming)};
}

Result<double> measure_peak(const PeakLoop& loop, int num_threads, const MeasureOptions& options) {
  std::vector<double> rates;
  for (int i = 0; i < options.num_samples; ++i) {
    ARGOSY_ASSIGN_OR_RETURN(const double rate,
                            sample_peak(loop, num_threads, options.peak_seconds));
    rates.push_back(rate);
  }
  return median(rates);
}

}  // namespace

Result<MachineRates> measure_machine(const MeasureOptions& options) {
  if (options.num_samples < 1 || options.sample_bytes < 1 || !(options.peak_seconds > 0)) {
    return base::invalid("measuring {} samples of {} bytes and {} seconds; each must be above 0",
                         options.num_samples, options.sample_bytes, options.peak_seconds);
  }
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  MachineRates rates;
  rates.num_threads = options.num_threads == 0 ? cpu->num_cores : options.num_threads;
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<PeakLoop> loops, peak_loops(Level::kAmx));
  for (const PeakLoop& loop : loops) {
    MachineRates::Peak peak{loop};
    ARGOSY_ASSIGN_OR_RETURN(peak.one_thread, measure_peak(loop, 1, options));
    ARGOSY_ASSIGN_OR_RETURN(peak.all_threads, measure_peak(loop, rates.num_threads, options));
    rates.peaks.push_back(peak);
    if (peak.one_thread > rates.peaks[rates.best_bf16].one_thread) {
      rates.best_bf16 = rates.peaks.size() - 1;
    }
  }
  ARGOSY_ASSIGN_OR_RETURN(rates.one_thread, measure_memory(1, options, &rates.memory_bytes));
  ARGOSY_ASSIGN_OR_RETURN(rates.all_threads,
                          measure_memory(rates.num_threads, options, &rates.memory_bytes));
  return rates;
}

}  // namespace argosy
