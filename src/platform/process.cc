// See process.h. Between fork and exec only what is safe in a copy of a process with threads: all
// strings are made before. Test: tests/platform/launch_test.cc.
#include "platform/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "base/error.h"
#include "platform/read_file.h"

namespace argosy::platform {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

std::string limit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return fmt::format("{}", limit.rlim_cur);
}

// A child's standard descriptors are set by dup2, which must not meet its own target.
Descriptor above_standard(int fd) {
  if (fd < 0 || fd > 2) return Descriptor(fd);
  const Descriptor low(fd);
  return Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

Status descriptor_error(const char* call, int error) {
  if (error == EMFILE || error == ENFILE) {
    return base::error(StatusCode::kOutOfMemory,
                       "{}: {}; this process may have {} open files (ulimit -n)", call,
                       reason(error), limit_of(RLIMIT_NOFILE));
  }
  return base::error(StatusCode::kOutOfMemory, "{}: {}", call, reason(error));
}

Status fork_error(int error) {
  if (error != EAGAIN) return base::error(StatusCode::kOutOfMemory, "fork: {}", reason(error));
  return base::error(StatusCode::kOutOfMemory,
                     "fork: {}; this user may have {} processes (ulimit -u), or pids.max of the "
                     "control group is reached",
                     reason(error), limit_of(RLIMIT_NPROC));
}

std::vector<char*> as_argv(const std::vector<std::string>& words) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  return argv;
}

// In the child. Never returns: the program runs, or errno goes to `failure` and the child ends.
[[noreturn]] void become(const SpawnOptions& options, char* const* argv, char* const* envp,
                         pid_t parent, int failure) {
  bool is_ready = prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
  // The parent may have ended before the line above took effect.
  if (getppid() != parent) _exit(127);
  for (int target = 0; target < 3 && is_ready; ++target) {
    const int fd = options.standard[target];
    if (fd >= 0) is_ready = dup2(fd, target) == target;
  }
  if (is_ready) is_ready = sigprocmask(SIG_SETMASK, &options.signal_mask, nullptr) == 0;
  if (is_ready) execvpe(argv[0], argv, envp);
  const int error = errno;
  // A parent that cannot be told sees the exit code.
  [[maybe_unused]] const ssize_t told = write(failure, &error, sizeof(error));
  _exit(127);
}

// errno of the child's exec, 0 when the program runs.
int read_failure(int fd) {
  int error = 0;
  ssize_t got = 0;
  do {
    got = read(fd, &error, sizeof(error));
  } while (got < 0 && errno == EINTR);
  return got == sizeof(error) ? error : 0;
}

Status exec_error(const std::string& program, int error) {
  const bool is_missing = error == ENOENT || error == ENOTDIR;
  return base::error(is_missing ? StatusCode::kNotFound : StatusCode::kIo, "cannot run '{}': {}",
                     program, reason(error));
}

// The parent's number in /proc/N/stat, whose second field may hold any characters in parentheses.
int parent_of(int process_id) {
  const std::string stat = read_small_file(fmt::format("/proc/{}/stat", process_id));
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos || name_end + 4 >= stat.size()) return -1;
  int parent = -1;
  const char* const begin = stat.data() + name_end + 4;  // ") S "
  std::from_chars(begin, stat.data() + stat.size(), parent);
  return parent;
}

}  // namespace

Result<Pipe> make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return descriptor_error("pipe", errno);
  Pipe pipe{above_standard(ends[0]), above_standard(ends[1])};
  if (!pipe.read_end.is_open() || !pipe.write_end.is_open()) {
    return descriptor_error("pipe", errno);
  }
  return pipe;
}

Result<Descriptor> open_null() {
  Descriptor null = above_standard(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null.is_open()) return descriptor_error("open /dev/null", errno);
  return null;
}

StandardDescriptors::StandardDescriptors() {
  for (int fd = 0; fd < 3; ++fd) {
    // The lowest free number is what open() gives.
    if (fcntl(fd, F_GETFD) < 0) fillers_[fd] = Descriptor(open("/dev/null", O_RDWR));
  }
}

int parent_process_id() { return getppid(); }

std::string random_hex_128() {
  uint64_t words[2] = {};
  // Up to 256 bytes come whole or, before the kernel's pool is ready, after a wait.
  while (getrandom(words, sizeof(words), 0) != sizeof(words)) {
  }
  return fmt::format("{:016x}{:016x}", words[0], words[1]);
}

Result<int> spawn(const SpawnOptions& options) {
  const std::vector<char*> argv = as_argv(options.command);
  const std::vector<char*> envp = as_argv(options.environment);
  ARGOSY_ASSIGN_OR_RETURN(Pipe failure, make_pipe());
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return fork_error(errno);
  if (child == 0) become(options, argv.data(), envp.data(), parent, failure.write_end.get());
  failure.write_end.reset();
  if (const int error = read_failure(failure.read_end.get()); error != 0) {
    waitpid(child, nullptr, 0);
    return exec_error(options.command[0], error);
  }
  return static_cast<int>(child);
}

std::optional<ChildEnd> collect_child(int process_id) {
  int status = 0;
  if (waitpid(process_id, &status, WNOHANG) != process_id) return std::nullopt;
  ChildEnd end;
  if (WIFSIGNALED(status)) {
    end.signal = WTERMSIG(status);
  } else {
    end.exit_code = WEXITSTATUS(status);
  }
  return end;
}

std::vector<int> all_processes() {
  std::vector<int> processes;
  DIR* const folder = opendir("/proc");
  if (folder == nullptr) return processes;
  while (const dirent* const entry = readdir(folder)) {
    int number = 0;
    const char* const end = entry->d_name + std::strlen(entry->d_name);
    const auto [parsed, error] = std::from_chars(entry->d_name, end, number);
    if (error == std::errc() && parsed == end) processes.push_back(number);
  }
  closedir(folder);
  return processes;
}

bool is_stopped_child(int process_id) {
  siginfo_t info{};
  // WNOWAIT: the next question gets the same answer.
  const int options = WSTOPPED | WNOHANG | WNOWAIT;
  return waitid(P_PID, static_cast<id_t>(process_id), &info, options) == 0 && info.si_pid != 0;
}

std::vector<int> child_processes() {
  const int self = getpid();
  std::vector<int> children;
  for (const int process : all_processes()) {
    if (parent_of(process) == self) children.push_back(process);
  }
  return children;
}

void kill_self() {
  kill(getpid(), SIGKILL);
  std::abort();  // not reached
}

void stop_self() { kill(getpid(), SIGSTOP); }

std::string describe_signal(int signal) {
  const char* const name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("{} (SIG{})", signal, name) : fmt::format("{}", signal);
}

}  // namespace argosy::platform
