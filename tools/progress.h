// A progress bar on stderr for long work. Draws only when stderr is a terminal, and only after half
// a second, so that short runs and logs stay clean. Thread-safe. Test: tests/cli/output_test.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace argosy::tools {

class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Starts a new piece of work of `total` steps.
  void begin(std::string label, int64_t total);
  void step();
  // Wipes the bar, so that other lines can be printed.
  void clear();

 private:
  void draw();
  void wipe();

  using Clock = std::chrono::steady_clock;
  const bool is_terminal_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;  // guards what follows
  Clock::time_point last_draw_;
  std::string label_;
  int64_t total_ = 0;
  int64_t done_ = 0;
  bool drawn_ = false;
};

}  // namespace argosy::tools
