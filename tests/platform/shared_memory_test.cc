// memfds: shared between mappings, sparse, discarded to zero, refused by limits with their names.
#include "platform/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

namespace argosy::platform {
namespace {

constexpr int64_t kBytes = 1 << 20;

TEST(SharedMemory, TwoMappingsSeeOneMemory) {
  const Descriptor memory = std::move(create_shared_memory("test", kBytes)).value();
  const SharedMapping a = std::move(SharedMapping::map(memory, kBytes)).value();
  const SharedMapping b = std::move(SharedMapping::map(memory, kBytes)).value();
  EXPECT_NE(a.data(), b.data());
  EXPECT_EQ(b.data()[kBytes - 1], std::byte{0});
  a.data()[kBytes - 1] = std::byte{7};
  EXPECT_EQ(b.data()[kBytes - 1], std::byte{7});
}

TEST(SharedMemory, IsSparseAndDiscardsToZero) {
  const int64_t huge = int64_t{8} << 30;
  const Descriptor memory = std::move(create_shared_memory("test", huge)).value();
  const SharedMapping mapping = std::move(SharedMapping::map(memory, huge)).value();
  mapping.data()[huge / 2] = std::byte{1};
  struct stat info {};
  ASSERT_EQ(fstat(memory.get(), &info), 0);
  EXPECT_LT(info.st_blocks * 512, 8 << 20);
  discard_shared_memory(memory, huge / 2, 4096);
  EXPECT_EQ(mapping.data()[huge / 2], std::byte{0});
}

TEST(SharedMemory, LimitsAreNamed) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  rlimit small = old;
  small.rlim_cur = 4096;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Result<Descriptor> refused = create_shared_memory("test", kBytes);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), StatusCode::kOutOfMemory);
  EXPECT_NE(refused.error().message().find("1048576 bytes"), std::string::npos);
  EXPECT_NE(refused.error().message().find("RLIMIT_FSIZE"), std::string::npos);
}

TEST(SharedMemory, KnowsWhatIsLeft) { EXPECT_GT(available_memory_bytes(), 1 << 20); }

}  // namespace
}  // namespace argosy::platform
