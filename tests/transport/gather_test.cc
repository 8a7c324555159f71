// Group::gather: every rank's bytes reach the root, in rank order, whatever their sizes; wrong
// roots are refused on every rank and leave the group usable.
#include "transport/gather.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <random>

#include "support/run_group.h"
#include "transport/backends.h"

namespace argosy::transport {
namespace {

using Bytes = std::vector<std::byte>;

// Bytes that say whose they are and where they belong.
Bytes bytes_of(int rank, int64_t size) {
  Bytes bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>((i * 2654435761u >> 11) + static_cast<size_t>(rank) * 37);
  }
  return bytes;
}

class GatherTest : public BackendTest {
 protected:
  void expect_gathered(int root, const std::vector<int64_t>& sizes) const {
    run([&](Endpoint& endpoint) {
      const int self = endpoint.rank();
      const Bytes mine = bytes_of(self, sizes[static_cast<size_t>(self)]);
      std::vector<Bytes> all;
      const Status status = gather(endpoint, root, mine, self == root ? &all : nullptr,
                                   std::chrono::milliseconds(60'000));
      ASSERT_TRUE(status.ok()) << status.to_string();
      if (self != root) return;
      ASSERT_EQ(all.size(), sizes.size());
      for (int rank = 0; rank < endpoint.num_ranks(); ++rank) {
        EXPECT_EQ(
            all[static_cast<size_t>(rank)] == bytes_of(rank, sizes[static_cast<size_t>(rank)]),
            true)
            << "rank " << rank << " of " << endpoint.num_ranks() << ", root " << root;
      }
    });
  }
};

TEST_P(GatherTest, SizesAroundTheSlotAndEveryRoot) {
  const int64_t slot = kGatherWindowBytes / num_ranks();
  const int64_t around[] = {0, 1, 63, 64, 65, slot - 1, slot, slot + 1, 2 * slot, 3 * slot + 7};
  for (int root = 0; root < num_ranks(); root += 3) {
    std::vector<int64_t> sizes;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      sizes.push_back(around[static_cast<size_t>(rank * 3 + root) % std::size(around)]);
    }
    expect_gathered(root, sizes);
  }
}

TEST_P(GatherTest, NothingAtAllAndRandomSizes) {
  expect_gathered(0, std::vector<int64_t>(static_cast<size_t>(num_ranks()), 0));
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<int64_t> sizes;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      sizes.push_back(static_cast<int64_t>(rng() % (1u << (rng() % 22))));
    }
    expect_gathered(static_cast<int>(rng() % static_cast<uint64_t>(num_ranks())), sizes);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GatherTest, ::testing::ValuesIn(all_backends_and_ranks()),
                         name_of_param);

TEST(GatherGroup, WrongRootsAreRefusedEverywhereAndTheGroupLives) {
  testing::run_group(3, [](Group& group) {
    const Bytes mine = bytes_of(group.rank(), 10);
    std::vector<Bytes> all;
    const Status outside = group.gather(3, mine, &all);
    EXPECT_EQ(outside.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(outside.message(), "root is 3, it can be 0 to 2")) << outside.message();
    const Status differ = group.gather(group.rank() == 2 ? 1 : 0, mine, &all);
    EXPECT_EQ(differ.code(), StatusCode::kDisagree);
    EXPECT_TRUE(contains(differ.message(), "0 on rank 0, 1 on rank 2")) << differ.message();
    EXPECT_EQ(group.gather(1, mine, nullptr).code(), StatusCode::kInvalidArgument);
    ASSERT_TRUE(group.gather(1, mine, group.rank() == 1 ? &all : nullptr).ok());
    if (group.rank() == 1) {
      EXPECT_EQ(all[2], bytes_of(2, 10));
    }
  });
}

TEST(GatherGroup, OtherRanksReturnBeforeTheRootUsesTheBytes) {
  // Each leaves the group at once; the root must still get everything.
  for (int turn = 0; turn < 20; ++turn) {
    testing::run_group(4, [&](Group& group) {
      std::vector<Bytes> all;
      const Bytes mine = bytes_of(group.rank(), 100'000);
      ASSERT_TRUE(group.gather(0, mine, group.rank() == 0 ? &all : nullptr).ok());
      for (size_t rank = 0; rank < all.size(); ++rank) {
        EXPECT_EQ(all[rank] == bytes_of(static_cast<int>(rank), 100'000), true) << rank;
      }
    });
  }
}

TEST(GatherGroup, ARankThatLeftIsNamed) {
  // All are through the barrier before one leaves: a wait that is over still fails in a poisoned group.
  std::atomic<int> num_through{0};
  testing::run_group(3, [&](Group& group) {
    ASSERT_TRUE(group.barrier().ok());
    num_through.fetch_add(1);
    while (num_through.load() < 3) testing::sleep_ms(1);
    if (group.rank() == 2) return;
    std::vector<Bytes> all;
    const Status status = group.gather(0, {}, &all);
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(contains(status.message(), "rank 2")) << status.message();
  });
}

}  // namespace
}  // namespace argosy::transport
