// See progress.h. Test: tests/cli/output_test.cc.
#include "tools/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace argosy::tools {
namespace {

constexpr auto kQuietStart = std::chrono::milliseconds(500);
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr int kWidth = 30;

}  // namespace

Progress::Progress() : is_terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::begin(std::string label, int64_t total) {
  const std::lock_guard lock(mutex_);
  label_ = std::move(label);
  total_ = total;
  done_ = 0;
  draw();
}

void Progress::step() {
  const std::lock_guard lock(mutex_);
  ++done_;
  draw();
}

void Progress::clear() {
  const std::lock_guard lock(mutex_);
  wipe();
}

void Progress::draw() {
  const Clock::time_point now = Clock::now();
  if (!is_terminal_ || total_ <= 0 || now - start_ < kQuietStart || now - last_draw_ < kRedraw) {
    return;
  }
  last_draw_ = now;
  const int filled = static_cast<int>(kWidth * done_ / total_);
  const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                          std::string(static_cast<size_t>(kWidth - filled), '.');
  fmt::print(stderr, "\r{:<14} [{}] {}/{}", label_, bar, done_, total_);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::wipe() {
  if (!drawn_) return;
  fmt::print(stderr, "\r{:<{}}\r", "", 80);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace argosy::tools
