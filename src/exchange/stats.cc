// See argosy/exchange_stats.h.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "argosy/exchange_stats.h"

namespace argosy {

void WaitHistogram::add(int64_t ns) {
  const auto length = static_cast<uint64_t>(std::max<int64_t>(ns, 1));
  const int bucket = std::min(static_cast<int>(std::bit_width(length)) - 1, kNumBuckets - 1);
  ++buckets[static_cast<size_t>(bucket)];
  ++num_waits;
  total_ns += std::max<int64_t>(ns, 0);
  max_ns = std::max(max_ns, ns);
}

int64_t WaitHistogram::quantile_ns(double q) const {
  if (num_waits == 0) return 0;
  const auto wanted =
      std::max<int64_t>(1, static_cast<int64_t>(std::ceil(q * static_cast<double>(num_waits))));
  int64_t seen = 0;
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
    seen += buckets[static_cast<size_t>(bucket)];
    if (seen >= wanted) return std::min(max_ns, int64_t{2} << bucket);
  }
  return max_ns;
}

int ExchangeStats::straggler() const {
  const auto longest = std::ranges::max_element(waits, {}, &WaitHistogram::total_ns);
  if (longest == waits.end() || longest->total_ns == 0) return -1;
  return static_cast<int>(longest - waits.begin());
}

std::string describe(const ExchangeStats& stats) {
  std::string text;
  for (size_t peer = 0; peer < stats.waits.size(); ++peer) {
    const WaitHistogram& wait = stats.waits[peer];
    if (wait.num_waits == 0) continue;
    const auto us = [](int64_t ns) { return static_cast<double>(ns) * 1e-3; };
    text += fmt::format("rank {}: {} waits, p50 {:.1f} us, p99 {:.1f} us, longest {:.1f} us\n",
                        peer, wait.num_waits, us(wait.quantile_ns(0.5)), us(wait.quantile_ns(0.99)),
                        us(wait.max_ns));
  }
  if (const int slowest = stats.straggler(); slowest >= 0) {
    text += fmt::format("straggler: rank {}\n", slowest);
  }
  return text;
}

}  // namespace argosy
