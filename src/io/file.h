// A regular file opened for reading, by position: several threads may read at once.
//
// Test: tests/io/safetensors_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "argosy/status.h"

namespace argosy::io {

class ReadOnlyFile {
 public:
  // Errors: kNotFound, kIo (also for what is no regular file).
  static Result<ReadOnlyFile> open(const std::string& path);
  ~ReadOnlyFile();
  ReadOnlyFile(ReadOnlyFile&& other) noexcept;
  ReadOnlyFile& operator=(ReadOnlyFile&&) = delete;

  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }

  // Fills `out` from byte `offset` on. Errors: kIo, also when the file has become shorter.
  Status read(int64_t offset, std::span<std::byte> out) const;

 private:
  ReadOnlyFile(std::string path, int descriptor, int64_t size_bytes);
  std::string path_;
  int descriptor_ = -1;
  int64_t size_bytes_ = 0;
};

// The whole file. Errors: those of open(); kCorruptData when it is longer than `max_bytes`.
Result<std::string> read_text(const std::string& path, int64_t max_bytes);

}  // namespace argosy::io
