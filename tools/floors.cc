// See floors.h. Test: tests/cli/floors_test.cc.
#include "tools/floors.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "argosy/measure.h"

namespace argosy::tools {
namespace {

// --- work ---

StageWork& at(StageWorks& works, MoeStage stage) { return works[static_cast<size_t>(stage)]; }

}  // namespace

StageWorks works_of(const LayerCosts& layer, const RankWork& rank) {
  const auto hidden = static_cast<double>(layer.hidden);
  const auto tokens = static_cast<double>(rank.tokens);
  const auto rows = static_cast<double>(rank.rows);
  const auto sent_rows = static_cast<double>(rank.sent_rows);
  const double row_bytes = hidden * static_cast<double>(size_of(layer.hidden_dtype));
  const bool is_bf16 = layer.hidden_dtype == DType::kBF16;
  const double shared_gate = layer.shared_gate ? 1 : 0;
  StageWorks works = {};
  if (rank.tokens > 0) {
    // A product of T x H by H x E, always a chain of fp32 FMAs. Scores and top-k are left out.
    at(works, MoeStage::kRoute) = {2 * tokens * hidden * static_cast<double>(layer.num_experts),
                                   false, static_cast<double>(layer.gate_bytes), 0};
  }
  // A token's row is read once and written to the place of each of its expert rows.
  at(works, MoeStage::kDispatch) = {0, false, 0, (tokens + sent_rows) * row_bytes};
  // Three products of rows x F x H (gate, up, down); an expert with rows has its weights read once.
  at(works, MoeStage::kExperts) = {
      6 * rows * hidden * static_cast<double>(layer.intermediate), is_bf16,
      static_cast<double>(layer.expert_bytes) * static_cast<double>(rank.experts_hit), 0};
  // Every expert row is read once and added by one FMA an element; a row of output per token.
  at(works, MoeStage::kCombine) = {2 * sent_rows * hidden, false, 0,
                                   (tokens + sent_rows) * row_bytes};
  if (layer.shared_intermediate > 0 && rank.tokens > 0) {
    // As an expert that every token passes, and the product with its gate.
    const double products = 6 * tokens * hidden * static_cast<double>(layer.shared_intermediate);
    at(works, MoeStage::kShared) = {products + 2 * tokens * hidden * shared_gate, is_bf16,
                                    static_cast<double>(layer.shared_bytes), 0};
    // The shared experts' row is where combine starts.
    at(works, MoeStage::kCombine).moved_bytes += tokens * row_bytes;
  }
  return works;
}

// --- floors ---

namespace {

double per(double work, double rate) { return work > 0 && rate > 0 ? work / rate : 0; }

// Bytes that fit a cache may still be there from the call before: only its rate bounds them then.
// Where a measured cache is slower than the memory (noise, no cache at all), the memory's holds.
double seconds_of_work(const StageWork& work, const Rates& rates, bool in_cache) {
  const double peak = work.is_bf16 ? rates.bf16_peak : rates.f32_peak;
  const double read = in_cache ? std::max(rates.cache_read, rates.memory_read) : rates.memory_read;
  const double moved =
      in_cache ? std::max(rates.cache_moved, rates.memory_moved) : rates.memory_moved;
  return std::max(per(work.operations, peak),
                  per(work.read_bytes, read) + per(work.moved_bytes, moved));
}

// No rank begins these before all ranks have sent their counts.
bool follows_counts(MoeStage stage) {
  return stage == MoeStage::kDispatch || stage == MoeStage::kExperts || stage == MoeStage::kCombine;
}

StageWork sum_of(std::span<const StageWorks> ranks, size_t stage) {
  StageWork sum;
  for (const StageWorks& works : ranks) {
    sum.operations += works[stage].operations;
    sum.is_bf16 |= works[stage].is_bf16;
    sum.read_bytes += works[stage].read_bytes;
    sum.moved_bytes += works[stage].moved_bytes;
  }
  return sum;
}

double sum_of(const std::array<double, kNumMoeStages>& stages) {
  double sum = 0;
  for (const double stage : stages) sum += stage;
  return sum;
}

}  // namespace

Floors floors_of(std::span<const StageWorks> ranks, const FloorRates& rates) {
  Floors floors;
  floors.rates = rates;
  floors.ranks.resize(ranks.size());
  double together = 0;
  for (size_t stage = 0; stage < kNumMoeStages; ++stage) {
    double most_bytes = 0;  // of a rank: each may have a cache of its own
    for (const StageWorks& works : ranks) {
      most_bytes = std::max(most_bytes, works[stage].read_bytes + works[stage].moved_bytes);
    }
    const bool in_cache = most_bytes <= static_cast<double>(rates.last_cache_bytes);
    if (follows_counts(static_cast<MoeStage>(stage))) {
      together += seconds_of_work(sum_of(ranks, stage), rates.all_ranks, in_cache);
    }
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const double alone = seconds_of_work(ranks[rank][stage], rates.one_rank, in_cache);
      floors.ranks[rank][stage] = alone;
      floors.stages[stage] = std::max(floors.stages[stage], alone);
    }
  }
  floors.total = together;
  for (const auto& rank : floors.ranks) floors.total = std::max(floors.total, sum_of(rank));
  return floors;
}

