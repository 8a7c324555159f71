// POSIX reads by position (pread): no shared file offset, no mapping that a shrinking file could
// turn into a signal. Test: tests/io/safetensors_test.cc.
#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace argosy::io {
namespace {

Status system_error(const std::string& path, std::string_view action, int code) {
  const bool absent = code == ENOENT || code == ENOTDIR;
  return base::error(absent ? StatusCode::kNotFound : StatusCode::kIo, "{}: cannot {}: {}", path,
                     action, std::generic_category().message(code));
}

}  // namespace

Result<ReadOnlyFile> ReadOnlyFile::open(const std::string& path) {
  // Without O_NONBLOCK a named pipe would block here for ever.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return system_error(path, "open", errno);
  ReadOnlyFile file(path, descriptor, 0);
  struct stat info {};
  if (::fstat(descriptor, &info) != 0) return system_error(path, "stat", errno);
  if (!S_ISREG(info.st_mode)) {
    return base::error(StatusCode::kIo, "{}: not a regular file", path);
  }
  file.size_bytes_ = info.st_size;
  return file;
}

ReadOnlyFile::ReadOnlyFile(std::string path, int descriptor, int64_t size_bytes)
    : path_(std::move(path)), descriptor_(descriptor), size_bytes_(size_bytes) {}

ReadOnlyFile::ReadOnlyFile(ReadOnlyFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_bytes_(other.size_bytes_) {}

ReadOnlyFile::~ReadOnlyFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status ReadOnlyFile::read(int64_t offset, std::span<std::byte> out) const {
  constexpr size_t kMaxChunk = size_t{1} << 30;  // one pread moves less than 2 GiB
  size_t done = 0;
  while (done < out.size()) {
    const int64_t at = offset + static_cast<int64_t>(done);
    const size_t want = std::min(out.size() - done, kMaxChunk);
    const ssize_t got = ::pread(descriptor_, out.data() + done, want, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error(path_, "read", errno);
    if (got == 0) {
      return base::error(StatusCode::kIo, "{}: ends at byte {}, wanted {} bytes from {} on", path_,
                         at, out.size(), offset);
    }
    done += static_cast<size_t>(got);
  }
  return {};
}

Result<std::string> read_text(const std::string& path, int64_t max_bytes) {
  ARGOSY_ASSIGN_OR_RETURN(const ReadOnlyFile file, ReadOnlyFile::open(path));
  if (file.size_bytes() > max_bytes) {
    return base::error(StatusCode::kCorruptData, "{}: {} bytes long, at most {} are read", path,
                       file.size_bytes(), max_bytes);
  }
  std::string text(static_cast<size_t>(file.size_bytes()), '\0');
  ARGOSY_RETURN_IF_ERROR(file.read(0, std::as_writable_bytes(std::span(text))));
  return text;
}

}  // namespace argosy::io
