// Joining, agreeing, leaving. Cases K12 (C115, C119: settings that differ are named on every rank;
// C117: the two deadlines are settings; C122: any order of start) and K09 (one rank).
#include "argosy/group.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <set>
#include <vector>

#include "argosy/pinning.h"
#include "platform/cpu_detect.h"
#include "support/alloc_counter.h"
#include "support/rank_threads.h"
#include "transport/backends.h"
#include "transport/join.h"

namespace argosy {
namespace {

using std::chrono::milliseconds;
using transport::contains;
using transport::GroupAccess;
using transport::JoinOverrides;
using JoinResult = Result<std::unique_ptr<Group>>;

GroupOptions options_of(int rank, int num_ranks, std::shared_ptr<InprocWorld> world) {
  GroupOptions options;
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.inproc = std::move(world);
  return options;
}

std::shared_ptr<InprocWorld> make_world(int num_ranks) {
  return InprocWorld::create(num_ranks).value();
}

void run_group(int num_ranks, const std::function<void(Group&)>& body) {
  const std::shared_ptr<InprocWorld> world = make_world(num_ranks);
  testing::run_ranks(num_ranks, [&](int rank) {
    const JoinResult group = Group::join(options_of(rank, num_ranks, world));
    ASSERT_TRUE(group.has_value()) << group.error().to_string();
    body(**group);
  });
}

// Joins with options changed per rank; expects every rank to fail, and returns the errors.
std::vector<Status> join_errors(
    int num_ranks, const std::function<void(int, GroupOptions&, JoinOverrides&)>& change) {
  const std::shared_ptr<InprocWorld> world = make_world(num_ranks);
  std::vector<Status> errors(static_cast<size_t>(num_ranks));
  testing::run_ranks(num_ranks, [&](int rank) {
    GroupOptions options = options_of(rank, num_ranks, world);
    JoinOverrides overrides;
    change(rank, options, overrides);
    errors[static_cast<size_t>(rank)] = GroupAccess::join(options, overrides).error();
  });
  return errors;
}

TEST(Group, OneRankNeedsNoWorld) {
  const JoinResult group = Group::join({});
  ASSERT_TRUE(group.has_value()) << group.error().to_string();
  EXPECT_EQ((*group)->rank(), 0);
  EXPECT_EQ((*group)->num_ranks(), 1);
  EXPECT_EQ((*group)->transport_name(), "inproc");
  EXPECT_EQ((*group)->pool().num_threads(), 1);
  EXPECT_NE((*group)->dot_order(), DotOrder::kAuto);
  EXPECT_TRUE((*group)->barrier().ok());
  EXPECT_TRUE((*group)->agree({{"top_k", "2"}}).ok());
  EXPECT_TRUE((*group)->health().ok());
}

TEST(Group, JoinsInAnyOrderOfStart) {
  const uint64_t seed = 122;
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  for (const int num_ranks : {2, 4, 7}) {
    for (uint64_t repeat = 0; repeat < 4; ++repeat) {
      const std::shared_ptr<InprocWorld> world = make_world(num_ranks);
      testing::run_ranks(num_ranks, [&](int rank) {
        std::mt19937_64 rng = testing::rank_rng(seed + repeat, rank);
        testing::sleep_ms(static_cast<int64_t>(rng() % 30));
        const JoinResult group = Group::join(options_of(rank, num_ranks, world));
        ASSERT_TRUE(group.has_value()) << group.error().to_string();
        EXPECT_EQ((*group)->rank(), rank);
        testing::sleep_ms(static_cast<int64_t>(rng() % 5));
        EXPECT_TRUE((*group)->barrier().ok());
      });
    }
  }
}

TEST(Group, IdIsEqualOnAllRanksAndNewForEveryGroup) {
  std::set<uint64_t> ids;
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<uint64_t> id{0};
    run_group(3, [&](Group& group) {
      uint64_t expected = 0;
      if (!id.compare_exchange_strong(expected, group.id())) {
        EXPECT_EQ(group.id(), expected);
      }
    });
    EXPECT_NE(id.load(), 0u);
    ids.insert(id.load());
  }
  EXPECT_EQ(ids.size(), 20u);
}

TEST(Group, ResolvesDotOrderByEveryRanksAmx) {
  struct Row {
    DotOrder asked;
    std::vector<bool> has_amx;
    DotOrder want;
  };
  const std::vector<Row> rows = {
      {DotOrder::kAuto, {true, true, true}, DotOrder::kAmx},
      {DotOrder::kAuto, {true, true, false}, DotOrder::kVdpbf16},
      {DotOrder::kAuto, {false, true, true}, DotOrder::kVdpbf16},
      {DotOrder::kAuto, {false, false, false}, DotOrder::kVdpbf16},
      {DotOrder::kAmx, {false, true, false}, DotOrder::kAmx},
      {DotOrder::kVdpbf16, {true, true, true}, DotOrder::kVdpbf16},
  };
  for (const Row& row : rows) {
    const std::shared_ptr<InprocWorld> world = make_world(3);
    testing::run_ranks(3, [&](int rank) {
      GroupOptions options = options_of(rank, 3, world);
      options.dot_order = row.asked;
      const JoinResult group = GroupAccess::join(
          options, {.has_amx = row.has_amx[static_cast<size_t>(rank)], .version = {}});
      ASSERT_TRUE(group.has_value()) << group.error().to_string();
      EXPECT_EQ((*group)->dot_order(), row.want);
    });
  }
}

TEST(Group, LevelAndThreadsAreEachRanksOwn) {
  const std::shared_ptr<InprocWorld> world = make_world(2);
  testing::run_ranks(2, [&](int rank) {
    GroupOptions options = options_of(rank, 2, world);
    options.threads_per_rank = rank + 1;
    options.level = rank == 0 ? Level::kReference : Level::kGeneric;
    const JoinResult group = Group::join(options);
    ASSERT_TRUE(group.has_value()) << group.error().to_string();
    EXPECT_EQ((*group)->pool().num_threads(), rank + 1);
    EXPECT_EQ((*group)->level(), *options.level);
  });
}

TEST(Group, BindsItsThreadsWhereAskedAndOnlyThere) {
  const std::vector<int>& usable = usable_cpus();
  ASSERT_FALSE(usable.empty());
  const std::shared_ptr<InprocWorld> world = make_world(3);
  testing::run_ranks(3, [&](int rank) {
    const int free_cpus = platform::num_affinity_cpus();
    GroupOptions options = options_of(rank, 3, world);
    options.threads_per_rank = 2;
    // Rank 2 does not ask; the choice is each rank's own.
    if (rank < 2) options.pin_first_core = 2 * rank;
    const JoinResult group = Group::join(options);
    ASSERT_TRUE(group.has_value()) << group.error().to_string();
    const std::vector<int>& cpus = (*group)->pinned_cpus();
    if (rank == 2) {
      EXPECT_TRUE(cpus.empty());
      EXPECT_EQ(platform::num_affinity_cpus(), free_cpus);
      return;
    }
    ASSERT_EQ(cpus.size(), 2u);
    for (size_t thread = 0; thread < 2; ++thread) {
      EXPECT_EQ(cpus[thread], usable[(2 * static_cast<size_t>(rank) + thread) % usable.size()]);
    }
    (*group)->pool().parallel_for(64, [&](int64_t, int thread) {
      EXPECT_EQ(sched_getcpu(), cpus[static_cast<size_t>(thread)]);
      EXPECT_EQ(platform::num_affinity_cpus(), 1);
      sched_yield();
    });
  });
}

TEST(GroupJoin, ACoreThatNoMachineHasIsRefusedOnEveryRank) {
  for (const int core : {-1, 32768}) {
    const std::vector<Status> errors = join_errors(2, [&](int rank, GroupOptions& options, auto&) {
      if (rank == 1) options.pin_first_core = core;
    });
    for (const Status& error : errors) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      EXPECT_TRUE(contains(error.message(), fmt::format("pin_first_core is {}", core)))
          << error.to_string();
    }
  }
}

