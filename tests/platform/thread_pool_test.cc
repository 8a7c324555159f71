// ThreadPool: each task exactly once, visible results, default MXCSR, no allocation, no leak on
// failure.
#include "argosy/thread_pool.h"

#include <gtest/gtest.h>
#include <immintrin.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/alloc_counter.h"
#include "support/rank_threads.h"

namespace argosy {
namespace {

std::unique_ptr<ThreadPool> make_pool(int num_threads) {
  Result<std::unique_ptr<ThreadPool>> pool = ThreadPool::create(num_threads);
  EXPECT_TRUE(pool.has_value()) << pool.error().to_string();
  return std::move(pool).value();
}

int num_threads_of_process() {
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word) {
    if (word == "Threads:") {
      int number = 0;
      file >> number;
      return number;
    }
  }
  return -1;
}

class ThreadPoolTest : public ::testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, RunsEachTaskOnceForAnySize) {
  const int num_threads = GetParam();
  const std::unique_ptr<ThreadPool> pool = make_pool(num_threads);
  EXPECT_EQ(pool->num_threads(), num_threads);
  const uint64_t seed = 20240731;
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  for (int call = 0; call < 400; ++call) {
    const int64_t num_tasks = call < 8 ? call : static_cast<int64_t>(rng() % 300);
    // Plain ints: the pool must order the tasks' writes before its return (thread sanitizer).
    std::vector<int> runs(static_cast<size_t>(num_tasks), 0);
    std::vector<int> by(static_cast<size_t>(num_tasks), -1);
    pool->parallel_for(num_tasks, [&](int64_t task, int thread) {
      ++runs[static_cast<size_t>(task)];
      by[static_cast<size_t>(task)] = thread;
      if (task % 64 == 3) std::this_thread::yield();
    });
    for (size_t i = 0; i < runs.size(); ++i) {
      ASSERT_EQ(runs[i], 1) << "call " << call << " task " << i << " of " << num_tasks;
      ASSERT_GE(by[i], 0);
      ASSERT_LT(by[i], num_threads);
    }
  }
}

TEST_P(ThreadPoolTest, NeverRunsOneThreadNumberTwiceAtATime) {
  const std::unique_ptr<ThreadPool> pool = make_pool(GetParam());
  std::vector<std::atomic<int>> inside(static_cast<size_t>(GetParam()));
  std::atomic<int> num_overlaps{0};
  for (int call = 0; call < 50; ++call) {
    pool->parallel_for(40, [&](int64_t, int thread) {
      std::atomic<int>& mine = inside[static_cast<size_t>(thread)];
      if (mine.fetch_add(1) != 0) num_overlaps.fetch_add(1);
      std::this_thread::yield();
      mine.fetch_sub(1);
    });
  }
  EXPECT_EQ(num_overlaps.load(), 0);
}

TEST_P(ThreadPoolTest, UsesAllItsThreads) {
  const int num_threads = GetParam();
  const std::unique_ptr<ThreadPool> pool = make_pool(num_threads);
  std::vector<std::thread::id> ids(static_cast<size_t>(num_threads));
  std::atomic<int> num_inside{0};
  // No task ends before each thread has one: it hangs (and the test times out) if a thread stays
  // away.
  pool->parallel_for(num_threads, [&](int64_t, int thread) {
    ids[static_cast<size_t>(thread)] = std::this_thread::get_id();
    num_inside.fetch_add(1);
    while (num_inside.load() < num_threads) std::this_thread::yield();
  });
  EXPECT_EQ(std::set<std::thread::id>(ids.begin(), ids.end()).size(),
            static_cast<size_t>(num_threads));
  EXPECT_EQ(ids[0], std::this_thread::get_id());
}

