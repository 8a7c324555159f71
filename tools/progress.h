// A progress bar for long work. Draws only on a terminal, and only after a quiet start, so that
// short runs and logs stay clean. Thread-safe. Test: tests/cli/progress_test.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>

namespace argosy::tools {

class Progress {
 public:
  // `stream` must outlive it.
  explicit Progress(std::FILE* stream = stderr,
                    std::chrono::milliseconds quiet_start = std::chrono::milliseconds(500));
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
  std::FILE* const stream_;
  const std::chrono::milliseconds quiet_start_;
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
