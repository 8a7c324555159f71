// What every back end promises: windows, put before signal, waits with names, abort, leaving.
// Cases K12 (C117: a slow rank below the limit never fails) and K11 (flag visible implies data
// visible).
#include "transport/endpoint.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#include "support/alloc_counter.h"
#include "transport/backends.h"

namespace argosy::transport {
namespace {

INSTANTIATE_TEST_SUITE_P(All, BackendTest, ::testing::ValuesIn(all_backends_and_ranks()),
                         name_of_param);

TEST_P(BackendTest, WindowsAreZeroAlignedAndNumberedAlike) {
  std::atomic<uint32_t> first_id{0};
  run([&](Endpoint& endpoint) {
    EXPECT_EQ(endpoint.num_ranks(), num_ranks());
    for (const int64_t bytes : {int64_t{64}, int64_t{1}, int64_t{0}, int64_t{100'000}}) {
      const Result<Window> window = endpoint.alloc(bytes, ample());
      ASSERT_TRUE(window.has_value()) << window.error().to_string();
      EXPECT_EQ(window->bytes, bytes);
      uint32_t expected = 0;
      if (bytes == 64) first_id.compare_exchange_strong(expected, window->id);
      if (bytes == 64) {
        EXPECT_EQ(window->id, first_id.load());
      }
      EXPECT_EQ(reinterpret_cast<uintptr_t>(endpoint.local_ptr(*window, 0)) % 64, 0u);
      for (int64_t i = 0; i < bytes; ++i) {
        ASSERT_EQ(*endpoint.local_ptr(*window, i), std::byte{0});
      }
      ASSERT_TRUE(endpoint.barrier(ample()).ok());
      endpoint.free(*window);
    }
  });
}

TEST_P(BackendTest, AllocReportsDifferentSizesToEverybodyAndStaysUsable) {
  if (num_ranks() == 1) return;
  run([&](Endpoint& endpoint) {
    const int last = num_ranks() - 1;
    const Result<Window> odd = endpoint.alloc(endpoint.rank() == last ? 128 : 64, ample());
    ASSERT_FALSE(odd.has_value());
    EXPECT_EQ(odd.error().code(), StatusCode::kDisagree);
    EXPECT_TRUE(contains(odd.error().message(), "rank 0 asks for 64 bytes"));
    EXPECT_TRUE(contains(odd.error().message(), "rank " + std::to_string(last) + " for 128 bytes"));
    const Result<Window> even = endpoint.alloc(64, ample());
    ASSERT_TRUE(even.has_value()) << even.error().to_string();
    endpoint.signal((endpoint.rank() + 1) % num_ranks(), *even, 0, 1);
    const std::vector<WaitItem> items = {{(endpoint.rank() + last) % num_ranks(), 0, 1}};
    EXPECT_TRUE(endpoint.wait_all(*even, items, ample(), "ring").ok());
  });
}

TEST_P(BackendTest, AllocReportsSizesThatCannotBeHad) {
  run([&](Endpoint& endpoint) {
    const Result<Window> huge = endpoint.alloc(std::numeric_limits<int64_t>::max(), ample());
    ASSERT_FALSE(huge.has_value());
    EXPECT_EQ(huge.error().code(), StatusCode::kOutOfMemory);
    EXPECT_TRUE(contains(huge.error().message(), "9223372036854775807 bytes"));
    const Result<Window> negative = endpoint.alloc(-1, ample());
    ASSERT_FALSE(negative.has_value());
    EXPECT_EQ(negative.error().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(endpoint.barrier(ample()).ok());
  });
}

// Every round each rank writes a row to everybody, in one, two or three places, then raises its
// flag; after the wait every byte of this round must be there. Under the thread sanitizer a missing
// release shows.
TEST_P(BackendTest, SignalsPublishPuts) {
  const uint64_t seed = 7;
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  const int num_rounds = testing::kUnderSanitizer ? 30 : 100;
  constexpr int64_t kRowWords = 2500;  // 20,000 bytes: more than two blocks of put_multi
  constexpr int64_t kRowBytes = kRowWords * 8;
  constexpr int64_t kPlaces = 3;
  run([&](Endpoint& endpoint) {
    const int self = endpoint.rank();
    std::mt19937_64 rng = testing::rank_rng(seed, self);
    const int64_t rows_at = num_ranks() * int64_t{64};
    const Window window =
        endpoint.alloc(rows_at + num_ranks() * kPlaces * kRowBytes, ample()).value();
    const auto row_offset = [&](int source, int64_t place) {
      return rows_at + (source * kPlaces + place) * kRowBytes;
    };
    std::vector<uint64_t> row(kRowWords);
    for (int round = 1; round <= num_rounds; ++round) {
      std::iota(row.begin(), row.end(), static_cast<uint64_t>(round * 1000 + self) << 32);
      for (int i = 0; i < num_ranks(); ++i) {
        const int peer = (self + i) % num_ranks();
        const int64_t places[] = {row_offset(self, 0), row_offset(self, 1)};
        endpoint.put_multi(peer, window, places, row.data(), kRowBytes,
                           round % 2 == 0 ? Reuse::kSoon : Reuse::kLater);
        testing::random_pause(rng);
        endpoint.put_signal(peer, window, row_offset(self, 2), row.data(), kRowBytes, self * 64,
                            static_cast<uint64_t>(round));
      }
      const auto items = items_for_all(num_ranks(), 64, static_cast<uint64_t>(round));
      ASSERT_TRUE(endpoint.wait_all(window, items, ample(), "rows").ok());
      for (int source = 0; source < num_ranks(); ++source) {
        for (int64_t place = 0; place < kPlaces; ++place) {
          std::iota(row.begin(), row.end(), static_cast<uint64_t>(round * 1000 + source) << 32);
          ASSERT_EQ(std::memcmp(endpoint.local_ptr(window, row_offset(source, place)), row.data(),
                                kRowBytes),
                    0)
              << "round " << round << " source " << source << " place " << place;
        }
      }
      ASSERT_TRUE(endpoint.barrier(ample()).ok());
    }
  });
}

TEST_P(BackendTest, PutsOfOddSizesTouchNothingElse) {
  for (const Reuse reuse : {Reuse::kSoon, Reuse::kLater})
    run([&](Endpoint& endpoint) {
      constexpr int64_t kBytes = 40'000;
      const Window window = endpoint.alloc(kBytes, ample()).value();
      const int peer = (endpoint.rank() + 1) % num_ranks();
      std::vector<std::byte> source(20'000, std::byte{0xAB});
      for (const int64_t bytes : {0, 1, 7, 63, 8191, 8192, 8193, 16385}) {
        const int64_t offsets[] = {3, 20'005};
        endpoint.put_multi(peer, window, offsets, source.data(), bytes, reuse);
        ASSERT_TRUE(endpoint.barrier(ample()).ok());
        const std::byte* at = endpoint.local_ptr(window, 0);
        for (int64_t i = 0; i < kBytes; ++i) {
          const bool is_written = (i >= 3 && i < 3 + bytes) || (i >= 20'005 && i < 20'005 + bytes);
          ASSERT_EQ(at[i], is_written ? std::byte{0xAB} : std::byte{0}) << bytes << " at " << i;
        }
        ASSERT_TRUE(endpoint.barrier(ample()).ok());
        std::memset(endpoint.local_ptr(window, 0), 0, kBytes);
        ASSERT_TRUE(endpoint.barrier(ample()).ok());
      }
    });
}

TEST_P(BackendTest, PeersReadEachOthersRowsAfterABarrier) {
  run([&](Endpoint& endpoint) {
    const Window window = endpoint.alloc(8, ample()).value();
    for (int round = 0; round < 20; ++round) {
      const int64_t mine = round * 100 + endpoint.rank();
      std::memcpy(endpoint.local_ptr(window, 0), &mine, 8);
      ASSERT_TRUE(endpoint.barrier(ample()).ok());
      for (int peer = 0; peer < num_ranks(); ++peer) {
        const std::byte* at = endpoint.peer_ptr(peer, window, 0);
        if (at == nullptr) continue;  // not every back end can
        int64_t theirs = 0;
        std::memcpy(&theirs, at, 8);
        ASSERT_EQ(theirs, round * 100 + peer);
      }
      ASSERT_TRUE(endpoint.barrier(ample()).ok());
    }
  });
}

TEST_P(BackendTest, BarrierLetsNobodyPassEarly) {
  std::atomic<int> num_arrived{0};
  const int num_rounds = testing::kUnderSanitizer ? 100 : 300;
  run([&](Endpoint& endpoint) {
    std::mt19937_64 rng = testing::rank_rng(11, endpoint.rank());
    for (int round = 1; round <= num_rounds; ++round) {
      testing::random_pause(rng);
      num_arrived.fetch_add(1);
      ASSERT_TRUE(endpoint.barrier(ample()).ok());
      ASSERT_GE(num_arrived.load(), round * num_ranks());
      ASSERT_TRUE(endpoint.barrier(ample()).ok());
    }
  });
}

TEST_P(BackendTest, SteadyStateAllocatesNothing) {
  if (!testing::is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  if (GetParam().backend.name == kSimBackend) return;
  std::atomic<int64_t> before{0};
  run([&](Endpoint& endpoint) {
    const Window window = endpoint.alloc(num_ranks() * int64_t{64}, ample()).value();
    std::vector<WaitItem> items = items_for_all(num_ranks(), 64, 0);
    const int64_t word = endpoint.rank();
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
    if (endpoint.rank() == 0) before = testing::num_allocations();
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
    for (uint64_t epoch = 1; epoch <= 50; ++epoch) {
      for (WaitItem& item : items) item.value = epoch;
      for (int peer = 0; peer < num_ranks(); ++peer) {
        endpoint.put_signal(peer, window, word * 64 + 8, &word, 8, word * 64, epoch);
      }
      ASSERT_TRUE(endpoint.wait_all(window, items, ample(), "epoch").ok());
      ASSERT_TRUE(endpoint.barrier(ample()).ok());
    }
    if (endpoint.rank() == 0) {
      EXPECT_EQ(testing::num_allocations() - before.load(), 0);
    }
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
  });
}

TEST_P(BackendTest, SlowRankBelowTheDeadlineNeverFails) {
  run([&](Endpoint& endpoint) {
    for (int round = 0; round < 2; ++round) {
      if (endpoint.rank() == round % num_ranks()) testing::sleep_ms(70);
      EXPECT_TRUE(endpoint.barrier(Deadline::after(milliseconds(10'000))).ok());
    }
    EXPECT_TRUE(endpoint.health().ok());
  });
}

TEST_P(BackendTest, TimeoutNamesTheSilentRanksAndPoisonsTheOthers) {
  if (num_ranks() == 1) return;
  std::atomic<int> num_timeouts{0};
  std::atomic<int> num_done{0};
  const int silent = num_ranks() - 1;
  run([&](Endpoint& endpoint) {
    const Window window = endpoint.alloc(num_ranks() * int64_t{64}, ample()).value();
    for (int peer = 0; peer < num_ranks(); ++peer) {
      endpoint.signal(peer, window, endpoint.rank() * 64, 4);
    }
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
    if (endpoint.rank() == silent) {
      while (num_done.load() < silent) testing::sleep_ms(1);
      const Status health = endpoint.health();
      EXPECT_EQ(health.code(), StatusCode::kAborted) << health.to_string();
      return;
    }
    for (int peer = 0; peer < num_ranks(); ++peer) {
      endpoint.signal(peer, window, endpoint.rank() * 64, 5);
    }
    // Rank 0 gives up first, the others have time to hear of it.
    const auto span = milliseconds(endpoint.rank() == 0 ? 100 : 50'000);
    const Status status = endpoint.wait_all(window, items_for_all(num_ranks(), 64, 5),
                                            Deadline::after(span), "rows of epoch 5");
    num_done.fetch_add(1);
    const std::string named = "rows of epoch 5: rank 0 waited 100 ms for rank " +
                              std::to_string(silent) + " (have 4, want 5)";
    EXPECT_TRUE(contains(status.message(), named)) << status.to_string();
    if (status.code() == StatusCode::kTimeout) num_timeouts.fetch_add(1);
    if (endpoint.rank() != 0) {
      EXPECT_EQ(status.code(), StatusCode::kAborted);
    }
    EXPECT_EQ(endpoint.barrier(ample()).code(), StatusCode::kAborted);
  });
  EXPECT_EQ(num_timeouts.load(), 1);
}

// Rank 0 is silent, every other waits for the one before it, the last gives up first: rank 0 is named, not the
// ranks between, which wait themselves.
TEST_P(BackendTest, TimeoutNamesTheRankThatAllTheOthersWaitFor) {
  if (num_ranks() < 3) return;
  const int last = num_ranks() - 1;
  std::atomic<int> num_done{0};
  run([&](Endpoint& endpoint) {
    const int self = endpoint.rank();
    const Window window = endpoint.alloc(64, ample()).value();
    if (self == 0) {
      while (num_done.load() < last) testing::sleep_ms(1);
      return;
    }
    const WaitItem item{self - 1, 0, 1};
    const auto span = milliseconds(self == last ? 300 : 50'000);
    const Status status = endpoint.wait_all(window, {&item, 1}, Deadline::after(span), "chain");
    num_done.fetch_add(1);
    const std::string named = "chain: rank " + std::to_string(last) + " waited 300 ms for rank 0";
    EXPECT_TRUE(contains(status.message(), named)) << status.to_string();
    EXPECT_FALSE(contains(status.message(), "want")) << status.to_string();
  });
}

// Ranks that wait for each other in a circle have nobody else to name.
TEST_P(BackendTest, TimeoutInACircleNamesTheNext) {
  if (num_ranks() < 2) return;
  run([&](Endpoint& endpoint) {
    const Window window = endpoint.alloc(64, ample()).value();
    const WaitItem item{(endpoint.rank() + 1) % num_ranks(), 0, 1};
    const auto span = milliseconds(endpoint.rank() == 0 ? 200 : 50'000);
    const Status status = endpoint.wait_all(window, {&item, 1}, Deadline::after(span), "circle");
    EXPECT_TRUE(contains(status.message(), "rank 0 waited 200 ms for rank 1 (have 0, want 1)"))
        << status.to_string();
  });
}

TEST_P(BackendTest, BarrierAndAllocNameMissingRanks) {
  if (num_ranks() == 1) return;
  for (const bool by_alloc : {false, true}) {
    std::atomic<int> num_done{0};
    run([&](Endpoint& endpoint) {
      if (endpoint.rank() == 1) {
        while (num_done.load() < num_ranks() - 1) testing::sleep_ms(1);
        return;
      }
      const Deadline deadline = Deadline::after(milliseconds(60));
      const Status status =
          by_alloc ? endpoint.alloc(64, deadline).error() : endpoint.barrier(deadline);
      num_done.fetch_add(1);
      EXPECT_TRUE(contains(status.message(), by_alloc ? "allocation of window" : "barrier"));
      // On a loaded machine a rank that is on its way may be named beside the one that is missing.
      EXPECT_TRUE(contains(status.message(), "ms for rank ")) << status.to_string();
      EXPECT_TRUE(contains(status.message(), "rank 1")) << status.to_string();
      EXPECT_EQ(contains(status.message(), "have 0, want 1"), !by_alloc) << status.to_string();
      const bool is_expected =
          status.code() == StatusCode::kTimeout || status.code() == StatusCode::kAborted;
      EXPECT_TRUE(is_expected) << status.to_string();
    });
  }
}

TEST_P(BackendTest, AbortWakesSleepersAndTheFirstReasonStays) {
  const int aborter = num_ranks() - 1;
  std::atomic<int> num_waiting{0};
  run([&](Endpoint& endpoint) {
    const Window window = endpoint.alloc(64, ample()).value();
    const platform::Clock::time_point start = platform::Clock::now();
    if (endpoint.rank() == aborter) {
      while (num_waiting.load() < num_ranks() - 1) testing::sleep_ms(1);
      testing::sleep_ms(30);
      endpoint.abort(Status(StatusCode::kNonFinite, "token 17 has NaN"));
      endpoint.abort(Status(StatusCode::kInternal, "too late"));
    } else {
      num_waiting.fetch_add(1);
    }
    const std::vector<WaitItem> items = {{aborter, 0, 1}};
    const Status status = endpoint.wait_all(window, items, ample(), "never");
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    const std::string told =
        "rank " + std::to_string(aborter) + " aborted the group: NonFinite: token 17 has NaN";
    EXPECT_EQ(status.message().substr(0, told.size()), told);
    EXPECT_LT(platform::Clock::now() - start, milliseconds(20'000));
    // Later waits too, reached or not, and every collective.
    EXPECT_EQ(endpoint.wait_all(window, {}, ample(), "nothing").code(), StatusCode::kAborted);
    EXPECT_EQ(endpoint.barrier(ample()).code(), StatusCode::kAborted);
    EXPECT_EQ(endpoint.alloc(64, ample()).error().code(), StatusCode::kAborted);
    EXPECT_EQ(endpoint.health().message(), told);
  });
}

TEST_P(BackendTest, ARankThatLeavesIsNamedAtOnceByAllWhoWaitForIt) {
  if (num_ranks() == 1) return;
  std::atomic<int> num_ready{0};
  run([&](Endpoint& endpoint) {
    const Window window = endpoint.alloc(num_ranks() * int64_t{64}, ample()).value();
    ASSERT_TRUE(endpoint.barrier(ample()).ok());
    num_ready.fetch_add(1);
    while (num_ready.load() < num_ranks()) testing::sleep_ms(1);  // all are out of the barrier
    if (endpoint.rank() == 0) return;                             // the harness detaches it
    const platform::Clock::time_point start = platform::Clock::now();
    const std::vector<WaitItem> items = {{0, 0, 2}};
    const Status status = endpoint.wait_all(window, items, ample(), "epoch 2");
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.to_string();
    EXPECT_TRUE(contains(status.message(), "waits for rank 0, which has left"));
    EXPECT_LT(platform::Clock::now() - start, milliseconds(20'000));
  });
}

TEST_P(BackendTest, WhoFindsALostRankTellsThoseWhoWaitForHim) {
  if (num_ranks() < 3) return;
  std::atomic<int> num_ready{0};
  std::atomic<int> num_done{0};
  run([&](Endpoint& endpoint) {
    const Window window = endpoint.alloc(64, ample()).value();
    num_ready.fetch_add(1);
    while (num_ready.load() < num_ranks()) testing::sleep_ms(1);
    if (endpoint.rank() == 0) return;
    // Rank 1 waits for rank 0, which has left; all others wait for rank 1, which stays.
    const std::vector<WaitItem> items = {{endpoint.rank() == 1 ? 0 : 1, 0, 1}};
    const Status status =
        endpoint.wait_all(window, items, Deadline::after(milliseconds(20'000)), "chain");
    EXPECT_EQ(status.code(), endpoint.rank() == 1 ? StatusCode::kPeerLost : StatusCode::kAborted)
        << status.to_string();
    EXPECT_TRUE(contains(status.message(), "rank 1 waits for rank 0, which has left"));
    num_done.fetch_add(1);
    while (num_done.load() < num_ranks() - 1) testing::sleep_ms(1);
  });
}

TEST_P(BackendTest, TheLastSignalOfARankThatLeftCounts) {
  const int num_repeats = testing::kUnderSanitizer ? 20 : 50;
  for (int repeat = 0; repeat < num_repeats; ++repeat) {
    run([&](Endpoint& endpoint) {
      const Window window = endpoint.alloc(num_ranks() * int64_t{64}, ample()).value();
      for (int peer = 0; peer < num_ranks(); ++peer) {
        endpoint.signal(peer, window, endpoint.rank() * 64, 1);
      }
      if (endpoint.rank() == 0) return;
      const std::vector<WaitItem> items = {{0, 0, 1}};
      const Status status = endpoint.wait_all(window, items, ample(), "last words");
      EXPECT_TRUE(status.ok()) << status.to_string();
    });
  }
}

TEST_P(BackendTest, RanksLeaveInAnyOrderAfterTheirLastBarrier) {
  for (int repeat = 0; repeat < 30; ++repeat) {
    run([&](Endpoint& endpoint) {
      std::mt19937_64 rng = testing::rank_rng(static_cast<uint64_t>(repeat), endpoint.rank());
      testing::random_pause(rng);
      const Status status = endpoint.barrier(ample());
      EXPECT_TRUE(status.ok()) << status.to_string();
    });
  }
}

}  // namespace
}  // namespace argosy::transport
