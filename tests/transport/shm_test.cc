// What only processes have: ranges of a heap, the meeting and its refusals, death noticed by name.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "platform/local_socket.h"
#include "support/rank_threads.h"
#include "transport/shm/endpoint.h"
#include "transport/shm/heap.h"

namespace argosy::transport::shm {
namespace {

using platform::Deadline;
using platform::Descriptor;
using std::chrono::milliseconds;

std::string new_job(const char* what) {
  static std::atomic<int> number{0};
  return std::string(what) + "-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

Seat seat_of(const std::string& job, int rank, int num_ranks) {
  return {job, 0, rank, num_ranks, int64_t{64} << 20};
}

bool contains(const Status& status, const std::string& part) {
  return status.message().find(part) != std::string::npos;
}

TEST(RangeAllocator, NeverOverlapsAndJoinsWhatIsGivenBack) {
  std::mt19937_64 random(3);
  RangeAllocator ranges(4096, 1 << 20);
  std::map<int64_t, int64_t> taken;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0 || taken.empty()) {
      const auto bytes = static_cast<int64_t>(1 + random() % 32) * 4096;
      const int64_t offset = ranges.take(bytes);
      if (offset < 0) {
        EXPECT_LT(ranges.largest(), bytes);
        continue;
      }
      EXPECT_GE(offset, 4096);
      EXPECT_LE(offset + bytes, 1 << 20);
      const auto next = taken.lower_bound(offset);
      const int64_t end_before =
          next == taken.begin() ? 0 : std::prev(next)->first + std::prev(next)->second;
      ASSERT_LE(end_before, offset);
      ASSERT_LE(offset + bytes, next == taken.end() ? 1 << 20 : next->first);
      taken.emplace(offset, bytes);
    } else {
      const auto at =
          std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
      ranges.give_back(at->first, at->second);
      taken.erase(at);
    }
  }
  for (const auto& [offset, bytes] : taken) ranges.give_back(offset, bytes);
  EXPECT_EQ(ranges.largest(), (1 << 20) - 4096);
}

// Attaches every rank with its own seat, one `stagger` after the other; the statuses.
std::vector<Status> attach_all(const std::vector<Seat>& seats, milliseconds span,
                               milliseconds stagger = milliseconds(0)) {
  std::vector<Status> statuses(seats.size());
  testing::run_ranks(static_cast<int>(seats.size()), [&](int i) {
    const auto at = static_cast<size_t>(i);
    std::this_thread::sleep_for(stagger * i);
    statuses[at] = attach(seats[at], {}, Deadline::after(span)).error();
  });
  return statuses;
}

TEST(ShmMeeting, ARankThatNeverComesIsNamed) {
  const std::string job = new_job("missing");
  const std::vector<Status> statuses =
      attach_all({seat_of(job, 0, 4), seat_of(job, 2, 4)}, milliseconds(400));
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
    EXPECT_TRUE(contains(status, "ranks 1, 3")) << status.to_string();
  }
  // Without rank 0 there is nobody to ask.
  const Status alone = attach_all({seat_of(new_job("alone"), 1, 2)}, milliseconds(100))[0];
  EXPECT_EQ(alone.code(), StatusCode::kTimeout);
  EXPECT_TRUE(contains(alone, "rank 0 of job alone-")) << alone.to_string();
}

