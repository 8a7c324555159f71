// Mapped memory: zero, aligned, moved without leak, refused by value when it cannot be had.
#include "platform/memory.h"

#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "argosy/tensor.h"
#include "support/rank_threads.h"

namespace argosy::platform {
namespace {

TEST(MappedMemory, IsZeroAlignedAndWritable) {
  for (const int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{4097}, int64_t{1} << 20}) {
    Result<MappedMemory> memory = MappedMemory::map(bytes);
    ASSERT_TRUE(memory.has_value()) << memory.error().to_string();
    EXPECT_EQ(memory->size_bytes(), bytes);
    ASSERT_NE(memory->data(), nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % 4096, 0u);
    for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(memory->data()[i], std::byte{0});
    for (int64_t i = 0; i < bytes; ++i) memory->data()[i] = std::byte{1};
  }
}

TEST(MappedMemory, ReservesMoreThanTheMachineHas) {
  if (testing::kUnderSanitizer) GTEST_SKIP() << "address space is cut";
  const Result<MappedMemory> memory = MappedMemory::map(int64_t{1} << 42);
  ASSERT_TRUE(memory.has_value()) << memory.error().to_string();
  memory->data()[int64_t{1} << 41] = std::byte{1};
  EXPECT_EQ(memory->data()[(int64_t{1} << 42) - 1], std::byte{0});
}

TEST(MappedMemory, RefusesByValue) {
  const Result<MappedMemory> negative = MappedMemory::map(-7);
  ASSERT_FALSE(negative.has_value());
  EXPECT_EQ(negative.error().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(negative.error().message().find("-7"), std::string::npos);
  const int64_t most = std::numeric_limits<int64_t>::max();
  const Result<MappedMemory> huge = MappedMemory::map(most);
  ASSERT_FALSE(huge.has_value());
  EXPECT_EQ(huge.error().code(), StatusCode::kOutOfMemory);
  EXPECT_NE(huge.error().message().find(std::to_string(most)), std::string::npos);
}

TEST(HugePages, AskingChangesNoByteOfAnyRange) {
  constexpr int64_t kBytes = int64_t{6} << 20;
  Result<MappedMemory> memory = MappedMemory::map(kBytes);
  ASSERT_TRUE(memory.has_value());
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 0},
                                     {1, 1},
                                     {5, 4095},
                                     {4097, 2 << 20},
                                     {63, kBytes - 64},
                                     {0, kBytes}}) {
    memory->data()[0] = std::byte{7};
    memory->data()[kBytes - 1] = std::byte{9};
    prefer_huge_pages(memory->data() + first, count);
    EXPECT_EQ(memory->data()[0], std::byte{7});
    EXPECT_EQ(memory->data()[kBytes - 1], std::byte{9});
    EXPECT_EQ(memory->data()[kBytes / 2], std::byte{0});
  }
}

// Whether huge pages were asked for behind `address`: flag "hg" of its mapping.
bool asks_for_huge_pages(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  bool is_within = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2) {
      const auto at = reinterpret_cast<uintptr_t>(address);
      is_within = begin <= at && at < end;
    } else if (is_within && line.starts_with("VmFlags:")) {
      return line.find(" hg") != std::string::npos;
    }
  }
  return false;
}

TEST(HugePages, ALargeBufferBeginsOnOneAndAsks) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
    GTEST_SKIP() << "a kernel without huge pages";
  }
  AlignedBuffer buffer;
  for (const int64_t bytes : {kHugePage, 3 * kHugePage + 64, int64_t{40} << 20}) {
    ASSERT_TRUE(buffer.reserve(bytes).ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kHugePage, 0u) << bytes;
    EXPECT_TRUE(asks_for_huge_pages(buffer.data())) << bytes;
  }
}

TEST(MappedMemory, MovesWithoutLeak) {
  // 1,000 mappings of 1 TiB fit no address space: each must be gone before the next few.
  const int64_t bytes = testing::kUnderSanitizer ? int64_t{1} << 36 : int64_t{1} << 40;
  MappedMemory kept;
  for (int i = 0; i < 1000; ++i) {
    Result<MappedMemory> memory = MappedMemory::map(bytes);
    ASSERT_TRUE(memory.has_value()) << i << ": " << memory.error().to_string();
    MappedMemory moved = std::move(memory).value();
    kept = std::move(moved);
  }
  EXPECT_EQ(kept.size_bytes(), bytes);
}

}  // namespace
}  // namespace argosy::platform
