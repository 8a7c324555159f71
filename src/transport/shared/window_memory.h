// Where the memory of windows comes from: the one thing in which threads and processes differ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "argosy/status.h"

namespace argosy::transport::shared {

class WindowMemory {
 public:
  virtual ~WindowMemory() = default;
  // Zeroed memory of the own rank, 64-byte aligned, backed when touched; a handle that every rank can turn
  // into an address. Errors: kOutOfMemory naming bytes and limit.
  virtual Result<uint64_t> create(int64_t bytes) = 0;
  // Precondition: `rank` created the handle and has not released it.
  virtual std::byte* address(int rank, uint64_t handle) = 0;
  // Precondition: no rank uses the memory any more.
  virtual void release(uint64_t handle, int64_t bytes) = 0;
};

}  // namespace argosy::transport::shared
