// The progress bar draws on a terminal and nowhere else.
#include "tools/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace argosy::tools {
namespace {

constexpr std::chrono::milliseconds kAtOnce(0);

void work(Progress& progress) {
  progress.begin("load", 2);
  progress.step();
  progress.step();
}

TEST(Progress, AFileStaysEmpty) {
  std::FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  {
    Progress progress(file, kAtOnce);
    work(progress);
  }
  EXPECT_EQ(std::ftell(file), 0);
  std::fclose(file);
}

// A pseudo-terminal: what is written to terminal() is read by text().
class Terminal {
 public:
  Terminal() : master_(posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK)) {
    if (master_ < 0 || grantpt(master_) != 0 || unlockpt(master_) != 0) return;
    const char* const name = ptsname(master_);
    if (name != nullptr) terminal_ = std::fopen(name, "w");
  }
  ~Terminal() {
    if (terminal_ != nullptr) std::fclose(terminal_);
    if (master_ >= 0) close(master_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  std::FILE* terminal() const { return terminal_; }
  std::string text() const {
    std::string result;
    char buffer[256];
    for (ssize_t got = 0; (got = read(master_, buffer, sizeof(buffer))) > 0;) {
      result.append(buffer, static_cast<size_t>(got));
    }
    return result;
  }

 private:
  int master_;
  std::FILE* terminal_ = nullptr;
};

TEST(Progress, ATerminalSeesTheBarAndItsEnd) {
  const Terminal terminal;
  if (terminal.terminal() == nullptr) GTEST_SKIP() << "no pseudo-terminals here";
  Progress progress(terminal.terminal(), kAtOnce);
  work(progress);
  const std::string drawn = terminal.text();
  EXPECT_NE(drawn.find("load"), std::string::npos) << drawn;
  EXPECT_NE(drawn.find("[..............................] 0/2"), std::string::npos) << drawn;
  progress.clear();
  const std::string wiped = terminal.text();
  ASSERT_FALSE(wiped.empty());
  EXPECT_EQ(wiped.front(), '\r');
  EXPECT_EQ(wiped.back(), '\r');
  progress.clear();
  EXPECT_EQ(terminal.text(), "");
}

TEST(Progress, AShortRunOnATerminalStaysClean) {
  const Terminal terminal;
  if (terminal.terminal() == nullptr) GTEST_SKIP() << "no pseudo-terminals here";
  {
    Progress progress(terminal.terminal(), std::chrono::hours(1));
    work(progress);
  }
  EXPECT_EQ(terminal.text(), "");
}

}  // namespace
}  // namespace argosy::tools
