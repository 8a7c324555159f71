// Usable cores: the quota's text, and the affinity mask of this process.
#include "platform/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

namespace argosy::platform {
namespace {

TEST(Cores, ParsesTheQuota) {
  EXPECT_EQ(parse_cpu_max("200000 100000\n"), 2);
  EXPECT_EQ(parse_cpu_max("150000 100000"), 1);  // a second core would be there half of the time
  EXPECT_EQ(parse_cpu_max("10000 100000"), 1);
  for (const char* text : {"max 100000\n", "", " ", "100000", "x 100000", "100000 0", "-1 100000",
                           "99999999999999999999 1", "100000 100000x"}) {
    EXPECT_EQ(parse_cpu_max(text), std::nullopt) << text;
  }
}

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
