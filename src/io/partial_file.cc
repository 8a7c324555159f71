// See partial_file.h. Test: tests/io/safetensors_test.cc.
#include "io/partial_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace argosy::io {
namespace {

Status io_error(const std::string& path, std::string_view action, int code) {
  return base::error(StatusCode::kIo, "{}: cannot {}: {}", path, action,
                     std::generic_category().message(code));
}

}  // namespace

PartialFile::~PartialFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!path_.empty()) ::unlink(path_.c_str());
}

Status PartialFile::create() {
  constexpr int kMaxTries = 1000;
  for (int i = 0; i < kMaxTries && descriptor_ < 0; ++i) {
    const std::string path = fmt::format("{}.partial{}", target_, i);
    descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (descriptor_ >= 0) path_ = path;
    if (descriptor_ < 0 && errno != EEXIST) return io_error(path, "create", errno);
  }
  if (descriptor_ < 0) return io_error(target_ + ".partial", "create", EEXIST);
  return {};
}

Status PartialFile::write(std::span<const std::byte> bytes) {
  constexpr size_t kMaxChunk = size_t{1} << 30;
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxChunk));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return io_error(path_, "write", errno);
    bytes = bytes.subspan(static_cast<size_t>(done));
  }
  return {};
}

Status PartialFile::rename_to_target() {
  const int closed = ::close(std::exchange(descriptor_, -1));
  if (closed != 0) return io_error(path_, "close", errno);
  if (std::rename(path_.c_str(), target_.c_str()) != 0) {
    return io_error(target_, "rename to", errno);
  }
  path_.clear();
  return {};
}

}  // namespace argosy::io
