// Memory that threads or processes of one host share, for yardsticks that move bytes themselves.
//
// Test: tests/bench/latency_work_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "argosy/status.h"

namespace argosy::tools::bench {

class SharedRegion {
 public:
  SharedRegion() = default;
  ~SharedRegion();
  SharedRegion(SharedRegion&& other) noexcept;
  SharedRegion& operator=(SharedRegion&& other) noexcept;

  // Maps `bytes` of zeros under `name` (letters, digits, '.', '_', '-'), which whoever comes first makes. Errors: kIo with
  // the system's reason.
  static Result<SharedRegion> open(const std::string& name, int64_t bytes);
  // The name is gone; the memory stays with those that mapped it. Nobody may open it afterwards.
  static void remove(const std::string& name);

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace argosy::tools::bench
