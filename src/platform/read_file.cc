// Reads with a bound: /proc and /sys files have no size of their own. Test:
// tests/platform/cpu_test.cc.
#include "platform/read_file.h"

#include <cstdio>
#include <memory>

namespace argosy::platform {

std::string read_small_file(const std::string& path) {
  constexpr size_t kMaxBytes = size_t{64} * 1024;
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "re"));
  if (file == nullptr) return "";
  std::string text(kMaxBytes, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  return text;
}

}  // namespace argosy::platform
