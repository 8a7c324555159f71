// Small text files of /proc and /sys. Test: tests/platform/cpu_test.cc.
#pragma once

#include <string>

namespace argosy::platform {

// The file's first 64 KiB, or "" when it cannot be read.
std::string read_small_file(const std::string& path);

}  // namespace argosy::platform
