// What an exchange has seen since it was made: loads and waits, for finding slow ranks.
//
// Cost of keeping them: docs/perf/latency.md. Test: tests/exchange/stats_test.cc.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace argosy {

// Waits by length: bucket b counts those of [2^b, 2^(b+1)) ns, bucket 0 also those of 0 ns, the last all longer ones.
struct WaitHistogram {
  static constexpr int kNumBuckets = 40;
  std::array<int64_t, kNumBuckets> buckets{};
  int64_t num_waits = 0;
  int64_t total_ns = 0;
  int64_t max_ns = 0;

  void add(int64_t ns);
  // Upper end of the bucket that holds the quantile, ns; 0 without waits. 0 <= q <= 1.
  int64_t quantile_ns(double q) const;
};

struct ExchangeStats {
  int64_t num_calls = 0;
  std::vector<int64_t> tokens_received;  // [L] rows that came for each local expert, cumulative
  // [R] from the start of each wait until that peer's flag was seen; of this rank itself: none.
  std::vector<WaitHistogram> waits;

  // The peer that was waited for longest in sum; -1 when nobody was waited for.
  int straggler() const;
};

// One line per rank with p50, p99 and the longest wait, and the straggler's name.
std::string describe(const ExchangeStats& stats);

}  // namespace argosy
