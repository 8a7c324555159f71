// A test that fails on purpose. CMake runs it inverted: if it ever passes, the harness reports nothing.
#include <gtest/gtest.h>

TEST(Canary, MustFail) { EXPECT_EQ(1, 2) << "this failure is wanted"; }
TEST(Canary, MustPass) { EXPECT_EQ(2, 2); }
