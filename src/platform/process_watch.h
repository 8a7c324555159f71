// Learns at once when another process ends, by its pidfd. Test: tests/platform/process_watch_test.cc.
#pragma once

#include <poll.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "argosy/status.h"
#include "platform/descriptor.h"

namespace argosy::platform {

// A descriptor of the own process that becomes readable when it ends, for sending to others. Errors:
// kUnsupported naming the call and what to do when the system has none.
Result<Descriptor> open_own_pidfd();

// A thread that calls on_end(i) once when process i of the list ends. Does no work while they live.
class ProcessWatch {
 public:
  // Entries that are not open are not watched. Errors: kIo, kOutOfMemory.
  static Result<std::unique_ptr<ProcessWatch>> start(std::vector<Descriptor> pidfds,
                                                     std::function<void(size_t)> on_end);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

 private:
  ProcessWatch() = default;
  void loop();

  std::vector<Descriptor> pidfds_;
  std::function<void(size_t)> on_end_;
  Descriptor stop_;            // an eventfd
  std::vector<pollfd> polls_;  // stop_, then the processes
  std::thread thread_;
};

}  // namespace argosy::platform