// --- rates ---

namespace {

int64_t last_cache_bytes(const CpuInfo& cpu) {
  int64_t largest = 0;
  for (const CacheInfo& cache : cpu.caches) largest = std::max(largest, cache.bytes);
  return largest;
}

struct Loops {
  PeakLoop bf16;  // the highest level's: bf16 also widens to fp32
  PeakLoop f32;
};

// The lower levels are compiled for AVX2 as well and use it where the CPU has it.
Result<Loops> loops_of(Level level) {
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<PeakLoop> loops,
                          peak_loops(std::max(level, Level::kAvx2)));
  Loops found{loops.back(), loops.front()};
  for (const PeakLoop& loop : loops) {
    if (loop.operands == DType::kF32) found.f32 = loop;
  }
  return found;
}

// The best rates that some threads have shown.
struct Sampler {
  Rates best;
  int64_t sample_bytes = 0;  // of memory

  Status sample(const Loops& loops, double peak_seconds, MemoryProbe& memory, MemoryProbe& cache) {
    ARGOSY_ASSIGN_OR_RETURN(const double bf16,
                            sample_peak(loops.bf16, best.num_threads, peak_seconds));
    ARGOSY_ASSIGN_OR_RETURN(const double f32,
                            sample_peak(loops.f32, best.num_threads, peak_seconds));
    best.bf16_peak = std::max(best.bf16_peak, bf16);
    best.f32_peak = std::max(best.f32_peak, f32);
    ARGOSY_RETURN_IF_ERROR(sample_probe(memory, &best.memory_read, &best.memory_moved));
    // What is to be found in the cache has just been pushed out of it.
    ARGOSY_RETURN_IF_ERROR(cache.sample_read(cache.num_bytes(), best.num_threads).error());
    return sample_probe(cache, &best.cache_read, &best.cache_moved);
  }

  // A copied byte is read and written.
  Status sample_probe(MemoryProbe& probe, double* read, double* moved) const {
    ARGOSY_ASSIGN_OR_RETURN(const double only_read,
                            probe.sample_read(sample_bytes, best.num_threads));
    ARGOSY_ASSIGN_OR_RETURN(const double copied, probe.sample_copy(sample_bytes, best.num_threads));
    ARGOSY_ASSIGN_OR_RETURN(const double streamed,
                            probe.sample_streaming_copy(sample_bytes, best.num_threads));
    *read = std::max(*read, only_read);
    *moved = std::max({*moved, only_read, 2 * copied, 2 * streamed});
    return {};
  }
};

// Larger than the last cache, and enough for each thread to pass over for a while.
int64_t probe_bytes(const FloorOptions& options, int64_t last_cache, int num_threads) {
  if (options.memory_bytes > 0) return options.memory_bytes;
  constexpr int64_t kMiB = 1 << 20;
  return std::max({2 * last_cache, 64 * kMiB, 4 * kMiB * num_threads});
}

}  // namespace

Result<FloorRates> measure_floor_rates(const FloorOptions& options) {
  if (options.num_ranks < 1 || options.threads_per_rank < 1 || options.num_samples < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("rates of {} ranks with {} threads by {} samples; each is at least 1",
                              options.num_ranks, options.threads_per_rank, options.num_samples));
  }
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  ARGOSY_ASSIGN_OR_RETURN(const Loops loops, loops_of(options.level));
  const int64_t threads = int64_t{options.num_ranks} * options.threads_per_rank;
  Sampler one, all;
  one.best.num_threads = std::min(options.threads_per_rank, cpu->num_cores);
  all.best.num_threads = static_cast<int>(std::min<int64_t>(threads, cpu->num_cores));
  FloorRates rates;
  rates.bf16_instruction = loops.bf16.instruction;
  rates.f32_instruction = loops.f32.instruction;
  rates.last_cache_bytes = last_cache_bytes(*cpu);
  const int num_threads = all.best.num_threads;
  ARGOSY_ASSIGN_OR_RETURN(
      const std::unique_ptr<MemoryProbe> memory,
      MemoryProbe::create(num_threads, probe_bytes(options, rates.last_cache_bytes, num_threads)));
  rates.memory_bytes = memory->num_bytes();
  // A quarter: the rest is left to whoever shares the cache.
  ARGOSY_ASSIGN_OR_RETURN(
      const std::unique_ptr<MemoryProbe> cache,
      MemoryProbe::create(num_threads,
                          std::max<int64_t>(rates.last_cache_bytes / 4, int64_t{1} << 20)));
  // An eighth a sample: no pass comes back to what a cache still holds.
  all.sample_bytes = rates.memory_bytes / 8;
  one.sample_bytes = all.sample_bytes / num_threads * one.best.num_threads;
  const bool same = one.best.num_threads == num_threads;
  for (int i = 0; i < options.num_samples; ++i) {
    ARGOSY_RETURN_IF_ERROR(all.sample(loops, options.peak_seconds, *memory, *cache));
    if (!same) ARGOSY_RETURN_IF_ERROR(one.sample(loops, options.peak_seconds, *memory, *cache));
  }
  rates.all_ranks = all.best;
  rates.one_rank = same ? all.best : one.best;
  return rates;
}

}  // namespace argosy::tools
