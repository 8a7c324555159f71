// The counter itself must see every way into the heap, or the tests that count zero prove nothing.
#include "support/alloc_counter.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

namespace argosy::testing {
namespace {

template <typename Body>
int64_t allocations_of(Body&& body) {
  const int64_t before = num_allocations();
  body();
  return num_allocations() - before;
}

TEST(AllocCounter, SeesEveryWayIntoTheHeap) {
  if (!is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  void* volatile memory = nullptr;
  EXPECT_EQ(allocations_of([&] { memory = std::malloc(10); }), 1);
  EXPECT_EQ(allocations_of([&] { memory = std::realloc(memory, 20000); }), 1);
  std::free(memory);
  EXPECT_EQ(allocations_of([&] { memory = std::calloc(3, 10); }), 1);
  std::free(memory);
  EXPECT_EQ(allocations_of([&] { memory = std::aligned_alloc(64, 128); }), 1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
  std::free(memory);
  int* volatile number = nullptr;
  EXPECT_EQ(allocations_of([&] { number = new int(1); }), 1);
  delete number;
  EXPECT_EQ(allocations_of([] {}), 0);
}

TEST(AllocCounter, SeesOtherThreads) {
  if (!is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  const int64_t busy = allocations_of([] {
    std::thread([] {
      for (int i = 0; i < 100; ++i) {
        void* volatile memory = std::malloc(100);
        std::free(memory);
      }
    }).join();
  });
  EXPECT_GE(busy, 100);
}

}  // namespace
}  // namespace argosy::testing
