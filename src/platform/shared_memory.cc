// memfd_create, ftruncate, mmap. Test: tests/platform/shared_memory_test.cc.
#include "platform/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "base/error.h"
#include "platform/read_file.h"

namespace argosy::platform {
namespace {

using base::error;

// "; RLIMIT_AS is 1073741824 bytes", or "" without a limit.
std::string describe_limit(const char* name, __rlimit_resource_t which) {
  rlimit limit{};
  if (getrlimit(which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return fmt::format("; {} is {} bytes", name, limit.rlim_cur);
}

}  // namespace

Result<Descriptor> create_shared_memory(const char* label, int64_t bytes) {
  // Asked before: a truncation above the limit would end the process with a signal.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<uint64_t>(bytes) > limit.rlim_cur) {
    return error(StatusCode::kOutOfMemory, "shared memory of {} bytes is refused{}", bytes,
                 describe_limit("RLIMIT_FSIZE (ulimit -f)", RLIMIT_FSIZE));
  }
  Descriptor memory(memfd_create(label, MFD_CLOEXEC));
  if (!memory.is_open()) {
    return error(
        errno == ENOSYS || errno == EPERM ? StatusCode::kUnsupported : StatusCode::kOutOfMemory,
        "memfd_create failed: {}; it needs Linux 3.17 and must be allowed in the container "
        "(seccomp); ranks as threads (transport inproc) work without it",
        std::strerror(errno));
  }
  if (ftruncate(memory.get(), bytes) != 0) {
    return error(StatusCode::kOutOfMemory, "shared memory cannot grow to {} bytes: {}", bytes,
                 std::strerror(errno));
  }
  return memory;
}

void discard_shared_memory(const Descriptor& memory, int64_t offset, int64_t bytes) {
  if (bytes > 0) {
    fallocate(memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  }
}

Result<SharedMapping> SharedMapping::map(const Descriptor& memory, int64_t bytes) {
  void* address = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_NORESERVE, memory.get(), 0);
  if (address == MAP_FAILED) {
    return error(StatusCode::kOutOfMemory, "cannot map {} bytes of shared memory: {}{}", bytes,
                 std::strerror(errno), describe_limit("RLIMIT_AS (ulimit -v)", RLIMIT_AS));
  }
  // Only a hint: refused where huge pages are off for shared memory.
  madvise(address, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  SharedMapping mapping;
  mapping.data_ = static_cast<std::byte*>(address);
  mapping.bytes_ = bytes;
  return mapping;
}

SharedMapping::~SharedMapping() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

int64_t available_memory_bytes() {
  const std::string text = read_small_file("/proc/meminfo");
  constexpr std::string_view kKey = "MemAvailable:";
  const size_t at = text.find(kKey);
  if (at == std::string::npos) return std::numeric_limits<int64_t>::max();
  const size_t begin = text.find_first_not_of(' ', at + kKey.size());
  int64_t kib = 0;
  if (begin == std::string::npos ||
      std::from_chars(text.data() + begin, text.data() + text.size(), kib).ec != std::errc()) {
    return std::numeric_limits<int64_t>::max();
  }
  return kib * 1024;
}

}  // namespace argosy::platform
