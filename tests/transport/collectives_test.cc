// AllGather and reduce_sum: many epochs with random delays, several in flight, refusals on every
// rank. Cases K11 (C102, C105: no byte of another epoch; C113: zero bytes are not "no message
// yet").
#include "transport/collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "support/alloc_counter.h"
#include "transport/backends.h"

namespace argosy::transport {
namespace {

class CollectivesTest : public BackendTest {};

INSTANTIATE_TEST_SUITE_P(All, CollectivesTest, ::testing::ValuesIn(all_backends_and_ranks()),
                         name_of_param);

std::unique_ptr<AllGather> make_gather(Endpoint& endpoint, int64_t max_bytes) {
  Result<std::unique_ptr<AllGather>> gather = AllGather::create(endpoint, max_bytes, ample());
  EXPECT_TRUE(gather.has_value()) << gather.error().to_string();
  return std::move(gather).value();
}

std::span<const std::byte> bytes_of(const std::vector<uint64_t>& words, size_t num_words) {
  return std::as_bytes(std::span(words).first(num_words));
}

// What rank `rank` gives in `epoch`: size and content both depend on both.
std::vector<uint64_t> message(int rank, uint64_t epoch) {
  const size_t num_words = (epoch * 7 + static_cast<uint64_t>(rank) * 3) % 12;
  std::vector<uint64_t> words(num_words);
  for (size_t i = 0; i < num_words; ++i) {
    words[i] = epoch << 32 | static_cast<uint64_t>(rank) << 16 | i;
  }
  return words;
}

void expect_epoch(const AllGather& gather, uint64_t epoch) {
  ASSERT_EQ(gather.epoch(), epoch);
  for (int rank = 0; rank < gather.num_ranks(); ++rank) {
    const std::vector<uint64_t> want = message(rank, epoch);
    const std::span<const std::byte> got = gather.from(rank);
    ASSERT_EQ(got.size(), want.size() * 8) << "epoch " << epoch << " rank " << rank;
    ASSERT_TRUE(want.empty() || std::memcmp(got.data(), want.data(), got.size()) == 0)
        << "epoch " << epoch << " rank " << rank;
  }
}

TEST_P(CollectivesTest, EveryEpochGetsItsOwnBytes) {
  const uint64_t seed = 3;
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  const uint64_t num_epochs = testing::kUnderSanitizer ? 200 : 600;
  run([&](Endpoint& endpoint) {
    std::mt19937_64 rng = testing::rank_rng(seed, endpoint.rank());
    const std::unique_ptr<AllGather> gather = make_gather(endpoint, 96);
    for (uint64_t epoch = 1; epoch <= num_epochs; ++epoch) {
      testing::random_pause(rng);
      std::vector<uint64_t> mine = message(endpoint.rank(), epoch);
      ASSERT_TRUE(gather->issue(bytes_of(mine, mine.size())).ok());
      std::ranges::fill(mine, 0);  // reusable on return
      testing::random_pause(rng);
      ASSERT_TRUE(gather->wait(ample(), "epoch").ok());
      testing::random_pause(rng);  // slow readers: the others may already be one epoch on
      expect_epoch(*gather, epoch);
    }
  });
}

TEST_P(CollectivesTest, ThreeInFlightInAnyOrder) {
  const uint64_t seed = 5;
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  const uint64_t num_epochs = testing::kUnderSanitizer ? 60 : 200;
  run([&](Endpoint& endpoint) {
    std::mt19937_64 rng = testing::rank_rng(seed, endpoint.rank());
    std::vector<std::unique_ptr<AllGather>> gathers;
    for (int i = 0; i < 3; ++i) gathers.push_back(make_gather(endpoint, 96));
    std::vector<size_t> order = {0, 1, 2};
    for (uint64_t epoch = 1; epoch <= num_epochs; ++epoch) {
      // Orders differ between ranks, and between issue and wait.
      std::ranges::shuffle(order, rng);
      for (const size_t i : order) {
        const auto mine = message(endpoint.rank() + static_cast<int>(i), epoch);
        ASSERT_TRUE(gathers[i]->issue(bytes_of(mine, mine.size())).ok());
        testing::random_pause(rng);
      }
      std::ranges::shuffle(order, rng);
      for (const size_t i : order) {
        ASSERT_TRUE(gathers[i]->wait(ample(), "in flight").ok());
        for (int rank = 0; rank < num_ranks(); ++rank) {
          const auto want = message(rank + static_cast<int>(i), epoch);
          ASSERT_TRUE(std::ranges::equal(gathers[i]->from(rank), bytes_of(want, want.size())));
        }
      }
    }
  });
}

TEST_P(CollectivesTest, TooManyBytesFailOnEveryRankAndLeaveItUsable) {
  run([&](Endpoint& endpoint) {
    const std::unique_ptr<AllGather> gather = make_gather(endpoint, 60);
    EXPECT_EQ(gather->max_bytes(), 64);
    const int culprit = num_ranks() - 1;
    const std::vector<uint64_t> words(9, 1);
    ASSERT_TRUE(gather->issue(bytes_of(words, endpoint.rank() == culprit ? 9 : 8)).ok());
    const Status status = gather->wait(ample(), "counts");
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(),
              "counts: rank " + std::to_string(culprit) + " gives 72 bytes, the limit is 64");
    ASSERT_TRUE(gather->issue(bytes_of(words, 8)).ok());
    EXPECT_TRUE(gather->wait(ample(), "counts").ok());
    EXPECT_EQ(gather->from(culprit).size(), 64u);
  });
}

TEST_P(CollectivesTest, RefusesIssueBeforeWaitAndBadSizes) {
  run([&](Endpoint& endpoint) {
    const std::unique_ptr<AllGather> gather = make_gather(endpoint, 0);
    ASSERT_TRUE(gather->issue({}).ok());
    EXPECT_EQ(gather->issue({}).code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(gather->wait(ample(), "empty").ok());
    EXPECT_TRUE(gather->from(0).empty());
    const auto bad = AllGather::create(endpoint, -1, ample());
    ASSERT_FALSE(bad.has_value());
    EXPECT_EQ(bad.error().code(), StatusCode::kInvalidArgument);
    // One rank alone with a bad size must not keep the others waiting.
    const auto lonely = AllGather::create(endpoint, endpoint.rank() == 0 ? -1 : 64, ample());
    EXPECT_EQ(lonely.has_value(), false);
    EXPECT_TRUE(endpoint.barrier(ample()).ok());
  });
}

TEST_P(CollectivesTest, SumsInRankOrder) {
  // The order shows in the bits: 2^53 + 1 + ... rounds differently from 1 + 2^53 + ... .
  const auto value_of = [](int rank, size_t i) {
    return i == 0 ? (rank == 0 ? 0x1p53 : 1.0)
                  : (rank % 2 == 0 ? 1.0 / (rank + 3.0) : -1e-9 * rank);
  };
  run([&](Endpoint& endpoint) {
    const std::unique_ptr<AllGather> gather = make_gather(endpoint, 64);
    std::mt19937_64 rng = testing::rank_rng(9, endpoint.rank());
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<double> values, want;
      for (size_t i = 0; i < 8; ++i) {
        values.push_back(value_of(endpoint.rank(), i));
        double sum = value_of(0, i);
        for (int rank = 1; rank < num_ranks(); ++rank) sum += value_of(rank, i);
        want.push_back(sum);
      }
      testing::random_pause(rng);
      ASSERT_TRUE(reduce_sum(*gather, std::span<double>(values), ample()).ok());
      ASSERT_EQ(std::memcmp(values.data(), want.data(), 64), 0);
    }
    std::vector<int64_t> counts = {endpoint.rank(), int64_t{1} << 40, -1};
    ASSERT_TRUE(reduce_sum(*gather, std::span<int64_t>(counts), ample()).ok());
    const int64_t n = num_ranks();
    EXPECT_EQ(counts, (std::vector<int64_t>{n * (n - 1) / 2, n << 40, -n}));
  });
}

TEST_P(CollectivesTest, SumsRefuseDifferentLengthsAndOverflow) {
  if (num_ranks() == 1) return;
  run([&](Endpoint& endpoint) {
    const std::unique_ptr<AllGather> gather = make_gather(endpoint, 64);
    std::vector<int64_t> counts(endpoint.rank() == 1 ? 3 : 4, std::numeric_limits<int64_t>::max());
    const Status lengths = reduce_sum(*gather, std::span<int64_t>(counts), ample());
    EXPECT_EQ(lengths.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(lengths.message(), "rank 0 gives 4 values, rank 1 gives 3"));
    const Status overflow = reduce_sum(*gather, std::span<int64_t>(counts).first(2), ample());
    EXPECT_EQ(overflow.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(overflow.message(), "value 0 leaves int64"));
    std::vector<int64_t> long_counts(9, 1);
    const Status size = reduce_sum(*gather, std::span<int64_t>(long_counts), ample());
    EXPECT_TRUE(contains(size.message(), "rank 0 gives 72 bytes, the limit is 64"));
    EXPECT_TRUE(endpoint.barrier(ample()).ok());
  });
}

TEST_P(CollectivesTest, SteadyStateAllocatesNothing) {
  if (!testing::is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  if (GetParam().backend.name == kSimBackend) return;
  std::atomic<int64_t> before{0};
  run([&](Endpoint& endpoint) {
    const std::unique_ptr<AllGather> gather = make_gather(endpoint, 64);
    std::array<double, 4> values{1, 2, 3, 4};
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
    if (endpoint.rank() == 0) before = testing::num_allocations();
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
    for (int i = 0; i < 50; ++i) {
      ASSERT_TRUE(reduce_sum(*gather, std::span<double>(values), ample()).ok());
    }
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
    if (endpoint.rank() == 0) {
      EXPECT_EQ(testing::num_allocations() - before.load(), 0);
    }
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
  });
}

}  // namespace
}  // namespace argosy::transport
