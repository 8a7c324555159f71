// Copies of any size and alignment arrive whole and touch nothing else.
#include "platform/copy.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace argosy::platform {
namespace {

TEST(CopyBlock, CopiesAllAndNothingElse) {
  std::mt19937_64 random(5);
  std::vector<std::byte> source(5000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  for (const bool past_caches : {false, true}) {
    const CopyBlock copy = copy_block(past_caches);
    for (int i = 0; i < 3000; ++i) {
      const size_t bytes = i < 300 ? static_cast<size_t>(i) : random() % 4000;
      const size_t from = random() % 130;
      const size_t to = random() % 130;
      std::vector<std::byte> target(5000, std::byte{0x5A});
      copy(target.data() + to, source.data() + from, static_cast<int64_t>(bytes));
      finish_streaming();
      for (size_t at = 0; at < target.size(); ++at) {
        const bool is_copied = at >= to && at < to + bytes;
        ASSERT_EQ(target[at], is_copied ? source[from + at - to] : std::byte{0x5A})
            << bytes << " bytes from " << from << " to " << to << ", at " << at;
      }
    }
  }
}

}  // namespace
}  // namespace argosy::platform
