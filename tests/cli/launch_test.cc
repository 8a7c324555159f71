// argosy launch and argosy run over processes, from outside: labels, exit codes, signals, and that
// nothing is left whatever is killed.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
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

constexpr uid_t kNobody = 65534;

int count_processes_of(uid_t user) {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    struct stat seen {};
    count += stat(entry.path().c_str(), &seen) == 0 && S_ISDIR(seen.st_mode) && seen.st_uid == user
                 ? 1
                 : 0;
  }
  return count;
}

std::vector<int> children_of(int parent) {
  std::vector<int> children;
  std::istringstream list(read_text(fmt::format("/proc/{}/task/{}/children", parent, parent)));
  for (int child = 0; list >> child;) children.push_back(child);
  return children;
}

int count_of(const std::string& part, const std::string& text) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
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
  Tool(
      Words words, const std::string& mark, const std::string& out_path = "/dev/null",
      const std::string& err_path = "/dev/null",
      const std::function<bool()>& prepare = [] { return true; }) {
    words.insert(words.begin(), ARGOSY_CLI);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    std::string variable = mark;
    putenv(variable.data());
    if (freopen(out_path.c_str(), "w", stdout) == nullptr ||
        freopen(err_path.c_str(), "w", stderr) == nullptr) {
      _exit(99);
    }
    if (!prepare()) _exit(99);
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

TEST(Launch, TooFewProcessesAreNamed) {
  // The limit counts all processes of a user; root, whom it does not bind, becomes a user without
  // others: the tool, its guardian and one rank fit.
  const std::string err_path = fresh_dir("processes_limit") + "/err";
  const std::string mark = fresh_mark("processes_limit");
  const bool is_root = geteuid() == 0;
  if (is_root && count_processes_of(kNobody) != 0) GTEST_SKIP() << "nobody runs something";
  Tool tool({"launch", "-n", "4", "--", "sleep", "600"}, mark, "/dev/null", err_path, [&] {
    const rlimit limit{is_root ? rlim_t{3} : 1, is_root ? rlim_t{3} : 1};
    return setrlimit(RLIMIT_NPROC, &limit) == 0 && (!is_root || setuid(kNobody) == 0);
  });
  const int status = tool.wait();
  if (WIFEXITED(status) && WEXITSTATUS(status) == 99) GTEST_SKIP() << "cannot run as nobody";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status;
  const std::string err = read_text(err_path);
  EXPECT_NE(err.find("fork"), std::string::npos) << err;
  if (is_root) {
    EXPECT_NE(err.find("this user may have 3 processes"), std::string::npos) << err;
    EXPECT_NE(err.find("after 1 of 4 ranks were started"), std::string::npos) << err;
  }
  EXPECT_EQ(count_marked(mark), 0);
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

// What is opened in the place of a closed descriptor is not taken for it.
TEST(Launch, ClosedStandardDescriptorsEndNothing) {
  const std::vector<std::vector<int>> cases = {{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}};
  for (const std::vector<int>& closed : cases) {
    const std::string mark = fresh_mark("closed");
    Tool tool(launch_words(2, "echo out; echo err >&2", {"--timeout", "30"}), mark, "/dev/null",
              "/dev/null", [&] {
                for (const int fd : closed) close(fd);
                return true;
              });
    const int status = tool.wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << " " << closed.size();
    EXPECT_EQ(count_marked(mark), 0);
  }
}

TEST(Launch, WrongValuesBeforeTheCommandAreNamed) {
  for (const auto& [option, value] :
       {std::pair{"-n", "65"}, {"-n", "0"}, {"-n", "x"}, {"--timeout", "nan"}, {"--grace", "-1"}}) {
    const CliResult result = run_cli({"launch", option, value, "--", "true"});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find(fmt::format("'{}' is n", value)), std::string::npos) << result.err;
  }
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

// The digest kept for this layer, see digest_test.cc.
constexpr const char* kLayer = "deepseek_v3_tiny 1 bf16 amx ";

std::string kept_digest() {
  const std::string kept = read_text(testdata("digests.txt"));
  const size_t at = kept.find(kLayer);
  return at == std::string::npos ? "" : kept.substr(at + std::string(kLayer).size(), 32);
}

Words run_layer(const Words& more) {
  Words words = {"--dot-order", "amx", "--check", "none", "--json", "-"};
  words.insert(words.end(), more.begin(), more.end());
  return run_arguments("deepseek_v3_tiny", 1, "bf16", words);
}

void expect_digest(const CliResult& result, int ranks) {
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  const nlohmann::json report = result.json();
  ASSERT_FALSE(report.is_discarded()) << result.out;  // one rank alone has printed
  EXPECT_EQ(report["digest"], kept_digest()) << ranks << " ranks";
  EXPECT_EQ(report["ranks"], ranks);
  EXPECT_EQ(report["transport"], "shm");
}

TEST(RunProcesses, TheDigestIsThatOfThreads) {
  for (const int ranks : {1, 2, 3, 4, 7, 8, 16}) {
    expect_digest(run_cli(run_layer({"--transport", "shm", "--ranks", std::to_string(ranks)})),
                  ranks);
  }
}

TEST(RunProcesses, EveryKeptDigestComesOutOfProcesses) {
  std::istringstream lines(read_text(testdata("digests.txt")));
  constexpr int kRanks[] = {1, 2, 3, 4, 7, 8, 16};
  size_t turn = 0;
  for (std::string model, layer, run, order, digest;
       lines >> model >> layer >> run >> order >> digest; ++turn) {
    const int ranks = kRanks[turn % std::size(kRanks)];
    const CliResult result =
        run_cli(run_arguments(model, std::stoi(layer), run,
                              {"--dot-order", order, "--check", "none", "--json", "-",
                               "--transport", "shm", "--ranks", std::to_string(ranks)}));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.json()["digest"], digest) << model << layer << run << order << " " << ranks;
  }
  EXPECT_GE(turn, 36u);
}

TEST(RunProcesses, UnderArgosyLaunchTheEnvironmentSaysAll) {
  for (const int ranks : {1, 3, 8}) {
    Words words = {"launch", "-n", std::to_string(ranks), "--no-label", "--", ARGOSY_CLI};
    const Words run = run_layer({});
    words.insert(words.end(), run.begin(), run.end());
    expect_digest(run_cli(words), ranks);
  }
}

TEST(RunProcesses, UnderOpenMpiToo) {
  if (std::system("command -v mpirun >/dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun here";
  for (const int ranks : {2, 4, 16}) {
    std::string command =
        fmt::format("mpirun --oversubscribe --allow-run-as-root -n {} '{}'", ranks, ARGOSY_CLI);
    for (const std::string& word : run_layer({})) command += " '" + word + "'";
    // Through the launcher as one unlabelled rank; its variables must not reach mpirun's ranks.
    const CliResult result = run_cli(
        {"launch", "-n", "1", "--no-label", "--", "sh", "-c",
         "unset ARGOSY_RANK ARGOSY_WORLD_SIZE ARGOSY_JOB RANK WORLD_SIZE; exec " + command});
    expect_digest(result, ranks);
  }
}

TEST(RunProcesses, RankZeroAloneTellsWhatAllRanksMet) {
  const std::string dir = fresh_dir("processes");
  Words words = run_layer({"--transport", "shm", "--ranks", "4", "--output", dir + "/out"});
  words[2] = "/no/such/folder";
  const CliResult result = run_cli(words);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.rfind("argosy: rank 0: ", 0), 0u) << result.err;
  EXPECT_NE(result.err.find("/no/such/folder"), std::string::npos) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_TRUE(std::filesystem::is_empty(dir));
}

TEST(RunProcesses, WhatOneRankAloneMetEndsAllAtOnce) {
  // Rank 2 looks for its model elsewhere, the others are well.
  const std::string script = fmt::format(
      "model=$1; shift; [ $RANK = 2 ] && model=/no/such/folder; exec '{}' run --model $model "
      "\"$@\"",
      ARGOSY_CLI);
  Words words = {"launch", "-n", "4", "--no-label", "--", "sh", "-c", script, "sh"};
  const Words run = run_layer({});
  words.insert(words.end(), run.begin() + 2, run.end());
  const auto start = Clock::now();
  const CliResult result = run_cli(words);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("rank 2 aborted the group"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("/no/such/folder"), std::string::npos) << result.err;
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
}

TEST(RunProcesses, AFailedCheckIsExitCode1) {
  const CliResult result = run_cli(run_arguments(
      "mixtral_tiny", 0, "bf16", {"--tolerance", "1e-9", "--transport", "shm", "--ranks", "2"}));
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.err.find("argosy: check failed: output"), std::string::npos) << result.err;
}

TEST(RunProcesses, AKilledRankIsNamedByTheOthers) {
  const std::string dir = fresh_dir("killed");
  const std::string mark = fresh_mark("killed");
  Words words = run_layer({"--transport", "shm", "--ranks", "3", "--repeat", "1000000"});
  words[std::find(words.begin(), words.end(), "-") - words.begin()] = dir + "/report.json";
  Tool tool(words, mark, "/dev/null", dir + "/err");
  // Ranks are the launcher's children; one that has all ranks' memory mapped has joined.
  const auto ranks_at_work = [&] {
    std::vector<int> ranks;
    for (const int child : children_of(tool.pid())) {
      if (count_of("memfd:", read_text(fmt::format("/proc/{}/maps", child))) >= 3) {
        ranks.push_back(child);
      }
    }
    return ranks;
  };
  ASSERT_TRUE(comes_true([&] { return ranks_at_work().size() == 3; }));
  std::vector<int> ranks = ranks_at_work();
  int victim = 0;
  for (const int rank : ranks) {
    const std::string environment = read_text(fmt::format("/proc/{}/environ", rank));
    if (environment.find(std::string("ARGOSY_RANK=1") + '\0') != std::string::npos) victim = rank;
  }
  ASSERT_GT(victim, 0);
  kill(victim, SIGKILL);
  const int status = tool.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status;
  const std::string err = read_text(dir + "/err");
  // A survivor that was aborted by the other's words need not repeat them; what each gets: tests/failure/.
  EXPECT_TRUE(err.find("argosy: rank 0: ") != std::string::npos ||
              err.find("argosy: rank 2: ") != std::string::npos)
      << err;
  for (const char* const part :
       {"lost rank 1, whose process has ended", "rank 1 (process ", "signal 9"}) {
    EXPECT_NE(err.find(part), std::string::npos) << part << " in: " << err;
  }
  EXPECT_FALSE(exists(dir + "/report.json"));
  EXPECT_EQ(count_marked(mark), 0);
}

// The survivors name it at their deadline; nobody waits for a rank that cannot end by itself.
TEST(RunProcesses, AStoppedRankIsNamedAndNotWaitedFor) {
  const Clock::time_point start = Clock::now();
  const CliResult result = run_cli(run_layer({"--transport", "shm", "--ranks", "3", "--timeout",
                                              "4", "--simulate", "stop=1@60", "--repeat", "9"}));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.out, "");
  // By the survivor that gave up first; the other was aborted by it and need not repeat it.
  EXPECT_GE(count_of("4000 ms for rank 1 ", result.err), 1) << result.err;
  EXPECT_NE(result.err.find("simulated: seed=0,stop=1@60"), std::string::npos) << result.err;
  // The launcher's own patience would be 10 s and more.
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(9));
}

// An exception on one rank: all end, and hear what it was.
TEST(RunProcesses, AnExceptionOnOneRankIsToldByAll) {
  for (const char* const transport : {"inproc", "shm"}) {
    const CliResult result = run_cli(run_layer(
        {"--transport", transport, "--ranks", "3", "--simulate", "throw=1@60", "--repeat", "9"}));
    EXPECT_EQ(result.exit_code, 2) << transport << result.err;
    EXPECT_NE(result.err.find("an exception: thrown on purpose by rank 1"), std::string::npos)
        << transport << result.err;
  }
}

TEST(RunProcesses, WrongWordsOfTroubleAreNamed) {
  for (const char* const transport : {"inproc", "shm"}) {
    const CliResult result =
        run_cli(run_layer({"--transport", transport, "--ranks", "2", "--simulate", "speed=1"}));
    EXPECT_EQ(result.exit_code, 2) << transport;
    EXPECT_NE(result.err.find("'speed=1' is none of"), std::string::npos) << result.err;
  }
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
