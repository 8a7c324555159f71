// launch() as a library call: what ranks see, exit codes, forwarded output, refusals, and that the
// caller's process is left as it was. Whole-process behaviour: tests/cli/launch_test.cc.
#include "argosy/launch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "platform/output_forwarder.h"
#include "platform/process.h"
#include "support/rank_threads.h"

namespace argosy {
namespace {

using std::chrono::milliseconds;

LaunchOptions shell(int num_ranks, const std::string& script) {
  LaunchOptions options;
  options.num_ranks = num_ranks;
  options.command = {"sh", "-c", script};
  options.label_output = false;
  return options;
}

std::string temp_path(const std::string& name) {
  return ::testing::TempDir() + "/argosy_launch_" + name + "_" + std::to_string(getpid());
}

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(Launch, RanksGetTheirVariablesAndRankZeroAloneStdin) {
  const std::string dir = temp_path("variables");
  std::filesystem::create_directories(dir);
  const Result<LaunchResult> result =
      launch(shell(3,
                   "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $ARGOSY_RANK "
                   "$ARGOSY_WORLD_SIZE ${#ARGOSY_JOB} $(readlink /proc/self/fd/0) > " +
                       dir + "/$RANK; echo $ARGOSY_JOB >> " + dir + "/jobs"));
  ASSERT_TRUE(result.has_value()) << result.error().to_string();
  EXPECT_EQ(result->exit_code, 0);
  EXPECT_EQ(result->message, "");
  for (int rank = 0; rank < 3; ++rank) {
    const std::string r = std::to_string(rank);
    const std::string line = text_of(dir + "/" + r);
    EXPECT_EQ(line.rfind(r + " 3 " + r + " 3 " + r + " 3 32 ", 0), 0u) << line;
    EXPECT_EQ(line.find("/dev/null") != std::string::npos,
              rank != 0 || std::filesystem::read_symlink("/proc/self/fd/0") == "/dev/null")
        << line;
  }
  std::istringstream jobs(text_of(dir + "/jobs"));
  std::set<std::string> names;
  for (std::string name; jobs >> name;) names.insert(name);
  EXPECT_EQ(names.size(), 1u);
  std::filesystem::remove_all(dir);
}

TEST(Launch, TheFirstFailureGivesTheExitCode) {
  // Rank 2 fails first although its number is the highest; the others fail otherwise, later.
  LaunchOptions options = shell(3, "[ $RANK = 2 ] && exit 7; sleep 0.3; exit 5");
  std::vector<std::string> notices;
  options.notice = [&](const std::string& line) { notices.push_back(line); };
  const Result<LaunchResult> result = launch(options);
  ASSERT_TRUE(result.has_value()) << result.error().to_string();
  EXPECT_EQ(result->exit_code, 7);
  ASSERT_TRUE(result->first_failure.has_value());
  EXPECT_EQ(result->first_failure->rank, 2);
  EXPECT_EQ(result->ranks[0].exit_code, 5);
  EXPECT_EQ(notices, std::vector<std::string>{result->message});
  EXPECT_EQ(result->message, "rank 2 (process " + std::to_string(result->ranks[2].process_id) +
                                 ") ended with exit code 7");
}

TEST(Launch, AKilledRankIsLost) {
  const Result<LaunchResult> result = launch(shell(2, "[ $RANK = 1 ] && kill -9 $$; sleep 0.1"));
  ASSERT_TRUE(result.has_value()) << result.error().to_string();
  EXPECT_EQ(result->exit_code, 3);
  EXPECT_EQ(result->first_failure->signal, SIGKILL);
  EXPECT_NE(result->message.find("was killed by signal 9 (SIGKILL)"), std::string::npos)
      << result->message;
  EXPECT_EQ(result->ranks[0].exit_code, 0);
}

TEST(Launch, EscalatesToRanksThatStay) {
  // Rank 1 ends by SIGTERM, rank 2 only by SIGKILL.
  LaunchOptions options = shell(3,
                                "[ $RANK = 0 ] && exit 4; [ $RANK = 2 ] && trap '' TERM; "
                                "while true; do sleep 0.01; done");
  options.grace = milliseconds(100);
  options.kill_after = milliseconds(100);
  const Result<LaunchResult> result = launch(options);
  ASSERT_TRUE(result.has_value()) << result.error().to_string();
  EXPECT_EQ(result->exit_code, 4);
  EXPECT_EQ(result->ranks[1].signal, SIGTERM);
  EXPECT_EQ(result->ranks[2].signal, SIGKILL);
}

TEST(Launch, TheTimeoutEndsAllRanks) {
  LaunchOptions options = shell(4, "exec sleep 600");
  options.timeout = milliseconds(200);
  const auto start = std::chrono::steady_clock::now();
  const Result<LaunchResult> result = launch(options);
  ASSERT_TRUE(result.has_value()) << result.error().to_string();
  EXPECT_EQ(result->exit_code, 3);
  EXPECT_TRUE(result->timed_out);
  EXPECT_FALSE(result->first_failure.has_value());
  EXPECT_EQ(result->message, "the timeout of 200 ms passed; still running: rank 0, 1, 2, 3");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Launch, LeavesTheCallersProcessAsItWas) {
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  struct sigaction original {};
  sigaction(SIGCHLD, &ignore, &original);  // would lose exit codes, were it left so
  const auto count_descriptors = [] {
    int count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  };
  const int descriptors = count_descriptors();
  const Result<LaunchResult> result = launch(shell(3, "sleep 600 & exit 6"));
  ASSERT_TRUE(result.has_value()) << result.error().to_string();
  EXPECT_EQ(result->exit_code, 6);
  struct sigaction after {};
  sigaction(SIGCHLD, &original, &after);
  EXPECT_EQ(after.sa_handler, SIG_IGN);
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  for (int signal = 1; signal < 32; ++signal) {
    EXPECT_EQ(sigismember(&mask, signal), sigismember(&before, signal)) << signal;
  }
  int is_subreaper = -1;
  prctl(PR_GET_CHILD_SUBREAPER, &is_subreaper);
  EXPECT_EQ(is_subreaper, 0);
  EXPECT_EQ(count_descriptors(), descriptors);
  EXPECT_TRUE(platform::child_processes().empty());  // the sleeps in the background too
}

TEST(Launch, RefusalsAreTyped) {
  LaunchOptions options = shell(0, "true");
  EXPECT_EQ(launch(options).error().code(), StatusCode::kInvalidArgument);
  options.num_ranks = 65;
  EXPECT_NE(launch(options).error().message().find("65"), std::string::npos);
  options.num_ranks = 2;
  options.command = {};
  EXPECT_EQ(launch(options).error().code(), StatusCode::kInvalidArgument);
  options.command = {"true"};
  options.timeout = milliseconds(-1);
  EXPECT_EQ(launch(options).error().code(), StatusCode::kInvalidArgument);
  options.timeout.reset();
  options.command = {"/no/such/program"};
  const Status missing = launch(options).error();
  EXPECT_EQ(missing.code(), StatusCode::kNotFound);
  EXPECT_EQ(missing.message(), "cannot run '/no/such/program': No such file or directory");
  options.command = {"/dev/null"};
  EXPECT_EQ(launch(options).error().code(), StatusCode::kIo);
}

TEST(OutputForwarder, LabelsLinesAndBoundsThem) {
  // Standard output becomes a pipe for the test; gtest prints after it is restored.
  Result<platform::Pipe> rank = platform::make_pipe();
  Result<platform::Pipe> out = platform::make_pipe();
  ASSERT_TRUE(rank.has_value() && out.has_value());
  const int saved = fcntl(1, F_DUPFD_CLOEXEC, 3);
  fflush(stdout);
  dup2(out->write_end.get(), 1);
  out->write_end.reset();
  const size_t limit = platform::OutputForwarder::kMaxLineBytes;
  std::string want;
  std::string seen;
  {
    platform::OutputForwarder forwarder;
    forwarder.add(7, 1, std::move(rank->read_end));
    std::thread writer([&, end = std::move(rank->write_end)]() mutable {
      const std::string text = "one\n\n" + std::string(limit + 10, 'x') + "\nlast";
      for (size_t at = 0; at < text.size();) {
        const ssize_t put = write(end.get(), text.data() + at, text.size() - at);
        if (put <= 0) break;
        at += static_cast<size_t>(put);
      }
      end.reset();
    });
    std::thread reader([&] {
      char buffer[4096];
      for (ssize_t got; (got = read(out->read_end.get(), buffer, sizeof(buffer))) > 0;) {
        seen.append(buffer, static_cast<size_t>(got));
      }
    });
    while (forwarder.has_sources() || forwarder.has_pending()) {
      std::vector<pollfd> polls;
      forwarder.add_polls(&polls);
      ASSERT_GT(poll(polls.data(), polls.size(), 60'000), 0);
      forwarder.handle(polls, 0);
    }
    writer.join();
    dup2(saved, 1);
    close(saved);
    reader.join();
  }
  want = "[rank 7] one\n[rank 7] \n[rank 7] " + std::string(limit, 'x') +
         "\n[rank 7] xxxxxxxxxx\n[rank 7] last\n";
  EXPECT_EQ(seen == want, true) << seen.size() << " bytes, want " << want.size();
}

}  // namespace
}  // namespace argosy
