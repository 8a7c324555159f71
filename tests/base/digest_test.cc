// digest_of against published XXH3-128 vectors: one length of each code path of the algorithm, so
// that a changed library, seed, byte order or half order is seen.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/moe.h"

namespace argosy {
namespace {

// The byte sequence of xxHash's own self-check.
std::vector<std::byte> published_bytes(size_t length) {
  std::vector<std::byte> bytes(length);
  uint64_t state = 2654435761u;
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(state >> 56);
    state *= 11400714785074694797u;
  }
  return bytes;
}

TEST(DigestTest, PublishedVectors) {
  struct Row {
    size_t length;
    std::string_view digest;
  };
  constexpr Row kRows[] = {
      {0, "99aa06d3014798d86001c324468d497f"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb"},
      {6, "082afe0b8162d12a3e7039bdda43cfc6"},    {12, "6e3efd8fc7802b18061a192713f69ad9"},
      {24, "0ce966e4678d37611e7044d28b1b901d"},   {48, "a002ac4e5478227ef942219aed80f67b"},
      {81, "4952f58181ab00425e8bafb9f95fb803"},   {222, "337e09641b948717f1aebd597cec6b3a"},
      {403, "1b6de21e332dd73dcdeb804d65c6dea4"},  {512, "18d2d110dcc9bca1617e49599013cb6b"},
      {2048, "f736557fd47073a5dd59e2c3a5f038e0"}, {2367, "e89c0f6ff369b427cb37aeb9e5d361ed"},
  };
  for (const Row& row : kRows) {
    const std::vector<std::byte> bytes = published_bytes(row.length);
    EXPECT_EQ(digest_of(bytes), row.digest) << row.length << " bytes";
  }
}

TEST(DigestTest, AlwaysThirtyTwoDigits) {
  // Among 4096 inputs each half starts with a zero digit many times: padding is not optional.
  for (uint32_t value = 0; value < 4096; ++value) {
    const std::string digest = digest_of(std::as_bytes(std::span(&value, 1)));
    ASSERT_EQ(digest.size(), 32u) << value;
    ASSERT_EQ(digest.find_first_not_of("0123456789abcdef"), std::string::npos) << digest;
  }
}

TEST(DigestTest, AddressDoesNotMatter) {
  const std::vector<std::byte> bytes = published_bytes(1000);
  const std::string want = digest_of(bytes);
  for (size_t shift = 0; shift < 64; ++shift) {
    std::vector<std::byte> moved(shift);
    moved.insert(moved.end(), bytes.begin(), bytes.end());
    ASSERT_EQ(digest_of(std::span(moved).subspan(shift)), want) << shift;
  }
}

}  // namespace
}  // namespace argosy
