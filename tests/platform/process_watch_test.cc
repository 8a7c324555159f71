// The end of a watched process is told once, soon; a living one is not; stopping the watch does not wait.
#include "platform/process_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

namespace argosy::platform {
namespace {

pid_t start_sleeper() {
  const pid_t pid = fork();
  if (pid == 0) {
    pause();
    _exit(0);
  }
  return pid;
}

Descriptor pidfd_of(pid_t pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

TEST(ProcessWatch, TellsTheEndOfTheRightProcess) {
  const pid_t lives = start_sleeper();
  const pid_t dies = start_sleeper();
  std::vector<Descriptor> pidfds;
  pidfds.push_back(pidfd_of(lives));
  pidfds.emplace_back();
  pidfds.push_back(pidfd_of(dies));
  std::atomic<int> ended{-1};
  std::atomic<int> num_calls{0};
  {
    const auto watch = std::move(ProcessWatch::start(std::move(pidfds), [&](size_t i) {
                         ended = static_cast<int>(i);
                         ++num_calls;
                       })).value();
    usleep(20'000);
    EXPECT_EQ(num_calls, 0);
    kill(dies, SIGKILL);
    for (int i = 0; i < 5000 && num_calls == 0; ++i) usleep(1000);
    EXPECT_EQ(ended, 2);
  }
  EXPECT_EQ(num_calls, 1);
  kill(lives, SIGKILL);
  waitpid(lives, nullptr, 0);
  waitpid(dies, nullptr, 0);
  EXPECT_EQ(num_calls, 1);
}

TEST(ProcessWatch, OpensTheOwnPidfd) { EXPECT_TRUE(open_own_pidfd().has_value()); }

}  // namespace
}  // namespace argosy::platform