TEST(ShmMeeting, ARankTakenTwiceIsNamedOnAll) {
  for (const int twice : {0, 1}) {
    const std::string job = new_job("twice");
    const std::vector<Status> statuses = attach_all(
        {seat_of(job, 0, 3), seat_of(job, 1, 3), seat_of(job, twice, 3)}, milliseconds(10'000));
    for (const Status& status : statuses) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
      EXPECT_TRUE(contains(status, "rank " + std::to_string(twice) + " of 3 is taken twice"))
          << status.to_string();
    }
  }
}

// Whoever comes after the meeting has failed is told why, not left to its own deadline.
TEST(ShmMeeting, ALateRankHearsWhyTheMeetingFailed) {
  const std::string job = new_job("late");
  const std::vector<Status> statuses =
      attach_all({seat_of(job, 0, 4), seat_of(job, 0, 4), seat_of(job, 1, 4), seat_of(job, 2, 4)},
                 milliseconds(10'000), milliseconds(100));
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_TRUE(contains(status, "rank 0 of 4 is taken twice")) << status.to_string();
  }
}

TEST(ShmMeeting, SettingsThatDifferAreNamed) {
  const std::string job = new_job("differ");
  for (const Status& status :
       attach_all({seat_of(job, 0, 2), seat_of(job, 1, 3)}, milliseconds(10'000))) {
    EXPECT_EQ(status.code(), StatusCode::kDisagree) << status.to_string();
    EXPECT_TRUE(contains(status, "num_ranks differs: rank 0 has 2, rank 1")) << status.to_string();
  }
}

TEST(ShmMeeting, AnotherRanksFailureIsToldToAll) {
  for (const int failing : {0, 1, 2}) {
    const std::string job = new_job("failure");
    std::vector<Status> statuses(3);
    testing::run_ranks(3, [&](int rank) {
      const Status own = rank == failing
                             ? Status(StatusCode::kUnsupported, "level amx is not to be had")
                             : Status();
      statuses[static_cast<size_t>(rank)] =
          attach(seat_of(job, rank, 3), own, Deadline::after(milliseconds(5000))).error();
    });
    for (const Status& status : statuses) {
      EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.to_string();
      EXPECT_TRUE(contains(status, "level amx is not to be had")) << status.to_string();
    }
  }
}

// From here on the calling thread alone gets `error` for the system call `number`, as an old kernel or a
// container's filter would give it.
bool take_away(unsigned number, unsigned error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {4, code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(ShmMeeting, ACallThatTheSystemLacksIsNamedOnAll) {
  const std::pair<unsigned, const char*> calls[] = {{SYS_memfd_create, "memfd_create failed"},
                                                    {SYS_pidfd_open, "pidfd_open failed"}};
  for (const auto& [number, text] : calls) {
    for (const unsigned error : {ENOSYS, EPERM}) {
      const std::string job = new_job("lacking");
      std::vector<Status> statuses(3);
      std::atomic<bool> can_filter{true};
      testing::run_ranks(3, [&, call = number](int rank) {
        if (rank == 1 && !take_away(call, error)) can_filter = false;
        statuses[static_cast<size_t>(rank)] =
            attach(seat_of(job, rank, 3), {}, Deadline::after(milliseconds(10'000))).error();
      });
      if (!can_filter) GTEST_SKIP() << "no filters of system calls here";
      for (const Status& status : statuses) {
        EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.to_string();
        EXPECT_TRUE(contains(status, text)) << status.to_string();
        EXPECT_TRUE(contains(status, "transport inproc")) << status.to_string();
      }
    }
  }
}

// In a process of its own: the limit stays.
TEST(ShmMeeting, NoRoomForTheHeapIsNamedWithBytesAndLimit) {
  if (testing::kUnderSanitizer) GTEST_SKIP() << "the sanitizer needs the address space";
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{rlim_t{8} << 30, rlim_t{8} << 30};
    Seat seat = seat_of(new_job("room"), 0, 1);
    seat.heap_bytes = kDefaultHeapBytes;
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    const Status status = attach(seat, {}, Deadline::after(milliseconds(10'000))).error();
    const bool is_right = status.code() == StatusCode::kOutOfMemory &&
                          contains(status, std::to_string(kDefaultHeapBytes) + " bytes") &&
                          contains(status, "RLIMIT_AS (ulimit -v) is 8589934592 bytes");
    if (!is_right) std::fprintf(stderr, "%s\n", status.to_string().c_str());
    _exit(is_right ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// In a process of its own: the limit is the process's. Rank 0 can take no connection, or not the descriptors that
// come with one: it says so, and when its time has come it ends.
TEST(ShmMeeting, NoDescriptorsForTheOthersIsNamedInTime) {
  if (testing::kUnderSanitizer)
    GTEST_SKIP() << "the sanitizer's checks need a descriptor of their own";
  const pid_t child = fork();
  if (child == 0) {
    bool is_right = true;
    for (const int spare : {3, 4, 5, 6}) {
      const std::string job = new_job("descriptors");
      Status status;
      std::vector<Descriptor> fillers;
      rlimit limit{};
      getrlimit(RLIMIT_NOFILE, &limit);
      const pid_t guest = fork();
      if (guest == 0) {
        (void)attach(seat_of(job, 1, 3), {}, Deadline::after(milliseconds(2000)));
        _exit(0);
      }
      limit.rlim_cur = 64;
      setrlimit(RLIMIT_NOFILE, &limit);
      while (true) {
        fillers.emplace_back(dup(0));
        if (!fillers.back().is_open()) break;
      }
      fillers.resize(fillers.size() - 1 - static_cast<size_t>(spare));
      const platform::Clock::time_point start = platform::Clock::now();
      status = attach(seat_of(job, 0, 3), {}, Deadline::after(milliseconds(1000))).error();
      // With room for a socket the third rank's absence is all there is to say.
      const bool is_named =
          (status.code() == StatusCode::kOutOfMemory && contains(status, "64 open files")) ||
          (status.code() == StatusCode::kTimeout && contains(status, "for rank 2"));
      is_right = is_right && is_named && platform::Clock::now() - start < milliseconds(20'000);
      if (!is_named) std::fprintf(stderr, "%d: %s\n", spare, status.to_string().c_str());
      fillers.clear();
      kill(guest, SIGKILL);
      waitpid(guest, nullptr, 0);
    }
    _exit(is_right ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ShmMeeting, AStrangersSocketIsRefused) {
  const Seat seat = seat_of(new_job("stranger"), 1, 2);
  platform::LocalListener stranger =
      std::move(platform::LocalListener::listen(socket_name(seat))).value();
  Status status;
  testing::run_ranks(2, [&](int i) {
    if (i == 0) {
      platform::LocalSocket visitor = std::move(stranger.accept()).value();
      const std::byte nonsense[5] = {};
      ASSERT_TRUE(visitor.send(nonsense, {}).ok());
      // Stays until the visitor has hung up.
      (void)visitor.receive(4096, Deadline::after(milliseconds(10'000)));
      (void)visitor.receive(4096, Deadline::after(milliseconds(10'000)));
    } else {
      status = attach(seat, {}, Deadline::after(milliseconds(10'000))).error();
    }
  });
  EXPECT_EQ(status.code(), StatusCode::kCorruptData) << status.to_string();
  EXPECT_TRUE(contains(status, "no rank of Argosy")) << status.to_string();
}

// A process that is killed while others wait for it: all name it, at once.
TEST(ShmProcess, AKilledRankIsNamedByAll) {
  const std::string job = new_job("killed");
  const pid_t victim = fork();
  if (victim == 0) {
    const auto endpoint = attach(seat_of(job, 2, 3), {}, Deadline::after(milliseconds(20'000)));
    if (endpoint.has_value()) pause();
    _exit(1);
  }
  testing::run_ranks(2, [&](int rank) {
    Result<std::unique_ptr<Endpoint>> endpoint =
        attach(seat_of(job, rank, 3), {}, Deadline::after(milliseconds(20'000)));
    ASSERT_TRUE(endpoint.has_value()) << endpoint.error().to_string();
    if (rank == 0) {
      usleep(50'000);
      kill(victim, SIGKILL);
    }
    const platform::Clock::time_point start = platform::Clock::now();
    const Status status = (*endpoint)->barrier(Deadline::after(milliseconds(20'000)));
    // Who hears of it from the other before seeing it himself is aborted, by the same words.
    EXPECT_TRUE(status.code() == StatusCode::kPeerLost || status.code() == StatusCode::kAborted)
        << status.to_string();
    EXPECT_TRUE(contains(status, "lost rank 2, whose process has ended")) << status.to_string();
    EXPECT_LT(platform::Clock::now() - start, milliseconds(10'000));
  });
  waitpid(victim, nullptr, 0);
}

}  // namespace
}  // namespace argosy::transport::shm
