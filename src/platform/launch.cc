// One poll loop: ends of ranks (an epoll of their pidfds, which reports them in the order in which
// they ended), signals (a signalfd), their output. No handler runs and nothing is polled in vain.
// A failure or the timeout moves the job along running -> grace -> SIGTERM -> SIGKILL. Test:
// tests/platform/launch_test.cc, tests/cli/launch_test.cc.
#include "argosy/launch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <thread>

#include "base/env.h"
#include "base/error.h"
#include "platform/clock.h"
#include "platform/guardian.h"
#include "platform/output_forwarder.h"
#include "platform/process.h"

namespace argosy {
namespace {

using platform::Clock;
using platform::Deadline;
using platform::Descriptor;
using std::chrono::milliseconds;

constexpr int kExitLost = 3;
constexpr milliseconds kMaxTime = std::chrono::hours(24 * 365);
// For the end of output that something outside the job still holds open.
constexpr milliseconds kDrainTime{1'000};
// SIGKILL takes effect at once, except on a process stuck inside the kernel.
constexpr milliseconds kSweepTime{5'000};

constexpr std::array kForwarded = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,
                                   SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP};

// Blocks what the loop reads from a signalfd, for the scope. SIGPIPE too: a closed stdout is an
// error of write here. A SIGCHLD that the caller ignores would lose the ranks' exit codes.
class SignalScope {
 public:
  SignalScope() {
    sigemptyset(&watched_);
    for (const int signal : kForwarded) sigaddset(&watched_, signal);
    sigaddset(&watched_, SIGCHLD);
    sigaddset(&watched_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &watched_, &previous_mask_);
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &standard, &previous_child_action_);
  }
  ~SignalScope() {
    sigaction(SIGCHLD, &previous_child_action_, nullptr);
    // What is ours must not reach the caller when the mask goes.
    sigset_t ours;
    sigemptyset(&ours);
    for (const int signal : {SIGCHLD, SIGPIPE}) {
      if (sigismember(&previous_mask_, signal) == 0) sigaddset(&ours, signal);
    }
    const timespec now{};
    while (sigtimedwait(&ours, nullptr, &now) > 0) {
    }
    pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  const sigset_t& watched() const { return watched_; }
  const sigset_t& previous_mask() const { return previous_mask_; }

 private:
  sigset_t watched_{};
  sigset_t previous_mask_{};
  struct sigaction previous_child_action_ {};
};

// Orphans of ranks become children of this process, for the scope.
class SubreaperScope {
 public:
  SubreaperScope() {
    prctl(PR_GET_CHILD_SUBREAPER, &was_subreaper_);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~SubreaperScope() { prctl(PR_SET_CHILD_SUBREAPER, was_subreaper_); }
  SubreaperScope(const SubreaperScope&) = delete;
  SubreaperScope& operator=(const SubreaperScope&) = delete;

 private:
  int was_subreaper_ = 0;
};

std::string system_reason() { return std::generic_category().message(errno); }

Status check(const LaunchOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > kMaxLaunchedRanks) {
    return base::invalid("num_ranks is {}, it can be 1 to {}", options.num_ranks,
                         kMaxLaunchedRanks);
  }
  if (options.command.empty() || options.command[0].empty()) {
    return base::invalid("there is no command to start {} ranks of", options.num_ranks);
  }
  const std::array<std::pair<const char*, milliseconds>, 3> times = {
      {{"timeout", options.timeout.value_or(milliseconds(1))},
       {"grace", options.grace},
       {"kill_after", options.kill_after}}};
  for (const auto& [name, time] : times) {
    if (time.count() >= 0 && time <= kMaxTime) continue;
    return base::invalid("{} is {} ms; it can be 0 to {}", name, time.count(), kMaxTime.count());
  }
  return {};
}

std::vector<std::string> environment_of(int rank, int num_ranks, const std::string& job) {
  const std::array<std::pair<const char*, std::string>, 7> ours = {
      {{"ARGOSY_JOB", job},
       {"ARGOSY_RANK", std::to_string(rank)},
       {"ARGOSY_WORLD_SIZE", std::to_string(num_ranks)},
       {"RANK", std::to_string(rank)},
       {"WORLD_SIZE", std::to_string(num_ranks)},
       {"LOCAL_RANK", std::to_string(rank)},
       {"LOCAL_WORLD_SIZE", std::to_string(num_ranks)}}};
  std::vector<std::string> all;
  // The job first: the guardian finds it in the first bytes.
  for (const auto& [name, value] : ours) all.push_back(fmt::format("{}={}", name, value));
  for (std::string& variable : base::environment()) {
    const std::string_view name = std::string_view(variable).substr(0, variable.find('='));
    const auto is_same = [&](const auto& one) { return one.first == name; };
    if (std::none_of(ours.begin(), ours.end(), is_same)) all.push_back(std::move(variable));
  }
  return all;
}

std::string describe(const RankExit& end) {
  const std::string who = fmt::format("rank {} (process {})", end.rank, end.process_id);
  if (end.signal == 0) return fmt::format("{} ended with exit code {}", who, end.exit_code);
  return fmt::format("{} was killed by signal {}", who, platform::describe_signal(end.signal));
}

class Launcher {
 public:
  Launcher(const LaunchOptions& options, std::string job)
      : options_(options),
        job_(std::move(job)),
        run_end_(options.timeout.has_value() ? Deadline::after(*options.timeout)
                                             : Deadline::never()) {}
  ~Launcher() { end_all(); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  Status start();
  LaunchResult supervise();

 private:
  enum class Phase { kRunning, kGrace, kTerminated, kKilled };

  Status start_rank(int rank);
  Status watch(int rank, int process_id);

  void wait_for_events(Clock::time_point until);
  void handle_signals();
  void forward(const signalfd_siginfo& signal);
  void handle_ends();
  void note_end(RankExit end);
  void advance();
  void terminate();
  void kill_running(int signal);
  bool all_running_are_stopped() const;

  // Kills and collects what the ranks left behind: orphans that became children of this process.
  void sweep(Deadline deadline);
  std::vector<int> orphans() const;
  void collect_orphans();
  void drain_output();
  void end_all();

  std::string running_ranks() const;
  void notify(const std::string& line) const {
    if (options_.notice) options_.notice(line);
  }

  const LaunchOptions& options_;
  const std::string job_;
  const Deadline run_end_;
  const platform::StandardDescriptors standard_;  // before anything else is opened
  SignalScope signals_;
  SubreaperScope subreaper_;
  std::vector<int> foreign_children_;  // that the caller had before
  std::optional<platform::Guardian> guardian_;
  Descriptor null_;
  Descriptor signal_fd_;
  Descriptor ends_;                  // epoll of the pidfds
  std::vector<Descriptor> pid_fds_;  // [rank]
  std::vector<int> running_;         // [rank]: process id, 0 when ended
  platform::OutputForwarder output_;
  Phase phase_ = Phase::kRunning;
  Clock::time_point phase_end_ = Clock::time_point::max();
  LaunchResult result_;
};

Status Launcher::start() {
  foreign_children_ = platform::child_processes();
  signal_fd_ = Descriptor(signalfd(-1, &signals_.watched(), SFD_CLOEXEC | SFD_NONBLOCK));
  ends_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  if (!signal_fd_.is_open() || !ends_.is_open()) {
    return base::error(StatusCode::kOutOfMemory, "signalfd or epoll: {}", system_reason());
  }
  ARGOSY_ASSIGN_OR_RETURN(null_, platform::open_null());
  ARGOSY_ASSIGN_OR_RETURN(platform::Guardian guardian,
                          platform::Guardian::start("ARGOSY_JOB=" + job_));
  guardian_.emplace(std::move(guardian));
  foreign_children_.push_back(guardian_->process_id());
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    if (Status status = start_rank(rank); !status.ok()) {
      if (rank == 0) return status;
      return base::error(status.code(), "{} (after {} of {} ranks were started)", status.message(),
                         rank, options_.num_ranks);
    }
  }
  return {};
}

Status Launcher::start_rank(int rank) {
  platform::SpawnOptions spawn;
  spawn.command = options_.command;
  spawn.environment = environment_of(rank, options_.num_ranks, job_);
  spawn.signal_mask = signals_.previous_mask();
  if (rank != 0) spawn.standard[0] = null_.get();
  platform::Pipe pipes[2];
  for (int i = 0; i < 2 && options_.label_output; ++i) {
    ARGOSY_ASSIGN_OR_RETURN(pipes[i], platform::make_pipe());
    spawn.standard[i + 1] = pipes[i].write_end.get();
  }
  ARGOSY_ASSIGN_OR_RETURN(const int process_id, platform::spawn(spawn));
  running_.push_back(process_id);
  result_.ranks.push_back({rank, process_id, 0, 0});
  for (int i = 0; i < 2 && options_.label_output; ++i) {
    output_.add(rank, i + 1, std::move(pipes[i].read_end));
  }
  return watch(rank, process_id);
}

Status Launcher::watch(int rank, int process_id) {
  const long fd = syscall(SYS_pidfd_open, process_id, 0u);
  if (fd < 0) {
    const StatusCode code =
        errno == ENOSYS || errno == EPERM ? StatusCode::kUnsupported : StatusCode::kOutOfMemory;
    return base::error(code,
                       "pidfd_open of rank {}: {}; it needs Linux 5.3 and a container that "
                       "allows the call",
                       rank, system_reason());
  }
  pid_fds_.emplace_back(static_cast<int>(fd));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<uint32_t>(rank);
  if (epoll_ctl(ends_.get(), EPOLL_CTL_ADD, pid_fds_.back().get(), &event) == 0) return {};
  return base::error(StatusCode::kOutOfMemory, "epoll of rank {}: {}", rank, system_reason());
}

LaunchResult Launcher::supervise() {
  while (std::any_of(running_.begin(), running_.end(), [](int process) { return process != 0; })) {
    wait_for_events(std::min(
        phase_end_, phase_ < Phase::kTerminated ? run_end_.at() : Clock::time_point::max()));
    handle_ends();
    handle_signals();
    advance();
  }
  sweep(Deadline::after(kSweepTime));
  drain_output();
  if (result_.first_failure.has_value()) {
    const RankExit& first = *result_.first_failure;
    result_.exit_code = first.signal != 0 ? kExitLost : first.exit_code;
  } else if (result_.timed_out) {
    result_.exit_code = kExitLost;
  }
  return result_;
}

// Output is handled here, the rest by the caller.
void Launcher::wait_for_events(Clock::time_point until) {
  std::vector<pollfd> polls = {{ends_.get(), POLLIN, 0}, {signal_fd_.get(), POLLIN, 0}};
  const size_t first_output = polls.size();
  output_.add_polls(&polls);
  int timeout = -1;
  if (until != Clock::time_point::max()) {
    // Rounded up, or the last millisecond would be a busy loop.
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
    timeout = static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
  }
  if (poll(polls.data(), polls.size(), timeout) > 0) output_.handle(polls, first_output);
}

void Launcher::handle_signals() {
  signalfd_siginfo signal{};
  while (read(signal_fd_.get(), &signal, sizeof(signal)) == sizeof(signal)) {
    const int number = static_cast<int>(signal.ssi_signo);
    if (number == SIGCHLD) {
      collect_orphans();
    } else if (number != SIGPIPE) {
      forward(signal);
    }
  }
}

void Launcher::forward(const signalfd_siginfo& signal) {
  const int number = static_cast<int>(signal.ssi_signo);
  // The terminal sends these to its whole foreground group, and ranks of our group have theirs.
  const bool is_from_terminal =
      signal.ssi_code == SI_KERNEL && (number == SIGINT || number == SIGQUIT || number == SIGTSTP);
  for (const int process : running_) {
    if (process == 0) continue;
    if (is_from_terminal && getpgid(process) == getpgrp()) continue;
    kill(process, number);
  }
  // Stopped by the shell's wish: this process stops as well, until SIGCONT.
  if (number == SIGTSTP) kill(getpid(), SIGSTOP);
}

void Launcher::handle_ends() {
  std::array<epoll_event, kMaxLaunchedRanks> events;
  const int count = epoll_wait(ends_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const size_t rank = events[static_cast<size_t>(i)].data.u32;
    const std::optional<platform::ChildEnd> end = platform::collect_child(running_[rank]);
    if (!end.has_value()) continue;
    pid_fds_[rank].reset();
    note_end(
        {static_cast<int>(rank), std::exchange(running_[rank], 0), end->exit_code, end->signal});
  }
}

void Launcher::note_end(RankExit end) {
  result_.ranks[static_cast<size_t>(end.rank)] = end;
  const bool is_failure = end.exit_code != 0 || end.signal != 0;
  // What the launcher ended itself is no failure of its own.
  if (!is_failure || phase_ != Phase::kRunning) return;
  result_.first_failure = end;
  result_.message = describe(end);
  notify(result_.message);
  phase_ = Phase::kGrace;
  phase_end_ = Clock::now() + options_.grace;
}

void Launcher::advance() {
  if (running_ranks().empty()) return;
  // Nobody who waits for SIGCONT ends by himself, nor hears SIGTERM.
  if ((phase_ == Phase::kGrace || phase_ == Phase::kTerminated) && all_running_are_stopped()) {
    notify(fmt::format("stopped and waited for by nobody: rank {}; they get SIGKILL",
                       running_ranks()));
    kill_running(SIGKILL);
    phase_ = Phase::kKilled;
    phase_end_ = Clock::time_point::max();
    return;
  }
  if (phase_ < Phase::kTerminated && run_end_.passed()) {
    result_.timed_out = true;
    const std::string line = fmt::format("the timeout of {} ms passed; still running: rank {}",
                                         options_.timeout->count(), running_ranks());
    if (!result_.first_failure.has_value()) result_.message = line;
    notify(line);
    terminate();
  } else if (phase_ == Phase::kGrace && Clock::now() >= phase_end_) {
    notify(fmt::format("{} ms later still running: rank {}; they get SIGTERM",
                       options_.grace.count(), running_ranks()));
    terminate();
  } else if (phase_ == Phase::kTerminated && Clock::now() >= phase_end_) {
    notify(fmt::format("{} ms after SIGTERM still running: rank {}; they get SIGKILL",
                       options_.kill_after.count(), running_ranks()));
    kill_running(SIGKILL);
    phase_ = Phase::kKilled;
    phase_end_ = Clock::time_point::max();
  }
}

void Launcher::terminate() {
  kill_running(SIGTERM);
  phase_ = Phase::kTerminated;
  phase_end_ = Clock::now() + options_.kill_after;
}

void Launcher::kill_running(int signal) {
  for (const int process : running_) {
    if (process != 0) kill(process, signal);
  }
}

bool Launcher::all_running_are_stopped() const {
  return std::all_of(running_.begin(), running_.end(), [](int process) {
    return process == 0 || platform::is_stopped_child(process);
  });
}

std::string Launcher::running_ranks() const {
  std::vector<size_t> ranks;
  for (size_t rank = 0; rank < running_.size(); ++rank) {
    if (running_[rank] != 0) ranks.push_back(rank);
  }
  return fmt::format("{}", fmt::join(ranks, ", "));
}

std::vector<int> Launcher::orphans() const {
  std::vector<int> orphans = platform::child_processes();
  const auto is_known = [&](int process) {
    return std::find(running_.begin(), running_.end(), process) != running_.end() ||
           std::find(foreign_children_.begin(), foreign_children_.end(), process) !=
               foreign_children_.end();
  };
  orphans.erase(std::remove_if(orphans.begin(), orphans.end(), is_known), orphans.end());
  return orphans;
}

void Launcher::collect_orphans() {
  for (const int process : orphans()) platform::collect_child(process);
}

void Launcher::sweep(Deadline deadline) {
  // Each round may hand over the children of those that the last one killed.
  for (std::vector<int> left = orphans(); !left.empty() && !deadline.passed(); left = orphans()) {
    for (const int process : left) kill(process, SIGKILL);
    for (const int process : left) platform::collect_child(process);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void Launcher::drain_output() {
  const Clock::time_point sources_end = Clock::now() + kDrainTime;
  while (output_.has_sources() || output_.has_pending()) {
    if (output_.has_sources() && Clock::now() >= sources_end) output_.close_sources();
    // A reader that takes nothing may keep us as long as it keeps any writer, unless there is a
    // limit for the run.
    if (!output_.has_sources() && run_end_.passed() && Clock::now() >= sources_end) return;
    wait_for_events(output_.has_sources() ? sources_end : std::max(sources_end, run_end_.at()));
    handle_signals();
  }
}

// Also after a start that failed half way; does nothing after supervise().
void Launcher::end_all() {
  kill_running(SIGKILL);
  const Deadline deadline = Deadline::after(kSweepTime);
  for (int& process : running_) {
    while (process != 0 && !deadline.passed()) {
      if (platform::collect_child(process).has_value()) process = 0;
      if (process != 0) std::this_thread::sleep_for(milliseconds(1));
    }
  }
  sweep(deadline);
}

}  // namespace

Result<LaunchResult> launch(const LaunchOptions& options) {
  ARGOSY_RETURN_IF_ERROR(check(options));
  Launcher launcher(options, platform::random_hex_128());
  ARGOSY_RETURN_IF_ERROR(launcher.start());
  return launcher.supervise();
}

}  // namespace argosy
