// Starts one job's ranks as processes of this host and stays until the last one has ended.
//
// Invariant: when launch() returns, or this process dies in whatever way, no process of the job is
// left. Ranks stay in the caller's process group, so that a terminal's job control reaches them.
// Test: tests/cli/launch_test.cc, tests/platform/launch_test.cc.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "argosy/status.h"

namespace argosy {

inline constexpr int kMaxLaunchedRanks = 64;

struct LaunchOptions {
  int num_ranks = 1;                 // 1 to kMaxLaunchedRanks
  std::vector<std::string> command;  // program (looked up in PATH) and arguments; no shell
  // True: every line that a rank prints comes out with "[rank 3] " before it; lines above 64 KiB in
  // pieces, each with its label. False: ranks write to the caller's stdout and stderr themselves.
  bool label_output = true;
  std::optional<std::chrono::milliseconds> timeout;  // of the whole run; unset: none
  // After a first rank failed, how long the others may take to end by themselves.
  std::chrono::milliseconds grace{5'000};
  // Between SIGTERM and SIGKILL.
  std::chrono::milliseconds kill_after{2'000};
  // Hears at once what went wrong, one line without end of line, on the calling thread; may be
  // empty.
  std::function<void(const std::string& line)> notice;
};

struct RankExit {
  int rank = 0;
  int process_id = 0;
  int exit_code = 0;  // 0 when it ended by a signal
  int signal = 0;     // 0 when it ended by itself
};

struct LaunchResult {
  // That of the rank that failed first; 3 when it was killed by a signal, or when the timeout
  // passed before one failed; 0 when all ended with 0.
  int exit_code = 0;
  // "rank 3 (process 4711) was killed by signal 9 (SIGKILL)"; empty when all ended with 0.
  std::string message;
  bool timed_out = false;
  std::optional<RankExit> first_failure;
  std::vector<RankExit> ranks;  // [num_ranks]
};

// Starts num_ranks copies of the command and waits for all of them.
//
// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ARGOSY_RANK, ARGOSY_WORLD_SIZE and
// ARGOSY_JOB (128 random bits, hex). Rank 0 inherits stdin, the others read /dev/null. SIGINT,
// SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT and SIGTSTP that reach this process are
// passed on to all ranks; what a terminal sent to the whole process group they have already. A rank
// that fails gives the others `grace` to end with their own errors, then comes SIGTERM, then
// SIGKILL; at once SIGKILL when all that are left are stopped (SIGSTOP). The timeout starts with SIGTERM.
//
// Blocks: until all ranks ended. Threads: one call per process at a time; it alters the calling
// thread's signal mask and makes the process a subreaper meanwhile, and no other thread may start
// child processes: what is left of the job at the end is found among the children and killed.
// Errors: kInvalidArgument (num_ranks, empty command, times); kNotFound or kIo when the command
// cannot be executed, with the system's reason; kOutOfMemory when the system refuses a process, a
// pipe or a descriptor, naming how many ranks were started and the limit; kUnsupported without
// pidfd_open (Linux 5.3). Ranks already started are then ended.
Result<LaunchResult> launch(const LaunchOptions& options);

}  // namespace argosy
