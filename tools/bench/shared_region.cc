// See shared_region.h.
#include "tools/bench/shared_region.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace argosy::tools::bench {

SharedRegion::~SharedRegion() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

SharedRegion::SharedRegion(SharedRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

SharedRegion& SharedRegion::operator=(SharedRegion&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Result<SharedRegion> SharedRegion::open(const std::string& name, int64_t bytes) {
  const auto failed = [&](const char* what) {
    return Status(StatusCode::kIo, fmt::format("shared memory /{} of {} bytes: {}: {}", name, bytes,
                                               what, std::strerror(errno)));
  };
  const int file = shm_open(("/" + name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return failed("open");
  SharedRegion region;
  if (ftruncate(file, bytes) != 0) {
    const Status status = failed("size");
    close(file);
    return status;
  }
  void* const address =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const Status status = address == MAP_FAILED ? failed("map") : Status();
  close(file);
  ARGOSY_RETURN_IF_ERROR(status);
  region.data_ = static_cast<std::byte*>(address);
  region.bytes_ = bytes;
  return region;
}

void SharedRegion::remove(const std::string& name) { shm_unlink(("/" + name).c_str()); }

}  // namespace argosy::tools::bench
