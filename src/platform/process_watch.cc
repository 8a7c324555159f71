// pidfd_open, poll, eventfd. Test: tests/platform/process_watch_test.cc.
#include "platform/process_watch.h"

#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace argosy::platform {

Result<Descriptor> open_own_pidfd() {
  Descriptor pidfd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (pidfd.is_open()) return pidfd;
  return base::error(
      errno == ENOSYS || errno == EPERM ? StatusCode::kUnsupported : StatusCode::kOutOfMemory,
      "pidfd_open failed: {}; it needs Linux 5.3 and must be allowed in the container "
      "(seccomp); ranks as threads (transport inproc) work without it",
      std::strerror(errno));
}

Result<std::unique_ptr<ProcessWatch>> ProcessWatch::start(std::vector<Descriptor> pidfds,
                                                          std::function<void(size_t)> on_end) {
  std::unique_ptr<ProcessWatch> watch(new ProcessWatch());
  watch->pidfds_ = std::move(pidfds);
  watch->on_end_ = std::move(on_end);
  watch->stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
  if (!watch->stop_.is_open()) {
    return base::error(StatusCode::kIo, "eventfd failed: {}", std::strerror(errno));
  }
  // Here, so that the thread itself never allocates.
  watch->polls_.push_back({watch->stop_.get(), POLLIN, 0});
  for (const Descriptor& pidfd : watch->pidfds_) watch->polls_.push_back({pidfd.get(), POLLIN, 0});
  try {
    watch->thread_ = std::thread([watcher = watch.get()] { watcher->loop(); });
  } catch (const std::system_error& refusal) {
    return base::error(StatusCode::kOutOfMemory, "no thread to watch the peers: {}",
                       refusal.what());
  }
  return watch;
}

ProcessWatch::~ProcessWatch() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  // An eventfd with room takes a write at once.
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

void ProcessWatch::loop() {
  while (true) {
    if (::poll(polls_.data(), polls_.size(), -1) < 0 && errno != EINTR) return;
    if (polls_[0].revents != 0) return;
    for (size_t i = 1; i < polls_.size(); ++i) {
      if (polls_[i].revents == 0) continue;
      polls_[i].fd = -1;  // poll passes over it from now on
      polls_[i].revents = 0;
      on_end_(i - 1);
    }
  }
}

}  // namespace argosy::platform
