// A new file that takes its target's place when it is whole. Test: tests/io/safetensors_test.cc.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "argosy/status.h"

namespace argosy::io {

// Written beside the target; removed again unless it was renamed.
class PartialFile {
 public:
  explicit PartialFile(std::string target) : target_(std::move(target)) {}
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile();

  // Errors of all three: kIo with the system's reason.
  Status create();
  Status write(std::span<const std::byte> bytes);
  Status rename_to_target();

 private:
  std::string target_;
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace argosy::io
