// Usable cores follow the affinity mask of the calling thread; quotas: cpu_test.cc.
#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

#include "platform/cpu_detect.h"

namespace argosy::platform {
namespace {

TEST(Cores, FollowsTheAffinityMask) {
  EXPECT_GE(usable_cores(), 1);
  int pinned = 0;
  std::thread([&] {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    CPU_SET(first, &mask);
    ASSERT_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
    pinned = usable_cores();
  }).join();
  EXPECT_EQ(pinned, 1);
}

}  // namespace
}  // namespace argosy::platform