TEST_P(ThreadPoolTest, TasksHaveTheDefaultFloatEnvironment) {
  const unsigned before = _mm_getcsr();
  constexpr unsigned kFlushing = 0x9FC0;
  _mm_setcsr(kFlushing);  // inherited by threads that start now
  std::vector<unsigned> seen(200, 0);
  unsigned after = 0;
  {
    const std::unique_ptr<ThreadPool> pool = make_pool(GetParam());
    for (int call = 0; call < 3; ++call) {
      pool->parallel_for(200, [&](int64_t task, int) {
        seen[static_cast<size_t>(task)] = _mm_getcsr();
        std::this_thread::yield();
        _mm_setcsr(0x7F80);  // a task that leaves a mess must not reach the next one
      });
    }
    after = _mm_getcsr() & ~0x3Fu;  // the sticky flags are whoever's
  }
  _mm_setcsr(before);
  for (const unsigned each : seen) EXPECT_EQ(each, 0x1F80u);
  EXPECT_EQ(after, kFlushing);
}

TEST_P(ThreadPoolTest, AllocatesNothing) {
  if (!testing::is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  const std::unique_ptr<ThreadPool> pool = make_pool(GetParam());
  std::atomic<int64_t> sum{0};
  const auto body = [&sum](int64_t task, int) { sum.fetch_add(task); };
  pool->parallel_for(100, body);
  const int64_t before = testing::num_allocations();
  for (int call = 0; call < 100; ++call) pool->parallel_for(100, body);
  EXPECT_EQ(testing::num_allocations() - before, 0);
  EXPECT_EQ(sum.load(), 101 * 4950);
}

TEST_P(ThreadPoolTest, WakesAfterSleepAndJoinsAsleepOrAwake) {
  // A sanitizer starts a thread of its own with the first one of the program.
  std::thread([] {}).join();
  const int num_before = num_threads_of_process();
  for (const int64_t pause_ms : {0, 30}) {
    const std::unique_ptr<ThreadPool> pool = make_pool(GetParam());
    for (int call = 0; call < 3; ++call) {
      testing::sleep_ms(pause_ms);
      std::atomic<int> num_run{0};
      pool->parallel_for(64, [&](int64_t, int) { num_run.fetch_add(1); });
      EXPECT_EQ(num_run.load(), 64);
    }
  }
  // The system may count a joined thread for a moment longer.
  for (int turn = 0; turn < 2000 && num_threads_of_process() > num_before; ++turn) {
    testing::sleep_ms(1);
  }
  EXPECT_LE(num_threads_of_process(), num_before);
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, ::testing::Values(1, 2, 3, 4, 5));

TEST(ThreadPool, RefusesNumbersOutsideItsRange) {
  for (const int number : {-1, 0, 1025}) {
    const auto pool = ThreadPool::create(number);
    ASSERT_FALSE(pool.has_value());
    EXPECT_EQ(pool.error().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(pool.error().message().find(std::to_string(number)), std::string::npos);
  }
}

// Runs in a child process: its address space is cut so that some threads start and a later one
// cannot.
[[noreturn]] void create_without_address_space() {
  std::ifstream file("/proc/self/statm");
  long num_pages = 0;
  file >> num_pages;
  const auto used = static_cast<rlim_t>(num_pages) * 4096;
  const rlimit limit{used + (rlim_t{96} << 20), used + (rlim_t{96} << 20)};
  const int num_before = num_threads_of_process();
  if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
  const auto pool = ThreadPool::create(1000);
  const bool is_typed = !pool.has_value() && pool.error().code() == StatusCode::kOutOfMemory;
  const bool is_named = is_typed && pool.error().message().find("of 1000") != std::string::npos;
  for (int turn = 0; turn < 2000 && num_threads_of_process() > num_before; ++turn) {
    testing::sleep_ms(1);
  }
  const bool is_clean = num_threads_of_process() == num_before;
  std::fprintf(stderr, "%s\n", pool.has_value() ? "ok" : pool.error().message().c_str());
  _exit(is_named && is_clean ? 0 : 4);
}

TEST(ThreadPoolDeathTest, ReportsAThreadThatCannotStart) {
  if (testing::kUnderSanitizer) GTEST_SKIP() << "sanitizers need the address space";
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(create_without_address_space(), ::testing::ExitedWithCode(0), "cannot start thread");
}

}  // namespace
}  // namespace argosy
