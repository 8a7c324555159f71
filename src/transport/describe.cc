// See describe.h. Test: tests/transport/describe_test.cc.
#include "transport/describe.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace argosy::transport {
namespace {

// Enough to see a pattern, short enough for a log line.
constexpr size_t kMaxDetailed = 16;

}  // namespace

std::string describe_ranks(std::span<const int> ranks) {
  std::string text;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += fmt::format("{}", ranks[first]);
    if (last > first) text += fmt::format("-{}", ranks[last]);
    first = last + 1;
  }
  return text;
}

std::string describe_silences(std::span<const Silence> silences) {
  std::string text;
  for (const Silence& silence : silences.first(std::min(silences.size(), kMaxDetailed))) {
    if (!text.empty()) text += ", ";
    text += fmt::format("rank {}", silence.peer);
    if (silence.want != 0) text += fmt::format(" (have {}, want {})", silence.have, silence.want);
  }
  if (silences.size() <= kMaxDetailed) return text;
  std::vector<int> rest;
  for (const Silence& silence : silences.subspan(kMaxDetailed)) rest.push_back(silence.peer);
  return text + fmt::format(" and {} more: {}", rest.size(), describe_ranks(rest));
}

}  // namespace argosy::transport
