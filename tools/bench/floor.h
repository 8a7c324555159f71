// The least time that arithmetic and memory allow for some work: one sample of the yardsticks.
//
// Test: tests/bench/data_test.cc.
#pragma once

#include <cstdint>
#include <memory>

#include "argosy/measure.h"
#include "argosy/status.h"
#include "tools/bench/bench_case.h"

namespace argosy::tools::bench {

class Floor {
 public:
  // What counts: the peak of the arithmetic, the read rate of the memory, or both.
  enum class Of { kPeak, kRead, kBoth };
  // Errors: those of MemoryProbe.
  static Result<Floor> create(const BenchContext& context, int num_threads, Of of);

  // The greater of operations / peak and bytes / read rate, of those that count, measured now.
  // Errors: those of sample_peak and MemoryProbe.
  Result<double> seconds(double operations, double bytes);

 private:
  Floor() = default;

  PeakLoop peak_;
  double peak_seconds_ = 0;
  int num_threads_ = 1;
  bool counts_peak_ = false;
  std::unique_ptr<MemoryProbe> probe_;  // null when the memory does not count
};

}  // namespace argosy::tools::bench
