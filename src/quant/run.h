// What both directions share: the level, threads, when to go past the caches. Test: tests/quant/.
#pragma once

#include <atomic>
#include <cstdint>

#include "argosy/thread_pool.h"
#include "platform/copy.h"
#include "platform/float_env.h"
#include "quant/segments.h"

namespace argosy::quant {

// Columns that one pass of the kernels takes: values, codes and amax of them stay in L1. A multiple of every block.
inline constexpr int64_t kChunkCols = 2048;
inline constexpr int64_t kLeastBlock = 16;
inline constexpr int64_t kMaxChunkBlocks = kChunkCols / kLeastBlock;

// Elements of a task: large enough that its start costs nothing.
inline constexpr int64_t kTaskElements = int64_t{1} << 16;

// An output of this many bytes pushes itself out of the caches before anybody reads it.
inline constexpr int64_t kStreamBytes = int64_t{16} << 20;

inline int64_t rows_per_task(int64_t block_rows, int64_t cols) {
  const int64_t wanted = kTaskElements / (cols > 0 ? cols : 1);
  return ceil_div(wanted > 1 ? wanted : 1, block_rows) * block_rows;
}

// f(task) for all of them, on the pool or here, denormals kept.
template <typename F>
void run_tasks(ThreadPool* pool, const Tasks& tasks, bool stream, F&& f) {
  const auto one = [&](int64_t task, int) {
    f(tasks[task]);
    if (stream) platform::finish_streaming();
  };
  const platform::ScopedFloatEnv float_env(platform::Denormals::kKeep);
  if (pool != nullptr) return pool->parallel_for(tasks.size(), one);
  for (int64_t task = 0; task < tasks.size(); ++task) one(task, 0);
}

// Relaxed: a maximum or minimum of all threads, read after they are done.
template <typename T>
void raise_to(std::atomic<T>* largest, T value) {
  T seen = largest->load(std::memory_order_relaxed);
  while (seen < value && !largest->compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}
template <typename T>
void lower_to(std::atomic<T>* least, T value) {
  T seen = least->load(std::memory_order_relaxed);
  while (value < seen && !least->compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace argosy::quant
