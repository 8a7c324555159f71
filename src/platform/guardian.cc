// The guardian waits for the end of a pipe whose other end only its maker holds. One byte before
// the end says that all is well. Test: tests/cli/launch_test.cc.
#include "platform/guardian.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "platform/read_file.h"

namespace argosy::platform {
namespace {

// A process between fork and exec does not show its mark yet; it dies by its parent's death.
constexpr int kRounds = 100;
constexpr useconds_t kRoundMicroseconds = 20'000;
constexpr int kQuietRounds = 3;
constexpr const char* kName = "argosy-guard";

// Guardians of jobs within this one are left to end their own ranks first.
bool has_mark(int process_id, std::string_view mark) {
  if (read_small_file(fmt::format("/proc/{}/comm", process_id)).rfind(kName, 0) == 0) return false;
  const std::string environment = read_small_file(fmt::format("/proc/{}/environ", process_id));
  for (size_t begin = 0; begin < environment.size();) {
    const size_t end = std::min(environment.find('\0', begin), environment.size());
    if (std::string_view(environment).substr(begin, end - begin) == mark) return true;
    begin = end + 1;
  }
  return false;
}

void kill_marked(std::string_view mark) {
  int num_quiet = 0;
  for (int round = 0; round < kRounds && num_quiet < kQuietRounds; ++round) {
    bool found = false;
    for (const int process : all_processes()) {
      if (process == getpid() || !has_mark(process, mark)) continue;
      found |= kill(process, SIGKILL) == 0;
    }
    num_quiet = found ? 0 : num_quiet + 1;
    usleep(kRoundMicroseconds);
  }
}

// Drops everything inherited but the pipe: a copy of a rank's output pipe would keep it open.
void detach(int line) {
  setsid();
  prctl(PR_SET_NAME, kName);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  dup2(line, 3);
  syscall(SYS_close_range, 4u, ~0u, 0u);
  const int null = open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3 && null >= 0; ++fd) dup2(null, fd);
  if (null > 3) close(null);
}

[[noreturn]] void guard(std::string_view mark, int line) {
  detach(line);
  char word = 0;
  ssize_t got = 0;
  do {
    got = read(3, &word, 1);
  } while (got < 0 && errno == EINTR);
  if (got == 0) kill_marked(mark);
  _exit(0);
}

}  // namespace

Result<Guardian> Guardian::start(const std::string& mark) {
  ARGOSY_ASSIGN_OR_RETURN(Pipe line, make_pipe());
  const pid_t child = fork();
  if (child < 0) {
    return base::error(StatusCode::kOutOfMemory, "fork of the guardian: {}", std::strerror(errno));
  }
  if (child == 0) {
    line.write_end.reset();
    guard(mark, line.read_end.get());
  }
  return Guardian(child, std::move(line.write_end));
}

Guardian::~Guardian() {
  if (!line_.is_open()) return;
  const char well = 1;
  // SIGPIPE is blocked by the launcher; a guardian that is gone needs no word.
  [[maybe_unused]] const ssize_t told = write(line_.get(), &well, 1);
  line_.reset();
  waitpid(process_id_, nullptr, 0);
}

}  // namespace argosy::platform
