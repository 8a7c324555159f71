// argosy launch and argosy run over processes, from outside: labels, exit codes, signals, and that
// nothing is left whatever is killed.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>
#include <sstream>
#include <thread>

#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Words launch_words(int ranks, const std::string& script, const Words& more = {}) {
  Words words = {"launch", "-n", std::to_string(ranks)};
  words.insert(words.end(), more.begin(), more.end());
  words.insert(words.end(), {"--", "sh", "-c", script});
  return words;
}

std::multiset<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::multiset<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.insert(line);
  return lines;
}

// Processes that hold `mark` in their environment, the launcher's own guardian not among them.
int count_marked(const std::string& mark) {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (std::stoi(name) == getpid()) continue;
    count += read_text(entry.path() / "environ").find(mark) != std::string::npos ? 1 : 0;
  }
  return count;
}

template <typename Condition>
bool comes_true(const Condition& condition) {
  const Clock::time_point end = Clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

// The tool as a child of the test that can be sent signals.
class Tool {
 public:
  explicit Tool(Words words, const std::string& mark, const std::string& out_path = "/dev/null") {
    words.insert(words.begin(), ARGOSY_CLI);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    std::string variable = mark;
    putenv(variable.data());
    if (freopen(out_path.c_str(), "w", stdout) == nullptr ||
        freopen("/dev/null", "w", stderr) == nullptr) {
      _exit(99);
    }
    execv(ARGOSY_CLI, argv.data());
    _exit(99);
  }
  ~Tool() {
    if (!has_ended_) {
      kill(pid_, SIGKILL);
      wait();
    }
  }
  int pid() const { return pid_; }
  // The wait status.
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    has_ended_ = true;
    return status;
  }

 private:
  int pid_;
  bool has_ended_ = false;
};

std::string fresh_mark(const std::string& name) {
  return fmt::format("ARGOSY_TEST_MARK={}_{}", name, getpid());
}

