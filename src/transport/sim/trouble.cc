// Reads and writes Trouble. See sim.h. Test: tests/transport/sim_test.cc.
#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "transport/sim/sim.h"

namespace argosy::transport::sim {
namespace {

constexpr int64_t kMaxMicroseconds = 10'000'000;
constexpr int64_t kMaxMilliseconds = 3'600'000;
constexpr int kMaxRank = 1023;

std::optional<uint64_t> number(std::string_view text, uint64_t max) {
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.empty() || value > max) return std::nullopt;
  return value;
}

// The text up to `mark`, and what follows; nothing follows where there is no mark.
std::pair<std::string_view, std::string_view> split(std::string_view text, char mark) {
  const size_t at = text.find(mark);
  if (at == std::string_view::npos) return {text, {}};
  return {text.substr(0, at), text.substr(at + 1)};
}

std::string_view name_of(Fault fault) {
  switch (fault) {
    case Fault::kKill:
      return "kill";
    case Fault::kStop:
      return "stop";
    case Fault::kThrow:
      return "throw";
    case Fault::kPause:
      return "pause";
    case Fault::kNone:
      break;
  }
  return "";
}

Fault fault_named(std::string_view name) {
  for (const Fault fault : {Fault::kKill, Fault::kStop, Fault::kThrow, Fault::kPause}) {
    if (name == name_of(fault)) return fault;
  }
  return Fault::kNone;
}

// RANK@STEP, or RANK@STEP:MS for a pause.
bool read_fault(std::string_view value, Trouble* trouble) {
  const auto [place, span] = split(value, ':');
  const auto [rank, step] = split(place, '@');
  const std::optional<uint64_t> rank_number = number(rank, kMaxRank);
  const std::optional<uint64_t> step_number = number(step, std::numeric_limits<int64_t>::max());
  if (!rank_number.has_value() || !step_number.has_value()) return false;
  trouble->rank = static_cast<int>(*rank_number);
  trouble->step = static_cast<int64_t>(*step_number);
  if (trouble->fault != Fault::kPause) return value.find(':') == std::string_view::npos;
  const std::optional<uint64_t> milliseconds = number(span, kMaxMilliseconds);
  if (!milliseconds.has_value()) return false;
  trouble->pause = std::chrono::milliseconds(*milliseconds);
  return true;
}

bool read_word(std::string_view word, Trouble* trouble) {
  const auto [name, value] = split(word, '=');
  if (const Fault fault = fault_named(name); fault != Fault::kNone) {
    trouble->fault = fault;
    return read_fault(value, trouble);
  }
  const bool is_seed = name == "seed";
  const std::optional<uint64_t> amount =
      number(value, is_seed ? std::numeric_limits<uint64_t>::max() : uint64_t{kMaxMicroseconds});
  if (!amount.has_value()) return false;
  if (is_seed) {
    trouble->seed = *amount;
  } else if (name == "delay_us") {
    trouble->max_delay = std::chrono::microseconds(*amount);
  } else if (name == "pause_us") {
    trouble->max_pause = std::chrono::microseconds(*amount);
  } else {
    return false;
  }
  return true;
}

}  // namespace

Result<Trouble> parse(std::string_view text) {
  Trouble trouble;
  std::set<std::string_view> seen;
  while (!text.empty()) {
    const auto [word, rest] = split(text, ',');
    const std::string_view name = split(word, '=').first;
    const std::string_view kind = fault_named(name) == Fault::kNone ? name : "fault";
    if (!seen.insert(kind).second) {
      return base::invalid("simulate: '{}' is a second {}; there can be one", word, kind);
    }
    if (!read_word(word, &trouble)) {
      return base::invalid(
          "simulate: '{}' is none of seed=N, delay_us=0..{}, pause_us=0..{}, kill=RANK@STEP, "
          "stop=RANK@STEP, throw=RANK@STEP, pause=RANK@STEP:MS (RANK 0..{}, MS 0..{})",
          word, kMaxMicroseconds, kMaxMicroseconds, kMaxRank, kMaxMilliseconds);
    }
    text = rest;
  }
  return trouble;
}

Status check(const Trouble& trouble, int num_ranks, bool are_processes) {
  if (trouble.fault == Fault::kNone) return {};
  if (trouble.rank >= num_ranks) {
    return base::invalid("simulate: {}={}@{}, but the ranks are 0 to {}", name_of(trouble.fault),
                         trouble.rank, trouble.step, num_ranks - 1);
  }
  const bool hits_process = trouble.fault == Fault::kKill || trouble.fault == Fault::kStop;
  if (hits_process && !are_processes) {
    return base::invalid(
        "simulate: {} needs ranks that are processes (transport shm); these share one",
        name_of(trouble.fault));
  }
  return {};
}

std::string to_string(const Trouble& trouble) {
  std::string text = fmt::format("seed={}", trouble.seed);
  if (trouble.max_delay.count() > 0) text += fmt::format(",delay_us={}", trouble.max_delay.count());
  if (trouble.max_pause.count() > 0) text += fmt::format(",pause_us={}", trouble.max_pause.count());
  if (trouble.fault == Fault::kNone) return text;
  text += fmt::format(",{}={}@{}", name_of(trouble.fault), trouble.rank, trouble.step);
  if (trouble.fault == Fault::kPause) text += fmt::format(":{}", trouble.pause.count());
  return text;
}

}  // namespace argosy::transport::sim