TEST(GroupJoin, DifferentSettingsAreNamedAlikeOnEveryRank) {
  struct Row {
    std::string want;
    std::function<void(GroupOptions&, JoinOverrides&)> change;
  };
  const std::vector<Row> rows = {
      {"\"step_deadline_ms\" differs: \"30000\" on ranks 0-1, 3; \"7\" on rank 2",
       [](GroupOptions& options, JoinOverrides&) { options.step_deadline = milliseconds(7); }},
      {"\"startup_deadline_ms\" differs: \"60000\" on ranks 0-1, 3; \"59000\" on rank 2",
       [](GroupOptions& options, JoinOverrides&) {
         options.startup_deadline = milliseconds(59'000);
       }},
      {"\"dot_order\" differs: \"auto\" on ranks 0-1, 3; \"vdpbf16\" on rank 2",
       [](GroupOptions& options, JoinOverrides&) { options.dot_order = DotOrder::kVdpbf16; }},
      {"\"argosy_version\" differs: ",
       [](GroupOptions&, JoinOverrides& overrides) { overrides.version = "0.0.1-other"; }},
  };
  for (const Row& row : rows) {
    const std::vector<Status> errors =
        join_errors(4, [&](int rank, GroupOptions& options, JoinOverrides& overrides) {
          if (rank == 2) row.change(options, overrides);
        });
    for (const Status& error : errors) {
      EXPECT_EQ(error.code(), StatusCode::kDisagree) << error.to_string();
      EXPECT_TRUE(contains(error.message(), row.want)) << error.to_string();
      EXPECT_EQ(error.message(), errors[0].message());
    }
  }
}

TEST(GroupJoin, RankOutsideTakenTwiceOrOfAnotherSizeFailsEverywhere) {
  struct Row {
    StatusCode code;
    std::string want;
    std::function<void(GroupOptions&)> change;
  };
  const std::vector<Row> rows = {
      {StatusCode::kInvalidArgument, "rank 0 of 3 is taken twice",
       [](GroupOptions& options) { options.rank = 0; }},
      {StatusCode::kInvalidArgument, "rank 3 is outside [0, 3)",
       [](GroupOptions& options) { options.rank = 3; }},
      {StatusCode::kInvalidArgument, "rank -1 is outside [0, 3)",
       [](GroupOptions& options) { options.rank = -1; }},
      {StatusCode::kDisagree, "num_ranks differs: rank 2 has 4, the world was made for 3",
       [](GroupOptions& options) { options.num_ranks = 4; }},
      {StatusCode::kInvalidArgument, "step_deadline is 0 ms",
       [](GroupOptions& options) { options.step_deadline = milliseconds(0); }},
      {StatusCode::kInvalidArgument, "startup_deadline is -3 ms",
       [](GroupOptions& options) { options.startup_deadline = milliseconds(-3); }},
      {StatusCode::kInvalidArgument, "a pool of 0 threads",
       [](GroupOptions& options) { options.threads_per_rank = 0; }},
  };
  for (const Row& row : rows) {
    const platform::Clock::time_point start = platform::Clock::now();
    const std::vector<Status> errors =
        join_errors(3, [&](int rank, GroupOptions& options, JoinOverrides&) {
          if (rank == 2) row.change(options);
        });
    for (const Status& error : errors) {
      EXPECT_EQ(error.code(), row.code) << error.to_string();
      EXPECT_TRUE(contains(error.message(), row.want)) << error.to_string();
    }
    EXPECT_LT(platform::Clock::now() - start, milliseconds(20'000));
  }
}

TEST(GroupJoin, ManyRanksNeedAWorldOfLegalSize) {
  EXPECT_EQ(Group::join(options_of(0, 2, nullptr)).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Group::join(options_of(0, 0, nullptr)).error().code(), StatusCode::kInvalidArgument);
  for (const int num_ranks : {-1, 0, 1025}) {
    const auto world = InprocWorld::create(num_ranks);
    ASSERT_FALSE(world.has_value());
    EXPECT_EQ(world.error().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(world.error().message(), std::to_string(num_ranks)));
  }
}

TEST(GroupJoin, RanksThatNeverComeAreNamedOnAllOthersInTime) {
  const std::shared_ptr<InprocWorld> world = make_world(5);
  const platform::Clock::time_point start = platform::Clock::now();
  testing::run_ranks(5, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    GroupOptions options = options_of(rank, 5, world);
    options.startup_deadline = milliseconds(150);
    const Status status = Group::join(options).error();
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
    EXPECT_TRUE(contains(status.message(), "waited 150 ms for rank 1, rank 3"))
        << status.to_string();
  });
  EXPECT_LT(platform::Clock::now() - start, milliseconds(10'000));
  // Whoever comes after all hears it at once.
  const Status late = Group::join(options_of(1, 5, world)).error();
  EXPECT_EQ(late.code(), StatusCode::kTimeout) << late.to_string();
}

TEST(GroupJoin, AStrayJoinerDoesNotHarmACompleteGroup) {
  const std::shared_ptr<InprocWorld> world = make_world(2);
  testing::run_ranks(2, [&](int rank) {
    const JoinResult group = Group::join(options_of(rank, 2, world));
    ASSERT_TRUE(group.has_value()) << group.error().to_string();
    ASSERT_TRUE((*group)->barrier().ok());
    GroupOptions stray = options_of(rank, 2, world);
    EXPECT_TRUE(contains(Group::join(stray).error().message(), "taken twice"));
    stray.threads_per_rank = -1;
    EXPECT_EQ(Group::join(stray).error().code(), StatusCode::kInvalidArgument);
    stray.num_ranks = 7;
    EXPECT_FALSE(Group::join(stray).has_value());
    EXPECT_TRUE((*group)->barrier().ok());
  });
}

std::string long_value(size_t bytes) { return std::string(bytes, 'x'); }

TEST(GroupAgree, NamesTheFirstDifferenceOnEveryRankAndTheGroupLivesOn) {
  struct Row {
    std::string want;
    std::vector<Setting> common;
    std::vector<Setting> odd;  // rank 1's
  };
  const std::vector<Setting> layer = {{"num_experts", "8"}, {"top_k", "2"}, {"hidden", "64"}};
  const std::vector<Row> rows = {
      {"\"num_experts\" differs: \"8\" on ranks 0, 2; \"4\" on rank 1",
       layer,
       {{"num_experts", "4"}, {"top_k", "2"}, {"hidden", "64"}}},
      {"\"top_k\" differs: \"2\" on ranks 0, 2; \"3\" on rank 1",
       layer,
       {{"num_experts", "8"}, {"top_k", "3"}, {"hidden", "65"}}},
      {"setting 1 differs: \"top_k\" = \"2\" on ranks 0, 2; \"hidden\" = \"64\" on rank 1",
       layer,
       {{"num_experts", "8"}, {"hidden", "64"}, {"top_k", "2"}}},
      {"setting 2 differs: \"hidden\" = \"64\" on ranks 0, 2; none on rank 1",
       layer,
       {{"num_experts", "8"}, {"top_k", "2"}}},
      {"setting 0 differs: none on ranks 0, 2; \"a\" = \"\" on rank 1", {}, {{"a", ""}}},
      // Lengths are part of the text: fields cannot run into values.
      {"setting 0 differs: \"ab\" = \"c\" on ranks 0, 2; \"a\" = \"bc\" on rank 1",
       {{"ab", "c"}},
       {{"a", "bc"}}},
      {"... (60000 bytes) on ranks 0, 2; \"y\" on rank 1",
       {{"list", long_value(60'000)}},
       {{"list", "y"}}},
  };
  run_group(3, [&](Group& group) {
    for (const Row& row : rows) {
      EXPECT_TRUE(group.agree(row.common).ok());
      const Status status = group.agree(group.rank() == 1 ? row.odd : row.common);
      EXPECT_EQ(status.code(), StatusCode::kDisagree);
      EXPECT_TRUE(contains(status.message(), row.want)) << status.to_string();
      EXPECT_LT(status.message().size(), 2000u);
      EXPECT_TRUE(group.barrier().ok());
      EXPECT_TRUE(group.agree(row.odd).ok());
    }
  });
}

TEST(GroupAgree, ManyDifferentValuesStayReadable) {
  run_group(16, [&](Group& group) {
    const Status status = group.agree({{"seed", std::to_string(group.rank())}});
    EXPECT_EQ(status.code(), StatusCode::kDisagree);
    EXPECT_TRUE(contains(status.message(), "\"7\" on rank 7; and 8 more values"));
  });
}

TEST(GroupAgree, TooMuchTextFailsOnEveryRankAndTheGroupLivesOn) {
  run_group(3, [&](Group& group) {
    const size_t bytes =
        group.rank() == 1 ? 65'529 : 65'528;  // 8 bytes of lengths: the limit is 65,536
    const Status status = group.agree({{"", long_value(bytes)}});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(status.message(), "rank 1 need 65537 bytes, the limit is 65536"))
        << status.to_string();
    EXPECT_TRUE(group.agree({{"", long_value(65'528)}}).ok());
    EXPECT_EQ(
        group.agree({{std::string(1, static_cast<char>('a' + group.rank())), long_value(65'527)}})
            .code(),
        StatusCode::kDisagree);
    EXPECT_TRUE(group.barrier().ok());
  });
}

TEST(Group, AbortEndsEveryWaitWithItsReason) {
  std::atomic<int> num_joined{0};
  run_group(4, [&](Group& group) {
    num_joined.fetch_add(1);
    while (num_joined.load() < 4) testing::sleep_ms(1);
    if (group.rank() == 2) {
      testing::sleep_ms(30);
      group.abort(Status(StatusCode::kIo, "disk is gone"));
    }
    const Status status = group.barrier();
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_EQ(status.message(), "rank 2 aborted the group: Io: disk is gone");
    EXPECT_EQ(group.health().code(), StatusCode::kAborted);
    EXPECT_EQ(group.agree({}).code(), StatusCode::kAborted);
  });
}

TEST(Group, ARankThatLeavesIsNamed) {
  std::atomic<int> num_joined{0};
  run_group(3, [&](Group& group) {
    num_joined.fetch_add(1);
    while (num_joined.load() < 3) testing::sleep_ms(1);
    if (group.rank() == 1) return;
    const Status status = group.barrier();
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.to_string();
    EXPECT_TRUE(contains(status.message(), "waits for rank 1"));
  });
}

TEST(Group, StepDeadlineHoldsForSlowAndSilentRanks) {
  // C117: below the limit no error, above it the silent rank is named.
  for (const bool is_late : {false, true}) {
    const std::shared_ptr<InprocWorld> world = make_world(3);
    testing::run_ranks(3, [&](int rank) {
      GroupOptions options = options_of(rank, 3, world);
      options.step_deadline = milliseconds(is_late ? 100 : 20'000);
      const JoinResult group = Group::join(options);
      ASSERT_TRUE(group.has_value()) << group.error().to_string();
      EXPECT_EQ((*group)->step_deadline(), options.step_deadline);
      if (rank == 1) testing::sleep_ms(is_late ? 400 : 60);
      const Status status = (*group)->barrier();
      EXPECT_EQ(status.ok(), !is_late) << status.to_string();
      if (is_late) {
        EXPECT_TRUE(contains(status.message(), "ms for rank 1 (have 0, want 1)"));
      }
    });
  }
}

TEST(Group, BarriersAllocateNothing) {
  if (!testing::is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  std::atomic<int64_t> before{0};
  run_group(4, [&](Group& group) {
    ASSERT_TRUE(group.barrier().ok());
    if (group.rank() == 0) before = testing::num_allocations();
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(group.barrier().ok());
    if (group.rank() == 0) {
      EXPECT_EQ(testing::num_allocations() - before.load(), 0);
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

}  // namespace
}  // namespace argosy
