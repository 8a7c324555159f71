// See pinning_text.h. Test: tests/cli/floors_test.cc.
#include "tools/pinning_text.h"

#include <fmt/format.h>

#include <iterator>
#include <set>

namespace argosy::tools {
namespace {

// "0-3, 8".
std::string ranges_of(const std::set<int32_t>& cpus) {
  std::string text;
  for (auto first = cpus.begin(); first != cpus.end();) {
    auto last = first;
    auto next = std::next(first);
    while (next != cpus.end() && *next == *last + 1) last = next++;
    text += text.empty() ? "" : ", ";
    text += first == last ? fmt::format("{}", *first) : fmt::format("{}-{}", *first, *last);
    first = next;
  }
  return text;
}

}  // namespace

std::string pinning_text(const std::vector<std::vector<int32_t>>& pinned_cpus, int threads_per_rank,
                         int num_cores) {
  std::set<int32_t> cpus;
  size_t num_asked = 0;
  size_t num_bound = 0;
  for (const std::vector<int32_t>& rank : pinned_cpus) {
    num_asked += rank.size();
    for (const int32_t cpu : rank) {
      if (cpu < 0) continue;
      ++num_bound;
      cpus.insert(cpu);
    }
  }
  const size_t num_threads = pinned_cpus.size() * static_cast<size_t>(threads_per_rank);
  if (num_asked == 0) {
    return fmt::format("threads not pinned: {} threads, {} usable core{}", num_threads, num_cores,
                       num_cores == 1 ? "" : "s");
  }
  if (num_bound < num_threads) {
    return fmt::format("threads not pinned: the system bound {} of {}", num_bound, num_threads);
  }
  return fmt::format("threads pinned to core{} {}{}", cpus.size() == 1 ? "" : "s", ranges_of(cpus),
                     cpus.size() < num_threads ? fmt::format(", {} threads", num_threads) : "");
}

}  // namespace argosy::tools
