// See floor.h. Test: tests/bench/data_test.cc.
#include "tools/bench/floor.h"

#include <algorithm>

namespace argosy::tools::bench {

Result<Floor> Floor::create(const BenchContext& context, int num_threads, Of of) {
  Floor floor;
  floor.peak_ = context.peak;
  floor.peak_seconds_ = context.peak_seconds;
  floor.num_threads_ = num_threads;
  floor.counts_peak_ = of != Of::kRead;
  if (of != Of::kPeak) {
    ARGOSY_ASSIGN_OR_RETURN(floor.probe_, MemoryProbe::create(num_threads, context.probe_bytes));
  }
  return floor;
}

Result<double> Floor::seconds(double operations, double bytes) {
  double least = 0;
  if (counts_peak_) {
    ARGOSY_ASSIGN_OR_RETURN(const double rate, sample_peak(peak_, num_threads_, peak_seconds_));
    least = operations / rate;
  }
  if (probe_ != nullptr) {
    // Some milliseconds tell the rate; hundreds of megabytes would only double the run.
    constexpr double kMostSampled = 64 << 20;
    const auto sampled = static_cast<int64_t>(std::clamp(bytes, 1.0, kMostSampled));
    ARGOSY_ASSIGN_OR_RETURN(const double rate, probe_->sample_read(sampled));
    least = std::max(least, bytes / rate);
  }
  return least;
}

}  // namespace argosy::tools::bench