TEST(Launch, LabelsEveryLineOfSixteenRanks) {
  const CliResult result =
      run_cli(launch_words(16, "echo out $RANK; echo err $RANK >&2; printf 'half %s' $RANK"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::multiset<std::string> out, err;
  for (int rank = 0; rank < 16; ++rank) {
    out.insert(fmt::format("[rank {}] out {}", rank, rank));
    out.insert(fmt::format("[rank {}] half {}", rank, rank));
    err.insert(fmt::format("[rank {}] err {}", rank, rank));
  }
  EXPECT_EQ(lines_of(result.out), out);
  EXPECT_EQ(lines_of(result.err), err);
}

TEST(Launch, WithoutLabelsOutputIsTheRanksOwn) {
  const CliResult result = run_cli(launch_words(2, "printf x", {"--no-label"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "xx");
}

TEST(Launch, ManyLinesOfManyRanksArriveWhole) {
  const CliResult result = run_cli(
      launch_words(4, "i=0; while [ $i -lt 3000 ]; do echo line $i of $RANK; i=$((i+1)); done"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::multiset<std::string> lines = lines_of(result.out);
  EXPECT_EQ(lines.size(), 12000u);
  for (int rank = 0; rank < 4; ++rank) {
    for (const int line : {0, 1499, 2999}) {
      EXPECT_EQ(lines.count(fmt::format("[rank {}] line {} of {}", rank, line, rank)), 1u);
    }
  }
}

TEST(Launch, ExitCodesAndTheirMessages) {
  const CliResult failed = run_cli(launch_words(3, "[ $RANK = 1 ] && exit 9; sleep 0.2; exit 8"));
  EXPECT_EQ(failed.exit_code, 9) << failed.err;
  EXPECT_NE(failed.err.find("argosy: rank 1 (process "), std::string::npos) << failed.err;
  EXPECT_NE(failed.err.find("ended with exit code 9"), std::string::npos) << failed.err;

  const CliResult lost = run_cli(launch_words(3, "[ $RANK = 2 ] && kill -9 $$; sleep 0.1"));
  EXPECT_EQ(lost.exit_code, 3) << lost.err;
  EXPECT_NE(lost.err.find("rank 2 (process "), std::string::npos) << lost.err;
  EXPECT_NE(lost.err.find("killed by signal 9 (SIGKILL)"), std::string::npos) << lost.err;

  const CliResult late = run_cli(launch_words(2, "exec sleep 600", {"--timeout", "0.2"}));
  EXPECT_EQ(late.exit_code, 3) << late.err;
  EXPECT_NE(late.err.find("timeout of 200 ms"), std::string::npos) << late.err;

  const CliResult missing = run_cli({"launch", "-n", "2", "--", "no_such_program_here"});
  EXPECT_EQ(missing.exit_code, 2) << missing.err;
  EXPECT_NE(missing.err.find("'no_such_program_here'"), std::string::npos) << missing.err;

  for (const Words& words : {Words{"launch", "-n", "0", "--", "true"},
                             Words{"launch", "-n", "65", "--", "true"}, Words{"launch"}}) {
    EXPECT_EQ(run_cli(words).exit_code, 2);
  }
}

TEST(Launch, AnOptionOfTheCommandIsTheCommands) {
  const CliResult result = run_cli({"launch", "-n", "1", "--", "echo", "-n", "--timeout", "x"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "[rank 0] --timeout x\n");
}

TEST(Launch, TooFewDescriptorsAreNamed) {
  const CliResult result =
      run_cli({"launch", "-n", "1", "--", "sh", "-c",
               fmt::format("ulimit -n 24; exec '{}' launch -n 16 -- sleep 600", ARGOSY_CLI)});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("24 open files"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("of 16 ranks were started"), std::string::npos) << result.err;
}

TEST(Launch, KillingTheLauncherLeavesNoProcess) {
  // Ranks with children of their own, one of them in a session of its own.
  const std::string mark = fresh_mark("launcher");
  Tool tool(launch_words(3, "sleep 600 & setsid sleep 600 & wait"), mark);
  // Per rank: the shell and two sleeps (setsid may fork once more); and the launcher.
  ASSERT_TRUE(comes_true([&] { return count_marked(mark) >= 10; })) << count_marked(mark);
  kill(tool.pid(), SIGKILL);
  tool.wait();
  EXPECT_TRUE(comes_true([&] { return count_marked(mark) == 0; })) << count_marked(mark);
}

TEST(Launch, KillingARankLeavesNoProcess) {
  const std::string mark = fresh_mark("rank");
  Tool tool(launch_words(2,
                         "sleep 600 & setsid sleep 600 & [ $RANK = 1 ] && sleep 0.2 && kill -9 $$; "
                         "sleep 0.4",
                         {"--grace", "0.1"}),
            mark);
  const int status = tool.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status;
  EXPECT_EQ(count_marked(mark), 0);
}

TEST(Launch, ForwardsSignals) {
  const std::string dir = fresh_dir("signals");
  const std::string mark = fresh_mark("signals");
  for (const auto& [name, number] : std::vector<std::pair<std::string, int>>{{"INT", SIGINT},
                                                                             {"TERM", SIGTERM},
                                                                             {"HUP", SIGHUP},
                                                                             {"QUIT", SIGQUIT},
                                                                             {"USR1", SIGUSR1},
                                                                             {"USR2", SIGUSR2}}) {
    const std::string here = fmt::format("{}/{}_", dir, name);
    Tool tool(launch_words(2, fmt::format("trap 'echo got > {}$RANK; exit 0' {}; : > {}up$RANK; "
                                          "while true; do sleep 0.01; done",
                                          here, name, here)),
              mark);
    ASSERT_TRUE(comes_true([&] { return exists(here + "up0") && exists(here + "up1"); })) << name;
    kill(tool.pid(), number);
    const int status = tool.wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << name << " " << status;
    for (const char* const rank : {"0", "1"}) EXPECT_EQ(read_text(here + rank), "got\n") << name;
  }
  EXPECT_EQ(count_marked(mark), 0);
}

TEST(Launch, StopsAndGoesOn) {
  const std::string dir = fresh_dir("stop");
  const std::string mark = fresh_mark("stop");
  Tool tool(launch_words(1, fmt::format("trap 'echo stop > {0}/stop' TSTP; trap 'exit 0' CONT; : > "
                                        "{0}/up; while true; do sleep 0.01; done",
                                        dir)),
            mark);
  ASSERT_TRUE(comes_true([&] { return exists(dir + "/up"); }));
  kill(tool.pid(), SIGTSTP);
  int status = 0;
  ASSERT_EQ(waitpid(tool.pid(), &status, WUNTRACED), tool.pid());
  EXPECT_TRUE(WIFSTOPPED(status)) << status;
  EXPECT_TRUE(comes_true([&] { return read_text(dir + "/stop") == "stop\n"; }));
  kill(tool.pid(), SIGCONT);
  status = tool.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(RunProcesses, RanksThatDisagreeWithTheEnvironmentAreNamed) {
  const CliResult result = run_cli(run_arguments("mixtral_tiny", 0, "f32", {"--ranks", "3"}),
                                   {"RANK=0", "WORLD_SIZE=4"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("--ranks is 3"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("WORLD_SIZE in the environment is 4"), std::string::npos) << result.err;
}

TEST(RunProcesses, ABrokenEnvironmentIsNamed) {
  const CliResult result = run_cli(run_arguments("mixtral_tiny", 0, "f32", {}), {"RANK=0"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("WORLD_SIZE is not set"), std::string::npos) << result.err;
}

TEST(RunProcesses, InprocByNameIgnoresTheEnvironment) {
  const CliResult result = run_cli(
      run_arguments("mixtral_tiny", 0, "f32",
                    {"--ranks", "2", "--transport", "inproc", "--check", "none", "--json", "-"}),
      {"RANK=0", "WORLD_SIZE=4"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.json()["transport"], "inproc");
}

}  // namespace
}  // namespace argosy::testing
